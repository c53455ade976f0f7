"""tracker.log: any name, at any step, on any rank; the mean over the ranks that logged it, once, at its own step."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from own_scalars import COST, is_total, users
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
    return [(s.step, s.name, s.value) for s in users(sink.scalars)]


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
    assert [(s.step, s.value) for s in users(sink.scalars)] == [(1, 2.5)]


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
    assert users(sink.scalars) == []


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


# ---------------------------------------------------------------------- what the tracker says of itself


def own(rank: int, world: int) -> list[list[tuple[int, str, float]]]:
    """By batch, the scalars that the user has not logged."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(3))})
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    with Tracker(model, optimizer, schedule=every(2, first=False), sinks=[sink], metrics="norms") as tracker:
        for _ in range(6):
            optimizer.step()
            tracker.log(loss=1.0)
            if tracker.last_flush is not None and tracker.step % 2 == 0:
                assert tracker.last_flush.step == tracker.step
    return [[(s.step, s.name, s.value) for s in b.scalars if s not in users(b.scalars)] for b in sink.batches]


@pytest.mark.parametrize("world", [1, 2])
def test_every_flush_says_what_it_cost_and_how_fast_training_goes(world: int) -> None:
    found = run_threads(own, world, timeout=20)[0]
    costs = [of_flush for batch in found if (of_flush := [s for s in batch if s[1] in COST])]
    assert [{(step, name) for step, name, _ in batch} for batch in costs] == [
        {(2, name) for name in COST if name != "steps_per_second"},  # the first knows no time between flushes
        {(4, name) for name in COST},
        {(6, name) for name in COST},
    ]
    assert [len(batch) for batch in costs] == [4, 5, 5], "each once"
    for batch in costs:
        values = {name: value for _, name, value in batch}
        assert 0 < values["telemetry_ms"] < 10_000
        assert (values["telemetry_bytes"] > 0) == (world > 1), "of what travels between ranks"
        assert values["telemetry_bytes"] % 8 == 0
        assert values["telemetry_rows"] == 2
        assert values["telemetry_collectives"] == (2 if world > 1 else 0)
        assert values.get("steps_per_second", 1.0) > 0


def test_steps_per_second_is_the_rate_between_flushes() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2))})
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    with Tracker(model, optimizer, schedule=every(5, first=False), sinks=[sink], metrics="norms"):
        for _ in range(10):
            time.sleep(0.01)
            optimizer.step()
    (rate,) = [s.value for s in sink.scalars if s.name == "steps_per_second"]
    assert 1 < rate <= 100, "five steps take at least 50 ms"


def test_totals_of_all_parameters_and_of_every_role() -> None:
    """Over the parameters that have the number: ‖W‖ of several is the root of the sum of their squares."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4, bias=False)})
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
        p.grad = torch.randn(p.shape, generator=generator)
    model["embed"].weight.grad = None
    model["up"].weight.data[0, :2] = 0.0
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.5), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink], metrics="full"):
        optimizer.step()
    assert sink.run is not None
    roles = {p.name: p.role for p in sink.run.params}
    names = {"embed": model["embed"].weight, "up": model["up"].weight, "up.bias": model["up"].bias}
    names["down"] = model["down"].weight
    assert set(names) == set(roles)
    totals = {s.name: s.value for s in sink.scalars if is_total(s.name)}
    groups = {"total": set(names), **{f"total.{r}": {n for n in names if roles[n] == r} for r in roles.values()}}
    assert len(groups) > 3
    expected: dict[str, float] = {}
    for group, members in groups.items():
        for quantity in ("weight", "grad", "update"):
            there = {n: p for n, p in names.items() if n in members and (quantity == "weight" or p.grad is not None)}
            if not there:
                continue
            of = {"weight": lambda p: p, "grad": lambda p: p.grad, "update": lambda p: -0.5 * p.grad}[quantity]
            x = torch.cat([of(p).detach().double().flatten() for p in there.values()])
            found = {
                "rms": x.square().mean().sqrt(),
                "frobenius": x.norm(),
                "max_abs": x.abs().max(),
                "mean_abs": x.abs().mean(),
                "nonfinite": 0.0,
                "zero_share": (x == 0).double().mean(),
            }
            if quantity == "update":
                w = torch.cat([p.detach().double().flatten() for p in there.values()])
                found["weight_ratio"] = x.norm() / w.norm()
            expected |= {f"{quantity}_{name}/{group}": float(v) for name, v in found.items()}
    assert set(totals) == set(expected)
    for name, value in expected.items():
        # weights and updates are those after and of the step, whose rounding a difference in float32 shows
        assert totals[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


def test_totals_of_one_role_are_not_written_twice() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 2))})
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink], metrics=["weight_rms", "weight_spectral"]):
        optimizer.step()
    assert [(s.step, s.name, s.value) for s in sink.scalars if is_total(s.name)] == [(1, "weight_rms/total", 1.0)]


@pytest.mark.parametrize("world", [1, 2])
def test_logged_at_the_step_of_a_checkpoint_after_it_was_made(world: int) -> None:
    """What is logged before and after ``state_dict()`` at one step is written once each, at that step."""

    def job(rank: int, world: int) -> list[tuple[int, str, float]]:
        layer, sink = torch.nn.Linear(2, 2), MemorySink()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with Tracker(layer, optimizer, schedule=every(4), metrics="weight_rms", sinks=[sink]) as tracker:
            for step in range(1, 6):
                optimizer.step()
                tracker.log(loss=float(step))
                if step in (2, 3):
                    tracker.state_dict()
                    tracker.log(val=float(10 * step))
        return sorted((s.step, s.name, s.value) for s in users(sink.scalars))

    found = run_threads(job, world)[0] if world > 1 else job(0, 1)
    assert found == [
        (1, "loss", 1),
        (2, "loss", 2),
        (2, "val", 20),
        (3, "loss", 3),
        (3, "val", 30),
        (4, "loss", 4),
        (5, "loss", 5),
    ]
