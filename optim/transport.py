"""Pieces to whole matrices on their owners, and results back to pieces: the only collectives of this package.

    pieces on every rank --gather--> whole matrices, each on one owner --scatter--> pieces on every rank

Every transfer is one ``all_to_all_single`` with split sizes for N same-shaped matrices together. Nothing is padded:
what a rank does not have, it does not send, so bytes go on falling when ranks outnumber matrices, and an uneven or
empty piece needs no special case. The functions are generators that yield while a transfer is in flight.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Counts = Sequence[Sequence[int]]
"""Counts[i][r]: rows that rank r contributes to matrix i."""


class Exchange(Protocol):
    """How N same-shaped matrices move between the ranks that hold their pieces and the ranks that own them."""

    def gather(self, pieces: Sequence[Tensor], counts: Counts) -> Generator[None, None, dict[int, Tensor]]:
        """Whole matrices by index, on their owners: the rows of all pieces in rank order."""

    def scatter(
        self, owned: Mapping[int, Tensor], counts: Counts, like: Tensor
    ) -> Generator[None, None, tuple[Tensor, ...]]:
        """This rank's piece of every matrix. ``like`` has the dtype, device and trailing shape of a piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Every rank holds whole matrices and works for itself: nothing moves."""

    def gather(self, pieces: Sequence[Tensor], counts: Counts) -> Generator[None, None, dict[int, Tensor]]:
        """The pieces are the matrices."""
        yield from ()
        return dict(enumerate(pieces))

    def scatter(
        self, owned: Mapping[int, Tensor], counts: Counts, like: Tensor
    ) -> Generator[None, None, tuple[Tensor, ...]]:
        """The matrices are the pieces."""
        yield from ()
        return tuple(owned[i] for i in range(len(owned)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated:
    """Every rank holds whole matrices and each works for all: results are exchanged.

    Args:
        group: The replicas.
        owners: For each matrix the rank in ``group`` that works on it.
    """

    group: dist.ProcessGroup
    owners: tuple[int, ...]

    def gather(self, pieces: Sequence[Tensor], counts: Counts) -> Generator[None, None, dict[int, Tensor]]:
        """The owner has the matrix already."""
        yield from ()
        rank = self.group.rank()
        return {i: piece for i, piece in enumerate(pieces) if self.owners[i] == rank}

    def scatter(
        self, owned: Mapping[int, Tensor], counts: Counts, like: Tensor
    ) -> Generator[None, None, tuple[Tensor, ...]]:
        """Every owner sends its results to all."""
        rank, world = self.group.rank(), self.group.size()
        size = like.numel()
        mine = torch.cat([owned[i].reshape(-1) for i in _owned(self.owners, rank)] or [like.new_empty(0)])
        arriving = [len(_owned(self.owners, r)) * size for r in range(world)]
        flat = yield from _all_to_all(mine.repeat(world), [mine.numel()] * world, arriving, self.group)
        results: dict[int, Tensor] = {}
        for r, block in enumerate(torch.split_with_sizes(flat, arriving)):
            indices = _owned(self.owners, r)
            for i, part in zip(indices, torch.split_with_sizes(block, [size] * len(indices)), strict=True):
                results[i] = part.view(like.shape)
        return tuple(results[i] for i in range(len(self.owners)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSharded:
    """Matrices cut along dimension 0 over the ranks of ``group``.

    Args:
        group: The shards, in the order of their rows.
        owners: For each matrix the rank in ``group`` that assembles it.
    """

    group: dist.ProcessGroup
    owners: tuple[int, ...]

    def gather(self, pieces: Sequence[Tensor], counts: Counts) -> Generator[None, None, dict[int, Tensor]]:
        """Send the rows of every piece to the owner of its matrix."""
        rank, world = self.group.rank(), self.group.size()
        trailing = pieces[0].shape[1:]
        width = math.prod(trailing)
        leaving = [sum(counts[i][rank] for i in _owned(self.owners, r)) * width for r in range(world)]
        mine = _owned(self.owners, rank)
        arriving = [sum(counts[i][s] for i in mine) * width for s in range(world)]
        sent = torch.cat([pieces[i].reshape(-1) for r in range(world) for i in _owned(self.owners, r)])
        flat = yield from _all_to_all(sent, leaving, arriving, self.group)
        blocks = [
            torch.split_with_sizes(block, [counts[i][s] * width for i in mine])
            for s, block in enumerate(torch.split_with_sizes(flat, arriving))
        ]
        return {i: torch.cat([blocks[s][j] for s in range(world)]).view(-1, *trailing) for j, i in enumerate(mine)}

    def scatter(
        self, owned: Mapping[int, Tensor], counts: Counts, like: Tensor
    ) -> Generator[None, None, tuple[Tensor, ...]]:
        """Send to every rank the rows that it contributed."""
        rank, world = self.group.rank(), self.group.size()
        trailing = like.shape[1:]
        width = math.prod(trailing)
        mine = _owned(self.owners, rank)
        rows = {i: torch.split_with_sizes(owned[i], list(counts[i])) for i in mine}
        parts = [rows[i][r].reshape(-1) for r in range(world) for i in mine]
        leaving = [sum(counts[i][r] for i in mine) * width for r in range(world)]
        arriving = [sum(counts[i][rank] for i in _owned(self.owners, r)) * width for r in range(world)]
        flat = yield from _all_to_all(torch.cat(parts) if parts else like.new_empty(0), leaving, arriving, self.group)
        results: dict[int, Tensor] = {}
        for r, block in enumerate(torch.split_with_sizes(flat, arriving)):
            indices = _owned(self.owners, r)
            for i, part in zip(
                indices, torch.split_with_sizes(block, [counts[i][rank] * width for i in indices]), strict=True
            ):
                results[i] = part.view(-1, *trailing) if part.numel() else part.new_empty(counts[i][rank], *trailing)
        return tuple(results[i] for i in range(len(self.owners)))

    def assemble_vectors(self, vectors: Sequence[Tensor], offset: int, length: int) -> Generator[None, None, Tensor]:
        """Concatenate one vector a matrix over the ranks: [N, length] on all of them, in one all-reduce."""
        whole = vectors[0].new_zeros(len(vectors), length)
        for row, vector in zip(whole, vectors, strict=True):
            row[offset : offset + vector.numel()] = vector
        work = dist.all_reduce(whole, group=self.group, async_op=True)
        yield
        assert work is not None
        work.wait()
        return whole


def pipeline(tasks: Iterable[Iterator[None]], *, depth: int = 3) -> None:
    """Advance up to ``depth`` tasks in turn, so that one's transfers overlap another's computation.

    Every rank must be given the same tasks in the same order: the turns, and so the collectives, then agree.
    """
    source = iter(tasks)
    running: list[Iterator[None]] = []
    exhausted = False
    while running or not exhausted:
        while len(running) < depth and not exhausted:
            task = next(source, None)
            if task is None:
                exhausted = True
            else:
                running.append(task)
        running = [task for task in running if next(task, _DONE) is not _DONE]


def require_agreement(shared: Sequence[tuple[dist.ProcessGroup, str, tuple[int, ...]]]) -> None:
    """Refuse parameters that the ranks sharing them see differently: one small collective a group, at construction.

    Without it a DTensor whose global shape was guessed from an uneven piece, or another order of parameters on one
    rank, would mix matrices or hang in the first step.

    Args:
        shared: Process group, name and global shape of every parameter that ranks share, in order.

    Raises:
        ValueError: By the name of the first parameter that differs, on every rank.
    """
    for group in dict.fromkeys(group for group, _, _ in shared):
        mine = [(name, shape) for g, name, shape in shared if g is group]
        everybody: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(group.size())]
        dist.all_gather_object(everybody, mine, group=group)
        for seen in zip_longest(*everybody):
            if len(set(seen)) > 1:
                name = next(s[0] for s in seen if s is not None)
                raise ValueError(
                    f"parameter {name!r}: the ranks that share it hold {', '.join(map(_shown, seen))} in its place; "
                    "give every rank the same parameters in the same order, and shape= and stride= to "
                    "DTensor.from_local where pieces are uneven"
                )


def assign_owners(costs: Sequence[float], loads: list[float]) -> tuple[int, ...]:
    """Give each matrix to the rank with the least work so far, the dearest first; ``loads`` is updated in place.

    Deterministic: ties go to the lower rank, and equal costs keep their order.
    """
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda j: -costs[j]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return tuple(owners)


_DONE = object()


def _shown(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if entry is None else f"{entry[0]!r} {entry[1]}"


def _owned(owners: Sequence[int], rank: int) -> list[int]:
    return [i for i, owner in enumerate(owners) if owner == rank]


def _all_to_all(
    sent: Tensor, leaving: list[int], arriving: list[int], group: dist.ProcessGroup
) -> Generator[None, None, Tensor]:
    received = sent.new_empty(sum(arriving))
    work = dist.all_to_all_single(received, sent, arriving, leaving, group=group, async_op=True)
    yield
    assert work is not None
    work.wait()
    return received
