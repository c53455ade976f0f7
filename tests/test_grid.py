"""Who shares a parameter and which block each rank holds: by hand, and against what ranks really hold."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from scion_telemetry.optim import Layout, Scion
from scion_telemetry.optim.grid import Dims, Grid, require_supported, shared_coordinates
from scion_telemetry.optim.layout import Axis, take_piece
from scion_telemetry.testing import run_threads

pytestmark = pytest.mark.timeout(60)
Mesh = Sequence[tuple[int, int | None]]
"""Size of every mesh dimension, and the tensor dimension that it cuts."""


def _layouts(shape: tuple[int, ...], mesh: Mesh) -> tuple[Layout, ...]:
    layout = Layout(shape=shape, axes=tuple(Axis(size=size, coordinate=0, dim=dim) for size, dim in mesh))
    return tuple(layout.at(c) for c in itertools.product(*(range(size) for size, _ in mesh)))


def _grid(shape: tuple[int, ...], mesh: Mesh, *, stacked: bool = False) -> Grid:
    return Grid(group=None, layouts=_layouts(shape, mesh), dims=Dims.of(len(shape), stacked=stacked))


@pytest.mark.parametrize(
    ("ndim", "stacked", "rows", "columns"),
    [(0, False, 0, None), (1, False, 0, None), (2, False, 0, 1), (3, True, 1, 2), (3, False, 0, 1), (5, False, 0, 1)],
)
def test_where_rows_and_columns_are(ndim: int, stacked: bool, rows: int, columns: int | None) -> None:
    assert Dims.of(ndim, stacked=stacked) == Dims(rows=rows, columns=columns)


@pytest.mark.parametrize(
    ("shape", "mesh", "stacked", "blocks", "replicas", "row_sizes", "column_sizes"),
    [
        ((5, 3), [(4, 0)], False, [(0, 0), (1, 0), (2, 0), (3, 0)], [0] * 4, (2, 2, 1, 0), (3,)),
        ((5, 3), [(2, 1)], False, [(0, 0), (0, 1)], [0, 0], (5,), (2, 1)),
        ((5, 3), [(2, 0), (2, 1)], False, [(0, 0), (0, 1), (1, 0), (1, 1)], [0] * 4, (3, 2), (2, 1)),
        ((5, 3), [(2, 1), (2, 0)], False, [(0, 0), (1, 0), (0, 1), (1, 1)], [0] * 4, (3, 2), (2, 1)),
        # 5 rows are 3 and 2, and then 2, 1 and 1, 1.
        ((5, 3), [(2, 0), (2, 0)], False, [(0, 0), (1, 0), (2, 0), (3, 0)], [0] * 4, (2, 1, 1, 1), (3,)),
        ((5, 3), [(2, None), (2, 0)], False, [(0, 0), (1, 0), (0, 0), (1, 0)], [0, 0, 1, 1], (3, 2), (3,)),
        ((5, 3), [(2, 0), (2, None)], False, [(0, 0), (0, 0), (1, 0), (1, 0)], [0, 1, 0, 1], (3, 2), (3,)),
        ((5, 3), [(3, None)], False, [(0, 0)] * 3, [0, 1, 2], (5,), (3,)),
        ((5,), [(2, 0)], False, [(0, 0), (1, 0)], [0, 0], (3, 2), None),
        ((2, 5, 3), [(2, 1), (2, 2)], True, [(0, 0), (0, 1), (1, 0), (1, 1)], [0] * 4, (3, 2), (2, 1)),
        ((5, 3, 2, 2), [(2, 0), (2, 1)], False, [(0, 0), (0, 1), (1, 0), (1, 1)], [0] * 4, (3, 2), (2, 1)),
        ((5, 3), [(1, 0), (2, 1), (1, None)], False, [(0, 0), (0, 1)], [0, 0], (5,), (2, 1)),
        # Blocks that hold nothing are blocks of their own: here two of rows, and three of columns.
        ((2, 1), [(4, 0)], False, [(0, 0), (1, 0), (2, 0), (3, 0)], [0] * 4, (1, 1, 0, 0), (1,)),
        ((2, 1), [(4, 1)], False, [(0, 0), (0, 1), (0, 2), (0, 3)], [0] * 4, (2,), (1, 0, 0, 0)),
    ],
)
def test_blocks_by_hand(
    shape: tuple[int, ...],
    mesh: Mesh,
    stacked: bool,
    blocks: list[tuple[int, int]],
    replicas: list[int],
    row_sizes: tuple[int, ...],
    column_sizes: tuple[int, ...] | None,
) -> None:
    grid = _grid(shape, mesh, stacked=stacked)
    assert list(grid.blocks) == blocks
    assert list(grid.replicas) == replicas
    assert grid.sizes(grid.dims.rows) == row_sizes
    assert grid.blocks_along(grid.dims.rows) == len(row_sizes)
    assert grid.cut(grid.dims.rows) == (len(row_sizes) > 1)
    assert list(grid.shapes) == [layout.local_shape for layout in grid.layouts]
    if column_sizes is None:
        assert grid.dims.columns is None
        assert not grid.cut(None)
    else:
        assert grid.dims.columns is not None
        assert grid.sizes(grid.dims.columns) == column_sizes
        assert grid.cut(grid.dims.columns) == (len(column_sizes) > 1)


def test_right_to_left_sharding_has_blocks_by_mesh_coordinates() -> None:
    """FSDP over tensor parallelism: the inner axis cuts first. 8 rows lie as 01 45 23 67 in the order of the blocks."""
    axes = (Axis(size=2, coordinate=0, dim=0, split_factor=2), Axis(size=2, coordinate=0, dim=0))
    layout = Layout(shape=(8, 3), axes=axes)
    layouts = tuple(layout.at(c) for c in itertools.product(range(2), range(2)))
    grid = Grid(group=None, layouts=layouts, dims=Dims.of(2, stacked=False))
    assert grid.blocks == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert [x.runs(0) for x in grid.layouts] == [((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),)]
    assert grid.sizes(0) == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("mesh", "stacked", "expected"),
    [
        ([(2, 0), (2, 1)], False, [[0, 0], [0, 1], [1, 0], [1, 1]]),  # a matrix: all of them
        ([(2, 0), (2, 1)], True, [[1, 0], [1, 1]]),  # those with the same experts
        ([(2, 0), (2, None)], True, [[1, 0], [1, 1]]),
        ([(2, 0), (2, 0)], True, [[1, 1]]),
        ([(2, 1), (2, 2)], True, [[0, 0], [0, 1], [1, 0], [1, 1]]),
        ([(2, None), (2, None)], True, [[0, 0], [0, 1], [1, 0], [1, 1]]),
    ],
)
def test_ranks_that_share_matrices(mesh: Mesh, stacked: bool, expected: list[list[int]]) -> None:
    seen_from = _layouts((4, 6, 8), mesh)[-1]  # at coordinates [1, 1]
    assert shared_coordinates(seen_from, Dims.of(3, stacked=stacked)) == expected


def _shared(
    shape: tuple[int, ...], ranks: Tensor, placements: Sequence[Placement]
) -> list[tuple[int, list[int], Grid, Tensor]]:
    """What every rank's optimizer makes of a parameter: its rank, the sharing ranks, the grid; and what it holds."""
    full = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)

    def rank_function(rank: int, world: int) -> tuple[int, list[int], Grid, Tensor]:
        mesh = DeviceMesh("cpu", ranks)
        param = nn.Parameter(distribute_tensor(full, mesh, placements, src_data_rank=None))
        optimizer = Scion([{"params": [param], "norm": "Spectral" if len(shape) > 1 else "BiasRMS"}])
        grid = optimizer._grids[param]
        members = [rank] if grid.group is None else dist.get_process_group_ranks(grid.group)
        if grid.group is not None:
            assert members[grid.rank] == rank
            assert grid.number(grid.dims.rows) == grid.blocks[grid.rank][0]
            assert len(grid.index(grid.dims.rows, full.device)) == param.to_local().shape[grid.dims.rows]
        return rank, members, grid, param.to_local().detach()

    return run_threads(rank_function, ranks.numel(), timeout=20)


def _check_shared(shape: tuple[int, ...], ranks: Tensor, placements: Sequence[Placement]) -> None:
    """The ranks of a grid hold what it says, every replica has the whole once, and blocks have the sizes it says."""
    full = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    results = _shared(shape, ranks, placements)
    held = {rank: piece for rank, _, _, piece in results}
    for rank, members, grid, _ in results:
        assert rank in members
        assert all(sorted(m) == sorted(members) for r, m, _, _ in results if r in members)
        for member, layout, expected in zip(members, grid.layouts, grid.shapes, strict=True):
            torch.testing.assert_close(take_piece(full, layout), held[member], atol=0, rtol=0)
            assert tuple(held[member].shape) == expected
        for member, block in zip(members, grid.blocks, strict=True):
            assert held[member].shape[grid.dims.rows] == grid.sizes(grid.dims.rows)[block[0]]
        copies = set(grid.replicas)
        of_first = torch.cat([held[m].reshape(-1) for m, r in zip(members, grid.replicas, strict=True) if r == 0])
        assert len(of_first.unique()) == len(of_first)  # nothing twice
        for copy in copies:
            entries = [held[m].reshape(-1) for m, r in zip(members, grid.replicas, strict=True) if r == copy]
            torch.testing.assert_close(torch.cat(entries).sort().values, of_first.sort().values, atol=0, rtol=0)
    # All parts of a stack together, or of one matrix, are the whole.
    every = torch.cat([held[m].reshape(-1) for m in held]).unique()
    assert len(every) == full.numel()


MESHES = [(2,), (4,), (2, 2), (2, 1, 2)]


@st.composite
def _cases(draw: Any) -> tuple[tuple[int, ...], Tensor, tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    sizes = draw(st.sampled_from(MESHES))
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    order = draw(st.permutations(range(math.prod(sizes))))
    return shape, torch.tensor(order).view(sizes), tuple(draw(placement) for _ in sizes)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(_cases())
def test_any_shape_on_any_order_of_ranks(case: tuple[tuple[int, ...], Tensor, tuple[Placement, ...]]) -> None:
    _check_shared(*case)


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[3, 1], [2, 0]], [[2, 3], [0, 1]]])
def test_the_stacks_of_other_experts_are_shared_by_other_ranks(ranks: list[list[int]]) -> None:
    for rank, members, _, _ in _shared((4, 6, 8), torch.tensor(ranks), (Shard(0), Shard(1))):
        assert sorted(members) == sorted(next(row for row in ranks if rank in row))
    for rank, members, grid, _ in _shared((4, 6, 8), torch.tensor(ranks), (Shard(0), Shard(0))):
        assert members == [rank]
        assert grid.group is None


@pytest.mark.parametrize(
    ("shape", "mesh", "stacked", "dim"),
    [
        ((4, 6, 3, 3), [(2, 2)], False, 2),
        ((4, 6, 3, 3), [(2, 0), (2, 3)], False, 3),
        ((4, 6, 8), [(2, 2)], False, 2),
        ((4, 6, 3, 3), [(2, 1)], False, None),
        ((4, 6, 8), [(2, 2)], True, None),
        ((4, 6, 8), [(2, 0), (2, 1), (2, 2)], True, None),
        ((4, 6), [(2, 0), (2, 1)], False, None),
        ((4,), [(2, 0)], False, None),
        ((4, 6, 3, 3), [(1, 2)], False, None),  # over one rank: no cut
    ],
)
def test_kernels_that_are_cut_are_refused_by_name(
    shape: tuple[int, ...], mesh: Mesh, stacked: bool, dim: int | None
) -> None:
    layout, dims = _layouts(shape, mesh)[0], Dims.of(len(shape), stacked=stacked)
    if dim is None:
        require_supported(layout, dims, "layers.3.conv")
        return
    message = rf"'layers\.3\.conv' of shape .*Shard\({dim}\).*cuts dimension {dim}; supported are cuts along rows"
    with pytest.raises(ValueError, match=message):
        require_supported(layout, dims, "layers.3.conv")


def test_optimizers_refuse_a_cut_kernel_on_every_rank() -> None:
    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        param = nn.Parameter(distribute_tensor(torch.zeros(4, 6, 3, 3), mesh, [Shard(3)], src_data_rank=None))
        with pytest.raises(ValueError, match=r"'stem'.*Shard\(3\) x2.*cuts dimension 3"):
            Scion([("stem", param)])

    run_threads(rank_function, 2, timeout=20)


def test_the_groups_of_the_mesh_are_used_and_others_are_made_once() -> None:
    """Also where the mesh lists its ranks in another order; blocks over two mesh dimensions share one new group."""

    def rank_function(rank: int, world: int) -> None:
        mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]))
        line = DeviceMesh("cpu", torch.tensor([3, 1, 0, 2]))
        full = torch.ones(8, 8)
        params = [
            nn.Parameter(distribute_tensor(full, m, p, src_data_rank=None))
            for m, p in [
                (line, [Shard(0)]),
                (mesh, [Shard(0), Shard(1)]),
                (mesh, [Shard(1), Shard(0)]),
                (mesh, [Replicate(), Shard(0)]),
            ]
        ]
        stack = nn.Parameter(distribute_tensor(torch.ones(2, 4, 4), mesh, [Shard(0), Shard(1)], src_data_rank=None))
        optimizer = Scion([{"params": [*params, stack], "norm": "Spectral"}])
        groups = [optimizer._grids[p].group for p in [*params, stack]]
        assert groups[0] is line.get_group()
        assert groups[1] is groups[2] is groups[3]
        assert groups[4] is mesh.get_group(1)
        assert len(optimizer._groups) <= 1

    run_threads(rank_function, 4, timeout=20)
