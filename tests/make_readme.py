"""Writes the metric tables and the figure of the README; tests/test_readme.py holds it to them.

python tests/make_readme.py [RUN]
"""

import re
import sys
from pathlib import Path

from scion_telemetry.metrics.catalogue import METRICS, QUANTITIES, SELECTION_METRICS

README = Path(__file__).parent.parent / "README.md"


def metric_table() -> str:
    lines = ["| metric | formula | of | unit |", "|---|---|---|---|"]
    for m in METRICS:
        of = "all four" if m.quantities == QUANTITIES else ", ".join(m.quantities)
        lines.append(f"| `{m.name}` | {_cell(m.formula)} | {of} | {m.unit} |")
    return "\n".join(lines)


def selection_table() -> str:
    lines = ["| column | formula | unit |", "|---|---|---|"]
    lines += [f"| `{m.name}` | {_cell(m.formula)} | {m.unit} |" for m in SELECTION_METRICS]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_tables(text: str) -> str:
    for name, table in (("metrics", metric_table()), ("selection", selection_table())):
        text = re.sub(
            rf"(<!-- table: {name} -->\n).*?(<!-- end -->)",
            lambda m, table=table: f"{m[1]}{table}\n{m[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


def draw(run: str) -> None:
    from PIL import Image

    from scion_telemetry import load_run, plots

    figure = plots.overview(load_run(run))
    path = README.parent / "docs" / "demo.png"
    path.parent.mkdir(exist_ok=True)
    plots.save(figure, path)
    with Image.open(path) as image:  # a palette halves the file, and the repository keeps every version of it
        small = image.convert("RGB").quantize(96)
    small.save(path, optimize=True)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
    if len(sys.argv) > 1:
        draw(sys.argv[1])
