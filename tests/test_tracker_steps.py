"""Unusual steps: no gradient, frozen, NaN, closures, accumulation, schedulers, nested steps, new parameters."""

import logging
import math
from typing import Any

import pytest
import torch
from parity import Net, backward, compare
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from truth import layer_values, worst

from scion_telemetry import Tracker, at, every
from scion_telemetry.optim import Dion2, Scion, group_params
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def columns(sink: MemorySink, step: int, param: str) -> set[str]:
    (row,) = [r for r in sink.layers if (r.step, r.param) == (step, param)]
    return {name.split("_")[0] for name in row.values}


# ---------------------------------------------------------------------- gradients that are not there


def test_a_head_that_is_never_used() -> None:
    model, sink = Net(), MemorySink()
    model.second = nn.Linear(3, 12, bias=False)
    optimizer = Dion2(group_params(model), lr=0.1, fraction=0.5)
    before = model.second.weight.detach().clone()
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        for step in range(1, 6):
            backward(model, step)
            optimizer.step()
    assert torch.equal(model.second.weight, before)
    assert columns(sink, 5, "second") == {"weight", "momentum"}
    assert sink.value(5, "second", "momentum_max_abs") == 0
    assert {r.param for r in sink.selection} == {"up", "mid", "narrow"}


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_frozen_parameters_and_a_step_without_any_gradient(make: Any) -> None:
    model, sink = Net(), MemorySink()
    model.mid.weight.requires_grad_(False)
    optimizer = make(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        optimizer.step()
        backward(model, 1)
        optimizer.step()
    assert all(columns(sink, 1, r.param) == {"weight"} for r in sink.layers if r.step == 1)
    assert columns(sink, 2, "mid") == {"weight"}
    assert {"weight", "grad", "update"} <= columns(sink, 2, "up")


def without_gradients(rank: int, world: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (world,))
    model = nn.ParameterDict({n: nn.Parameter(distribute_tensor(randn(5, 3), mesh, [Shard(0)])) for n in "ab"})
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        optimizer.step()
        model["a"].grad = model["a"].detach().clone()
        optimizer.step()
    return sink.layers


def test_no_gradient_anywhere_on_two_ranks() -> None:
    rows = {(r.step, r.param): r.values for r in run_forked(without_gradients, 2, timeout=20)[0]}
    kinds = {key: {name.split("_")[0] for name in values} for key, values in rows.items()}
    assert kinds == {
        (1, "a"): {"weight"},
        (1, "b"): {"weight"},
        (2, "a"): {"weight", "grad", "update"},
        (2, "b"): {"weight"},
    }


# ---------------------------------------------------------------------- gradients of other kinds


def partial_gradients(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (world,))
    full = randn(6, 4)
    placements = {"kept": [Replicate()], "cut": [Shard(0)]}
    model = nn.ParameterDict({n: nn.Parameter(distribute_tensor(full, mesh, p)) for n, p in placements.items()})
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, foreach=False), MemorySink()
    share = randn(6, 4, seed=1 + rank)
    whole = sum((randn(6, 4, seed=1 + r) for r in range(world)), torch.zeros(6, 4))
    errors = []
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]) as tracker:
        for p in model.values():
            p.grad = DTensor.from_local(share, mesh, [Partial()])
        optimizer.step()
        tracker.flush()
        for row in sink.layers:
            truth = layer_values({"weight": full, "grad": whole, "momentum": whole, "update": 0 * whole}, "hidden")
            errors.append(worst(row.values, truth))
    return errors


def test_gradients_that_are_not_summed_up_yet() -> None:
    errors = run_forked(partial_gradients, 2, timeout=20)[0]
    assert len(errors) == 2
    assert max(errors) <= 1e-6  # the sum over ranks is in float32


def test_sparse_gradients() -> None:
    model, sink = nn.Embedding(10, 4, sparse=True), MemorySink()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        model(torch.tensor([1, 1, 3])).square().sum().backward()
        grad = model.weight.grad.to_dense()  # type: ignore[union-attr]
        optimizer.step()
    assert sink.value(1, "weight", "grad_frobenius") == pytest.approx(float(grad.double().norm()), rel=1e-12)


# ---------------------------------------------------------------------- NaN and infinity


def poisoned(rank: int, world: int, bad: float) -> float:
    mesh = init_device_mesh("cpu", (world,))
    model = nn.ParameterDict(
        {n: nn.Parameter(distribute_tensor(randn(5, 3, seed=i), mesh, [Shard(0)])) for i, n in enumerate("abc")}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(step: int) -> None:
        for i, (name, p) in enumerate(model.items()):
            grad = randn(5, 3, seed=10 * step + i)
            if name == "b" and step == 2:
                grad[4, 1] = bad  # on the last rank
            p.grad = distribute_tensor(grad, mesh, [Shard(0)])

    return compare(model, optimizer, train, rank=rank).error


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_poisoned_layer_leaves_the_others_right(bad: float) -> None:
    assert run_forked(lambda r, w: poisoned(r, w, bad), 2, timeout=20)[0] <= 1e-7


# ---------------------------------------------------------------------- ways to step


def test_a_closure_is_one_step() -> None:
    model, sink, calls = Net(), MemorySink(), []
    optimizer = Scion(group_params(model), lr=0.01)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model, 1)
        calls.append(torch.is_grad_enabled())
        return 2.5

    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]) as tracker:
        assert optimizer.step(closure) == 2.5
        assert optimizer.step(closure=closure) == 2.5
        assert tracker.step == 2
    assert sink.steps == [1, 2]
    assert calls == [True, True]
    assert "grad" in columns(sink, 1, "up")


def test_lbfgs_calls_its_closure_often_and_is_one_step() -> None:
    model, sink = Net(), MemorySink()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        loss.backward()
        return loss

    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]):
        optimizer.step(closure)
    assert sink.steps == [1]
    assert sink.value(1, "up", "update_rms") > 0


def test_accumulated_gradients_are_measured_once_and_whole() -> None:
    model, sink = Net(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]):
        for micro in range(3):
            backward(model, micro)
        whole = float(model.up.weight.grad.double().square().mean().sqrt())  # type: ignore[union-attr]
        optimizer.step()
    assert sink.steps == [1]
    assert sink.value(1, "up", "grad_rms") == pytest.approx(whole, rel=1e-12)


def test_the_update_follows_the_learning_rate_of_its_own_step() -> None:
    """lr 0.1, 0.01, 0.001 by a scheduler: entries of a Sign update are ± lr / d_in, whatever comes next."""
    model, sink = nn.Linear(16, 4, bias=False), MemorySink()
    optimizer = Scion(model.parameters(), lr=1.0, norm="Sign", unconstrained=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 ** (step + 1))
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
        for _ in range(3):
            model.weight.grad = randn(4, 16)
            optimizer.step()
            scheduler.step()
    for step in (1, 2, 3):
        assert sink.value(step, "weight", "update_max_abs") == pytest.approx(0.1**step / 16, rel=1e-6)


def test_an_update_holds_the_rate_and_not_the_decay() -> None:
    """W = 2, direction 1, lr 0.1, decoupled decay 0.1: update 0.1, decay 0.02, W = 1.88."""
    for optimizer_class in (torch.optim.AdamW, Dion2):
        model = nn.ParameterDict({"w": nn.Parameter(torch.full((3,), 2.0))})
        adamw = {"params": [model["w"]], **({"algorithm": "adamw"} if optimizer_class is Dion2 else {})}
        optimizer, sink = optimizer_class([adamw], lr=0.1, weight_decay=0.1), MemorySink()  # type: ignore[operator]
        with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
            model["w"].grad = torch.ones(3)
            optimizer.step()
        assert sink.value(1, "w", "update_max_abs") == pytest.approx(0.1, rel=1e-6)
        assert sink.value(1, "w", "weight_max_abs") == pytest.approx(1.88, rel=1e-6)


class Around(torch.optim.SGD):
    """A step around a step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_around_a_step_is_one_step() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # torch hooks the step of a class when it is first constructed
    model, sink = Net(), MemorySink()
    optimizer = Around(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]) as tracker:
        for step in range(1, 4):
            backward(model, step)
            optimizer.step()
            assert tracker.step == step
    assert sink.steps == [1, 2, 3]
    assert sink.value(3, "up", "update_rms") > 0


def test_a_step_that_raised_does_not_count() -> None:
    model, sink = Net(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def broken() -> float:
        raise RuntimeError("the data ran out")

    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]) as tracker:
        with pytest.raises(RuntimeError, match="the data ran out"):
            optimizer.step(broken)
        backward(model, 1)
        optimizer.step()
        assert tracker.step == 1
    assert sink.steps == [1]


def test_parameters_added_later_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = Net(), MemorySink()
    rest = [p for name, p in model.named_parameters() if "head" not in name]
    optimizer = torch.optim.SGD(rest, lr=0.1)
    with Tracker(model, optimizer, schedule=at(2, 3, 4), sinks=[sink]), caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            if step == 2:
                optimizer.add_param_group({"params": [model.head.weight]})
            backward(model, step)
            optimizer.step()
    assert [r.message for r in caplog.records if "other parameters" in r.message] == [caplog.records[0].message]
    assert sink.steps == [2, 3, 4]
    assert "head" not in {r.param for r in sink.layers}


def test_tied_weights_are_one_row_with_two_names() -> None:
    model, sink = nn.Module(), MemorySink()
    model.embed, model.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    model.out.weight = model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
        model.embed.weight.grad = torch.full((10, 4), 3 / math.sqrt(40))
        optimizer.step()
    assert [r.param for r in sink.layers] == ["embed"]
    assert sink.run is not None
    assert sink.run.params[0].aliases == ("out",)
    assert sink.value(1, "embed", "grad_rms") * math.sqrt(40) == pytest.approx(3)
