"""Writes the tables of the two READMEs and the figure of the first; tests/test_readme.py holds them to the code.

python tests/make_readme.py [RUN]
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scion_telemetry.metrics.catalogue import HISTOGRAMS, METRICS
from scion_telemetry.metrics.declare import QUANTITIES, HistogramMetric, Metric
from scion_telemetry.metrics.selection_columns import SELECTION_METRICS
from scion_telemetry.optim.dion2 import Dion2Algorithm
from scion_telemetry.optim.dion3 import Dion3Algorithm
from scion_telemetry.optim.groups import ROLES
from scion_telemetry.optim.norms import ALIASES, NORMS
from scion_telemetry.optim.orthogonalize import NAMES
from scion_telemetry.optim.scalar import AdamWAlgorithm, LionAlgorithm
from scion_telemetry.optim.scion import ScionAlgorithm

README = Path(__file__).parent.parent / "README.md"
OPTIM_README = README.parent / "optim" / "README.md"
RULES = {
    "Scion": ScionAlgorithm(),
    "Dion2": Dion2Algorithm(),
    "Dion3": Dion3Algorithm(),
    "AdamW": AdamWAlgorithm(),
    "Lion": LionAlgorithm(),
}
# Options that are checked by making what they name.
CHOICES = {
    "norm": ["Auto, " + ", ".join((*NORMS, *ALIASES))],
    "newton_schulz_func": [", ".join(NAMES) + ", or a callable"],
}


def metric_table() -> str:
    return _table("metric", METRICS)


def histogram_table() -> str:
    return _table("histogram", HISTOGRAMS)


def _table(what: str, metrics: Sequence[Metric | HistogramMetric]) -> str:
    lines = [f"| {what} | formula | of | unit |", "|---|---|---|---|"]
    for m in metrics:
        of = "all four" if m.quantities == QUANTITIES else ", ".join(m.quantities)
        lines.append(f"| `{m.name}` | {_cell(m.formula)} | {of} | {m.unit} |")
    return "\n".join(lines)


def selection_table() -> str:
    """One line a column; of columns that differ in a number alone, ``mass_at_0.25``, one line for all."""
    families: dict[str, list[str]] = {}
    for m in SELECTION_METRICS:
        families.setdefault(re.sub(r"(?<=_at_)[\d.]+$", "F", m.name), []).append(m.name.rpartition("_at_")[2])
    formulas = {m.name: m for m in SELECTION_METRICS}
    lines = ["| column | formula | unit |", "|---|---|---|"]
    for family, numbers in families.items():
        first = formulas[family.removesuffix("F") + numbers[0] if family.endswith("_at_F") else family]
        formula = first.formula
        if family.endswith("_at_F"):
            formula = f"{formula.replace(numbers[0], 'F')}; F = {', '.join(numbers)}"
        lines.append(f"| `{family}` | {_cell(formula)} | {first.unit} |")
    return "\n".join(lines)


def role_table() -> str:
    lines = ["| role | stepped with |", "|---|---|"]
    for role, options in ROLES.items():
        own = ", ".join(f"`{name}={value!r}`" for name, value in options.items())
        lines.append(f"| {role} | {own or 'the rule of the optimizer'} |")
    return "\n".join(lines)


def option_table() -> str:
    lines = [f"| option | {' | '.join(RULES)} | allowed |", "|---" * (len(RULES) + 2) + "|"]
    for option in dict.fromkeys(name for rule in RULES.values() for name in rule.defaults):
        defaults = [f"`{r.defaults[option]!r}`" if option in r.defaults else "" for r in RULES.values()]
        allowed = dict.fromkeys(r.checks[option][1] for r in RULES.values() if option in r.checks) or CHOICES[option]
        lines.append(f"| `{option}` | {' | '.join(defaults)} | {_cell('; '.join(allowed))} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_tables(text: str) -> str:
    tables = {
        "metrics": metric_table,
        "histograms": histogram_table,
        "selection": selection_table,
        "roles": role_table,
        "options": option_table,
    }
    for name, make in tables.items():
        table = make()
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
    for path in (README, OPTIM_README):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    if len(sys.argv) > 1:
        draw(sys.argv[1])
