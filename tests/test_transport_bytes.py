"""Counted bytes of one Dion2 or Scion step: only what is selected travels, once per direction and replica, unpadded."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from scion_telemetry.optim import Dion2, Layout, Scion
from scion_telemetry.testing import run_threads

pytestmark = pytest.mark.timeout(60)


class Call(NamedTuple):
    """One all-to-all on one rank, in elements."""

    rank: int
    sent: int
    received: int
    dtype: torch.dtype


class Sums(NamedTuple):
    """One all-reduce on one rank: the scores of N matrices."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    seen: list[Call] = []
    real: Callable[..., Any] = dist.all_to_all_single

    def counted(output: Tensor, input: Tensor, arriving: Any = None, leaving: Any = None, **kwargs: Any) -> Any:
        assert sum(leaving) == input.numel()
        assert sum(arriving) == output.numel()
        assert input.dtype == output.dtype
        seen.append(Call(dist.get_rank(), input.numel(), output.numel(), input.dtype))
        return real(output, input, arriving, leaving, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    return seen


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Sums]:
    seen: list[Sums] = []
    real: Callable[..., Any] = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(Sums(dist.get_rank(), tuple(tensor.shape), tensor.dtype))
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    return seen


@pytest.fixture(autouse=True)
def _no_other_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting two kinds of transfer counts all: a step uses no other."""

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective that is not counted")

    for name in (
        "all_gather",
        "all_gather_into_tensor",
        "broadcast",
        "reduce_scatter_tensor",
        "send",
        "recv",
        "reduce",
    ):
        monkeypatch.setattr(dist, name, forbidden)


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


def test_replicas_go_on_sharing_the_work_after_loading(calls: list[Call]) -> None:
    def rank_function(rank: int, world: int) -> None:
        param = nn.Parameter(torch.ones(6, 4))
        param.grad = torch.ones(6, 4)
        optimizer = Dion2([param], dist.group.WORLD)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()

    run_threads(rank_function, 2, timeout=30)
    assert len(calls) == 2
