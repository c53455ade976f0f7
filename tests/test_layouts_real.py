"""Real parallelism on gloo ranks trains as one process does: FSDP2, HSDP, DDP, tensor, expert and pipeline parallel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_model import Former, Make, Piece, alone, batch, check, dion2, loss_of, optimizer_of, pieces, scion, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from scion_telemetry.testing import run_forked

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("make", [scion, dion2])]
Pieces = dict[str, Piece]


def _second(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.ndim > 1 else None


def _shard(model: Former, mesh: DeviceMesh, **options: Any) -> None:
    for part in (model.lower, model.upper):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _split(model: Former, mesh: DeviceMesh) -> None:
    """Tensor parallelism: whole heads and hidden units on every rank, everything else on all."""
    column, row = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model.lower, mesh, {"q": column, "k": column, "v": column, "o": row})
    parallelize_module(model.upper, mesh, {"up": column, "down": row})


@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2_along_columns(make: Make, world: int) -> None:
    def rank_function(rank: int, world: int) -> Pieces:
        model = Former()
        _shard(model, init_device_mesh("cpu", (world,)), shard_placement_fn=_second)
        assert model.upper.up.weight.placements == (Shard(1),)
        train(model, make, part=rank, parts=world)
        return pieces(model)

    check(run_forked(rank_function, world, timeout=30), alone(make))


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_hsdp(make: Make, along: str) -> None:
    def rank_function(rank: int, world: int) -> Pieces:
        model = Former()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        _shard(model, mesh, shard_placement_fn=_second if along == "columns" else None)
        train(model, make, part=rank, parts=world)
        return pieces(model)

    check(run_forked(rank_function, 4, timeout=30), alone(make))


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_that_shares_the_work(make: Make, world: int) -> None:
    def rank_function(rank: int, world: int) -> Pieces:
        model = DistributedDataParallel(Former(), find_unused_parameters=True)
        train(model, make, part=rank, parts=world, process_group=dist.group.WORLD)
        return pieces(model)

    check(run_forked(rank_function, world, timeout=30), alone(make))


@pytest.mark.parametrize(("world", "shared"), [(2, True), (2, False), (4, True)])
def test_tensor_parallel(make: Make, world: int, shared: bool) -> None:
    """Weights cut along rows (column-parallel) and columns (row-parallel) beside whole ones."""

    def rank_function(rank: int, world: int) -> Pieces:
        model = Former()
        _split(model, init_device_mesh("cpu", (world,)))
        train(model, make, process_group=dist.group.WORLD if shared else None)
        return pieces(model)

    check(run_forked(rank_function, world, timeout=30), alone(make))


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_fsdp2_over_tensor_parallel(make: Make, along: str) -> None:
    """Right-to-left shards where both cut one dimension, blocks where they cut two."""

    def rank_function(rank: int, world: int) -> Pieces:
        model = Former()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        _split(model, mesh["tp"])
        _shard(model, mesh["dp"], shard_placement_fn=_second if along == "columns" else None)
        twice, blocks = (model.upper.up, model.upper.down) if along == "rows" else (model.upper.down, model.upper.up)
        assert isinstance(twice.weight.placements[0], _StridedShard)
        assert {p.dim for p in blocks.weight.placements} == {0, 1}
        train(model, make, part=mesh["dp"].get_local_rank(), parts=2)
        return pieces(model)

    check(run_forked(rank_function, 4, timeout=30), alone(make))


def _spread(model: Former, mesh: DeviceMesh) -> None:
    """Expert parallelism: every rank has some of the experts."""
    experts = model.upper.experts
    experts.group = mesh.get_group()
    for name in ("inner", "outer"):
        full = getattr(experts, name).detach()
        setattr(experts, name, nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)))


@pytest.mark.parametrize("world", [2, 4])
def test_expert_parallel(make: Make, world: int) -> None:
    def rank_function(rank: int, world: int) -> Pieces:
        model = Former(experts=True)
        _spread(model, init_device_mesh("cpu", (world,)))
        train(model, make, process_group=dist.group.WORLD)
        return pieces(model)

    check(run_forked(rank_function, world, timeout=30), alone(make, experts=True))


@pytest.mark.parametrize("along", [0, 1, 2])
def test_fsdp2_over_expert_parallel(make: Make, along: int) -> None:
    """Experts over two ranks, and over two others again along experts, rows or columns; all else by FSDP2 alone."""
    refused = make is dion2 and along == 1  # rows of every expert that are selected from all ranks must be whole

    def rank_function(rank: int, world: int) -> Pieces:
        model = Former(experts=True)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        _spread(model, mesh["ep"])
        fully_shard(model.upper.experts, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(along % p.ndim))
        _shard(model, mesh["dp"])
        assert [p.dim for p in model.upper.experts.inner.placements] == [along, 0]
        if refused:
            with pytest.raises(ValueError, match=r"'upper\.experts\.inner': a stack.*='local'"):
                optimizer_of(model, make)
            return {}
        train(model, make, part=mesh["dp"].get_local_rank(), parts=2)
        return pieces(model)

    results = run_forked(rank_function, 4, timeout=30)
    if not refused:
        check(results, alone(make, experts=True))


@pytest.mark.parametrize("world", [2, 4])
def test_pipeline_stages(make: Make, world: int) -> None:
    """Every stage has parameters of its own; with four ranks two of them share each stage by FSDP2."""

    def rank_function(rank: int, world: int) -> Pieces:
        whole = Former()
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
        stage, copy, parts = rank // (world // 2), mesh["dp"].get_local_rank(), world // 2
        part: nn.Module = (whole.lower, whole.upper)[stage]
        if world > 2:
            fully_shard(part, mesh=mesh["dp"])
        other = (1 - stage) * parts + copy

        def backward(step: int) -> None:
            tokens, targets = batch(step, copy, parts)
            if stage == 0:
                out = part(tokens)
                dist.send(out.detach().contiguous(), other)
                grad = torch.empty_like(out)
                dist.recv(grad, other)
                out.backward(grad)
            else:
                received = torch.empty(*tokens.shape, 8)
                dist.recv(received, other)
                received.requires_grad_()
                loss_of(part(received), targets).backward()
                assert received.grad is not None
                dist.send(received.grad, other)

        train(part, make, backward=backward)
        return {f"{('lower', 'upper')[stage]}.{n}": p for n, p in pieces(part).items()}

    check(run_forked(rank_function, world, timeout=30), alone(make))


def test_frozen_and_unused_parameters_are_left_alone_and_late_ones_join(make: Make) -> None:
    """What the checks above rely on: one process, by name."""
    initial: dict[str, Tensor] = {n: p.detach() for n, p in Former().named_parameters()}
    trained = alone(make)
    moved = {n for n, p in trained.items() if not torch.equal(p, initial[n])}
    still = {"lower.frozen.weight", "lower.frozen.bias", "upper.unused.weight"}
    assert moved == set(initial) - still
    assert "upper.late.weight" in moved
