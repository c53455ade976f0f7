"""CsvSink: histograms, slices and parameters that come in mid-run, on disk and read back."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sample_run import HISTOGRAMS, NAMES, SLICE_COLUMNS, batch, histogram, param, run_info, slices, write_run

from scion_telemetry.rows import Batch, Histogram, RunInfo, Slice
from scion_telemetry.sinks import CsvSink
from scion_telemetry.store import load_run

HEAD = "step,param,name,log2,count,mass"


def info(**changes: Any) -> RunInfo:
    return run_info(**{"histograms": HISTOGRAMS, "slice_columns": SLICE_COLUMNS, **changes})


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def measured(step: int) -> Batch:
    rows = batch(step)
    both = tuple(histogram(step, name=name) for name in HISTOGRAMS)
    return Batch(step=step, layers=rows.layers, selection=rows.selection, histograms=both)


def written(sink: CsvSink, steps: range, *, whole: bool = True, **changes: Any) -> None:
    """A run of ``steps``, killed before it could write its slices unless ``whole``."""
    sink.open(info(**changes))
    for step in steps:
        sink.write(measured(step))
    if whole:
        sink.write(Batch(step=steps[-1], slices=slices(steps[-1])))
        sink.close()


def test_text_on_disk(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    assert lines(tmp_path / "histograms.csv") == [HEAD]
    sink.write(Batch(step=2, histograms=(histogram(2), histogram(2, "norm", HISTOGRAMS[1]))))
    assert not (tmp_path / "slices.csv").exists()
    sink.write(Batch(step=2, slices=slices(2)))
    sink.close()
    assert (tmp_path / "histograms.csv").read_bytes() == (
        b"step,param,name,log2,count,mass\n"
        b"2,embed,weight_row_norms,-inf,3,0\n"
        b"2,embed,weight_row_norms,-1,1,0.5\n"
        b"2,embed,weight_row_norms,0,2,2.25\n"
        b"2,embed,weight_row_norms,NaN,1,inf\n"
        b"2,norm,selection_frequencies,-inf,3,0\n"
        b"2,norm,selection_frequencies,-1,1,0.5\n"
        b"2,norm,selection_frequencies,0,2,2.25\n"
        b"2,norm,selection_frequencies,NaN,1,inf\n"
    )
    assert (tmp_path / "slices.csv").read_bytes() == (
        b"param,matrix,index,selected,steps,score\nlayers.2.attn.wq,0,0,2,2,0.75\nlayers.2.attn.wq,2,319,0,2,\n"
    )
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["histograms"], facts["slice_columns"]) == (list(HISTOGRAMS), list(SLICE_COLUMNS))
    assert facts["schema_version"] == 1


def test_a_run_without_them_has_no_such_files(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(1, 3))
    assert sorted(files(tmp_path)) == ["layers.csv", "params.csv", "run.json", "scalars.csv", "selection.csv"]


def test_a_distribution_comes_back(tmp_path: Path) -> None:
    """What is read gives numpy's own histogram of the values that went in."""
    values = np.random.default_rng(0).lognormal(-3.0, 2.0, 5000).astype(np.float32).astype(np.float64)
    exponents = np.floor(4 * np.log2(values)) / 4
    edges, counts = np.unique(exponents, return_counts=True)
    mass = [values[exponents == edge].sum() for edge in edges]
    item = Histogram(
        step=1, param="embed", name=HISTOGRAMS[0], log2=tuple(edges), count=tuple(counts), mass=tuple(mass)
    )  # fmt: skip
    sink = CsvSink(tmp_path)
    sink.open(info())
    sink.write(Batch(step=1, histograms=(item,)))
    table = load_run(tmp_path).histograms
    expected, _ = np.histogram(values, bins=2.0 ** np.append(table["log2"], table["log2"].iloc[-1] + 0.25))
    assert table["count"].tolist() == expected.tolist()
    assert table["count"].sum() == 5000
    assert table["mass"].sum() == pytest.approx(values.sum(), rel=1e-8)


def test_names_that_need_care(tmp_path: Path) -> None:
    names = ('a,b"c', "two\nlines", "null", "01")
    sink = CsvSink(tmp_path)
    sink.open(info(names=names))
    parts = tuple(Slice(param=name, matrix=0, index=i, values={"score": math.nan}) for i, name in enumerate(names))
    sink.write(Batch(step=1, histograms=tuple(histogram(1, name) for name in names), slices=parts))
    run = load_run(tmp_path)
    expected = ['a,b"c', "two lines", "null", "01"]
    assert run.slices["param"].tolist() == expected
    assert run.histograms["param"].unique().tolist() == expected
    assert lines(tmp_path / "slices.csv")[3] == "null,0,2,,,NaN"


def test_what_was_not_declared_is_our_own_bug(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    before = files(tmp_path)
    with pytest.raises(AssertionError, match="undeclared histogram 'other'"):
        sink.write(Batch(step=1, layers=batch(1).layers, histograms=(histogram(1, name="other"),)))
    with pytest.raises(AssertionError, match=r"undeclared slice columns \{'gini'\}"):
        sink.write(Batch(step=1, slices=(Slice(param="embed", matrix=0, index=0, values={"gini": 1.0}),)))
    assert files(tmp_path) == before


# --- resume ----------------------------------------------------------------------------------------------------------


def test_resume_cuts_histograms_after_the_checkpoint_and_a_torn_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(CsvSink(tmp_path / "straight"), range(1, 6))
    written(CsvSink(tmp_path / "run"), range(1, 21))
    with (tmp_path / "run" / "histograms.csv").open("a") as file:
        file.write("2")
    with caplog.at_level(logging.WARNING):
        written(CsvSink(tmp_path / "run", resume=True), range(4, 6), start_step=3)
    assert "histograms.csv: cut 136 rows after step 3" in caplog.text  # 17 steps of two with four bins
    straight, run = files(tmp_path / "straight"), files(tmp_path / "run")
    assert {name for name in run if run[name] != straight[name]} == {"run.json"}
    assert load_run(tmp_path / "run").slices["steps"].tolist() == [5.0, 5.0]


def test_slices_of_a_run_that_went_on_are_not_kept(tmp_path: Path) -> None:
    written(CsvSink(tmp_path), range(1, 4))
    old = (tmp_path / "slices.csv").read_bytes()
    unstarted = CsvSink(tmp_path, resume=True)
    unstarted.open(info(start_step=3))
    unstarted.discard()
    assert (tmp_path / "slices.csv").read_bytes() == old  # nothing has happened yet
    written(CsvSink(tmp_path, resume=True), range(4, 6), whole=False, start_step=3)
    assert not (tmp_path / "slices.csv").exists()
    run = load_run(tmp_path)
    assert run.slices.columns.tolist() == ["param", "matrix", "index", *SLICE_COLUMNS]
    assert (len(run.slices), run.steps) == (0, [1, 2, 3, 4, 5])


def test_a_run_that_ends_where_it_resumes_replaces_its_slices(tmp_path: Path) -> None:
    written(CsvSink(tmp_path), range(1, 4))
    sink = CsvSink(tmp_path, resume=True)
    sink.open(info(start_step=3))
    sink.write(Batch(step=3, slices=slices(7)[:1]))
    sink.write(batch(4))  # nothing after that takes them away
    assert load_run(tmp_path).slices["steps"].tolist() == [7.0]


def test_resume_with_other_facts_about_slices(tmp_path: Path) -> None:
    written(CsvSink(tmp_path), range(1, 4))
    CsvSink(tmp_path, resume=True).open(info(start_step=3, slice_columns=("selected", "age")))
    assert load_run(tmp_path).slices.columns.tolist() == ["param", "matrix", "index", "selected", "age"]


def test_resume_of_a_run_that_had_none(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(1, 4))
    facts = json.loads((tmp_path / "run.json").read_text())
    del facts["histograms"], facts["slice_columns"]  # as it was before there were any
    (tmp_path / "run.json").write_text(json.dumps(facts))
    written(CsvSink(tmp_path, resume=True), range(4, 5), start_step=3)
    run = load_run(tmp_path)
    assert run.steps == [1, 2, 3, 4]
    assert run.histograms["step"].unique().tolist() == [4]
    assert run.info["histograms"] == list(HISTOGRAMS)


def test_resume_without_histograms_cuts_those_of_before(tmp_path: Path) -> None:
    written(CsvSink(tmp_path), range(1, 4))
    before = lines(tmp_path / "histograms.csv")
    write_run(CsvSink(tmp_path, resume=True), range(3, 5), run_info(start_step=2, slice_columns=SLICE_COLUMNS))
    assert lines(tmp_path / "histograms.csv") == before[: 1 + 2 * 2 * 4]
    assert load_run(tmp_path).info["histograms"] == list(HISTOGRAMS)


def test_resume_refuses_a_table_that_it_cannot_judge(tmp_path: Path) -> None:
    written(CsvSink(tmp_path), range(1, 4))
    (tmp_path / "histograms.csv").write_text("step,bins\n1,2\n")
    before = files(tmp_path)
    with pytest.raises(ValueError, match=r"histograms.csv cannot be resumed: its columns"):
        CsvSink(tmp_path, resume=True).open(info(start_step=1))
    assert files(tmp_path) == before


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    for name in ("histograms.csv", "slices.csv"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("precious\n")
        with pytest.raises(ValueError, match=rf"already holds a run \({name}\)"):
            CsvSink(folder).open(info())
        assert files(folder) == {name: b"precious\n"}


def test_a_run_that_did_not_start_leaves_nothing(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    sink.discard()
    assert files(tmp_path) == {}


# --- parameters that come in mid-run ---------------------------------------------------------------------------------


def test_extend_lists_the_new_parameters_and_goes_on(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info(names=NAMES[:2]))
    sink.write(Batch(step=1, histograms=(histogram(1),)))
    before = files(tmp_path)
    sink.extend(info(params=(param("embed"), param("new", shape=(4, 2)), param(NAMES[1]))))
    after = files(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"params.csv"}
    assert sorted(after) == sorted(before)
    sink.write(Batch(step=2, histograms=(histogram(2, "new"),)))
    sink.close()
    run = load_run(tmp_path)
    assert run.params["name"].tolist() == ["embed", "new", NAMES[1]]
    assert run.params["shape"].tolist()[1] == (4, 2)
    assert run.histograms.groupby("param", observed=True)["step"].max().to_dict() == {"embed": 1, "new": 2}


def test_a_forked_child_changes_nothing(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    before = files(tmp_path)
    child = os.fork()
    if child == 0:
        sink.extend(info(names=("x",)))
        sink.write(Batch(step=1, histograms=(histogram(1),), slices=slices(1)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert files(tmp_path) == before


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_histograms_that_find_no_room_leave_the_rest_alone(tmp_path: Path, small_files: Any) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    errors = {}
    for step in range(1, 31):
        try:
            sink.write(Batch(step=step, layers=batch(step).layers[:1], histograms=(histogram(step),)))
        except OSError as error:
            errors[step] = error
    full = min(errors)
    assert list(errors) == list(range(full, 31))
    assert {error.filename for error in errors.values()} == {str(tmp_path / "histograms.csv")}
    run = load_run(tmp_path)
    assert run.histograms["step"].tolist() == [step for step in range(1, full) for _ in range(4)]
    assert run.layers["step"].tolist() == list(range(1, 31))
    small_files()
    sink.write(Batch(step=31, histograms=(histogram(31),)))
    assert load_run(tmp_path).histograms["step"].tolist()[-5:] == [full - 1, 31, 31, 31, 31]


def test_slices_that_find_no_room_are_not_there_by_halves(tmp_path: Path, small_files: Any) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    many = tuple(Slice(param="embed", matrix=0, index=i, values={"selected": float(i)}) for i in range(500))
    with pytest.raises(OSError, match=r"slices\.csv"):
        sink.write(Batch(step=1, histograms=(histogram(1),), slices=many))
    assert "slices.csv" not in files(tmp_path)
    assert not list(tmp_path.glob("*tmp*")) + list(tmp_path.glob(".*"))
    assert load_run(tmp_path).histograms["step"].tolist() == [1] * 4
    params = (tmp_path / "params.csv").read_bytes()
    with pytest.raises(OSError, match=r"params\.csv"):
        sink.extend(info(names=tuple(f"layers.{i}.weight" for i in range(200))))
    assert (tmp_path / "params.csv").read_bytes() == params
    small_files()
    sink.write(Batch(step=1, slices=many))
    pd.testing.assert_series_equal(
        load_run(tmp_path).slices["selected"], pd.Series(np.arange(500.0), name="selected")
    )  # fmt: skip
