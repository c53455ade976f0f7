"""The worker of rank 0: order, back-pressure, sinks that fail, recover, cannot start or cannot close."""

import logging
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scion_telemetry import Tracker, every
from scion_telemetry.rows import Batch, RunInfo
from scion_telemetry.sinks import CsvSink, MemorySink
from scion_telemetry.testing import run_threads
from scion_telemetry.writer import Writer, open_sinks


def batch(step: int) -> Callable[[], Batch]:
    return lambda: Batch(step=step)


class Fails(MemorySink):
    """Writing fails at some steps, and closing if it is told so."""

    def __init__(self, *steps: int, closing: bool = False) -> None:
        super().__init__()
        self.bad, self.closing = steps, closing

    def write(self, batch: Batch) -> None:
        if batch.step in self.bad:
            raise OSError(28, "No space left on device")
        super().write(batch)

    def close(self) -> None:
        super().close()
        if self.closing:
            raise OSError("cannot close")


class CannotStart(MemorySink):
    """Refuses to start."""

    def open(self, run: RunInfo) -> None:
        raise RuntimeError("install it with pip install 'scion-telemetry[wandb]'")


def steps(sink: MemorySink) -> list[int]:
    return [b.step for b in sink.batches]


# ---------------------------------------------------------------------- the queue


def test_batches_arrive_in_order_on_one_thread() -> None:
    threads: set[str] = set()

    class Notes(MemorySink):
        def write(self, batch: Batch) -> None:
            threads.add(threading.current_thread().name)
            super().write(batch)

    sinks = (Notes(), Notes())
    writer = Writer(sinks)
    for step in range(100):
        writer.put(batch(step))
    writer.flush()
    assert steps(sinks[0]) == steps(sinks[1]) == list(range(100))
    writer.close()
    assert sinks[0].closed
    assert sinks[1].closed
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


def test_a_slow_sink_holds_training_up_and_loses_nothing() -> None:
    gate, sink = threading.Event(), MemorySink()
    started = threading.Semaphore(0)

    class Slow(MemorySink):
        def write(self, batch: Batch) -> None:
            started.release()
            gate.wait(10)

    writer = Writer([Slow(), sink])
    done: list[int] = []

    def train() -> None:
        for step in range(40):
            writer.put(batch(step))
            done.append(step)

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    assert started.acquire(timeout=10)
    deadline = time.monotonic() + 10
    while len(done) < 17 and time.monotonic() < deadline:  # one with the worker and 16 in the queue
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(done) == 17, "the queue has an end"
    gate.set()
    trainer.join(10)
    writer.close()
    assert steps(sink) == list(range(40))


def test_what_is_queued_when_python_ends_is_written(tmp_path: Path) -> None:
    """A tracker that nobody closed: the worker is a daemon, which would die with the rows of the last steps."""
    program = f"""
import time
from scion_telemetry.rows import Batch
from scion_telemetry.writer import Writer

class Slow:
    def write(self, batch):
        time.sleep(0.05)
        with open({str(tmp_path / "rows")!r}, "a") as file:
            file.write(f"{{batch.step}} ")

writer = Writer([Slow()])
for step in range(4):
    writer.put(lambda step=step: Batch(step=step))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)
    assert (tmp_path / "rows").read_text() == "0 1 2 3 "


def test_in_a_forked_child_flush_waits_for_no_thread_of_the_parent() -> None:
    gate = threading.Event()

    class Slow(MemorySink):
        def write(self, batch: Batch) -> None:
            gate.wait(10)

    writer = Writer([Slow()])
    writer.put(batch(1))
    child = multiprocessing.get_context("fork").Process(target=writer.flush, daemon=True)
    child.start()
    child.join(5)
    gate.set()
    writer.close()
    assert child.exitcode == 0


def test_a_batch_that_cannot_be_finished_is_reported_and_the_next_one_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> Batch:
        raise ZeroDivisionError("a formula")

    sink = MemorySink()
    writer = Writer([sink])
    for make in (batch(1), broken, batch(3)):
        writer.put(make)
    writer.close()
    assert steps(sink) == [1, 3]
    assert "could not be finished" in caplog.text
    assert "ZeroDivisionError" in caplog.text


# ---------------------------------------------------------------------- sinks that fail


def test_a_failing_sink_is_isolated_and_reported_when_it_fails_and_when_it_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Fails(2, 3, 4, 7), MemorySink()
    writer = Writer([bad, good])
    with caplog.at_level(logging.WARNING):
        for step in range(1, 9):
            writer.put(batch(step))
        writer.close()
    assert steps(good) == list(range(1, 9))
    assert steps(bad) == [1, 5, 6, 8]
    messages = [r.getMessage() for r in caplog.records]
    assert messages == [
        "Fails failed at step 2; training goes on",
        "Fails works again at step 5; 3 batches are missing from it",
        "Fails failed at step 7; training goes on",
        "Fails works again at step 8; 1 batches are missing from it",
    ]
    assert caplog.records[0].exc_info is not None
    assert "No space left on device" in caplog.text


class Exits(MemorySink):
    """Calls sys.exit in writing, which is no Exception."""

    def write(self, batch: Batch) -> None:
        raise SystemExit(3)


def test_a_sink_that_exits_neither_ends_the_worker_nor_stops_the_others() -> None:
    bad, good = Exits(), MemorySink()
    writer = Writer([bad, good])
    for step in range(1, 41):  # more than the queue holds
        writer.put(batch(step))
    writer.close()
    assert steps(good) == list(range(1, 41))


def test_one_that_cannot_close_leaves_the_others_closed(caplog: pytest.LogCaptureFixture) -> None:
    sinks = (Fails(closing=True), MemorySink())
    Writer(sinks).close()
    assert all(s.closed for s in sinks)
    assert "closing Fails failed" in caplog.text


# ---------------------------------------------------------------------- starting


def info(sink: Any) -> None:
    sink.open(None)


def test_all_sinks_start_or_none() -> None:
    sinks = (MemorySink(), Fails(closing=True), CannotStart(), MemorySink())
    with pytest.raises(RuntimeError, match="pip install"):
        open_sinks(sinks, info)
    assert [s.closed for s in sinks] == [True, True, False, False]


def tracked(*sinks: Any, **options: Any) -> tuple[Tracker, torch.optim.Optimizer]:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Tracker(model, optimizer, schedule=every(1), sinks=sinks, **options), optimizer


def test_a_sink_that_cannot_start_is_an_error_at_construction_and_leaves_no_hooks() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2))})
    optimizer, good = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    with pytest.raises(RuntimeError, match="pip install 'scion-telemetry"):
        Tracker(model, optimizer, sinks=[good, CannotStart()])
    assert good.closed
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_sink_that_cannot_start_is_an_error_on_all_ranks() -> None:
    def run(rank: int, world: int) -> tuple[str, bool]:
        good = MemorySink()
        try:
            tracked(good, CannotStart())
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}", good.closed
        return "nothing", good.closed

    first, second = run_threads(run, 2, timeout=20)
    assert first == ("RuntimeError: install it with pip install 'scion-telemetry[wandb]'", True)
    assert second == (f"ValueError: rank 0 failed: {first[0]}", False), "rank 1 has no sinks to open or close"


# ---------------------------------------------------------------------- leaving


def test_an_exception_inside_keeps_the_rows_and_is_the_one_that_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    sink = Fails(closing=True)
    tracker, optimizer = tracked(sink)

    def train() -> None:
        with tracker:
            for step in range(1, 6):
                if step == 4:
                    raise ValueError("the user's own")
                optimizer.step()

    with pytest.raises(ValueError, match="the user's own"):
        train()
    assert sink.steps == [1, 2, 3]
    assert sink.closed
    assert "closing Fails failed" in caplog.text
    assert not optimizer._optimizer_step_post_hooks


def test_sinks_are_closed_when_the_last_exchange_between_ranks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = MemorySink()
    tracker, optimizer = tracked(sink)
    optimizer.step()

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(tracker._scalars, "open", gone)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        tracker.close()
    assert sink.closed
    assert sink.steps == [1]
    tracker.close()


def test_flush_waits_for_the_sinks() -> None:
    class Slow(MemorySink):
        def write(self, batch: Batch) -> None:
            time.sleep(0.02)
            super().write(batch)

    sink = Slow()
    tracker, optimizer = tracked(sink)
    with tracker:
        optimizer.step()
        optimizer.step()
        tracker.flush()
        assert sink.steps == [1, 2]


def test_a_run_directory_is_taken_back_when_another_sink_cannot_start(tmp_path: Path) -> None:
    class Refuses(MemorySink):
        def open(self, run: RunInfo) -> None:
            raise RuntimeError("not logged in")

    def start(*sinks: Any) -> Tracker:
        model = nn.Linear(3, 4)
        return Tracker(model, torch.optim.SGD(model.parameters()), sinks=sinks)

    with pytest.raises(RuntimeError, match="not logged in"):
        start(CsvSink(tmp_path / "run"), Refuses())
    start(CsvSink(tmp_path / "run")).close()
