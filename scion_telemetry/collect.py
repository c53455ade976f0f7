"""One flush on one rank: partial results of every quantity into the buffers.

before the step   copies of weights whose update the optimizer does not show
while it steps    updates and selections, from events
after it          weights, gradients, momenta; one MAX, one SUM; singular values of what lies in pieces
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.describe import piece_like
from scion_telemetry.metrics import norms
from scion_telemetry.metrics.choice import Choice
from scion_telemetry.metrics.pieces import as_matrices
from scion_telemetry.optim.events import StepEvent
from scion_telemetry.optim.layout import local
from scion_telemetry.optim.selection import l1_scores, take
from scion_telemetry.places import Mine
from scion_telemetry.plan import Planned
from scion_telemetry.reduce import Schema
from scion_telemetry.selected import SelectionLog
from scion_telemetry.sheet import GRADIENT_SCORES, Flush, Settings, Sheet, make_schema
from scion_telemetry.shown import Previous, Shown
from scion_telemetry.sigma import Cut, Memory, Pieces, Whole, in_pieces

Find: TypeAlias = Callable[[Tensor], Tensor | None]
GROWN, REPLACED, FLAGS = range(3)
"""Flags of a flush: parameters have come or gone; weights were changed by something other than a step. Their number."""


class Collector:
    """Measures on this rank; the schedule is the tracker's business.

    Args:
        plan: What is measured, the same on all ranks.
        params: This rank's parameters by name.
        rank: This rank in the plan.
        group: Ranks to reduce over; None for one process.
        step: Steps taken so far.
        selects: Whether selections are measured at some flushes; their history is kept only then.
    """

    def __init__(
        self,
        plan: Sequence[Planned],
        params: Mapping[str, Tensor],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        step: int,
        selects: bool = True,
    ) -> None:
        self._plan = plan
        self.selects = selects
        self._group = group
        self.device = next(iter(params.values())).device if params else torch.device("cpu")
        self.numbers = {params[p.spec.info.name]: n for n, p in enumerate(plan) if p.spec.info.name in params}
        self._mine = {
            param: Mine.of(n, param, plan[n]) for param, n in self.numbers.items() if rank in plan[n].measurers
        }
        self._by_number = {mine.number: mine for mine in self._mine.values()}
        told = {p: mine.slices for p, mine in self._mine.items() if mine.slices is not None and mine.tells}
        self.log = SelectionLog(told if selects else {}, self.device, step)
        self.cut = Cut(plan, group, self.device)
        self.memory = Memory(self.device)
        self._sheet = Sheet(self._by_number, self.device)
        self.previous = Previous()
        self._shown = Shown(plan, self.numbers, self._mine, self.log, self._sheet, self.previous)
        self._schemas: dict[int, tuple[Choice, Schema]] = {}

    def schema(self, choice: Choice) -> Schema:
        """The layout of the buffers for a choice, worked out once."""
        if id(choice) not in self._schemas:  # the choice is kept, so that its number is not given to another one
            self._schemas[id(choice)] = (choice, make_schema(self._plan, choice))
        return self._schemas[id(choice)][1]

    def snapshot(self) -> dict[Tensor, Tensor]:
        """Copies of this rank's pieces of the weights whose update the optimizer will not show."""
        hidden = [m.param for m in self._mine.values() if not m.planned.spec.shows_update]
        return {param: local(param).detach().clone() for param in hidden}

    def observe(self, event: StepEvent, step: int, flush: Flush | None) -> None:
        """Take a step event: the selection's history always, everything else when there is a flush."""
        self._shown.observe(event, step, flush)

    def measure(self, momentum: Find, flush: Flush, among: Container[Tensor]) -> None:
        """Measure weights, gradients, momenta, and the updates that were not shown.

        Args:
            momentum: The momentum of a parameter, None where the optimizer keeps none.
            flush: Where to.
            among: The parameters to measure: those of one optimizer.
        """
        wants_grad = bool(flush.choice.names("grad")) or GRADIENT_SCORES in flush.buffers
        pieces: dict[str, dict[Mine, Tensor]] = {"weight": {}, "grad": {}, "momentum": {}}
        for param in self.numbers:  # in the plan's order: finding a gradient may communicate
            if param not in among:
                continue
            found: dict[str, Tensor] = {}
            if wants_grad and param.grad is not None:
                found["grad"] = piece_like(param.grad, param)
            if flush.choice.names("momentum") and (kept := momentum(param)) is not None:
                found["momentum"] = piece_like(kept, param)
            if flush.choice.names("weight"):
                found["weight"] = local(param).detach()
            if (mine := self._mine.get(param)) is not None:
                for quantity, piece in found.items():
                    pieces[quantity][mine] = as_matrices(piece, mine.planned.shape)
        updates = self._hidden_updates(flush)
        self.memory.begin(flush.step)
        if flush.choice.follows:
            self.memory.follow(flush.step, moved=flush.moved)
        whole = Whole(self.memory)
        for quantity, by_mine in (*pieces.items(), ("update", updates)):
            if by_mine:
                self._sheet.norms(flush, quantity, list(by_mine), list(by_mine.values()))
                self._singular_values(quantity, by_mine, whole, flush)
        self._selections(flush, pieces)
        flush.chosen.clear()
        self._dots(flush, ("momentum", "with_grad"), pieces["momentum"], pieces["grad"])
        self._dots(flush, ("update", "with_weight"), updates, pieces["weight"])
        if updates and "with_previous" in flush.choice.names("update"):
            self.previous.compare(self._sheet, flush, list(updates), list(updates.values()))
        whole.solve(flush.buffers, flush.step)

    def _selections(self, flush: Flush, pieces: Mapping[str, Mapping[Mine, Tensor]]) -> None:
        """What is known of a selection when its step is done: what was kept, and what the gradient alone says."""
        kept: dict[int, Tensor] = {}
        for param, chosen in flush.chosen.items():
            mine = self._mine[param]
            if (slices := mine.slices) is None:
                continue
            if (momentum := pieces["momentum"].get(mine)) is not None and ("momentum", "squares") in flush.buffers:
                part = take(momentum.reshape(slices.shape), chosen.indices, chosen.dim)
                kept[mine.number] = part.reshape(1, 1, part.numel())
            if (grad := pieces["grad"].get(mine)) is not None and GRADIENT_SCORES in flush.buffers:
                scores = l1_scores(grad.reshape(slices.shape), slices.dim)
                self._sheet.put(flush, GRADIENT_SCORES, [mine.number], scores, {mine.number: slices.positions})
        if kept:
            squares = norms.measure(list(kept.values()), frozenset(("squares",)))["squares"]
            self._sheet.put(flush, ("selection", "kept"), list(kept), squares)

    def keep_hidden(self, snapshots: Mapping[Tensor, Tensor], settings: Settings) -> None:
        """Keep updates that were not shown, for the step to come."""
        for param, before in snapshots.items() if self.previous.keeps else ():
            if (update := self._difference(param, before, settings)) is not None:
                self.previous.keep(param, as_matrices(update.float(), self._mine[param].planned.shape))

    def reduce(self, flush: Flush) -> tuple[int, int]:
        """Merge over all ranks and find σ₁ of what lies in pieces; returns the numbers of collectives and of bytes."""
        raised = flush.buffers.raised
        raised[REPLACED] = float(flush.moved)
        count = flush.buffers.reduce(self._group)
        if flush.choice.follows:
            # All ranks must agree. On an accelerator that would wait for the device: σ₁ may be low there, once.
            self.cut.memory.follow(flush.step, moved=norms.free_to_read(raised) and bool(raised[REPLACED] > 0))
        self.log.commit()
        size = 8 * flush.buffers.numbers if count else 0
        here = Pieces(pieces=flush.pieces, mine=self._by_number)
        more, further = self.cut.solve(here, flush.buffers, flush.step)
        flush.pieces.clear()
        return count + more, size + further

    def _hidden_updates(self, flush: Flush) -> dict[Mine, Tensor]:
        return {
            (mine := self._mine[param]): as_matrices(update, mine.planned.shape)
            for param, before in flush.snapshots.items()
            if (update := self._difference(param, before, flush.settings)) is not None
        }

    def _difference(self, param: Tensor, before: Tensor, settings: Settings) -> Tensor | None:
        """The update that a step made; None where it made none, for want of a gradient."""
        after = local(param).detach()
        # An optimizer may have given its gradients back, or need none: a weight that has moved was stepped.
        if param.grad is None and norms.free_to_read(after) and torch.equal(after, before):
            return None
        found = after.double() - settings[param].kept * before.double()
        return found if before.dtype == torch.float64 else found.float()  # differences are small, but not of digits

    def _singular_values(self, quantity: str, pieces: Mapping[Mine, Tensor], whole: Whole, flush: Flush) -> None:
        """Collect the matrices of which they are wanted: to be solved here, or with other ranks."""
        wanted = flush.choice.names(quantity)
        if wanted.isdisjoint(("sigma", "coherence")):
            return
        for mine, x in pieces.items():
            if mine.planned.shape.vector:
                continue
            if in_pieces(mine.planned, quantity):
                flush.pieces[(quantity, mine.number)] = x.float() if x.dtype == torch.float64 else x
                continue
            if "sigma" in wanted:
                whole.add(quantity, mine.number, x, list(mine.held))
            if "coherence" in wanted:
                squares = norms.measure([x], frozenset(("row_squares",)))["row_squares"]
                whole.add_coherence(mine.number, x, list(mine.held), squares)

    def _dots(
        self, flush: Flush, kind: tuple[str, str], some: Mapping[Mine, Tensor], others: Mapping[Mine, Tensor]
    ) -> None:
        both = [(m, x, others[m]) for m, x in some.items() if m in others] if kind in flush.buffers else []
        if both:
            values = torch.stack([norms.dot(x, y) for _, x, y in both])
            self._sheet.put(flush, kind, [m.number for m, _, _ in both], values)
