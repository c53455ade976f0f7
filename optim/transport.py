"""Pieces to whole matrices on their owners, and results back to pieces: the only collectives of this package.

    pieces on every rank --gather--> whole matrices, each on one owner --scatter--> pieces on every rank

Every transfer is one ``all_to_all_single`` with split sizes for N same-shaped matrices together. Nothing is padded:
what a rank does not have, it does not send, so bytes go on falling when ranks outnumber matrices, and an uneven or
empty piece needs no special case. The functions are generators that yield while a transfer is in flight.

An owner puts blocks together in the order of mesh coordinates. For a right-to-left sharding that is a permutation of
the rows; every norm here commutes with it, and ``scatter`` takes the blocks apart in the same order.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from .grid import Grid

Counts = Sequence[Sequence[int]]
"""Counts[i][b]: slices that block b contributes to matrix i."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How N same-shaped parameters move between the ranks that hold their pieces and the ranks that own them.

    Args:
        grid: The blocks, and who holds them.
        owners: For each parameter the rank in the grid's group that works on it.
    """

    grid: Grid
    owners: tuple[int, ...]

    @property
    def moves(self) -> bool:
        """Whether more than one rank is concerned."""
        return self.grid.group is not None and self.grid.group.size() > 1

    def gather(
        self, pieces: list[Tensor], dim: int | None = None, counts: Counts = ()
    ) -> Generator[None, None, dict[int, Tensor]]:
        """Whole matrices by index, on their owners.

        Args:
            pieces: This rank's pieces. The list is emptied, so that no copy of them outlives its way.
            dim: Dimension along which only some slices travel; None: all of them.
            counts: How many, by matrix and block.
        """
        grid, owned = self.grid, self._owned()
        mine = owned.get(grid.rank, []) if self.moves else range(len(pieces))
        # One process, or replicas: the owner has it already.
        if not self.moves or not (grid.cut(grid.dims.rows) or grid.cut(grid.dims.columns)):
            here = {i: pieces[i] for i in mine}
            pieces.clear()
            return here
        near = [r for r, replica in enumerate(grid.replicas) if replica == grid.replicas[grid.rank]]
        sent = [pieces[i] for r in near for i in owned.get(r, [])]
        shapes = {(i, r): self._shape(i, r, dim, counts) for i in mine for r in near}
        leaving, arriving = [0] * len(grid.layouts), [0] * len(grid.layouts)
        for r in near:
            leaving[r] = sum(pieces[i].numel() for i in owned.get(r, []))
            arriving[r] = sum(math.prod(shapes[i, r]) for i in mine)
        flat = _flat(sent, pieces[0])
        sent.clear()
        pieces.clear()
        flat = yield from self._all_to_all(flat, leaving, arriving)
        parts = iter(torch.split_with_sizes(flat, [math.prod(shapes[i, r]) for r in near for i in mine]))
        blocks: dict[int, dict[tuple[int, int], Tensor]] = {i: {} for i in mine}
        for r in near:
            for i in mine:
                blocks[i][grid.blocks[r]] = next(parts).view(shapes[i, r])
        return {i: self._join(blocks[i]) for i in mine}

    def scatter(
        self, owned: dict[int, Tensor], like: Sequence[Tensor], dim: int | None = None, counts: Counts = ()
    ) -> Generator[None, None, tuple[Tensor, ...]]:
        """This rank's piece of every matrix.

        Args:
            owned: Whole matrices by index. Where they move it is emptied, so that none outlives its way.
            like: Tensors of the shapes and dtype to receive.
            dim: As of ``gather``.
            counts: As of ``gather``.
        """
        if not self.moves:
            return tuple(owned[i] for i in range(len(owned)))
        grid, whose = self.grid, self._owned()
        mine = whose.get(grid.rank, [])
        blocks = {i: self._take_apart(owned[i], i, dim, counts) for i in mine}
        sent = [blocks[i][block] for block in grid.blocks for i in mine]
        leaving = [sum(blocks[i][block].numel() for i in mine) for block in grid.blocks]
        arriving = [sum(like[i].numel() for i in whose.get(r, [])) for r in range(len(grid.layouts))]
        flat = _flat(sent, like[0])
        for finished in (sent, blocks, owned):
            finished.clear()
        flat = yield from self._all_to_all(flat, leaving, arriving)
        order = [i for r in sorted(whose) for i in whose[r]]
        parts = torch.split_with_sizes(flat, [like[i].numel() for i in order])
        pieces = {i: part.view(like[i].shape) for i, part in zip(order, parts, strict=True)}
        return tuple(pieces[i] for i in range(len(like)))

    def add_up(self, scores: Sequence[Tensor], dim: int) -> Generator[None, None, Tensor]:
        """Scores of all slices along ``dim`` of every matrix, on every rank: one all-reduce.

        Args:
            scores: This rank's part of the scores of its own slices, ``[..., n local]`` each.
            dim: The dimension that the slices lie along.

        Returns:
            ``[N, ..., n]``.
        """
        grid = self.grid
        total = grid.layouts[0].shape[dim]
        table = scores[0].new_zeros(len(scores), *scores[0].shape[:-1], total)
        if grid.replicas[grid.rank] == 0:  # every block is added once
            table.index_copy_(-1, grid.index(dim, table.device), torch.stack(tuple(scores)))
        if self.moves:
            work = dist.all_reduce(table, group=grid.group, async_op=True)
            yield
            assert work is not None
            work.wait()
        return table

    def _owned(self) -> dict[int, list[int]]:
        """Matrices by the rank that owns them."""
        found: dict[int, list[int]] = {}
        for i, owner in enumerate(self.owners):
            found.setdefault(owner, []).append(i)
        return found

    def _shape(self, i: int, rank: int, dim: int | None, counts: Counts) -> tuple[int, ...]:
        shape = list(self.grid.shapes[rank])
        if dim is not None:
            shape[dim] = counts[i][self._block(rank, dim)]
        return tuple(shape)

    def _block(self, rank: int, dim: int) -> int:
        row, column = self.grid.blocks[rank]
        return row if dim == self.grid.dims.rows else column

    def _join(self, blocks: Mapping[tuple[int, int], Tensor]) -> Tensor:
        dims = self.grid.dims
        rows = sorted({row for row, _ in blocks})
        columns = sorted({column for _, column in blocks})
        if dims.columns is None or len(columns) == 1:
            bands = [blocks[row, columns[0]] for row in rows]
        else:
            bands = [torch.cat([blocks[row, c] for c in columns], dim=dims.columns) for row in rows]
        return bands[0] if len(bands) == 1 else torch.cat(bands, dim=dims.rows)

    def _take_apart(self, whole: Tensor, i: int, dim: int | None, counts: Counts) -> dict[tuple[int, int], Tensor]:
        grid, dims = self.grid, self.grid.dims

        def split(x: Tensor, d: int | None) -> tuple[Tensor, ...]:
            if d is None or x.ndim == 0:
                return (x,)
            return torch.split_with_sizes(x, list(counts[i]) if d == dim else list(grid.sizes(d)), dim=d)

        return {
            (row, column): block
            for row, band in enumerate(split(whole, dims.rows))
            for column, block in enumerate(split(band, dims.columns))
        }

    def _all_to_all(self, flat: Tensor, leaving: list[int], arriving: list[int]) -> Generator[None, None, Tensor]:
        received = flat.new_empty(sum(arriving))
        work = dist.all_to_all_single(received, flat, arriving, leaving, group=self.grid.group, async_op=True)
        yield
        assert work is not None
        work.wait()
        return received


def hollow(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes and dtype that take no memory."""
    return [piece.new_empty(()).expand(piece.shape) for piece in pieces]


def _flat(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in pieces]) if pieces else like.new_empty(0)


def pipeline(lanes: Iterable[Iterable[Iterator[None]]], *, depth: int = 3) -> None:
    """Advance up to ``depth`` tasks of every lane in turn, so that one's transfers overlap another's computation.

    A lane has the tasks of one process group. Every rank of the group must be given the same ones in the same order:
    their turns, and so the collectives, then agree, whatever else some of the ranks have to do in other lanes.
    """
    running = [_lane(iter(tasks), depth) for tasks in lanes]
    while running:
        running = [lane for lane in running if next(lane, _DONE) is not _DONE]


def _lane(source: Iterator[Iterator[None]], depth: int) -> Iterator[None]:
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
        yield


def require_agreement(shared: Sequence[tuple[dist.ProcessGroup, str, tuple[int, ...]]]) -> None:
    """Refuse parameters that the ranks sharing them see differently: one small collective a group, at construction.

    Without it a DTensor whose global shape was guessed from an uneven piece, or another order of parameters on one
    rank, would mix matrices or hang in the first step.

    Args:
        shared: Process group, name and global shape of every parameter that ranks share, in order.

    Raises:
        ValueError: By the name of the first parameter that differs, on every rank.
    """
    for group in in_turn(group for group, _, _ in shared):
        mine = [(name, shape) for g, name, shape in shared if g is group]
        everybody: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everybody, mine, group=group)
        for seen in zip_longest(*everybody):
            if len(set(seen)) > 1:
                name = next(s[0] for s in seen if s is not None)
                raise ValueError(
                    f"parameter {name!r}: the ranks that share it hold {', '.join(map(_shown, seen))} in its place; "
                    "give every rank the same parameters in the same order, and shape= and stride= to "
                    "DTensor.from_local where pieces are uneven"
                )


def held_elsewhere(shared: Sequence[tuple[dist.ProcessGroup, Tensor]]) -> set[Tensor]:
    """Parameters without a gradient here that have one on another rank of their group: one small all-reduce a group."""
    found: set[Tensor] = set()
    for group in in_turn(group for group, _ in shared):
        params = [param for g, param in shared if g is group]
        present = torch.tensor([p.grad is not None for p in params], dtype=torch.int32, device=params[0].device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
        found.update(p for p, any_rank in zip(params, present.tolist(), strict=True) if any_rank and p.grad is None)
    return found


def in_turn(groups: Iterable[dist.ProcessGroup | None]) -> list[dist.ProcessGroup | None]:
    """Every group once, in an order that all ranks share: of ranks that wait for one another none is the last.

    None, this rank alone, comes first.
    """
    return sorted(dict.fromkeys(groups), key=lambda g: [] if g is None else dist.get_process_group_ranks(g))


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
