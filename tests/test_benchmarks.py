"""The benchmarks run, and print what they promise; what they print is nobody's business but the reader's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scion_telemetry.metrics.catalogue import PRESETS

ROOT = Path(__file__).parent.parent


def printed(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / script), *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tables(text: str) -> list[list[dict[str, str]]]:
    """Every Markdown table, a dict a line."""
    found: list[list[dict[str, str]]] = []
    heads: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            heads = []
        elif not heads:
            heads = cells
            found.append([])
        elif set("".join(cells)) != {"-"}:
            found[-1].append(dict(zip(heads, cells, strict=True)))
    return found


def test_the_benchmark_of_the_optimizers_prints_its_table() -> None:
    text = printed("optim.py", "--quick", "--layers", "1", "--width", "16", "--repeats", "1")
    cells = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines()}
    heads = cells["optimizer"]
    assert len(heads) == 7
    row = {name: dict(zip(heads, values, strict=True)) for name, values in cells.items()}
    assert row["step / Muon"]["torch.optim.Muon"] == "1.00"
    # What is counted, and not timed, is known beforehand.
    assert [row["all_to_all, 4 ranks"][f"Dion2, {f}"] for f in ("1", "0.5", "0.25")] == ["1", "0.5", "0.25"]
    assert set(row["bytes, 1 rank"].values()) == {"", "0"}
    assert row["predicted"]["Dion2, 0.5"] == "0.23"


@pytest.fixture(scope="module")
def sections() -> dict[str, list[list[dict[str, str]]]]:
    """The tables of the tracker's benchmark in tiny sizes, by section."""
    parts = printed("telemetry.py", "--quick", "--repeats", "1").split("## ")[1:]
    return {part.split()[0]: tables(part) for part in parts}


def test_the_benchmark_of_the_tracker_counts_what_a_flush_sends(
    sections: dict[str, list[list[dict[str, str]]]],
) -> None:
    (rows,) = sections["overhead"]
    assert {row["ranks"] for row in rows} == {"1", "2"}
    assert {row["preset"] for row in rows} == {*PRESETS, "norms, selection"}
    for row in rows:
        assert row["collectives"] == row["counted"], "the tracker tells what the dispatcher sees"
        sent = int(row["bytes"])
        if row["ranks"] == "1":
            assert sent == int(row["collectives"]) == 0
        elif row["preset"].startswith("norms"):
            assert sent == 8 * int(row["numbers"])
            assert int(row["collectives"]) <= 2
        else:
            assert sent >= 8 * int(row["numbers"])
            assert int(row["collectives"]) <= 6
        assert int(row["rows"]) >= 11  # the parameters of the model, and further rows for what is selected


def test_the_benchmark_of_peers_compares_equal_metrics_with_the_truth(
    sections: dict[str, list[list[dict[str, str]]]],
) -> None:
    keys = 16  # 4 quantities of 4 matrices
    for rows, kinds in zip(sections["peers"], (1, 2), strict=True):
        ours, per_key, stacked, gathered, reading = rows
        assert {row["metrics"] for row in rows[:4]} == {str(keys * kinds)}
        assert reading["collectives"] == reading["metrics"] == "0"
        assert ours["over ours"] == ours["over ours, all"] == "1.00"
        assert int(ours["collectives"]) <= 2
        assert int(per_key["collectives"]) == keys * kinds
        assert int(stacked["collectives"]) == 2 * kinds - 1
        assert int(gathered["collectives"]) == keys
        entries = 12 * 16 * 16 * 4  # of all quantities
        assert int(gathered["bytes"]) == 4 * entries // 2
        assert float(ours["largest relative error"]) <= 1e-7
        assert all(float(row["largest relative error"]) <= 1e-4 for row in rows[:4])


def test_the_benchmark_of_singular_values_encloses_the_truth(
    sections: dict[str, list[list[dict[str, str]]]],
) -> None:
    ((ours, theirs),) = sections["sigma"]
    assert ours["truth in the interval"] == "yes"
    assert float(ours["error, flush 3"]) <= 0.005
    assert int(theirs["collectives"]) == 4


def test_the_benchmark_of_growth_grows_with_layers_and_sides_and_not_with_ranks(
    sections: dict[str, list[list[dict[str, str]]]],
) -> None:
    layers, sides, ranks = sections["growth"]
    for preset in ("norms", "basic"):
        few, many = (row for row in layers if row["preset"] == preset)
        assert few["collectives, 2"] == many["collectives, 2"]
        # A handful of numbers says which ranks go together, however many layers there are.
        more = int(many["numbers"]) - int(few["numbers"])
        further = int(many["layers"]) - int(few["layers"])
        assert int(few["numbers"]) == pytest.approx(int(few["layers"]) * more / further, abs=8)
        sent = [float(row["bytes / n"]) for row in sides if row["preset"] == preset]
        # The smallest matrices need fewer steps: two blocks fill the space of 32 vectors.
        assert sent[-1] <= 1.5 * sent[-2], "about linear in the side"
        alone, together = (row for row in ranks if row["preset"] == preset)
        assert alone["bytes a flush"] == together["bytes a flush"]
        assert alone["collectives"] == together["collectives"]
