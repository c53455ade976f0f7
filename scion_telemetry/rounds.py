"""When optimizers step: one round is one training step, whether one optimizer makes it or several.

before()     before each optimizer steps
begin()      before the first one of a round
after(o)     after each one
end()        when all have, or when one is about to step again
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scion_telemetry.optim.events import ObservableOptimizer, StepEvent


class Rounds:
    """Hooks on optimizers.

    A step around a step (a subclass that calls ``super().step()``) is one step. A step that a gradient scaler skips is
    none: plain optimizers are not called then; fused ones are, and find it out themselves, so on a CPU the scaler's
    ``found_inf`` is read here (on an accelerator that would wait for the device, and such a step counts). Fused
    optimizers of torch leave unscaled gradients behind.

    Args:
        optimizers: What to hook.
        begin: Called before the first optimizer of a round.
        before: Called before each one, and before ``begin``.
        after: Called after each one that stepped.
        end: Called at the end of the round.
        event: Called with what an observable optimizer shows.
        grams: Whether what Newton-Schulz knows is looked at.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        begin: Callable[[], None],
        before: Callable[[], None],
        after: Callable[[torch.optim.Optimizer], None],
        end: Callable[[], None],
        event: Callable[[StepEvent], None],
        grams: Callable[[], bool],
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._begin, self._before_one, self._after_one, self._end = begin, before, after, end
        self._running: dict[int, int] = {}
        self._done: set[int] = set()
        self._under_way = self._stepped = False
        self._handles: list[RemovableHandle] = []
        eager: Any = torch.compiler.disable  # a compiled step must not trace, and recompile, what measures it
        for number, optimizer in enumerate(self._optimizers):
            self._handles += [
                optimizer.register_step_pre_hook(eager(self._hook(self._before, number))),
                optimizer.register_step_post_hook(eager(self._hook(self._after, number))),
            ]
            if isinstance(optimizer, ObservableOptimizer):
                self._handles.append(optimizer.register_step_observer(eager(event), grams=grams))

    def detach(self) -> None:
        """Remove the hooks, and let go of who is called once a round that is under way has ended."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if not self._stepped:
            self._begin = self._before_one = self._end = lambda: None
            self._after_one = lambda optimizer: None

    def finish(self) -> None:
        """End a round, also one that not all optimizers have taken part in."""
        ends, self._under_way, self._stepped = self._stepped, False, False
        self._running.clear()
        self._done.clear()
        if ends:
            self._end()
        if not self._handles:
            self.detach()

    def _hook(self, call: Callable[[int], None], number: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            call(number)

        return hook

    def _before(self, number: int) -> None:
        # Another one has stepped since this one began, which raised then: that was the round before.
        if number in self._done or len(self._done) > self._running.get(number, len(self._done)):
            self.finish()
        if number not in self._running:
            self._before_one()
        # Running already: a step around this step, or one that raised. Nothing is measured yet, so begin once more.
        if not self._under_way or (number in self._running and not self._done):
            self._under_way = True
            self._begin()
        self._running.setdefault(number, len(self._done))

    def _after(self, number: int) -> None:
        if number not in self._running:  # the end of a step around a step
            return
        del self._running[number]
        self._done.add(number)
        if not skipped(self._optimizers[number]):
            self._stepped = True
            self._after_one(self._optimizers[number])
        if len(self._done) == len(self._optimizers):
            self.finish()


def skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient scaler found infinities and the fused optimizer has left its parameters as they were."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found > 0)
