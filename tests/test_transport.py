"""Blocks to whole matrices and back, against brute force with torch.chunk, on threads and on real ranks."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.optim.grid import Dims, Grid
from scion_telemetry.optim.layout import Axis, Layout
from scion_telemetry.optim.transport import Exchange, assign_owners, pipeline, require_agreement
from scion_telemetry.testing import run_forked, run_threads

Mesh = tuple[tuple[int, int | None], ...]
"""Size of every mesh dimension, and the tensor dimension that it cuts."""


def _run(generator: Any) -> Any:
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def _matrices(count: int, shape: Sequence[int]) -> list[Tensor]:
    size = math.prod(shape)
    return [torch.arange(size, dtype=torch.float32).view(tuple(shape)) + 1000 * i for i in range(count)]


def _coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size, _ in mesh)))


def _grid(shape: Sequence[int], mesh: Mesh, *, stacked: bool = False) -> Grid:
    axes = tuple(Axis(size=size, coordinate=0, dim=dim) for size, dim in mesh)
    layout = Layout(shape=tuple(shape), axes=axes)
    layouts = tuple(layout.at(c) for c in _coordinates(mesh))
    return Grid(group=dist.group.WORLD, layouts=layouts, dims=Dims.of(len(shape), stacked=stacked))


def _held(n: int, mesh: Mesh, coordinate: Sequence[int], dim: int) -> list[int]:
    """Indices that a rank holds of a dimension of length n: torch.chunk, once for every mesh dimension that cuts it."""
    indices = torch.arange(n)
    for (size, cut), c in zip(mesh, coordinate, strict=True):
        if cut == dim:
            chunks = indices.chunk(size)
            indices = chunks[c] if c < len(chunks) else indices[:0]
    return indices.tolist()


def _piece(full: Tensor, mesh: Mesh, coordinate: Sequence[int]) -> Tensor:
    for dim in range(full.ndim):
        full = full[(slice(None),) * dim + (_held(full.shape[dim], mesh, coordinate, dim),)]
    return full.clone()


def _block(mesh: Mesh, coordinate: Sequence[int], dim: int) -> int:
    """Number of a rank's block along a dimension: its mesh coordinates there, read as one number."""
    number = 0
    for (size, cut), c in zip(mesh, coordinate, strict=True):
        number = number * size + c if cut == dim else number
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Same-shaped tensors on a mesh; ``stacked`` where the first dimension counts matrices."""

    shape: tuple[int, ...]
    count: int
    mesh: Mesh
    stacked: bool = False


CASES = {
    "rows, as many matrices as ranks": Case(shape=(8, 3), count=4, mesh=((4, 0),)),
    "2, 2, 1 and 0 rows, more matrices than ranks": Case(shape=(5, 3), count=5, mesh=((4, 0),)),
    "fewer matrices than ranks": Case(shape=(5, 3), count=1, mesh=((4, 0),)),
    "one row": Case(shape=(1, 4), count=3, mesh=((4, 0),)),
    "vectors": Case(shape=(6,), count=3, mesh=((4, 0),)),
    "convolutions": Case(shape=(5, 2, 3, 3), count=3, mesh=((4, 0),)),
    "convolutions, inputs": Case(shape=(2, 5, 3, 3), count=3, mesh=((4, 1),)),
    "columns": Case(shape=(3, 5), count=7, mesh=((4, 1),)),
    "one column": Case(shape=(3, 1), count=2, mesh=((4, 1),)),
    "blocks": Case(shape=(5, 7), count=5, mesh=((2, 0), (2, 1))),
    "blocks, columns first": Case(shape=(5, 7), count=5, mesh=((2, 1), (2, 0))),
    "blocks, some empty": Case(shape=(1, 3), count=3, mesh=((2, 0), (2, 1))),
    "rows twice": Case(shape=(7, 2), count=3, mesh=((2, 0), (2, 0))),
    "rows twice, some empty": Case(shape=(3, 2), count=3, mesh=((2, 0), (2, 0))),
    "replicas": Case(shape=(4, 3), count=5, mesh=((4, None),)),
    "fewer replicas' matrices than ranks": Case(shape=(4, 3), count=1, mesh=((4, None),)),
    "scalars, replicated": Case(shape=(), count=3, mesh=((4, None),)),
    "nothing, replicated": Case(shape=(0, 3), count=3, mesh=((4, None),)),
    "HSDP": Case(shape=(5, 3), count=5, mesh=((2, None), (2, 0))),
    "HSDP, replicas last": Case(shape=(5, 3), count=5, mesh=((2, 0), (2, None))),
    "HSDP of columns": Case(shape=(3, 5), count=2, mesh=((2, None), (2, 1))),
    "stacks, rows": Case(shape=(3, 5, 4), count=3, mesh=((4, 1),), stacked=True),
    "stacks, blocks": Case(shape=(3, 5, 4), count=3, mesh=((2, 1), (2, 2)), stacked=True),
    "stacks, replicas": Case(shape=(3, 5, 4), count=3, mesh=((2, None), (2, 2)), stacked=True),
    "mesh dimensions of one rank": Case(shape=(5, 3), count=3, mesh=((1, 1), (4, 0), (1, 0))),
}


def _runs(names: Iterable[str], real: set[str]) -> list[Any]:
    """Every case on threads, and some on real ranks."""
    runners = [(run_threads, name) for name in names] + [(run_forked, name) for name in sorted(real)]
    return [pytest.param(runner, name, id=f"{name}-{runner.__name__}") for runner, name in runners]


REAL = {"2, 2, 1 and 0 rows, more matrices than ranks", "blocks", "HSDP", "stacks, blocks", "scalars, replicated"}


@pytest.mark.parametrize(("runner", "name"), _runs(CASES, REAL))
def test_whole_matrices_on_their_owners_and_results_back(runner: Any, name: str) -> None:
    case, world = CASES[name], 4
    whole = _matrices(case.count, case.shape)
    owners = assign_owners([1.0] * case.count, [0.0] * world)

    def rank_function(rank: int, world: int) -> tuple[dict[int, Tensor], tuple[Tensor, ...], list[Tensor]]:
        exchange = Exchange(grid=_grid(case.shape, case.mesh, stacked=case.stacked), owners=owners)
        pieces = [_piece(w, case.mesh, _coordinates(case.mesh)[rank]) for w in whole]
        gathered = _run(exchange.gather(list(pieces)))
        back = _run(exchange.scatter({i: 2 * m for i, m in gathered.items()}, pieces))
        return gathered, back, pieces

    for rank, (gathered, back, pieces) in enumerate(runner(rank_function, world, timeout=20)):
        assert sorted(gathered) == [i for i in range(case.count) if owners[i] == rank]
        for i, matrix in gathered.items():
            torch.testing.assert_close(matrix, whole[i], atol=0, rtol=0)
        for i, full in enumerate(whole):
            expected = _piece(full, case.mesh, _coordinates(case.mesh)[rank])
            torch.testing.assert_close(pieces[i], expected, atol=0, rtol=0)  # left alone
            torch.testing.assert_close(back[i], 2 * expected, atol=0, rtol=0)


PICKS = {
    # shape, mesh, dimension, and which of its indices are picked of every matrix
    "rows": ((7, 2), ((4, 0),), 0, [[0, 3, 6], [2], [0, 1, 2, 3, 4, 5, 6], []]),
    "rows, from one rank alone": ((7, 2), ((4, 0),), 0, [[4, 5], [0, 1]]),
    "columns": ((2, 7), ((4, 1),), 1, [[0, 3, 6], [2], [5, 6]]),
    "rows of matrices cut along columns": ((4, 5), ((4, 1),), 0, [[1], [3], [0]]),
    "columns of matrices cut along rows": ((5, 4), ((4, 0),), 1, [[1, 2], [0, 3]]),
    "rows of blocks": ((7, 5), ((2, 0), (2, 1)), 0, [[0, 4, 6], [1], [5, 6]]),
    "columns of blocks": ((7, 5), ((2, 0), (2, 1)), 1, [[0, 4], [1], [3, 4]]),
    "rows under HSDP": ((7, 5), ((2, None), (2, 0)), 0, [[0, 4, 6], [1], [5, 6]]),
    "rows of replicas": ((4, 3), ((4, None),), 0, [[0, 2], [3]]),
}


@pytest.mark.parametrize(("runner", "name"), _runs(PICKS, {"rows", "rows of blocks", "rows under HSDP"}))
def test_picked_slices_alone_move(runner: Any, name: str) -> None:
    shape, mesh, dim, picked = PICKS[name]
    whole, world = _matrices(len(picked), shape), 4
    owners = assign_owners([1.0] * len(picked), [0.0] * world)
    coordinates = _coordinates(mesh)
    # How many picked slices every block has; a block that several ranks hold has the same for each.
    number = {_block(mesh, c, dim): set(_held(shape[dim], mesh, c, dim)) for c in coordinates}
    counts = [[len(number[b] & set(p)) for b in range(len(number))] for p in picked]

    def part(i: int, rank: int) -> Tensor:
        mine = _held(shape[dim], mesh, coordinates[rank], dim)
        keep = [j for j, index in enumerate(mine) if index in picked[i]]
        return _piece(whole[i], mesh, coordinates[rank]).index_select(dim, torch.tensor(keep, dtype=torch.int64))

    def rank_function(rank: int, world: int) -> tuple[dict[int, Tensor], tuple[Tensor, ...]]:
        exchange = Exchange(grid=_grid(shape, mesh), owners=owners)
        pieces = [part(i, rank) for i in range(len(whole))]
        gathered = _run(exchange.gather(list(pieces), dim, counts))
        return gathered, _run(exchange.scatter({i: -m for i, m in gathered.items()}, pieces, dim, counts))

    for rank, (gathered, back) in enumerate(runner(rank_function, world, timeout=20)):
        assert sorted(gathered) == [i for i in range(len(whole)) if owners[i] == rank]
        for i, matrix in gathered.items():
            expected = whole[i].index_select(dim, torch.tensor(picked[i], dtype=torch.int64))
            torch.testing.assert_close(matrix, expected, atol=0, rtol=0)
        for i, piece in enumerate(back):
            torch.testing.assert_close(piece, -part(i, rank), atol=0, rtol=0)


def test_matrices_of_one_rank_do_not_move() -> None:
    pieces = _matrices(2, (2, 2))
    grid = Grid(group=None, layouts=(Layout(shape=(2, 2)),), dims=Dims.of(2, stacked=False))
    exchange = Exchange(grid=grid, owners=())
    assert not exchange.moves
    owned = _run(exchange.gather(list(pieces)))
    assert all(owned[i] is piece for i, piece in enumerate(pieces))
    assert _run(exchange.scatter(owned, pieces)) == tuple(pieces)


SCORES = {
    "rows": ((5, 3), ((4, 0),), False),
    "rows, some empty": ((2, 3), ((4, 0),), False),
    "columns": ((5, 3), ((4, 1),), False),
    "blocks": ((5, 3), ((2, 0), (2, 1)), False),
    "HSDP": ((5, 3), ((2, None), (2, 0)), False),
    "HSDP of columns": ((5, 3), ((2, 1), (2, None)), False),
    "replicas": ((5, 3), ((4, None),), False),
    "stacks, columns": ((2, 5, 3), ((4, 2),), True),
    "stacks, blocks": ((2, 5, 3), ((2, 1), (2, 2)), True),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("rows", [True, False])
def test_scores_of_all_blocks_add_up_whatever_is_cut(name: str, rows: bool) -> None:
    """Every rank gives the sums over what it holds; replicas must not be counted twice."""
    shape, mesh, stacked = SCORES[name]
    whole = _matrices(3, shape)
    across = -1 if rows else -2
    dim = len(shape) - (2 if rows else 1)

    def rank_function(rank: int, world: int) -> Tensor:
        exchange = Exchange(grid=_grid(shape, mesh, stacked=stacked), owners=(0, 0, 0))
        mine = [_piece(w, mesh, _coordinates(mesh)[rank]).sum(across) for w in whole]
        return _run(exchange.add_up(mine, dim))

    expected = torch.stack([w.sum(across) for w in whole])
    for table in run_threads(rank_function, 4, timeout=20):
        torch.testing.assert_close(table, expected, atol=0, rtol=0)


def test_agreement_names_what_is_missing() -> None:
    def rank_function(rank: int, world: int) -> None:
        mine = [(dist.group.WORLD, "a", (2, 2)), (dist.group.WORLD, "b", (3,))]
        require_agreement(mine)
        with pytest.raises(ValueError, match=r"'b'.*'b' \(3,\), nothing"):
            require_agreement(mine[: 2 - rank])

    run_threads(rank_function, 2)


def test_pipeline_takes_turns_and_keeps_few_in_flight() -> None:
    log: list[str] = []

    def task(name: str, turns: int) -> Iterator[None]:
        for i in range(turns):
            log.append(f"{name}{i}")
            yield
        log.append(f"{name} done")

    def tasks() -> Iterator[Iterator[None]]:
        for name in "abcd":
            log.append(f"start {name}")
            yield task(name, 2)

    pipeline([tasks()], depth=2)
    # a and b overlap; c is not even built before one of them has ended, and nothing is left behind.
    assert log == [
        *("start a", "start b", "a0", "b0", "a1", "b1", "a done", "b done"),
        *("start c", "start d", "c0", "d0", "c1", "d1", "c done", "d done"),
    ]


def test_pipeline_refills_as_soon_as_a_task_ends_and_passes_errors_on() -> None:
    log: list[str] = []

    def task(name: str, turns: int) -> Iterator[None]:
        for _ in range(turns):
            log.append(name)
            yield

    pipeline([(task(n, t) for n, t in [("a", 1), ("b", 4), ("c", 1)])], depth=2)
    assert "".join(log) == "ab" + "b" + "bc" + "b"  # c takes the place of a at the turn after its end

    def broken() -> Iterator[None]:
        yield
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        pipeline([[broken()]])
    pipeline([])


def test_the_turns_of_a_lane_do_not_depend_on_other_lanes() -> None:
    """Ranks of one process group may have other work besides: their collectives must come in one order."""

    def turns(other: list[int]) -> str:
        log: list[str] = []

        def task(name: str, count: int) -> Iterator[None]:
            for _ in range(count):
                log.append(name)
                yield

        mine = [task(name, 2) for name in "abcd"]
        pipeline([mine, [task("-", count) for count in other]], depth=2)
        assert log.count("-") == sum(other)
        return "".join(log).replace("-", "")

    assert {turns(other) for other in ([], [1], [5, 1, 3], [2] * 9)} == {"ababcdcd"}


def test_owners_are_balanced_deterministic_and_go_on_from_earlier_loads() -> None:
    assert assign_owners([1.0] * 5, [0.0] * 3) == (0, 1, 2, 0, 1)
    assert assign_owners([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0]) == (0, 1, 1, 1, 1, 1)
    loads = [2.0, 0.0]
    assert assign_owners([1.0, 1.0], loads) == (1, 1)
    assert loads == [2.0, 2.0]
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(200, generator=generator).tolist()
    loads = [0.0] * 7
    owners = assign_owners(costs, loads)
    assert owners == assign_owners(costs, [0.0] * 7)
    assert loads == pytest.approx([sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(7)])
    # Longest first is within 4/3 of the best possible, and here the best is about the mean.
    assert max(loads) <= 1.02 * sum(costs) / 7
