"""Which rows were selected, on disk and read back: of one run, of many, cut anywhere, resumed, and on a full disk."""

import base64
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sample_run import NAMES, SLICE_COLUMNS, batch, chosen, run_info, slices, write_run

from scion_telemetry.rows import Batch, Chosen, RunInfo
from scion_telemetry.sinks import CsvSink, MemorySink
from scion_telemetry.store import load_run, load_runs

HEAD = "step,param,matrix,count,rows"
COLUMNS = HEAD.split(",")


def info(**changes: Any) -> RunInfo:
    return run_info(**{"selection_rows": True, "slice_columns": SLICE_COLUMNS, **changes})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def measured(step: int) -> Batch:
    rows = batch(step)
    both = chosen(step), chosen(step + 1, matrix=2)
    both = (both[0], Chosen(step=step, param=both[1].param, matrix=2, count=10, rows=both[1].rows))
    return Batch(step=step, layers=rows.layers, selection=rows.selection, selected=both)


def written(path: Path, steps: range, *, resume: bool = False, **changes: Any) -> Path:
    sink = CsvSink(path, resume=resume)
    sink.open(info(**changes))
    for step in steps:
        sink.write(measured(step))
    sink.write(Batch(step=steps[-1], slices=slices(steps[-1])))
    sink.close()
    return path


def test_text_on_disk(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    assert (tmp_path / "selected.csv").read_text() == HEAD + "\n"
    sink.write(Batch(step=2, selected=(chosen(2), chosen(2, 'a,"b"', 3))))
    sink.close()
    # 2 has a bit in common with 2, 3, 6 and 7: 00110011 00000000.
    assert (tmp_path / "selected.csv").read_text() == (f'{HEAD}\n2,layers.2.attn.wq,0,10,MwA=\n2,"a,""b""",3,10,MwA=\n')
    assert json.loads((tmp_path / "run.json").read_text())["selection_rows"] is True


def test_a_flush_of_many_rows_takes_a_sixth_of_a_character_a_row(tmp_path: Path) -> None:
    flags = np.random.default_rng(0).random(6000) < 0.25
    sink = CsvSink(tmp_path)
    sink.open(info())
    rows = np.packbits(flags).tobytes()
    sink.write(Batch(step=1, selected=(Chosen(step=1, param="embed", matrix=0, count=6000, rows=rows),)))
    line = (tmp_path / "selected.csv").read_text().splitlines()[1]
    assert len(line) == len("1,embed,0,6000,") + 1000
    assert np.array_equal(load_run(tmp_path).raster("embed").to_numpy()[0], flags)


def test_everything_comes_back(tmp_path: Path) -> None:
    run = load_run(written(tmp_path, range(1, 4)))
    table = run.selected
    assert table.columns.tolist() == COLUMNS
    assert table["step"].tolist() == [1, 1, 2, 2, 3, 3]
    assert table["param"].cat.categories.tolist() == list(NAMES)
    assert [table[name].dtype for name in ("step", "matrix", "count")] == ["int64"] * 3
    assert table["matrix"].tolist() == [0, 2] * 3
    assert table["rows"].tolist() == [rows for s in (1, 2, 3) for rows in (chosen(s).rows, chosen(s + 1).rows)]
    assert run.raster(NAMES[1]).to_numpy()[1].tolist() == [bool(row & 2) for row in range(10)]
    assert run.raster(NAMES[1], 2).to_numpy()[1].tolist() == [bool(row & 3) for row in range(10)]


def test_what_is_not_known_is_said_with_what_is(tmp_path: Path) -> None:
    run = load_run(written(tmp_path / "a", range(1, 4)))
    for param, matrix in (("embed", 0), (NAMES[1], 1)):
        with pytest.raises(
            ValueError, match=rf"rows of {param}\[{matrix}\] .*known are {NAMES[1]}\[0\], {NAMES[1]}\[2"
        ):
            run.raster(param, matrix)
    write_run(CsvSink(tmp_path / "b"), range(1, 3))
    with pytest.raises(ValueError, match="measure selection_rows"):
        load_run(tmp_path / "b").raster("embed")


def test_a_run_of_before_there_was_such_a_table(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(1, 3))
    assert "selected.csv" not in files(tmp_path)
    facts = json.loads((tmp_path / "run.json").read_text())
    del facts["selection_rows"]
    (tmp_path / "run.json").write_text(json.dumps(facts))
    table = load_run(tmp_path).selected
    assert (len(table), table.columns.tolist()) == (0, COLUMNS)
    written(tmp_path, range(3, 4), resume=True, start_step=2)
    run = load_run(tmp_path)
    assert (run.selected["step"].tolist(), run.info["selection_rows"]) == ([3, 3], True)


def test_cut_anywhere(tmp_path: Path) -> None:
    written(tmp_path, range(1, 3))
    path = tmp_path / "selected.csv"
    data, whole = path.read_bytes(), load_run(tmp_path).selected
    for size in range(len(data)):
        path.write_bytes(data[:size])
        rows = max(0, data[:size].count(b"\n") - 1)
        pd.testing.assert_frame_equal(load_run(tmp_path).selected, whole.head(rows), check_categorical=False)


@pytest.mark.parametrize(
    ("rows", "count", "why"),
    [
        ("A", "10", "its rows are no base64"),
        ("A!==", "10", "its rows are no base64"),
        ("AAAAAAA=", "10", "5 bytes of rows, and 10 rows take 2"),
        ("", "10", "0 bytes of rows, and 10 rows take 2"),
        ("", "0", "0 bytes of rows, and 0 rows take 0"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, rows: str, count: str, why: str) -> None:
    written(tmp_path, range(1, 4))
    path = tmp_path / "selected.csv"
    lines = path.read_text().splitlines()
    lines[3] = ",".join([*lines[3].split(",")[:3], count, rows])
    path.write_text("\n".join(lines) + "\n")
    run = load_run(tmp_path)
    message = rf"selected\.csv, line 4 is damaged: {why}.*take the line out"
    with pytest.raises(ValueError, match=message):
        _ = run.selected
    with pytest.raises(ValueError, match=message):
        run.raster(NAMES[1])
    path.write_text("\n".join(lines[:3] + lines[4:]) + "\n")
    assert len(load_run(tmp_path).selected) == 5


def test_many_runs(tmp_path: Path) -> None:
    written(tmp_path / "a", range(1, 3), attributes={"lr": 0.1, "rows": 3})
    sink = CsvSink(tmp_path / "b")
    sink.open(info(names=("new",), attributes={"lr": 0.2}))
    sink.write(Batch(step=9, selected=(chosen(9, "new", 4),)))
    write_run(CsvSink(tmp_path / "c"), range(1, 3), run_info(attributes={"lr": 0.3}))
    table = load_runs(str(tmp_path / "*")).selected
    assert table.columns.tolist() == ["run", *COLUMNS, "lr", "run_rows"]
    assert table["run"].tolist() == ["a"] * 4 + ["b"]
    assert table["lr"].tolist() == [0.1] * 4 + [0.2]
    assert table["param"].cat.categories.tolist() == [*NAMES, "new"]
    assert table["matrix"].tolist() == [0, 2, 0, 2, 4]
    assert table["matrix"].dtype == "int64"
    assert table["rows"].tolist()[-1] == chosen(9).rows


def test_in_memory() -> None:
    sink = MemorySink()
    sink.open(info())
    for step in (1, 2):
        sink.write(measured(step))
    assert sink.run is not None
    assert sink.run.selection_rows
    assert sink.selected == [*measured(1).selected, *measured(2).selected]
    assert sink.steps == [1, 2]


def test_what_was_not_declared_is_our_own_bug(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(run_info())
    before = files(tmp_path)
    with pytest.raises(AssertionError, match=r"undeclared selection of 'layers\.2\.attn\.wq'"):
        sink.write(Batch(step=1, layers=batch(1).layers, selected=(chosen(1),)))
    assert files(tmp_path) == before


# --- resume ----------------------------------------------------------------------------------------------------------


def test_resume_cuts_what_came_after_the_checkpoint_and_a_torn_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path / "straight", range(1, 6))
    written(tmp_path / "run", range(1, 21))
    with (tmp_path / "run" / "selected.csv").open("a") as file:
        file.write("2,embed,0,10,Mw")
    with caplog.at_level(logging.WARNING):
        written(tmp_path / "run", range(4, 6), resume=True, start_step=3)
    assert "selected.csv: cut 34 rows after step 3" in caplog.text
    straight, run = files(tmp_path / "straight"), files(tmp_path / "run")
    assert {name for name in run if run[name] != straight[name]} == {"run.json"}


def test_resume_without_it_cuts_it_too_and_keeps_what_was_told(tmp_path: Path) -> None:
    written(tmp_path, range(1, 5))
    write_run(CsvSink(tmp_path, resume=True), range(3, 5), run_info(start_step=2, slice_columns=SLICE_COLUMNS))
    run = load_run(tmp_path)
    assert (run.selected["step"].tolist(), run.info["selection_rows"]) == ([1, 1, 2, 2], True)


def test_resume_refuses_a_table_that_it_cannot_judge(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4))
    (tmp_path / "selected.csv").write_text("step,flags\n1,2\n")
    before = files(tmp_path)
    with pytest.raises(ValueError, match=r"selected.csv cannot be resumed: its columns"):
        CsvSink(tmp_path, resume=True).open(info(start_step=1))
    assert files(tmp_path) == before


def test_a_run_is_never_overwritten_and_one_that_did_not_start_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "selected.csv").write_text("precious\n")
    with pytest.raises(ValueError, match=r"already holds a run \(selected\.csv\)"):
        CsvSink(tmp_path).open(info())
    assert files(tmp_path) == {"selected.csv": b"precious\n"}
    (tmp_path / "selected.csv").unlink()
    sink = CsvSink(tmp_path)
    sink.open(info())
    sink.discard()
    assert files(tmp_path) == {}


# --- parameters that come in mid-run, forked children, a full disk ----------------------------------------------------


def test_extend_begins_the_table_and_says_so(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(run_info(names=NAMES[:1], selection_columns=()))
    assert not (tmp_path / "selected.csv").exists()
    sink.extend(info(names=NAMES[:2], histograms=("selection_frequencies",)))
    assert (tmp_path / "selected.csv").read_text() == HEAD + "\n"
    sink.write(measured(3))
    sink.write(Batch(step=3, slices=slices(3)))
    sink.close()
    run = load_run(tmp_path)
    assert (run.selected["step"].tolist(), len(run.slices)) == ([3, 3], 2)
    assert (run.info["selection_rows"], run.info["histograms"]) == (True, ["selection_frequencies"])


def test_extend_forgets_nothing_that_a_run_before_it_told(tmp_path: Path) -> None:
    written(tmp_path, range(1, 3), histograms=("weight_row_norms",))
    sink = CsvSink(tmp_path, resume=True)
    sink.open(run_info(start_step=2, slice_columns=SLICE_COLUMNS))
    sink.extend(run_info(names=(*NAMES, "new"), slice_columns=SLICE_COLUMNS))
    run = load_run(tmp_path)
    assert (run.info["selection_rows"], run.info["histograms"]) == (True, ["weight_row_norms"])
    assert run.info["resumed_at"] == [2]


def test_a_forked_child_changes_nothing(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    before = files(tmp_path)
    child = os.fork()
    if child == 0:
        sink.write(measured(1))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert files(tmp_path) == before


def test_a_full_disk_leaves_whole_lines_and_the_rest_alone(tmp_path: Path, small_files: Any) -> None:
    sink = CsvSink(tmp_path)
    sink.open(info())
    wide = np.packbits(np.arange(4000) % 3 == 0).tobytes()
    errors = {}
    for step in range(1, 13):
        item = Chosen(step=step, param="embed", matrix=0, count=4000, rows=wide)
        try:
            sink.write(Batch(step=step, layers=batch(step).layers[:1], selected=(item,)))
        except OSError as error:
            errors[step] = error
    full = min(errors)
    assert {error.filename for error in errors.values()} == {str(tmp_path / "selected.csv")}
    assert full == 1 + (4096 - len(HEAD) - 1) // len(f"1,embed,0,4000,{base64.b64encode(wide).decode()}\n")
    run = load_run(tmp_path)
    assert run.selected["step"].tolist() == list(range(1, full))
    assert run.layers["step"].tolist() == list(range(1, 13))
    small_files()
    sink.write(measured(13))
    assert load_run(tmp_path).selected["step"].tolist() == [*range(1, full), 13, 13]


def test_a_table_that_finds_no_room_for_its_header_is_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    sink = CsvSink(tmp_path)
    sink.open(run_info(selection_columns=()))
    write, full = os.write, [True]

    def refuse(fd: int, data: bytes) -> int:
        if full[0] and bytes(data).startswith(HEAD.encode()):
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match=r"selected\.csv"):
        sink.extend(info())
    with pytest.raises(OSError, match=r"selected\.csv"):
        sink.write(measured(1))
    full[0] = False
    sink.write(measured(2))
    run = load_run(tmp_path)
    assert (run.layers["step"].unique().tolist(), run.selected["step"].tolist()) == ([1, 2], [2, 2])
