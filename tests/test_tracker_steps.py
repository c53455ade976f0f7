"""Gradients that are missing, frozen, sparse, not summed up yet, or not finite."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from parity import Net, backward, compare
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from truth import layer_values, worst

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2, group_params
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def columns(sink: MemorySink, step: int, param: str) -> set[str]:
    (row,) = [r for r in sink.layers if (r.step, r.param) == (step, param)]
    return quantities(row.values)


def quantities(values: Mapping[str, float]) -> set[str]:
    """What was measured; how many pieces have no gradient is always told."""
    found = {name.split("_")[0] for name in values if name != "grad_missing"}
    assert values["grad_missing"] == 0 or "grad" not in found
    return found


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
    assert sink.value(5, "second", "grad_missing") == 1
    assert sink.value(5, "up", "grad_missing") == 0
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
    kinds = {key: quantities(values) for key, values in rows.items()}
    missing = {key: values["grad_missing"] for key, values in rows.items()}
    assert missing == {(1, "a"): 2, (1, "b"): 2, (2, "a"): 0, (2, "b"): 2}, "pieces on both ranks"
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
            values = dict(row.values)
            settings = {name: values.pop(name) for name in ("grad_missing", "weight_decay", "update_lr")}
            assert settings == dict.fromkeys(settings, 0.0)
            errors.append(worst(values, truth))
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
