"""Singular values of a flush: at once of what this rank has whole, over all ranks together of what lies in pieces."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.metrics import spectral
from scion_telemetry.metrics.krylov import Problem
from scion_telemetry.places import Mine
from scion_telemetry.plan import Planned
from scion_telemetry.reduce import Buffers

Key: TypeAlias = tuple[str, int, int]
"""(quantity, or ``coherence`` of a weight; number of the parameter; number of the stacked matrix)."""

PARTIALS = ("sigma", "sigma_upper", "sigma_second")
COHERENCE = "coherence"
LASTING = ("weight", COHERENCE)
"""What changes little between flushes, and is found again from where it was. Singular vectors of the others turn at
every step, and a stale start is worse than none: 5 to 12 % low on noise."""
WIDTHS = {"update": spectral.WIDE_BLOCK}
"""Vectors of a random block, where more are needed. Gradients and momenta of real runs are within 0.01 % without,
because few directions dominate; pure noise, the worst case, is 3 % low at 1024². All singular values of an update are
nearly the same."""

_HABIT = 2
"""Runs in succession before which weights were changed by something else, after which that is no news."""


class Memory:
    """Vectors that a later run starts from: what weights were found to be is nearly right at the next flush.

    Args:
        device: Of the matrices.

    Attributes:
        restless: How many runs on weights in succession, up to the latest, found them changed by something else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seeds = torch.Generator().manual_seed(0)
        self.starts: dict[Key, Tensor] = {}
        self.solved: dict[Key, int] = {}
        self._blocks: dict[tuple[int, int], Tensor] = {}
        self.restless = self._before = 0
        self._followed = -1

    def begin(self, step: int) -> None:
        """A run at a step. What is random follows from the step, so that a resumed run goes on as it would have."""
        self.seeds.manual_seed(step)
        self._blocks.clear()

    def start(self, key: Key, size: int) -> Tensor:
        """The first block of a run."""
        known = self.starts.get(key)
        if known is not None and known.size(0) == size:
            return known
        self.solved.pop(key, None)
        shape = (size, min(WIDTHS.get(key[0], spectral.BLOCK), size))
        if shape not in self._blocks:  # one serves all matrices of a size
            self._blocks[shape] = spectral.random_start(*shape, self.seeds, self._device)
        return self._blocks[shape]

    def number_of_steps(self, key: Key, step: int) -> int:
        """Of a run at a step."""
        if key[0] not in LASTING:
            return spectral.WARM_STEPS
        if self.restless and key in self.solved:
            return spectral.WARM_STEPS
        return spectral.steps_for(warm=key in self.solved, since=step - self.solved.get(key, step))

    def note(self, keys: Sequence[Key], starts: Sequence[Tensor], step: int) -> None:
        """Keep what a run at a step ended with."""
        for key, start in zip(keys, starts, strict=True):
            if key[0] in LASTING:
                self.starts[key] = start
                self.solved[key] = step

    def follow(self, step: int, *, moved: bool) -> None:
        """A run on weights: start cold where something other than steps has changed them since the run before.

        Not so where that is the habit, of weights that are normalised after every step, say: from the third run on
        they start from what is known, with as many steps as after a long time.
        """
        if step != self._followed:
            self._followed, self._before, self.restless = step, self.restless, 0
        if moved:
            if self._before < _HABIT:
                self.starts.clear()
                self.solved.clear()
            self.restless = self._before + 1

    def restore(self, starts: Mapping[Key, Tensor], solved: Mapping[Key, int], *, restless: int = 0) -> None:
        """Go on from the vectors that another tracker had."""
        self.restless = restless
        self.starts.update({key: start.to(self._device) for key, start in starts.items()})
        self.solved.update(solved)


class Whole:
    """Matrices that this rank has whole, until they are solved together.

    Args:
        memory: Of weights; None: start cold.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory
        self._cold: dict[str, list[tuple[Key, Tensor, float]]] = {}
        self._warm: list[tuple[Key, Problem]] = []

    def add(self, quantity: str, number: int, x: Tensor, held: Sequence[int], scale: float = 1.0) -> None:
        """Add the matrices of a piece ``[B, R, C]``; ``held`` says which ones of the stack they are."""
        for b, matrix in zip(held, x, strict=True):
            key = (quantity, number, b)
            if quantity == "weight" and self._memory is not None and min(matrix.shape) > spectral.EXACT_SIZE:
                squares = spectral.sum_of_squares(matrix)
                self._warm.append((key, _problem(matrix, self._memory, key, squares, None)))
            else:
                self._cold.setdefault(quantity, []).append((key, matrix, scale))

    def add_coherence(self, number: int, x: Tensor, held: Sequence[int], row_squares: Tensor) -> None:
        """Add matrices whose rows are to have length 1."""
        for b, matrix, squares in zip(held, x, row_squares.view(x.shape[:2]), strict=True):
            key, scale = (COHERENCE, number, b), unit_rows(squares)
            if self._memory is None or min(matrix.shape) <= spectral.EXACT_SIZE:
                wide = matrix if matrix.dtype.itemsize >= 4 else matrix.float()
                unit = wide * scale.to(wide.dtype).unsqueeze(1)
                self._cold.setdefault(COHERENCE, []).append((key, unit, 1.0))
            else:
                self._warm.append((key, _problem(matrix, self._memory, key, count_of(squares), scale)))

    def solve(self, buffers: Buffers, step: int) -> None:
        """Find their singular values and put them into the buffers."""
        for quantity, entries in self._cold.items():
            keys = [key for key, _, _ in entries]
            steps = spectral.UPDATE_STEPS if quantity == "update" else spectral.WHOLE_STEPS
            seeds = [number for _, number, _ in keys]
            found = spectral.solve_whole([matrix for _, matrix, _ in entries], seeds=seeds, steps=steps)
            scale = torch.tensor([s for _, _, s in entries], dtype=torch.float64, device=found[0].device)
            _put(keys, [values * scale for values in found], buffers)
        if self._warm and (memory := self._memory) is not None:
            keys = [key for key, _ in self._warm]
            solved = spectral.solve(
                [problem for _, problem in self._warm],
                steps=[memory.number_of_steps(key, step) for key in keys],
                total=lambda t: t,
                generator=memory.seeds,
            )
            _put(keys, (solved.lower, solved.upper, solved.second), buffers)
            memory.note(keys, solved.starts, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """What this rank has of the matrices that lie in pieces, at one flush.

    Args:
        pieces: ``[B, R, C]`` by quantity and number.
        mine: By number.
    """

    pieces: Mapping[tuple[str, int], Tensor]
    mine: Mapping[int, Mine]


class Cut:
    """Singular values of matrices that no rank has whole; every rank takes part, whatever it holds.

    Args:
        plan: What is measured, the same on all ranks.
        group: Ranks to work with.
        device: Of the parameters.
    """

    def __init__(self, plan: Sequence[Planned], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._plan = plan
        self._group = group
        self._device = device
        self.memory = Memory(device)

    def solve(self, here: Pieces, buffers: Buffers, step: int) -> tuple[int, int]:
        """Find them and write them into the merged buffers; returns the numbers of collectives and of their bytes."""
        keys = list(self._keys(buffers))
        if not keys:
            return 0, 0
        count = size = 0
        self.memory.begin(step)

        def total(t: Tensor) -> Tensor:
            nonlocal count, size
            count, size = count + 1, size + t.numel() * t.element_size()
            assert self._group is not None
            dist.all_reduce(t, group=self._group)
            return t

        found = spectral.solve(
            [self._problem(key, here, buffers) for key in keys],
            steps=[self.memory.number_of_steps(key, step) for key in keys],
            total=total,
            generator=self.memory.seeds,
        )
        _put(keys, (found.lower, found.upper, found.second), buffers)
        self.memory.note(keys, found.starts, step)
        return count, size

    def _keys(self, buffers: Buffers) -> Iterator[Key]:
        for quantity in ("weight", "grad", "momentum", "update"):
            kinds = [
                name
                for name, kind in ((quantity, (quantity, "sigma")), (COHERENCE, (quantity, "coherence")))
                if kind in buffers
            ]
            for name in kinds:
                for number, planned in enumerate(self._plan):
                    if in_pieces(planned, quantity) and not planned.shape.vector:
                        yield from ((name, number, b) for b in range(planned.shape.batch))

    def _problem(self, key: Key, here: Pieces, buffers: Buffers) -> Problem:
        name, number, b = key
        quantity = "weight" if name == COHERENCE else name
        shape = self._plan[number].shape
        rows_cut, columns_cut = _cut_sides(self._plan[number])
        flip = columns_cut and not rows_cut  # iterate on the side that every piece holds whole
        size = shape.rows if flip else shape.columns
        squares = buffers.view((quantity, "row_squares"), number).view(shape.batch, -1)[b]
        piece, mine = here.pieces.get((quantity, number)), here.mine.get(number)
        rows = columns = None
        if piece is None or mine is None or b not in mine.held:
            piece = torch.empty(0, size, dtype=torch.float32, device=self._device)
            rows = torch.empty(0, dtype=torch.int64, device=self._device)
            lengths = squares[:0] if not flip else squares
        else:
            piece, rows, columns = piece[mine.held[b]], mine.place.rows, mine.place.columns
            lengths = squares if rows is None else squares[rows]
            if flip:
                piece, rows, columns = piece.mT, columns, rows
        scale = None
        total = squares.sum()
        if name == COHERENCE:
            scale = unit_rows(lengths)
            total = count_of(squares)
        return Problem(
            piece=piece,
            place=columns,
            rows=(rows, shape.rows) if rows_cut and columns_cut else None,
            start=self.memory.start(key, size),
            squares=total,
            row_scale=None if flip else scale,
            column_scale=scale if flip else None,
        )


def in_pieces(planned: Planned, quantity: str) -> bool:
    """No rank has a whole matrix of the quantity."""
    return planned.matrices_cut and not (quantity == "update" and planned.spec.owner_shows)


def unit_rows(squares: Tensor) -> Tensor:
    """Factors that make rows of these squared lengths rows of length 1; 0 for zero rows and those without a length."""
    return torch.where((squares > 0) & squares.isfinite(), squares.rsqrt(), 0.0).float()


def count_of(squares: Tensor) -> Tensor:
    """‖·‖_F² of the matrix with rows of length 1: how many rows are not zero."""
    return torch.where(squares.isfinite(), (squares > 0).double(), squares).sum()


def _problem(matrix: Tensor, memory: Memory, key: Key, squares: Tensor, scale: Tensor | None) -> Problem:
    """A matrix that is whole here, iterated on its shorter side."""
    flip = matrix.size(1) > matrix.size(0)
    return Problem(
        piece=matrix.mT if flip else matrix,
        place=None,
        rows=None,
        start=memory.start(key, min(matrix.shape)),
        squares=squares,
        row_scale=None if flip else scale,
        column_scale=scale if flip else None,
    )


def _cut_sides(planned: Planned) -> tuple[bool, bool]:
    first = 1 if planned.shape.stacked else 0
    return first in planned.cut, any(d > first for d in planned.cut)


def _put(keys: Sequence[Key], found: Sequence[Tensor], buffers: Buffers) -> None:
    """Lower bounds, upper bounds and second values to their places; of a coherence the lower bound alone."""
    spans = buffers.schema
    plain = [i for i, (name, _, _) in enumerate(keys) if name != COHERENCE]
    device = found[0].device
    for quantity in dict.fromkeys(keys[i][0] for i in plain):
        which = [i for i in plain if keys[i][0] == quantity]
        own = torch.tensor(which, device=device)
        for partial, values in (*zip(PARTIALS, found, strict=True), ("sigma_ranks", torch.ones_like(found[0]))):
            kind = (quantity, partial)
            if kind in buffers:
                places = [spans.span(kind, keys[i][1])[0] + keys[i][2] for i in which]
                buffers.put(kind, torch.tensor(places, device=device), values[own])
    if others := [i for i, (name, _, _) in enumerate(keys) if name == COHERENCE]:
        kind = ("weight", "coherence")
        places = [spans.span(kind, keys[i][1])[0] + keys[i][2] for i in others]
        buffers.put(kind, torch.tensor(places, device=device), found[0][torch.tensor(others, device=device)])
