"""Counted bytes of a step on 8, 64 and 1,024 ranks, as one of them sees it: a rank's share falls with their number."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from counted import Call, Sums, count
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from scion_telemetry.optim import Dion2, Layout, Scion

pytestmark = pytest.mark.timeout(60)
ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Call], list[Sums]]:
    return count(monkeypatch)


@pytest.fixture
def calls(counts: tuple[list[Call], list[Sums]]) -> list[Call]:
    return counts[0]


@pytest.fixture
def sums(counts: tuple[list[Call], list[Sums]]) -> list[Sums]:
    return counts[1]


@contextmanager
def _pretend(*sizes: int) -> Iterator[DeviceMesh]:
    """The mesh as rank 1 of so many ranks sees it; transfers do nothing."""
    dist.init_process_group("fake", rank=1, world_size=math.prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


def _meta(shape: tuple[int, int], mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    """A parameter without memory; every size of the mesh divides the dimension that it cuts."""
    sizes = list(shape)
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            assert sizes[placement.dim] % mesh.size(i) == 0
            sizes[placement.dim] //= mesh.size(i)

    def piece() -> DTensor:
        empty = torch.empty(sizes, device="meta")
        return DTensor.from_local(
            empty, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )

    param = nn.Parameter(piece())
    param.grad = piece()
    return param


COUNT, SIDE = 32, 4096


def _owned(world: int, ranks: int = 1) -> int:
    """Of 32 equal matrices, those that rank 1 owns, or all ranks below ``ranks``: they go round the ranks."""
    owners = [i % world for i in range(COUNT)]
    return owners.count(1) if ranks == 1 else sum(o < ranks for o in owners)


@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_bytes_of_a_large_model_fall_with_the_ranks(
    calls: list[Call], sums: list[Sums], world: int, fraction: float
) -> None:
    """32 matrices 4096x4096: what one rank sends is fraction · 2 · its share, up to 1,024 ranks and 32 matrices."""
    with _pretend(world) as mesh:
        Dion2([_meta((SIDE, SIDE), mesh, ROWS) for _ in range(COUNT)], fraction=fraction).step()
    k = max(1, math.ceil(fraction * SIDE / world))
    owned = COUNT // world if world <= COUNT else 1  # by rank 1: equal matrices go round the ranks
    to_owners = COUNT * k * SIDE
    to_owned = owned * world * k * SIDE
    assert [c[1:3] for c in calls] == [(to_owners, to_owned), (to_owned, to_owners)]
    assert sums == []


@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_bytes_of_columns_fall_with_the_ranks(calls: list[Call], sums: list[Sums], world: int, fraction: float) -> None:
    """Selected along the cut, nothing but the selection moves; across it, scores are added up and k is of the whole."""
    for select, k, entries in [
        ("cols", max(1, math.ceil(fraction * SIDE / world)), SIDE),
        ("rows", math.ceil(fraction * SIDE), SIDE // world),
    ]:
        calls.clear()
        with _pretend(world) as mesh:
            params = [_meta((SIDE, SIDE), mesh, COLUMNS) for _ in range(COUNT)]
            Dion2(params, fraction=fraction, select_dim=select).step()
        to_owners, to_owned = COUNT * k * entries, _owned(world) * world * k * entries
        assert [c[1:3] for c in calls] == [(to_owners, to_owned), (to_owned, to_owners)]
        assert sums == ([] if select == "cols" else [(1, (COUNT, SIDE), torch.float32)])


@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_bytes_of_hsdp_fall_with_the_ranks(calls: list[Call], sums: list[Sums], world: int, fraction: float) -> None:
    """Four replicas: a rank sends to the owners within its own one, and owners send their results to all four."""
    replicas, shards = 4, world // 4
    with _pretend(replicas, shards) as mesh:
        Dion2([_meta((SIDE, SIDE), mesh, COPIES, ROWS) for _ in range(COUNT)], fraction=fraction).step()
    k = max(1, math.ceil(fraction * SIDE / shards))
    owned = _owned(world) * shards * k * SIDE
    assert [c[1:3] for c in calls] == [
        (_owned(world, ranks=shards) * k * SIDE, owned),
        (replicas * owned, COUNT * k * SIDE),
    ]
    assert sums == []


@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_bytes_of_blocks_fall_with_the_ranks(calls: list[Call], sums: list[Sums], world: int, fraction: float) -> None:
    """Rows cut by FSDP, columns by four tensor-parallel ranks: a block's share of the selection moves, and scores."""
    across, shards = 4, world // 4
    with _pretend(shards, across) as mesh:
        params = [_meta((SIDE, SIDE), mesh, ROWS, COLUMNS) for _ in range(COUNT)]
        Dion2(params, fraction=fraction, select_dim="rows").step()
    k = max(1, math.ceil(fraction * SIDE / shards))
    to_owners = COUNT * k * SIDE // across
    to_owned = _owned(world) * world * k * SIDE // across
    assert [c[1:3] for c in calls] == [(to_owners, to_owned), (to_owned, to_owners)]
    assert sums == [(1, (COUNT, SIDE), torch.float32)]


@pytest.mark.parametrize("world", [8, 64, 1024])
def test_scion_on_blocks_of_a_large_model(calls: list[Call], sums: list[Sums], world: int) -> None:
    with _pretend(world // 4, 4) as mesh:
        Scion([_meta((SIDE, SIDE), mesh, ROWS, COLUMNS) for _ in range(COUNT)], norm="Spectral").step()
    share, whole = COUNT * SIDE * SIDE // world, _owned(world) * SIDE * SIDE
    assert [c[1:3] for c in calls] == [(share, whole), (whole, share)]
    assert sums == []


def test_later_steps_do_not_look_at_every_rank_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from the layouts of 1,024 ranks is found in the first step, and later ones do not ask again."""
    asked: list[int] = []
    real = Layout.runs
    with _pretend(1024) as mesh:
        optimizer = Dion2([_meta((SIDE, SIDE), mesh, ROWS) for _ in range(4)])
        optimizer.step()
        monkeypatch.setattr(Layout, "runs", lambda layout, dim: asked.append(dim) or real(layout, dim))
        optimizer.step()
    assert len(asked) < 100
