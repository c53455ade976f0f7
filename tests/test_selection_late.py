"""The later part of a run in slices.csv: how long it is, that it is counted right, and that it costs little to keep."""

from pathlib import Path

import pytest
from slices_run import LATE, Training, compare

from scion_telemetry import at, every, load_run
from scion_telemetry.sinks import CsvSink


@pytest.mark.parametrize("last", [2, 3, 7, 20, 41, 57])
def test_the_later_part_is_half_of_a_run_or_up_to_two_thirds(last: int, tmp_path: Path) -> None:
    training = Training()
    with training.tracker(every(1), CsvSink(tmp_path / "run")) as tracker:
        training.steps(1, last)
        marks = tracker.state_dict()["tally"]["marks"]
    assert all(len(found["steps"]) <= 3 for found in marks.values()), "however long the run"
    (late,) = set(load_run(tmp_path / "run").slices["steps_late"])
    assert 0.5 * last <= late <= 0.65 * last + 1
    compare(tmp_path / "run", list(range(1, last + 1)))


def test_a_run_whose_flushes_all_lie_in_its_second_half_tells_of_no_later_part(tmp_path: Path) -> None:
    training = Training()
    with training.tracker(at(11, 16), CsvSink(tmp_path / "run")):
        training.steps(1, 18)
    assert load_run(tmp_path / "run").slices[list(LATE)].isna().all(axis=None)
    compare(tmp_path / "run", [11, 16])


def test_a_state_from_before_there_was_a_later_part_goes_on(tmp_path: Path) -> None:
    training = Training()
    with training.tracker(every(1), CsvSink(tmp_path / "run")) as tracker:
        training.steps(1, 6)
        state = tracker.state_dict()
    del state["tally"]["marks"]
    with training.tracker(every(1), CsvSink(tmp_path / "run", resume=True), resume=state):
        training.steps(7, 20)
    table = load_run(tmp_path / "run").slices
    assert set(table["steps"]) == {20}
    assert set(table["steps_late"]) == {20 - 10}, "marked at 7 and, √2 later, at 10"
