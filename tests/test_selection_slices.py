"""slices.csv: what happened to every row over a run, however it ended, and the histograms of a window."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from slices_run import SHAPES, Training, compare, counted
from tracked import gauss, named

from scion_telemetry import Tracker, at, every, load_run
from scion_telemetry.optim import Dion2
from scion_telemetry.sinks import CsvSink, MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(60)


def flushes(schedule: Callable[[int], bool], last: int) -> list[int]:
    return [step for step in range(1, last + 1) if schedule(step)]


@pytest.mark.parametrize("schedule", [every(1), every(4), every(5, first=False), at(3, 4, 17)], ids=str)
def test_a_run_counts_every_selection_up_to_its_last_flush(schedule: Any, tmp_path: Path) -> None:
    training = Training()
    with training.tracker(schedule, CsvSink(tmp_path / "run")):
        training.steps(1, 18)
    compare(tmp_path / "run", flushes(schedule, 18))


@contextmanager
def _stops() -> Iterator[None]:
    with pytest.raises(ZeroDivisionError):
        yield


def test_a_run_that_ends_in_an_exception(tmp_path: Path) -> None:
    training = Training()
    with _stops(), training.tracker(every(4), CsvSink(tmp_path / "run")):
        training.steps(1, 14)
        raise ZeroDivisionError
    compare(tmp_path / "run", [1, 4, 8, 12])


def test_a_step_that_raises_between_its_selection_and_its_flush(tmp_path: Path) -> None:
    """Of a step that never ended nothing is told."""
    training = Training()

    def raises(_: object) -> None:
        if training.now == 12:
            raise ZeroDivisionError

    with _stops(), training.tracker(every(4), CsvSink(tmp_path / "run")):
        training.optimizer.register_step_observer(raises)
        training.steps(1, 14)
    assert training.now == 12
    compare(tmp_path / "run", [1, 4, 8])


def test_without_a_flush_there_is_nothing_to_tell(tmp_path: Path) -> None:
    training = Training()
    with training.tracker(at(100), CsvSink(tmp_path / "run")):
        training.steps(1, 5)
    assert load_run(tmp_path / "run").slices.empty


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_tell_of_all_rows(world: int, tmp_path: Path) -> None:
    def run(rank: int, world: int) -> None:
        training = Training(rank, world)
        with training.tracker(every(3), CsvSink(tmp_path / "run")):
            training.steps(1, 10)

    run_forked(run, world, timeout=50)
    compare(tmp_path / "run", [1, 3, 6, 9])


def test_ranks_tell_of_all_rows_after_an_exception_on_every_one(tmp_path: Path) -> None:
    def run(rank: int, world: int) -> None:
        training = Training(rank, world)
        with _stops(), training.tracker(every(3), CsvSink(tmp_path / "run")):
            training.steps(1, 10)
            raise ZeroDivisionError

    run_forked(run, 2, timeout=50)
    compare(tmp_path / "run", [1, 3, 6, 9])


# ---------------------------------------------------------------------- resumed

SAVED, END = 8, 17


def part(path: Path, first: int, last: int, state: Any, rank: int, world: int) -> Any:
    """Steps of a run; those before ``first`` stand for the optimizer's own checkpoint."""
    training = Training(rank, world)
    training.steps(1, first - 1)
    again = state is not None
    with training.tracker(every(3), CsvSink(path, resume=again), resume=state) as tracker:
        training.steps(first, last)
        return tracker.state_dict()


def on(world: int, *args: Any) -> Any:
    if world == 1:
        return part(*args, 0, 1)
    return run_forked(lambda r, w: part(*args, r, w), world, timeout=50)[-1]


@pytest.mark.parametrize("worlds", [(1, 1, 1), (1, 2, 4), (4, 1, 2), (2, 4, 1)], ids=str)
def test_a_run_that_went_on_twice_on_other_numbers_of_ranks(worlds: tuple[int, int, int], tmp_path: Path) -> None:
    """Saved between flushes: what was counted since the one before goes on."""
    path = tmp_path / "run"
    state = on(worlds[0], path, 1, SAVED, None)
    compare(path, [1, 3, 6])
    state = on(worlds[1], path, SAVED + 1, 13, state)
    compare(path, [1, 3, 6, 9, 12])
    on(worlds[2], path, 14, END, state)
    compare(path, [1, 3, 6, 9, 12, 15])


def test_rows_that_are_selected_from_otherwise_after_a_resume_start_anew(tmp_path: Path) -> None:
    """Columns of a matrix say nothing of its rows, and cannot be added to them."""

    def run(select: str, first: int, last: int, state: Any) -> Any:
        model = named(w=torch.ones(6, 6), v=torch.ones(4, 6))
        optimizer = Dion2(model.parameters(), fraction=0.5, select_dim=select)
        sink = CsvSink(tmp_path / "run", resume=state is not None)
        with Tracker(model, optimizer, schedule=every(1), sinks=[sink], resume=state) as tracker:
            for step in range(first, last + 1):
                for i, p in enumerate(model.parameters()):
                    p.grad = gauss(*p.shape, seed=10 * step + i)
                optimizer.step()
            return tracker.state_dict()

    run("cols", 6, 8, run("rows", 1, 5, None))
    run_rows = load_run(tmp_path / "run")
    table = run_rows.slices
    assert len(table) == 12, "six columns of each"
    assert table["selected"].sum() == 2 * 3 * 3
    assert set(table["steps"]) == {3}
    assert run_rows.selection["step"].tolist() == [s for s in range(1, 9) for _ in range(2)]
    first = run_rows.selection[run_rows.selection["step"] == 6]
    assert first["churn"].isna().all(), "there is no selection to compare with"
    assert (first["age_max"] == 1).all(), "columns are as old as the tracker that sees them"


# ---------------------------------------------------------------------- what is asked for


def test_gradient_columns_and_histograms_are_there_when_asked_for_alone() -> None:
    extras = ("selection_gradient", "selection_frequencies")
    for chosen in ((), extras[:1], extras[1:], extras):
        training, sink = Training(), MemorySink()
        with training.tracker(every(4, first=False), sink, metrics=["norms", *chosen]):
            training.steps(1, 12)
        assert sink.run is not None
        columns = {c for r in sink.selection for c in r.values}
        of_gradient = {c for c in columns if c.startswith("grad_") or c == "ef_growth"}
        assert len(of_gradient) == (18 if extras[0] in chosen else 0)
        assert sink.run.histograms == (extras[1:] if extras[1] in chosen else ())
        assert {h.name for h in sink.histograms} == set(sink.run.histograms)


def test_extras_are_measured_as_often_as_they_are_asked_for() -> None:
    training, sink = Training(), MemorySink()
    often = {"norms": 1, "selection_gradient": 2, "selection_frequencies": 3}
    with training.tracker(every(2, first=False), sink, metrics=often):
        training.steps(1, 12)
    assert sorted({r.step for r in sink.layers}) == [2, 4, 6, 8, 10, 12]
    assert sorted({r.step for r in sink.selection}) == [2, 6, 8, 10]  # each of the extras brings the selection
    assert sorted({r.step for r in sink.selection if "grad_gini" in r.values}) == [2, 6, 10]
    assert sorted({h.step for h in sink.histograms}) == [2, 8]


def test_a_selection_that_is_measured_less_often_counts_over_its_own_window() -> None:
    """Norms at every flush, selections at every third one: the same rows as of a tracker that flushes so rarely."""
    sinks = [MemorySink(), MemorySink()]
    ways = (every(2, first=False), {"norms": 1, "selection": 3}), (at(2, 8), ["norms", "selection"])
    for sink, (schedule, metrics) in zip(sinks, ways, strict=True):
        training = Training()
        with training.tracker(schedule, sink, metrics=metrics):
            training.steps(1, 12)
    often, rarely = ([(r.step, r.param, r.values) for r in sink.selection] for sink in sinks)
    assert {step for step, _, _ in often} == {2, 8}
    assert repr(often) == repr(rarely)  # NaN is not equal to itself
    assert {r.step for r in sinks[0].layers} == {2, 4, 6, 8, 10, 12}


def test_nothing_of_a_selection_is_kept_or_told_where_none_is_asked_for() -> None:
    training, sink = Training(), MemorySink()
    with training.tracker(every(2, first=False), sink, metrics=["norms"]) as tracker:
        training.steps(1, 4)
        state = tracker.state_dict()
    assert not sink.selection
    assert not sink.run.selection_columns
    assert not sink.run.slice_columns
    assert not state["selections"]
    later = MemorySink()
    with training.tracker(every(2), later, metrics=["selection"], resume=state):
        training.steps(5, 8)
    assert {r.step for r in later.selection} == {6, 8}
    assert all(r.values["age_max"] <= r.step - 4 for r in later.selection)  # counted from where it was asked for


def test_a_state_with_selections_goes_on_without_them(tmp_path: Path) -> None:
    training = Training()
    with training.tracker(every(2), metrics=["norms", "selection"]) as tracker:
        training.steps(1, 4)
        state = tracker.state_dict()
    with training.tracker(every(2), CsvSink(tmp_path / "run"), metrics=["norms"], resume=state):
        training.steps(5, 8)
    run = load_run(tmp_path / "run")
    assert run.slices.empty
    assert run.steps == [6, 8]


def test_histograms_of_frequencies_hold_every_row_of_the_window() -> None:
    training, sink = Training(), MemorySink()
    with training.tracker(every(4, first=False), sink, metrics=["norms", "selection_frequencies"]):
        training.steps(1, 8)
    before, after = counted([4]), counted([4, 8])
    assert len(sink.histograms) == 2 * len(SHAPES)
    for histogram in sink.histograms:
        rows = [key for key in after if key[0] == histogram.param]
        times = [(before if histogram.step == 4 else after)[key]["selected"] for key in rows]
        if histogram.step == 8:
            times = [t - before[key]["selected"] for key, t in zip(rows, times, strict=True)]
        expected = Counter(math.floor(4 * math.log2(t / 4)) / 4 if t else -math.inf for t in times)
        assert dict(zip(histogram.log2, histogram.count, strict=True)) == expected
        assert sum(histogram.mass) == pytest.approx(sum(times) / 4)
