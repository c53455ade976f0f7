"""tracker.log: any name, at any step, on any rank; the mean over the ranks that logged it, once, at its own step."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from scion_telemetry import Tracker, every
from scion_telemetry.schedule import Schedule
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked, run_threads

Log = Callable[[int, int], dict[str, Any]]
"""From step and rank to what is logged after that step."""


def logged(
    log: Log, rank: int = 0, *, steps: int = 6, schedule: Schedule | None = None, start_step: int = 0
) -> list[tuple[int, str, float]]:
    """Train on nothing; returns the scalars in the order in which they arrived."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2))})
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    schedule = every(2, first=False) if schedule is None else schedule
    with Tracker(model, optimizer, schedule=schedule, sinks=[sink], metrics="norms", start_step=start_step) as tracker:
        tracker.log(**log(start_step, rank))
        for step in range(start_step + 1, start_step + steps + 1):
            optimizer.step()
            tracker.log(**log(step, rank))
    for batch in sink.batches:
        order = [s.step for s in batch.scalars]
        assert order == sorted(order)
    return [(s.step, s.name, s.value) for s in sink.scalars]


def on_ranks(log: Log, world: int = 2, **options: Any) -> list[tuple[int, str, float]]:
    results = run_threads(lambda r, w: logged(log, r, **options), world, timeout=20)
    assert results[1:] == [[]] * (world - 1), "only rank 0 has sinks"
    return sorted(results[0])


def test_every_step_is_kept_once_with_its_own_step() -> None:
    found = logged(lambda step, rank: {"loss": step / 2} if step else {})
    assert found == [(step, "loss", step / 2) for step in range(1, 7)]


@pytest.mark.parametrize("schedule", [every(1), every(4), every(100), every(3, first=False)], ids=str)
def test_whatever_the_schedule(schedule: Schedule) -> None:
    found = logged(lambda step, rank: {"loss": float(step)}, schedule=schedule)
    assert found == [(step, "loss", float(step)) for step in range(7)]


def test_before_the_first_step_and_after_a_resume() -> None:
    found = logged(lambda step, rank: {"val": float(step)}, start_step=10, steps=3)
    assert found == [(step, "val", float(step)) for step in (10, 11, 12, 13)]


def test_only_after_the_last_flush() -> None:
    assert logged(lambda step, rank: {"final": 1.5} if step == 6 else {}) == [(6, "final", 1.5)]


def test_a_name_that_comes_late_between_flushes() -> None:
    def log(step: int, rank: int) -> dict[str, Any]:
        return {"loss": 1.0, **({"late": float(step)} if step >= 3 else {})}

    found = logged(log, steps=9)
    assert sorted(v for v in found if v[1] == "late") == [(s, "late", float(s)) for s in range(3, 10)]
    assert sorted(v for v in found if v[1] == "loss") == [(s, "loss", 1.0) for s in range(10)]


@pytest.mark.parametrize("run", [run_threads, run_forked], ids=["threads", "gloo"])
def test_mean_over_ranks(run: Callable[..., Any]) -> None:
    results = run(lambda r, w: logged(lambda step, rank: {"loss": float(step * (rank + 1))}, r), 4, timeout=20)
    assert results[0] == [(step, "loss", step * 2.5) for step in range(7)]


def test_names_on_some_ranks_only() -> None:
    found = on_ranks(lambda step, rank: {["even", "odd"][rank]: float(step), "both": float(rank)}, steps=4)
    expected = [(s, name, value) for s in range(5) for name, value in (("even", s), ("odd", s), ("both", 0.5))]
    assert found == sorted((s, n, float(v)) for s, n, v in expected)


def test_ranks_that_log_at_different_steps_and_in_another_order() -> None:
    def log(step: int, rank: int) -> dict[str, Any]:
        values = {"a": 1.0 + rank, "b": 10.0 + rank}
        return {} if (step + rank) % 2 else dict(reversed(values.items())) if rank else values

    found = on_ranks(log, steps=5)
    assert found == sorted((s, n, v + s % 2) for s in range(6) for n, v in (("a", 1.0), ("b", 10.0)))


def test_a_new_name_on_one_rank_in_the_middle_of_a_run() -> None:
    """Every step at which it may first appear, around every kind of flush."""
    for first in range(8):
        found = on_ranks(
            lambda step, rank, f=first: {"loss": 1.0, **({"new": float(step)} if rank == 1 and step >= f else {})},
            steps=8,
            schedule=every(3),
        )
        assert [v for v in found if v[1] == "new"] == [(s, "new", float(s)) for s in range(first, 9)]
        assert [v for v in found if v[1] == "loss"] == [(s, "loss", 1.0) for s in range(9)]


def test_logged_twice_at_one_step_is_the_mean() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2))})
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    with Tracker(model, optimizer, sinks=[sink]) as tracker:
        optimizer.step()
        tracker.log(loss=1.0)
        tracker.log(loss=4.0)
    assert [(s.step, s.value) for s in sink.scalars] == [(1, 2.5)]


VALUES: dict[str, Any] = {
    "float": 2.5,
    "int": 2,
    "tensor": torch.tensor(2.5),
    "tensor of shape [1, 1]": torch.tensor([[2.5]]),
    "bfloat16": torch.tensor(2.5, dtype=torch.bfloat16),
    "integer tensor": torch.tensor(3),
    "boolean tensor": torch.tensor(True),
    "with a graph": torch.tensor(2.5, requires_grad=True) * 1,
    "numpy": np.float32(2.5),
    "array of one number": np.array([2.5]),
    "beyond float32": 1e300,
    "nan": math.nan,
    "infinite": -math.inf,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_kinds_of_values(value: Any) -> None:
    expected = value.detach().item() if isinstance(value, Tensor) else np.asarray(value).item()
    for _, _, found in logged(lambda step, rank: {"x": value}, steps=3):
        assert type(found) is float
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_a_tensor_is_read_when_it_is_logged() -> None:
    running = torch.zeros((), dtype=torch.float64)

    def log(step: int, rank: int) -> dict[str, Any]:
        running.fill_(float(step))
        return {"x": running}

    assert [value for _, _, value in logged(log)] == [0, 1, 2, 3, 4, 5, 6]


def dtensors(rank: int, world: int) -> list[tuple[int, str, float]]:
    mesh = init_device_mesh("cpu", (world,))
    kept = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    total = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).sum()  # not summed up over ranks yet
    return logged(lambda step, _: {"kept": kept, "total": total}, rank, steps=1)


def test_dtensors_are_whole_numbers() -> None:
    assert run_forked(dtensors, 2, timeout=20)[0] == [
        (step, name, value) for step in (0, 1) for name, value in (("kept", 3.0), ("total", 6.0))
    ]


@pytest.mark.parametrize(
    "bad", ["0.5", None, True, torch.ones(2), torch.ones(()) * 1j, torch.empty(0), [1.0], 1j, np.ones(3)], ids=repr
)
def test_what_is_no_number_is_refused_and_nothing_of_the_call_is_kept(bad: Any) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2))})
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    with Tracker(model, optimizer, sinks=[sink]) as tracker:
        optimizer.step()
        with pytest.raises(TypeError, match="scalar 'bad' must be"):
            tracker.log(good=1.0, bad=bad)
    assert sink.scalars == []


def test_any_name_may_be_logged() -> None:
    names = ("self", "train/loss", "step", "")
    found = logged(lambda step, rank: dict.fromkeys(names, 1.0), steps=1, schedule=every(1))
    assert found == [(step, name, 1.0) for step in (0, 1) for name in names]


def test_after_close() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2))})
    with Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1)) as tracker:
        pass
    with pytest.raises(RuntimeError, match="closed; log inside its with block"):
        tracker.log(loss=1.0)
