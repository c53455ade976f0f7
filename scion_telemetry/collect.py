"""One flush on one rank: partial results of every quantity into the buffers, and σ₁ of what lies in pieces.

before the step   snapshots of weights whose update the optimizer does not show
while it steps    updates and selections, from events
after it          weights, gradients, momenta; one SUM, one MAX; Lanczos on pieces
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.describe import find_momentum, piece_like
from scion_telemetry.metrics import norms, selection, spectral
from scion_telemetry.metrics.catalogue import PARTIALS, SELECTION_PARTIALS, Choice, selection_shape
from scion_telemetry.metrics.pieces import MatrixShape, Place, as_matrices
from scion_telemetry.metrics.spectral import Krylov
from scion_telemetry.optim.events import StepEvent
from scion_telemetry.optim.layout import Layout, local, split_rows
from scion_telemetry.plan import Planned
from scion_telemetry.reduce import Buffers, Schema

SigmaKey = tuple[int, str, int]
"""(number of the parameter, quantity, number of the stacked matrix)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mine:
    """A parameter of which this rank measures a piece.

    Args:
        number: Its number in the plan.
        param: The parameter.
        planned: What all ranks agreed.
        place: Where the piece lies.
        held: Matrices of a stack that the piece holds, with their positions in it.
        slices: Positions of the piece's scores among all that are selected from; None for all of them, in order.
        tells: The piece tells of its selection. Of pieces of the same slices the first one does.
    """

    number: int
    param: Tensor
    planned: Planned
    place: Place
    held: Mapping[int, int]
    slices: Tensor | None
    tells: bool

    @classmethod
    def of(cls, number: int, param: Tensor, planned: Planned) -> "Mine":
        """Read the place from the parameter."""
        layout = Layout.of(param)
        runs = layout.runs(0) if planned.shape.stacked else ((0, 1),)
        place = Place.of(layout, planned.shape, device=param.device)
        slices, tells, dim = None, False, planned.spec.select_dim
        if dim is not None:
            heads = planned.spec.heads
            seen = split_rows(layout, heads) if heads > 1 else layout
            among = Place.of(seen, MatrixShape.of(seen.shape, "hidden"), device=param.device) if heads > 1 else place
            slices = among.vector_index(dim)
            other = seen.runs(len(seen.shape) - 3 - dim)
            tells = bool(other) and other[0][0] == 0
        return cls(
            number=number,
            param=param,
            planned=planned,
            place=place,
            held={b: i for i, b in enumerate(b for start, stop in runs for b in range(start, stop))},
            slices=slices,
            tells=tells,
        )


def make_schema(plan: Sequence[Planned], choice: Choice) -> Schema:
    """The buffers' layout: by parameter, quantity and partial result, selections last."""

    def entries() -> Iterator[tuple[int, str, Any, Any]]:
        for number, planned in enumerate(plan):
            for quantity, partials in choice.partials.items():
                for name in partials:
                    if not (name.startswith("sigma") and planned.shape.vector):
                        yield number, quantity, PARTIALS[name], planned.shape
            if planned.spec.select_dim is not None:
                shape = selection_shape(planned.shape, planned.spec.select_dim, planned.spec.heads)
                for partial in SELECTION_PARTIALS.values():
                    yield number, "selection", partial, shape

    return Schema.of(entries())


def _in_pieces(planned: Planned, quantity: str) -> bool:
    """No rank has a whole matrix of the quantity."""
    return planned.matrices_cut and not (quantity == "update" and planned.spec.owner_shows)


class Collector:
    """Measures on this rank; the schedule is the tracker's business.

    Args:
        plan: What is measured, the same on all ranks.
        choice: The columns.
        params: This rank's parameters by name.
        rank: This rank in the plan.
        group: Ranks to reduce over; None for one process.
        step: Steps taken so far.
    """

    def __init__(
        self,
        plan: Sequence[Planned],
        choice: Choice,
        params: Mapping[str, Tensor],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        step: int,
    ) -> None:
        self.schema = make_schema(plan, choice)
        self._plan = plan
        self._choice = choice
        self._group = group
        self._start = step
        self._numbers = {params[p.spec.info.name]: n for n, p in enumerate(plan) if p.spec.info.name in params}
        self._mine = {
            param: Mine.of(n, param, plan[n]) for param, n in self._numbers.items() if rank in plan[n].measurers
        }
        self._by_number = {mine.number: mine for mine in self._mine.values()}
        self.device = next(iter(params.values())).device if params else torch.device("cpu")
        self._histories: dict[Tensor, selection.History] = {}
        self._starts: dict[SigmaKey, Tensor] = {}
        self._snapshots: dict[Tensor, Tensor] = {}
        self._pieces: dict[tuple[int, str], Tensor] = {}
        self._seeds = torch.Generator().manual_seed(0)

    # ------------------------------------------------------------------ before and during the step

    def snapshot(self) -> None:
        """Keep the weights whose update the optimizer will not show: one copy of those pieces, until the flush."""
        if "update" in self._choice.partials:
            hidden = [m.param for m in self._mine.values() if not m.planned.spec.shows_update]
            self._snapshots = {param: local(param.detach()).clone() for param in hidden}

    def observe(self, event: StepEvent, step: int, buffers: Buffers | None) -> None:
        """Take a step event: the selection's history always, everything else when ``buffers`` is given."""
        for i, param in enumerate(event.params):
            mine = self._mine.get(param)
            if event.selections and mine is not None and mine.tells:
                self._select(mine, event, i, step, buffers)
            if buffers is not None and param in self._numbers:
                if mine is not None:
                    self._update(mine, event, i, buffers)
                if i in event.owned:
                    self._owned(self._numbers[param], event.owned[i], abs(event.scale), buffers)

    def _select(self, mine: Mine, event: StepEvent, i: int, step: int, buffers: Buffers | None) -> None:
        chosen = event.selections[i]
        scores, indices = (t.unsqueeze(0) if t.ndim == 1 else t for t in (chosen.scores, chosen.indices))
        history = self._histories.get(mine.param)
        if history is None:
            history = self._histories[mine.param] = selection.History.start(scores, self._start)
        if buffers is not None:
            ones = torch.ones((), dtype=torch.float64, device=scores.device)
            buffers.add((mine.number, "selection", "selected"), ones * indices.numel())
            buffers.add((mine.number, "selection", "selected_before"), ones * history.selected)
            buffers.add((mine.number, "selection", "selected_both"), history.repeated(indices))
        history.update(indices, step)
        if buffers is not None:
            signed = selection.signed_scores(scores, indices)
            buffers.add((mine.number, "selection", "scores"), signed, mine.slices)
            ages = history.ages()
            buffers.add((mine.number, "selection", "ages"), selection.age_histogram(ages))
            if ages.numel():
                buffers.add((mine.number, "selection", "oldest"), ages.max())

    def _update(self, mine: Mine, event: StepEvent, i: int, buffers: Buffers) -> None:
        direction, place = event.directions[i], mine.place
        if event.selections:
            chosen = event.selections[i]
            if chosen.indices.ndim == 1:
                place = place.select(chosen.dim, chosen.indices)
            else:  # every stacked matrix selects its own rows: spread them over the whole piece
                shape = list(direction.shape)
                shape[chosen.dim] = chosen.scores.size(-1)
                index = chosen.indices.unsqueeze(-1 if chosen.dim == -2 else -2).expand(direction.shape)
                direction = direction.new_zeros(shape).scatter_(chosen.dim, index, direction)
                direction = direction.view(local(mine.param).shape)  # heads are rows again
        matrices = as_matrices(direction, mine.planned.shape)
        self._measure(mine, "update", matrices, place, buffers, scale=abs(event.scale))
        if not mine.planned.spec.owner_shows:
            self._keep(mine, "update", matrices, abs(event.scale), buffers)

    def _owned(self, number: int, direction: Tensor, scale: float, buffers: Buffers) -> None:
        if (number, "update", "sigma") in buffers and self._plan[number].spec.owner_shows:
            self._sigma(number, "update", as_matrices(direction, self._plan[number].shape), scale, None, buffers)

    # ------------------------------------------------------------------ after the step

    def measure(
        self, states: Mapping[Tensor, Mapping[str, Any]], decay: Mapping[Tensor, float], buffers: Buffers
    ) -> None:
        """Measure weights, gradients, momenta, and the updates that were not shown.

        Args:
            states: The optimizer's state.
            decay: lr · wd of the decoupled weight decay of each parameter, which is not part of an update.
            buffers: Where to.
        """
        for param in self._numbers:
            found: dict[str, Tensor | None] = {}
            if "grad" in self._choice.partials and param.grad is not None:
                found["grad"] = piece_like(param.grad, param)
            if "momentum" in self._choice.partials:
                found["momentum"] = find_momentum(states.get(param, {}), param)
            mine = self._mine.get(param)
            if mine is None:
                continue
            found["weight"] = local(param.detach())
            if param in self._snapshots and param.grad is not None:
                kept = 1 - decay.get(param, 0.0)
                found["update"] = local(param.detach()).double() - kept * self._snapshots[param].double()
            for quantity, piece in found.items():
                if piece is not None and quantity in self._choice.partials:
                    matrices = as_matrices(piece, mine.planned.shape)
                    self._measure(mine, quantity, matrices, mine.place, buffers)
                    self._keep(mine, quantity, matrices, 1.0, buffers)
        self._snapshots = {}

    def _measure(
        self, mine: Mine, quantity: str, x: Tensor, place: Place, buffers: Buffers, *, scale: float = 1.0
    ) -> None:
        found = norms.squares(x)
        total = found.rows.sum()
        for partial, values, index in (
            ("pieces", torch.ones_like(total), None),
            ("row_squares", found.rows * scale**2, place.vector_index(-2)),
            ("column_squares", found.columns * scale**2, place.vector_index(-1)),
        ):
            buffers.add((mine.number, quantity, partial), values, index)
        if (mine.number, quantity, "nonfinite") in buffers:
            buffers.add((mine.number, quantity, "nonfinite"), norms.nonfinite(x, total))
        if (mine.number, quantity, "largest") in buffers:
            buffers.add((mine.number, quantity, "largest"), norms.largest(x) * scale)

    def _keep(self, mine: Mine, quantity: str, x: Tensor, scale: float, buffers: Buffers) -> None:
        """σ₁ of matrices that are whole here now; of others keep the piece until all ranks work on it together."""
        if (mine.number, quantity, "sigma") not in buffers:
            return
        if mine.planned.matrices_cut:
            self._pieces[(mine.number, quantity)] = x if scale == 1.0 else x.float() * scale
        else:
            self._sigma(mine.number, quantity, x, scale, mine.place.batch, buffers)

    def _sigma(
        self, number: int, quantity: str, x: Tensor, scale: float, batch: Tensor | None, buffers: Buffers
    ) -> None:
        for partial in ("sigma", "sigma_upper", "sigma_ranks"):
            assert (number, quantity, partial) in buffers
        for b, matrix in enumerate(x):
            index = torch.tensor([b], device=x.device) if batch is None else batch[b : b + 1]
            found = spectral.largest_singular_value(matrix, seed=number)
            buffers.add((number, quantity, "sigma"), found.lower * scale, index)
            buffers.add((number, quantity, "sigma_upper"), found.upper * scale, index)
            buffers.add((number, quantity, "sigma_ranks"), torch.ones_like(found.lower), index)

    # ------------------------------------------------------------------ over all ranks

    def reduce(self, buffers: Buffers) -> int:
        """Merge over all ranks and find σ₁ of what lies in pieces; returns the number of collectives."""
        count = buffers.reduce(self._group)
        problems = {key: self._problem(key, buffers) for key in self._cut_matrices()}
        if problems:
            warm = all(key in self._starts for key in problems)
            steps = spectral.WARM_STEPS if warm else spectral.COLD_STEPS

            def total(t: Tensor) -> Tensor:
                nonlocal count
                count += 1
                assert self._group is not None
                dist.all_reduce(t, group=self._group)
                return t

            spectral.run(list(problems.values()), steps=steps, total=total)
            for (number, quantity, b), problem in problems.items():
                self._finish(number, quantity, b, problem, buffers)
        self._pieces = {}
        return count

    def _cut_matrices(self) -> Iterator[SigmaKey]:
        for number, planned in enumerate(self._plan):
            for quantity in self._choice.partials:
                if _in_pieces(planned, quantity) and (number, quantity, "sigma") in self.schema.slots:
                    yield from ((number, quantity, b) for b in range(planned.shape.batch))

    def _problem(self, key: SigmaKey, buffers: Buffers) -> Krylov:
        number, quantity, b = key
        planned, shape = self._plan[number], self._plan[number].shape
        rows_cut, columns_cut = _cut_sides(planned)
        flip = columns_cut and not rows_cut  # iterate on the side that every piece holds whole
        size = shape.rows if flip else shape.columns
        piece, place, rows = self._local_matrix(number, quantity, b)
        if piece is None:
            piece = torch.empty(0, size, dtype=torch.float32, device=self.device)
            place, rows = None, torch.empty(0, dtype=torch.int64, device=self.device)
        elif flip:
            piece, place, rows = piece.mT, rows, place
        both = rows_cut and columns_cut
        start = self._starts.get(key)
        squares = buffers.view((number, quantity, "row_squares")).view(shape.batch, -1)[b].sum()
        return Krylov(
            piece=piece,
            place=place,
            rows=(rows, shape.rows) if both else None,
            start=_cold(size, self._seeds, self.device) if start is None else start,
            squares=squares,
        )

    def _local_matrix(self, number: int, quantity: str, b: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """This rank's piece of one matrix, with the positions of its columns and rows."""
        piece, mine = self._pieces.get((number, quantity)), self._by_number.get(number)
        if piece is None or mine is None or b not in mine.held:
            return None, None, None
        return piece[mine.held[b]], mine.place.columns, mine.place.rows

    def _finish(self, number: int, quantity: str, b: int, problem: Krylov, buffers: Buffers) -> None:
        found = problem.estimate()
        buffers.view((number, quantity, "sigma"))[b] = found.lower
        buffers.view((number, quantity, "sigma_upper"))[b] = found.upper
        buffers.view((number, quantity, "sigma_ranks"))[b] = 1.0
        self._starts[(number, quantity, b)] = problem.next_start(self._seeds)


def _cold(size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return spectral.random_start(size, min(spectral.BLOCK, size), generator, device)


def _cut_sides(planned: Planned) -> tuple[bool, bool]:
    first = 1 if planned.shape.stacked else 0
    return first in planned.cut, any(d > first for d in planned.cut)
