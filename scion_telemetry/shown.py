"""What optimizers show while they step: updates, selections, and what Newton-Schulz knows."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor

from scion_telemetry.metrics import norms
from scion_telemetry.metrics.pieces import as_matrices
from scion_telemetry.optim.events import Gram, StepEvent
from scion_telemetry.optim.layout import local
from scion_telemetry.places import Mine
from scion_telemetry.plan import Planned
from scion_telemetry.selected import SelectionLog
from scion_telemetry.sheet import SLICES, Flush, Index, Sheet
from scion_telemetry.sigma import Whole, in_pieces


class Previous:
    """Updates of the step before a measured one, where they are compared; whole pieces, scaled, float32."""

    def __init__(self) -> None:
        self._known: dict[Tensor, Tensor] = {}
        self._next: dict[Tensor, Tensor] = {}
        self.keeps = False

    def keep(self, param: Tensor, update: Tensor) -> None:
        """Keep an update of the step that is under way."""
        self._next[param] = update

    def end_step(self) -> None:
        """What was kept is now of the step before."""
        self._known, self._next, self.keeps = self._next, {}, False

    def compare(
        self,
        sheet: Sheet,
        flush: Flush,
        mine: Sequence[Mine],
        xs: Sequence[Tensor],
        scale: float = 1.0,
        part: Callable[[int, Tensor], Tensor] = lambda i, whole: whole,
    ) -> None:
        """<update, update before> and the length of the latter; ``part`` cuts the i-th as ``xs[i]`` is cut."""
        known = [(i, self._known[m.param]) for i, m in enumerate(mine) if m.param in self._known]
        if known:
            numbers = [mine[i].number for i, _ in known]
            dots = torch.stack([norms.dot(xs[i], part(i, before)) for i, before in known])
            sheet.put(flush, ("update", "with_previous"), numbers, dots * scale)
            squares = norms.measure([before for _, before in known], frozenset(("squares",)))["squares"]
            sheet.put(flush, ("update", "previous_squares"), numbers, squares)


class Shown:
    """Takes step events.

    Args:
        plan: What is measured.
        numbers: This rank's parameters.
        mine: Those of which it measures a piece.
        log: Selections.
        sheet: Writes into buffers.
        previous: Updates of the step before.
    """

    def __init__(
        self,
        plan: Sequence[Planned],
        numbers: Mapping[Tensor, int],
        mine: Mapping[Tensor, Mine],
        log: SelectionLog,
        sheet: Sheet,
        previous: Previous,
    ) -> None:
        self._plan = plan
        self._numbers = numbers
        self._mine = mine
        self._log = log
        self._sheet = sheet
        self._previous = previous

    def observe(self, event: StepEvent, step: int, flush: Flush | None) -> None:
        """The selection's history always, everything else when there is a flush."""
        if event.selections and (told := [i for i, p in enumerate(event.params) if p in self._log]):
            self._select(event, told, step, flush)
        measured = [i for i, p in enumerate(event.params) if p in self._mine]
        if flush is not None:
            if event.selections and SLICES in flush.buffers:
                flush.chosen.update({event.params[i]: event.selections[i] for i in measured})
            whole = Whole()
            if measured and flush.choice.names("update"):
                self._updates(event, measured, whole, flush)
            for i, direction in event.owned.items():
                number = self._numbers.get(event.params[i])
                if number is not None and self._plan[number].spec.owner_shows:
                    x = as_matrices(direction, self._plan[number].shape)
                    self._matrices(number, x, range(len(x)), event, whole, flush)
                    self._polar(number, direction, event, flush)
            whole.solve(flush.buffers, step)  # now: what the event shows is valid during the call alone
            for i, gram in event.grams.items():
                if event.params[i] in self._numbers:
                    self._gram(self._numbers[event.params[i]], gram, flush)
        if self._previous.keeps:
            for i in measured:
                mine = self._mine[event.params[i]]
                self._previous.keep(mine.param, spread(event, i, mine).float() * event.scale)

    def _select(self, event: StepEvent, told: Sequence[int], step: int, flush: Flush | None) -> None:
        params = [event.params[i] for i in told]
        indices = [event.selections[i].indices for i in told]
        if flush is None or SLICES not in flush.buffers:
            self._log.note(params, indices, step)
            return
        scores = [event.selections[i].scores for i in told]
        packed, windows = self._log.show(params, scores, indices, step)
        numbers = [self._numbers[p] for p in params]
        among = dict(zip(numbers, self._log.positions(params), strict=True))
        self._sheet.put(flush, SLICES, numbers, packed, among)
        counted = torch.tensor(windows, dtype=torch.float64, device=packed.device)
        self._sheet.put(flush, ("selection", "window"), numbers, counted)
        self._sheet.settings(flush, "selection", [self._mine[p] for p in params], ("fraction", "ef_decay"))

    def _updates(self, event: StepEvent, measured: Sequence[int], whole: Whole, flush: Flush) -> None:
        mine = [self._mine[event.params[i]] for i in measured]
        wanted = flush.choice.names("update")
        xs = [_pieces(event, i, m) for i, m in zip(measured, mine, strict=True)]
        index = _index(event, measured, mine) if not wanted.isdisjoint(norms.VECTORS) else {}
        self._sheet.norms(
            flush,
            "update",
            mine,
            xs,
            scale=event.scale,
            index=index,
            everywhere=lambda j: spread(event, measured[j], mine[j]),
        )
        if "zeros" in wanted:  # what is not selected is exactly 0
            rest = [float(local(m.param).numel() - x.numel()) for m, x in zip(mine, xs, strict=True)]
            zeros = torch.tensor(rest, dtype=torch.float64, device=xs[0].device)
            self._sheet.put(flush, ("update", "zeros"), [m.number for m in mine], zeros)
        if "with_weight" in wanted:
            self._sheet.put(
                flush,
                ("update", "with_weight"),
                [m.number for m in mine],
                self._with_weight(event, measured, xs, flush),
            )
        if "with_previous" in wanted:
            self._previous.compare(
                self._sheet, flush, mine, xs, event.scale, lambda j, whole: _selected(event, measured[j], whole)
            )
        for i, m, x in zip(measured, mine, xs, strict=True):
            if in_pieces(m.planned, "update"):
                if ("update", "sigma") in flush.buffers and not m.planned.shape.vector:
                    flush.pieces[("update", m.number)] = x.float() * abs(event.scale)
            elif not m.planned.spec.owner_shows:
                self._matrices(m.number, x, list(m.held), event, whole, flush)
                self._polar(m.number, event.directions[i], event, flush)

    def _with_weight(self, event: StepEvent, which: Sequence[int], xs: Sequence[Tensor], flush: Flush) -> Tensor:
        """<update, weight after the step>: what is shown is the direction, and the weight before it decays."""
        dots = []
        for i, x in zip(which, xs, strict=True):
            mine = self._mine[event.params[i]]
            weight = _selected(event, i, as_matrices(local(mine.param), mine.planned.shape))
            dots.append(norms.dot(x, weight) * flush.settings[mine.param].kept)
        squares = norms.measure(xs, frozenset(("squares",)))["squares"]
        return torch.stack(dots) * event.scale + squares * event.scale**2

    def _matrices(
        self, number: int, x: Tensor, held: Sequence[int], event: StepEvent, whole: Whole, flush: Flush
    ) -> None:
        """Whole directions on this rank."""
        if ("update", "sigma") in flush.buffers and not self._plan[number].shape.vector:
            whole.add("update", number, x, held, abs(event.scale))

    def _polar(self, number: int, direction: Tensor, event: StepEvent, flush: Flush) -> None:
        """How far a whole direction, of its selected part, is from orthonormal rows or columns of the right length."""
        planned, setting = self._plan[number], flush.settings[event.params[0]]  # those of one event share a group
        fits = planned.spec.norm == "rms_to_rms" and direction.ndim >= 2 and direction.numel() and event.lr
        if ("update", "polar") in flush.buffers and not planned.shape.vector and fits:
            length = event.lr * (setting.scale or 1.0) * sqrt(planned.shape.d_out / planned.shape.d_in)
            unit = direction.reshape(-1, *direction.shape[-2:]).float() * (abs(event.scale) / length)
            self._sheet.put(flush, ("update", "polar"), [number], polar_error(unit).max().view(1))

    def _gram(self, number: int, gram: Gram, flush: Flush) -> None:
        found = {"gram_rank": 1 / gram.trace2}
        if gram.trace3 is not None and gram.trace4 is not None:
            found["gram_lower"] = gram.frobenius * (gram.trace4 / gram.trace3).sqrt()
            found["gram_upper"] = gram.frobenius * gram.trace4 ** (1 / 8)
        for name, values in found.items():
            if values.numel():
                self._sheet.put(flush, ("momentum", name), [number], values.double().max().view(1))


def polar_error(x: Tensor) -> Tensor:
    """‖XXᵀ - I‖_F / √k of matrices ``[B, m, n]``, k the shorter side; 0 where rows (or columns) are orthonormal."""
    short = x if x.size(-2) <= x.size(-1) else x.mT
    gram = torch.bmm(short, short.mT)
    torch.diagonal(gram, dim1=-2, dim2=-1).sub_(1)
    error: Tensor = torch.linalg.vector_norm(gram, dim=(-2, -1), dtype=torch.float64)
    return error / sqrt(short.size(-2))


def spread(event: StepEvent, i: int, mine: Mine) -> Tensor:
    """The direction on the whole piece as ``[B, R, C]``, zero where nothing is selected."""
    direction = event.directions[i]
    if event.selections:
        chosen = event.selections[i]
        shape, indices, dim = list(direction.shape), chosen.indices, chosen.dim
        shape[dim] = chosen.scores.size(-1)
        index = indices.unsqueeze(-1 if dim == -2 else -2).expand(direction.shape)
        # Every stacked matrix selects its own rows; heads are rows again.
        direction = direction.new_zeros(shape).scatter_(dim, index, direction).view(local(mine.param).shape)
    return as_matrices(direction, mine.planned.shape)


def _pieces(event: StepEvent, i: int, mine: Mine) -> Tensor:
    """What is shown of an update as matrices ``[B, R, C]``: the selected rows or columns, or all."""
    if event.selections and event.selections[i].indices.ndim > 1:
        return spread(event, i, mine)
    return as_matrices(event.directions[i], mine.planned.shape)


def _selected(event: StepEvent, i: int, whole: Tensor) -> Tensor:
    """Of a whole piece ``[B, R, C]`` what ``_pieces`` shows of the update."""
    if not event.selections or event.selections[i].indices.ndim > 1:
        return whole
    chosen = event.selections[i]
    return whole.index_select(1 if chosen.dim == -2 else 2, chosen.indices)


def _index(event: StepEvent, measured: Sequence[int], mine: Sequence[Mine]) -> Mapping[str, Index]:
    """Where the rows or columns of selected parts go."""
    if not event.selections or event.selections[measured[0]].indices.ndim > 1:
        return {}
    by_row = event.selections[measured[0]].dim == -2
    name = "row_squares" if by_row else "column_squares"
    own = [m.row_index if by_row else m.column_index for m in mine]
    chosen = [event.selections[i].indices for i in measured]
    return {name: {m.number: o[c] for m, o, c in zip(mine, own, chosen, strict=True)}}
