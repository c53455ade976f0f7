"""Pieces to whole matrices and back, against brute force; and how many bytes travel for it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.optim.transport import Replicated, RowSharded, Whole, assign_owners, pipeline, require_agreement
from scion_telemetry.testing import run_forked, run_threads


def _run(generator: Any) -> Any:
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def _chunks(rows: int, world: int) -> list[int]:
    size = -(-rows // world)
    return [max(0, min(size, rows - size * r)) for r in range(world)]


def _matrices(count: int, shape: Sequence[int]) -> list[Tensor]:
    size = math.prod(shape)
    return [torch.arange(size, dtype=torch.float32).view(tuple(shape)) + 1000 * i for i in range(count)]


CASES = [
    # shape, number of matrices, owners, rows of matrix i on rank r (None: torch's chunks)
    ((8, 3), 4, None),  # even, as many matrices as ranks
    ((5, 3), 5, None),  # 2, 2, 1, 0 rows; more matrices than ranks, no multiple
    ((5, 3), 1, None),  # fewer matrices than ranks
    ((3, 4), 7, None),
    ((1, 4), 3, None),  # one row: three ranks have nothing
    ((6,), 3, None),  # vectors
    ((5, 2, 3, 3), 3, None),  # convolutions
    ((7, 2), 3, [[0, 7, 0, 0], [1, 2, 3, 1], [0, 0, 0, 7]]),  # other rows for every matrix, as a global selection gives
]


@pytest.mark.parametrize("runner", [run_threads, run_forked])
@pytest.mark.parametrize(("shape", "count", "rows"), CASES)
def test_row_sharded(runner: Any, shape: tuple[int, ...], count: int, rows: list[list[int]] | None) -> None:
    world = 4
    whole = _matrices(count, shape)
    counts = rows or [_chunks(shape[0], world)] * count
    owners = assign_owners([1.0] * count, [0.0] * world)

    def rank_function(rank: int, world: int) -> tuple[dict[int, Tensor], tuple[Tensor, ...]]:
        exchange = RowSharded(group=dist.group.WORLD, owners=owners)
        pieces = [torch.split(w, c)[rank].clone() for w, c in zip(whole, counts, strict=True)]
        kept = [p.clone() for p in pieces]
        gathered = _run(exchange.gather(pieces, counts))
        back = _run(exchange.scatter({i: 2 * m for i, m in gathered.items()}, counts, pieces[0]))
        for piece, before in zip(pieces, kept, strict=True):
            torch.testing.assert_close(piece, before, atol=0, rtol=0)
        return gathered, back

    results = runner(rank_function, world)
    for rank, (gathered, back) in enumerate(results):
        assert sorted(gathered) == [i for i in range(count) if owners[i] == rank]
        for i, matrix in gathered.items():
            torch.testing.assert_close(matrix, whole[i], atol=0, rtol=0)
        for i, piece in enumerate(back):
            torch.testing.assert_close(piece, 2 * torch.split(whole[i], counts[i])[rank], atol=0, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", [(4, 3), (6,), (), (3, 2, 2, 2), (0, 3)])
def test_replicated(count: int, shape: tuple[int, ...]) -> None:
    owners = assign_owners([1.0] * count, [0.0] * 2)
    whole = _matrices(count, shape)

    def rank_function(rank: int, world: int) -> tuple[Tensor, ...]:
        exchange = Replicated(group=dist.group.WORLD, owners=owners)
        owned = _run(exchange.gather(whole, [[1]] * count))
        assert sorted(owned) == [i for i in range(count) if owners[i] == rank]
        return _run(exchange.scatter({i: m + 0.5 for i, m in owned.items()}, [[1]] * count, whole[0]))

    for back in run_threads(rank_function, 2):
        for piece, matrix in zip(back, whole, strict=True):
            torch.testing.assert_close(piece, matrix + 0.5, atol=0, rtol=0)


def test_whole_matrices_do_not_move() -> None:
    pieces = _matrices(2, (2, 2))
    owned = _run(Whole().gather(pieces, []))
    assert all(owned[i] is piece for i, piece in enumerate(pieces))
    assert _run(Whole().scatter(owned, [], pieces[0])) == tuple(pieces)


@pytest.mark.parametrize("lengths", [[3, 2], [5, 0]])
def test_vectors_of_all_ranks_in_a_row(lengths: list[int]) -> None:
    def rank_function(rank: int, world: int) -> Tensor:
        exchange = RowSharded(group=dist.group.WORLD, owners=(0, 0))
        start = sum(lengths[:rank])
        vectors = [torch.arange(start, start + lengths[rank]).float() + 10 * i for i in range(2)]
        return _run(exchange.assemble_vectors(vectors, start, sum(lengths)))

    expected = torch.stack([torch.arange(5.0), torch.arange(5.0) + 10])
    for table in run_threads(rank_function, 2):
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

    pipeline(tasks(), depth=2)
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

    pipeline((task(n, t) for n, t in [("a", 1), ("b", 4), ("c", 1)]), depth=2)
    assert "".join(log) == "ab" + "b" + "bc" + "b"  # c takes the place of a at the turn after its end

    def broken() -> Iterator[None]:
        yield
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        pipeline([broken()])
    pipeline([])


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
