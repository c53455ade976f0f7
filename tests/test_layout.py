"""What a Layout says against what torch's own distribute_tensor, fully_shard and parallelize_module really give."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from scion_telemetry.optim import Dion2, Layout, Scion
from scion_telemetry.optim.layout import index_tensor, length, local, split_rows, take_piece
from scion_telemetry.testing import run_threads

MESHES = [(2,), (4,), (8,), (2, 2), (4, 2), (2, 4), (2, 2, 2)]


def _check(tensor: DTensor, full: Tensor) -> tuple[tuple[int, ...], Layout, Tensor]:
    """The layout of ``tensor`` describes this rank's piece of ``full``: its shape, its entries, its place."""
    layout, piece = Layout.of(tensor), tensor.to_local()
    assert layout.shape == tuple(full.shape)
    assert layout.local_shape == tuple(piece.shape)
    torch.testing.assert_close(take_piece(full, layout), piece, atol=0, rtol=0)
    for dim in range(full.ndim):
        runs = layout.runs(dim)
        assert all(0 <= a <= b <= full.shape[dim] for a, b in runs)
        assert all(b <= c for (_, b), (c, _) in itertools.pairwise(runs))  # ascending, disjoint
        assert length(runs) == len(index_tensor(runs)) == piece.shape[dim]
    return tuple(tensor.device_mesh.get_coordinate() or ()), layout, piece


def _check_each_seen_from_each(seen: list[tuple[tuple[int, ...], Layout, Tensor]]) -> None:
    for _, layout, _ in seen:
        for coordinate, other, piece in seen:
            assert layout.at(coordinate) == other
            assert layout.at(coordinate).local_shape == tuple(piece.shape)


def _check_covered(full: Tensor, seen: list[tuple[tuple[int, ...], Layout, Tensor]]) -> None:
    """Every entry of the full tensor is held equally often: once for each combination of replicas."""
    replicas = math.prod(a.size for a in seen[0][1].axes if a.dim is None)
    held = torch.cat([piece.reshape(-1) for _, _, piece in seen]).sort().values
    torch.testing.assert_close(held, full.reshape(-1).repeat_interleave(replicas), atol=0, rtol=0)


def _distribute(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    full = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)

    def rank_function(rank: int, world: int) -> tuple[tuple[int, ...], Layout, Tensor]:
        mesh = init_device_mesh("cpu", mesh_shape)
        return _check(distribute_tensor(full, mesh, placements, src_data_rank=None), full)

    seen = run_threads(rank_function, math.prod(mesh_shape), timeout=20)
    _check_each_seen_from_each(seen)
    _check_covered(full, seen)


@st.composite
def _distributions(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    mesh_shape = draw(st.sampled_from(MESHES))
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(_distributions())
def test_any_shape_on_any_mesh(case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]) -> None:
    _distribute(*case)


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((5, 3), (4,), (Shard(0),)),  # 2, 2, 1 and no rows
        ((3,), (8,), (Shard(0),)),
        ((10, 7), (2, 4), (Replicate(), Shard(0))),  # HSDP
        ((9, 7), (2, 4), (Shard(0), Shard(1))),
        ((11, 3), (2, 2), (Shard(0), Shard(0))),  # twice along one dimension, uneven
        ((3, 4), (4, 2), (Shard(0), Shard(0))),
        ((2, 5, 3), (2, 2, 2), (Shard(1), Replicate(), Shard(2))),
        ((4, 3, 5, 2), (4,), (Shard(-2),)),  # counted from the end
    ],
)
def test_named_cases(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    _distribute(shape, mesh_shape, placements)


@pytest.mark.parametrize(("hidden", "tp", "dp"), [(8, 2, 2), (12, 2, 4), (10, 2, 2), (6, 2, 4), (5, 2, 2), (7, 4, 2)])
def test_fsdp_over_tensor_parallelism(hidden: int, tp: int, dp: int) -> None:
    """Real fully_shard over parallelize_module: right-to-left shards, even, uneven and empty."""

    def rank_function(rank: int, world: int) -> Any:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(6, hidden), nn.Linear(hidden, 6, bias=False))
        fulls = []
        for p in model.parameters():
            p.data = torch.arange(p.numel(), dtype=torch.float32).view(p.shape)
            fulls.append(p.data.clone())
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        params = list(model.parameters())
        kinds = {type(x) for p in params for x in p.placements}
        return kinds, [_check(p, f) for p, f in zip(params, fulls, strict=True)]

    results = run_threads(rank_function, tp * dp, timeout=30)
    assert _StridedShard in results[0][0]
    for i in range(3):
        _check_each_seen_from_each([checked[i] for _, checked in results])


def test_mesh_dimensions_of_one_rank_cut_nothing() -> None:
    def rank_function(rank: int, world: int) -> tuple[tuple[int, ...], frozenset[int]]:
        mesh = init_device_mesh("cpu", (1, world, 1))
        placements = [Shard(0), Shard(0), Shard(1)]
        layout = Layout.of(distribute_tensor(torch.zeros(5, 2), mesh, placements, src_data_rank=None))
        return layout.local_shape, layout.sharded_dims

    assert run_threads(rank_function, 2, timeout=20) == [((3, 2), frozenset({0})), ((2, 2), frozenset({0}))]


def test_a_plain_tensor_is_whole() -> None:
    x = torch.arange(6.0).view(2, 3)
    layout = Layout.of(x)
    assert (layout.local_shape, layout.sharded_dims, layout.describe()) == ((2, 3), frozenset(), "whole")
    assert Layout.of(torch.tensor(1.0)).local_shape == ()
    assert local(x) is x
    assert take_piece(x, layout) is x


def test_replicated_and_split_layouts_have_names_and_equality_without_the_mesh() -> None:
    def rank_function(rank: int, world: int) -> tuple[str, bool]:
        first, second = (init_device_mesh("cpu", (2, 2)) for _ in range(2))
        a, b = (
            distribute_tensor(torch.zeros(4, 2), m, [Replicate(), Shard(0)], src_data_rank=None)
            for m in (first, second)
        )
        return Layout.of(a).describe(), Layout.of(a) == Layout.of(b) and hash(Layout.of(a)) == hash(Layout.of(b))

    assert set(run_threads(rank_function, 4)) == {("Replicate x2, Shard(0) x2", True)}


def test_an_unreduced_sum_is_refused() -> None:
    def rank_function(rank: int, world: int) -> str:
        partial = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (world,)), [Partial()])
        with pytest.raises(ValueError, match=r"unreduced sum.*Replicate or Shard") as caught:
            Layout.of(partial)
        return str(caught.value)

    assert len(run_threads(rank_function, 2)) == 2


def test_a_declared_shape_that_the_piece_contradicts_is_refused() -> None:
    # Of 5 rows the ranks hold 3 and 2 by the rule of torch; here both hold 2.
    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        wrong = DTensor.from_local(
            torch.ones(2, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
        )
        if rank == 0:
            with pytest.raises(ValueError, match=r"gives \(3, 3\)"):
                Layout.of(wrong)

    run_threads(rank_function, 2)


@pytest.mark.parametrize("optimizer", [Scion, Dion2])
def test_ranks_that_infer_other_global_shapes_are_refused_by_name(optimizer: Any) -> None:
    """from_local without shape= on 2, 2, 1 and 0 rows: the ranks believe in 8, 8, 4 and 0 rows."""

    def rank_function(rank: int, world: int) -> str:
        mesh = init_device_mesh("cpu", (world,))
        whole = torch.arange(1.0, 16.0).view(5, 3)
        piece = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).to_local()
        guessed = nn.Parameter(DTensor.from_local(piece, mesh, [Shard(0)], run_check=False))
        with pytest.raises(ValueError, match=r"'blocks\.0'.*\(8, 3\).*\(4, 3\).*\(0, 3\).*shape=") as caught:
            optimizer([("blocks.0", guessed)])
        return str(caught.value)

    assert len(set(run_threads(rank_function, 4))) == 1


def test_another_order_of_parameters_on_one_rank_is_refused_by_name() -> None:
    def rank_function(rank: int, world: int) -> None:
        names = ["experts", "dense"] if rank == 1 else ["dense", "experts"]
        group = torch.distributed.group.WORLD
        with pytest.raises(ValueError, match=r"'dense'.*'dense' \(2, 2\), 'experts' \(2, 2\).*same order"):
            Scion([(n, nn.Parameter(torch.zeros(2, 2))) for n in names], process_group=group)

    run_threads(rank_function, 2)


@st.composite
def _heads(draw: Any) -> tuple[int, int, tuple[int, ...], tuple[Placement, ...]]:
    mesh_shape = draw(st.sampled_from([(2,), (4,), (2, 2)]))
    placement = st.sampled_from([Replicate(), Shard(0), Shard(1)])
    return draw(st.integers(1, 8)), draw(st.integers(1, 3)), mesh_shape, tuple(draw(placement) for _ in mesh_shape)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(_heads())
def test_heads_are_split_where_every_piece_has_whole_ones(
    case: tuple[int, int, tuple[int, ...], tuple[Placement, ...]],
) -> None:
    """``[heads·h, d]`` seen as ``[heads, h, d]``: the same entries on every rank, or a refusal on all of them."""
    heads, height, mesh_shape, placements = case
    full = torch.arange(heads * height * 3, dtype=torch.float32).view(heads * height, 3)

    def rank_function(rank: int, world: int) -> tuple[bool, bool]:
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        layout = Layout.of(tensor)
        rows = torch.bincount(index_tensor(layout.runs(0)) // height, minlength=heads)
        whole = bool(((rows == 0) | (rows == height)).all())
        try:
            split = split_rows(layout, heads)
        except ValueError as error:
            return whole, "cuts heads" not in str(error)
        piece = take_piece(full.view(heads, height, 3), split)
        torch.testing.assert_close(tensor.to_local().view(split.local_shape), piece, atol=0, rtol=0)
        return whole, True

    results = run_threads(rank_function, math.prod(mesh_shape), timeout=20)
    assert {split for _, split in results} == {all(whole for whole, _ in results)}


def test_heads_that_do_not_divide_the_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rows are no multiple of 2 heads"):
        split_rows(Layout.of(torch.zeros(7, 3)), 2)
