"""Histograms and slices as tables: of one run, of many, of runs that have none, and of files cut anywhere."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sample_run import HISTOGRAMS, NAMES, SLICE_COLUMNS, batch, histogram, run_info, slices, write_run

from scion_telemetry.rows import Batch, RunInfo, Slice
from scion_telemetry.sinks import CsvSink
from scion_telemetry.store import load_run, load_runs

COLUMNS = ["step", "param", "name", "log2", "count", "mass"]
FACTS = ["param", "matrix", "index", *SLICE_COLUMNS]


def info(**changes: Any) -> RunInfo:
    return run_info(**{"histograms": HISTOGRAMS, "slice_columns": SLICE_COLUMNS, **changes})


def written(path: Path, *batches: Batch, **changes: Any) -> Path:
    sink = CsvSink(path)
    sink.open(info(**changes))
    for item in batches:
        sink.write(item)
    sink.close()
    return path


def two(step: int) -> Batch:
    """A batch of two histograms; the parameter that comes last in the model is the first."""
    return Batch(step=step, histograms=(histogram(step, "norm"), histogram(step, "embed", HISTOGRAMS[1])))


def test_everything_comes_back(tmp_path: Path) -> None:
    run = load_run(written(tmp_path, two(1), two(2), Batch(step=2, slices=slices(2))))
    bins = [(-math.inf, 3.0, 0.0), (-1.0, 1.0, 0.5), (0.0, 1.0, 1.125), (math.nan, 1.0, math.inf)]
    twice = [(-math.inf, 3.0, 0.0), (-1.0, 1.0, 0.5), (0.0, 2.0, 2.25), (math.nan, 1.0, math.inf)]
    which = [(1, "norm", HISTOGRAMS[0], bins), (1, "embed", HISTOGRAMS[1], bins)]
    which += [(2, "norm", HISTOGRAMS[0], twice), (2, "embed", HISTOGRAMS[1], twice)]
    expected = pd.DataFrame(
        [(step, name, kind, *cells) for step, name, kind, rows in which for cells in rows], columns=COLUMNS
    )
    pd.testing.assert_frame_equal(run.histograms.astype({"param": "str"}), expected)
    assert run.histograms["param"].cat.categories.tolist() == list(NAMES)
    assert run.slices.to_dict("list") == {
        "param": [NAMES[1], NAMES[1]],
        "matrix": [0, 2],
        "index": [0, 319],
        "selected": [2.0, 0.0],
        "steps": [2.0, 2.0],
        "score": [0.75, pytest.approx(math.nan, nan_ok=True)],
    }
    assert (run.slices["matrix"].dtype, run.slices["index"].dtype) == ("int64", "int64")
    assert run.slices["param"].cat.categories.tolist() == list(NAMES)
    assert run.steps == []  # steps are those of rows


def test_a_run_of_before_there_were_any(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(1, 3))
    facts = json.loads((tmp_path / "run.json").read_text())
    del facts["histograms"], facts["slice_columns"]
    (tmp_path / "run.json").write_text(json.dumps(facts))
    run = load_run(tmp_path)
    assert (len(run.histograms), run.histograms.columns.tolist()) == (0, COLUMNS)
    assert (len(run.slices), run.slices.columns.tolist()) == (0, FACTS[:3])
    assert run.histograms.dtypes.astype(str).tolist() == ["int64", "category", "str", *["float64"] * 3]
    assert run.steps == [1, 2]


def test_a_run_that_still_lives(tmp_path: Path) -> None:
    run = load_run(written(tmp_path, two(1)))
    assert len(run.histograms) == 8
    assert (len(run.slices), run.slices.columns.tolist()) == (0, FACTS)


@pytest.mark.parametrize("name", ["histograms", "slices"])
def test_cut_anywhere(tmp_path: Path, name: str) -> None:
    written(tmp_path, two(1), Batch(step=1, slices=slices(1)))
    path = tmp_path / f"{name}.csv"
    data = path.read_bytes()
    whole = getattr(load_run(tmp_path), name)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        table = getattr(load_run(tmp_path), name)
        rows = max(0, data[:size].count(b"\n") - 1)
        pd.testing.assert_frame_equal(table, whole.head(rows), check_categorical=False)


def test_many_runs(tmp_path: Path) -> None:
    written(tmp_path / "a", two(1), Batch(step=1, slices=slices(1)), attributes={"lr": 0.1, "mass": "light"})
    other = Slice(param="new", matrix=1, index=4, values={"selected": 3.0})
    written(
        tmp_path / "b", Batch(step=9, histograms=(histogram(9, "new"),), slices=(other,)),
        names=("new",), slice_columns=("selected",), attributes={"lr": 0.2, "selected": True},
    )  # fmt: skip
    write_run(CsvSink(tmp_path / "c"), range(1, 3), run_info(attributes={"lr": 0.3}))
    runs = load_runs(str(tmp_path / "*"))
    histograms, table = runs.histograms, runs.slices
    assert histograms.columns.tolist() == ["run", *COLUMNS, "lr", "run_mass", "selected"]
    assert histograms["run"].tolist() == ["a"] * 8 + ["b"] * 4
    assert histograms["run_mass"].tolist()[:8] == ["light"] * 8
    assert histograms.loc[histograms["run"] == "b", "count"].tolist() == [3.0, 1.0, 9.0, 1.0]
    assert histograms["param"].cat.categories.tolist() == [*NAMES, "new"]
    assert table.columns.tolist() == ["run", *FACTS, "lr", "mass", "run_selected"]
    assert table["selected"].tolist() == [1.0, 0.0, 3.0]
    assert (table["index"].tolist(), table["index"].dtype) == ([0, 319, 4], "int64")
    assert table["param"].cat.categories.tolist() == [*NAMES, "new"]
    assert table["lr"].tolist() == [0.1, 0.1, 0.2]
    assert runs.layers["selected"].isna().all()  # the attribute keeps its name where nothing else has it


def test_the_rows_beside_them_are_what_they_were(tmp_path: Path) -> None:
    plain, with_more = batch(1), two(1)
    written(tmp_path / "a", plain)
    both = Batch(step=1, layers=plain.layers, selection=plain.selection, histograms=with_more.histograms)
    written(tmp_path / "b", both)
    for name in ("layers.csv", "selection.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
