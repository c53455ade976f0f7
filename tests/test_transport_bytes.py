"""Counted bytes of one Dion2 or Scion step: only what is selected travels, once per direction and replica, unpadded."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted import Call, Sums, count
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from scion_telemetry.optim import Dion2, Scion
from scion_telemetry.testing import run_threads

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Call], list[Sums]]:
    return count(monkeypatch)


@pytest.fixture
def calls(counts: tuple[list[Call], list[Sums]]) -> list[Call]:
    return counts[0]


@pytest.fixture
def sums(counts: tuple[list[Call], list[Sums]]) -> list[Sums]:
    return counts[1]


def _total(calls: list[Call]) -> int:
    assert {c.dtype for c in calls} <= {torch.bfloat16}
    assert sum(c.sent for c in calls) == sum(c.received for c in calls)
    return sum(c.sent for c in calls)


def _chunks(n: int, parts: int) -> list[int]:
    size = -(-n // parts)
    return [max(0, min(size, n - size * p)) for p in range(parts)]


def _k(fraction: float, n: int) -> int:
    return min(n, max(1, math.ceil(round(fraction * n, 9))))


Mesh = tuple[tuple[int, ...], tuple[Placement, ...]]
Make = Callable[[list[nn.Parameter]], Any]
ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()


def _step(mesh: Mesh, shapes: list[tuple[int, ...]], make: Make) -> None:
    sizes, placements = mesh

    def rank_function(rank: int, world: int) -> None:
        device_mesh = init_device_mesh("cpu", sizes)
        params = []
        for i, shape in enumerate(shapes):
            full = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            p = nn.Parameter(distribute_tensor(full, device_mesh, placements, src_data_rank=None))
            p.grad = distribute_tensor(full + 1, device_mesh, placements, src_data_rank=None)
            params.append(p)
        make(params).step()

    run_threads(rank_function, math.prod(sizes), timeout=30)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5, 1.0])
def test_dion2_moves_only_the_selected_rows(
    calls: list[Call], sums: list[Sums], world: int, scope: str, fraction: float
) -> None:
    shapes = [(40, 24)] * 5 + [(7, 16)] * 3 + [(3, 8)]
    _step(((world,), (ROWS,)), list(shapes), lambda p: Dion2(p, fraction=fraction, selection_scope=scope))
    expected = 0
    for rows, columns in shapes:
        k = _k(fraction, rows if scope == "global" else -(-rows // world))
        selected = k if scope == "global" else sum(min(k, r) for r in _chunks(rows, world))
        expected += 2 * selected * columns  # there and back
    assert _total(calls) == expected
    assert len(calls) == 2 * 3 * world  # two transfers a shape, whatever the number of matrices
    # Scores travel in the global scope alone: N·n numbers a shape.
    tables = [(5, 40), (3, 7), (1, 3)] if scope == "global" else []
    assert sorted(sums) == sorted((r, table, torch.float32) for r in range(world) for table in tables)


MESHES: dict[str, Mesh] = {
    "columns": ((4,), (COLUMNS,)),
    "blocks": ((2, 2), (ROWS, COLUMNS)),
    "blocks, columns first": ((2, 2), (COLUMNS, ROWS)),
    "HSDP": ((2, 2), (COPIES, ROWS)),
    "HSDP, replicas last": ((2, 2), (ROWS, COPIES)),
    "HSDP of columns": ((2, 2), (COPIES, COLUMNS)),
    "HSDP of blocks": ((2, 2, 2), (COPIES, ROWS, COLUMNS)),
    "rows twice": ((2, 2), (ROWS, ROWS)),
    "replicas": ((4,), (COPIES,)),
}


def _cuts(mesh: Mesh) -> tuple[int, int, int]:
    """Blocks of rows, blocks of columns, and replicas of a mesh."""
    sizes, placements = mesh
    found = [math.prod(s for s, p in zip(sizes, placements, strict=True) if p == q) for q in (ROWS, COLUMNS, COPIES)]
    return found[0], found[1], found[2]


def _lengths(n: int, mesh: Mesh, placement: Placement) -> list[int]:
    """Length of every block along the dimension that a placement cuts: torch.chunk, once a mesh dimension."""
    lengths = [n]
    for size, p in zip(*mesh, strict=True):
        if p == placement:
            lengths = [c for length in lengths for c in _chunks(length, size)]
    return lengths


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("select", ["rows", "cols"])
def test_dion2_in_every_layout(calls: list[Call], sums: list[Sums], name: str, scope: str, select: str) -> None:
    """The selected slices go to an owner from one replica, and from there to every replica; scores are added apart."""
    mesh, fraction = MESHES[name], 0.3
    shapes = [(9, 7)] * 5 + [(6, 10)] * 2
    options: dict[str, Any] = {"fraction": fraction, "selection_scope": scope, "select_dim": select}
    _step(mesh, list(shapes), lambda p: Dion2(p, **options))
    row_blocks, column_blocks, replicas = _cuts(mesh)
    along, other = (row_blocks, column_blocks) if select == "rows" else (column_blocks, row_blocks)
    expected = 0
    for shape in shapes:
        n, width = shape if select == "rows" else shape[::-1]
        lengths = _lengths(n, mesh, ROWS if select == "rows" else COLUMNS)
        k = _k(fraction, n if scope == "global" else max(lengths))
        entries = width * (k if scope == "global" else sum(min(k, length) for length in lengths))
        there = entries if along * other > 1 else 0  # from replicas nothing: the owner has it
        expected += there + replicas * entries
    world = math.prod(mesh[0])
    assert _total(calls) == expected
    assert len(calls) == (2 if along * other > 1 else 1) * 2 * world
    tables = [(5, 9), (2, 6)] if select == "rows" else [(5, 7), (2, 10)]
    if other == 1 and (along == 1 or scope == "local"):
        tables = []  # every score is known where its slice is
    assert sorted(sums) == sorted((r, table, torch.float32) for r in range(world) for table in tables)


@pytest.mark.parametrize("name", MESHES)
def test_scion_moves_every_entry_there_and_to_every_replica(calls: list[Call], sums: list[Sums], name: str) -> None:
    mesh = MESHES[name]
    shapes: list[tuple[int, ...]] = [(5, 3), (5, 3), (8, 6), (1, 4)]
    kwargs = {"orthogonalizer": "polar_express"}
    _step(mesh, shapes, lambda p: Scion(p, norm="Spectral", norm_kwargs=kwargs))
    row_blocks, column_blocks, replicas = _cuts(mesh)
    there = 1 if row_blocks * column_blocks > 1 else 0
    assert _total(calls) == (there + replicas) * sum(math.prod(s) for s in shapes)
    assert sums == []


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(
    ("norm", "kwargs", "needs"),
    [
        ("Sign", {}, ""),
        ("RowNorm", {}, "rows"),
        ("RowNorm", {"transpose": True}, "columns"),
        ("ColNorm", {"transpose": True}, "rows"),
        ("ColNorm", {}, "columns"),
    ],
)
def test_other_norms_move_nothing_where_what_they_need_is_whole(
    calls: list[Call], sums: list[Sums], name: str, norm: str, kwargs: dict[str, Any], needs: str
) -> None:
    mesh = MESHES[name]
    shapes: list[tuple[int, ...]] = [(5, 3), (5, 3), (8, 6)]
    _step(mesh, shapes, lambda p: Scion(p, norm=norm, norm_kwargs=kwargs))
    row_blocks, column_blocks, replicas = _cuts(mesh)
    cut = {"": 1, "rows": column_blocks, "columns": row_blocks}[needs] > 1
    entries = sum(math.prod(s) for s in shapes)
    assert {c.dtype for c in calls} <= {torch.float32}  # in their own dtype
    assert sum(c.sent for c in calls) == sum(c.received for c in calls) == ((1 + replicas) * entries if cut else 0)
    assert (calls == []) == (not cut)
    assert sums == []


STACKS: dict[str, tuple[Mesh, int, int, int]] = {
    # the mesh; blocks that every matrix is cut into; its replicas; ranks that have part of one
    "experts": (((4,), (Shard(0),)), 1, 1, 0),
    "experts twice": (((2, 2), (Shard(0), Shard(0))), 1, 1, 0),
    "experts and rows": (((2, 2), (Shard(0), Shard(1))), 2, 1, 4),
    "experts and columns": (((2, 2), (Shard(2), Shard(0))), 2, 1, 4),
    "experts, replicated": (((2, 2), (COPIES, Shard(0))), 1, 2, 4),
    "rows and columns of every expert": (((2, 2), (Shard(1), Shard(2))), 4, 1, 4),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_experts_move_among_the_ranks_that_share_them(calls: list[Call], name: str) -> None:
    """Expert parallelism costs the optimizer nothing; cutting the matrices of experts costs what it costs elsewhere."""
    mesh, blocks, replicas, ranks = STACKS[name]
    shape, count = (3, 6, 4), 2
    kwargs = {"orthogonalizer": "polar_express"}
    _step(mesh, [shape] * count, lambda p: Scion(p, norm="Spectral", norm_kwargs=kwargs))
    directions = (blocks > 1) + replicas if ranks else 0
    assert _total(calls) == directions * count * math.prod(shape)
    assert len({c.rank for c in calls}) == ranks


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_send_every_result_to_all_and_nothing_else(calls: list[Call], sums: list[Sums], world: int) -> None:
    def rank_function(rank: int, world: int) -> None:
        params = [nn.Parameter(torch.ones(6, 4)) for _ in range(5)]
        for p in params:
            p.grad = torch.ones(6, 4)
        Dion2(params, dist.group.WORLD, fraction=0.5).step()

    run_threads(rank_function, world, timeout=30)
    selected = 2 * 6  # of a tall matrix, columns: 2 of 4
    assert _total(calls) == 5 * world * selected
    assert {c.received for c in calls} == {5 * selected}
    assert sums == []


def test_replicas_go_on_sharing_the_work_after_loading(calls: list[Call]) -> None:
    def rank_function(rank: int, world: int) -> None:
        param = nn.Parameter(torch.ones(6, 4))
        param.grad = torch.ones(6, 4)
        optimizer = Dion2([param], dist.group.WORLD)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()

    run_threads(rank_function, 2, timeout=30)
    assert len(calls) == 2
