"""Reported mistakes in reducing norms over ranks: totals, missing pieces, gradients before they are averaged."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from tracked import gauss, named, rms, rows

from scion_telemetry import Tracker, every
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(60)

COUNTING = torch.arange(1.0, 16.0).view(5, 3)
NORMS = ["frobenius", "rms", "missing"]


def stepped(model: nn.Module, grads: dict[str, Tensor | None], **options: Any) -> tuple[MemorySink, dict[str, float]]:
    """Rows and scalars of one step."""
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False), MemorySink()
    for name, p in model.named_parameters():
        p.grad = grads[name]
    with Tracker(model, optimizer, schedule=every(1), metrics=NORMS, sinks=[sink], **options):
        optimizer.step()
    return sink, {s.name: s.value for s in sink.scalars}


def like(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_c06_the_total_of_two_meshes() -> None:
    def run(rank: int, world: int) -> dict[str, float]:
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        model = named(
            line=distribute_tensor(COUNTING, line, [Shard(0)]),
            square=distribute_tensor(COUNTING, square, [Shard(0), Shard(1)]),
        )
        return stepped(model, like(model))[1]

    total = run_forked(run, 4, timeout=30)[0]
    assert total["grad_frobenius/total"] == pytest.approx(49.7996, abs=5e-5)
    assert total["grad_rms/total"] == pytest.approx((2 * 1240 / 30) ** 0.5, rel=1e-12)


@pytest.mark.parametrize("world", [2, 4])
def test_c07_the_total_of_a_sharded_and_a_plain_parameter(world: int) -> None:
    def run(rank: int, world: int) -> dict[str, float]:
        mesh = init_device_mesh("cpu", (world,))
        model = named(w=distribute_tensor(COUNTING, mesh, [Shard(0)]), plain=torch.ones(2, 2))
        return stepped(model, like(model))[1]

    assert run_forked(run, world, timeout=30)[0]["grad_frobenius/total"] == pytest.approx(35.2704, abs=5e-5)


def test_c09_ranks_with_other_keys() -> None:
    """Layers a and b on rank 0, b and c on rank 1, b in pieces: each is its own, and nobody waits."""

    def run(rank: int, world: int) -> tuple[MemorySink, dict[str, float]]:
        mesh = init_device_mesh("cpu", (world,))
        own = {"a": gauss(3, 2, seed=1)} if rank == 0 else {"c": gauss(4, 2, seed=3)}
        model = named(b=distribute_tensor(gauss(5, 3, seed=2), mesh, [Shard(0)]), **own)
        return stepped(model, like(model))

    sink, total = run_forked(run, 2, timeout=20)[0]
    truth = {"a": gauss(3, 2, seed=1), "b": gauss(5, 3, seed=2), "c": gauss(4, 2, seed=3)}
    assert {name for _, name in rows(sink)} == set(truth)
    for name, x in truth.items():
        assert sink.value(1, name, "grad_rms") == pytest.approx(rms(x), rel=1e-12)
    squares = sum(float(x.double().square().sum()) for x in truth.values())
    assert total["grad_frobenius/total"] == pytest.approx(squares**0.5, rel=1e-12)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_gradient_that_one_rank_lacks(absent: int) -> None:
    """Of pieces the rest is told, and that one is missing; other parameters are what they are."""

    def run(rank: int, world: int) -> MemorySink:
        mesh = init_device_mesh("cpu", (world,))
        model = named(cut=distribute_tensor(COUNTING, mesh, [Shard(0)]), fine=gauss(3, 2))
        grads = like(model)
        if rank == absent:
            grads["cut"] = None
        return stepped(model, grads)[0]

    found = rows(run_forked(run, 2, timeout=20)[0])
    left = COUNTING[3:] if absent == 0 else COUNTING[:3]
    assert found[1, "cut"]["grad_missing"] == 1
    assert found[1, "cut"]["grad_frobenius"] == pytest.approx(float(left.double().norm()), rel=1e-12)
    assert found[1, "cut"]["weight_frobenius"] == pytest.approx(1240**0.5, rel=1e-12)
    assert found[1, "fine"]["grad_missing"] == 0
    assert found[1, "fine"]["grad_rms"] == pytest.approx(rms(gauss(3, 2)), rel=1e-12)


def test_c12_gradients_are_those_that_ddp_has_averaged() -> None:
    """Gradients [6, 0] and [0, 8] have the mean [3, 4]; the first micro-step is kept to itself by each rank."""

    def run(rank: int, world: int) -> tuple[float, MemorySink]:
        layer = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(layer.weight)
        model = DistributedDataParallel(layer)
        optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
        half = torch.tensor([3.0, 0.0] if rank == 0 else [0.0, 4.0])
        with Tracker(model, optimizer, schedule=every(1), metrics=NORMS, sinks=[sink]) as tracker:
            with model.no_sync():
                (model(torch.ones(1)) * half).sum().backward()
            assert tracker.step == 0
            (model(torch.ones(1)) * half).sum().backward()
            optimizer.step()
        assert layer.weight.grad is not None
        return float(layer.weight.grad.norm()), sink

    found = run_forked(run, 2, timeout=30)
    assert [norm for norm, _ in found] == [5.0, 5.0]
    assert found[0][1].steps == [1]
    assert found[0][1].value(1, "weight", "grad_frobenius") == 5.0


def test_c59_tied_copies_on_two_stages_count_once() -> None:
    """A gradient of norm 3 on both, one of norm 4 on rank 1: 5 together, not 5.831."""

    def run(rank: int, world: int) -> tuple[MemorySink, dict[str, float]]:
        model = named(tied=torch.ones(3, 3), **({"layer": torch.full((4, 4), 1.0)} if rank == 1 else {}))
        return stepped(model, like(model))

    sink, total = run_forked(run, 2, timeout=20)[0]
    assert [r.param for r in sink.layers] == ["tied", "layer"]
    assert total["grad_frobenius/total"] == pytest.approx(5.0, rel=1e-12)


def test_a_rank_without_any_parameter_joins() -> None:
    """A stage of a pipeline that has nothing to train, first, in the middle or last."""
    for empty in range(3):

        def run(rank: int, world: int, empty: int = empty) -> MemorySink:
            own = {} if rank == empty else {f"stage{rank}": gauss(3, 2, seed=rank)}
            model = named(**own)
            unused = nn.Parameter(torch.ones(1))
            optimizer = torch.optim.SGD([*model.parameters()] or [unused], lr=0.0)
            if rank == empty:
                optimizer.param_groups[0]["params"].clear()
            sink = MemorySink()
            for p in model.values():
                p.grad = p.detach().clone()
            with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]) as tracker:
                optimizer.step()
                tracker.log(loss=float(rank))
                tracker.state_dict()
                assert tracker.verify().ok
            dist.barrier()
            return sink

        sink = run_forked(run, 3, timeout=30)[0]
        stages = [n for n in range(3) if n != empty]
        assert [r.param for r in sink.layers] == [f"stage{n}" for n in stages]
        for n in stages:
            assert sink.value(1, f"stage{n}", "grad_rms") == pytest.approx(rms(gauss(3, 2, seed=n)), rel=1e-12)
        assert [s.value for s in sink.scalars if s.name == "loss"] == [1.0]
