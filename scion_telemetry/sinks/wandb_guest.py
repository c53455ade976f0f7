"""Rows in a wandb run that belongs to somebody else: theirs come first, and neither side's are lost.

wandb keeps one open row and a counter (``run.step``), moves only forward, and drops a row whose step is below the
counter. Three facts about ``log``, tried on wandb 0.31, carry the rule below:

- ``log(row, commit=False)`` adds to the open row and moves nothing: the trainer's next bare ``log`` still gets the
  step it would have had, and a trainer that passes ``step=`` finds its counter where it left it.
- A second such row before the trainer has moved on would overwrite the first, so it has to wait.
- ``log(row, step=p)`` beyond the counter opens a row of our own, but whatever the trainer logs below ``p``
  afterwards is dropped without a word. That is safe only while the trainer counts at least as fast as the optimizer,
  and fatal when it counts epochs; so the counter is watched first.
"""

import logging
from collections import deque
from typing import Any, Protocol

logger = logging.getLogger(__name__)

STEP_KEY = "telemetry/step"
"""Optimizer step of a row, the x-axis of every chart."""

NONFINITE_KEY = "telemetry/nonfinite"
"""How many values of a row are NaN or infinite: charts leave such points out, so this is where they show."""

_WATCH_STEPS = 8  # below this, a trainer that counts epochs of one step looks like one that counts steps
_MAX_HELD_VALUES = 1_000_000  # about 100 MB of waiting rows


class WandbRun(Protocol):
    """What is used of a ``wandb.Run``."""

    @property
    def step(self) -> int:
        """The step that a bare ``log`` would use next."""

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Log a row."""


class GuestRows:
    """Places our rows, in order, into a run that its owner goes on logging to.

    A row takes the open row of the run when that holds none of ours yet. Otherwise, if the trainer's counter has been
    seen to keep up with the optimizer steps, it opens the next row up to ``step - 1``, which no such trainer has
    passed. Otherwise it waits for the trainer to move on. What still waits at the end follows at the steps after the
    trainer's last.

    Args:
        run: The owner's run.
    """

    def __init__(self, run: WandbRun) -> None:
        self._run = run
        self._held: deque[dict[str, Any]] = deque()
        self._held_values = 0
        self._left_out = 0
        self._last = -1  # row of the run that holds our latest row
        self._latest: dict[str, Any] = {}  # and what we put there
        self._seen = run.step  # counter of the run when we looked last
        self._optimizer_step = 0  # and the optimizer step we knew of then
        self._keeps_up = False

    def put(self, step: int, row: dict[str, Any]) -> None:
        """Place ``row`` of optimizer step ``step``, now or as soon as there is room. Rows of one step become one."""
        if getattr(self._run, "disabled", False):  # counts nothing, so that every row would wait for ever
            return
        self._watch(step)
        if not self._join(row):
            self._hold(row)
        while self._held and self._place(self._held[0], below=step):
            self._held_values -= _size(self._held.popleft())

    def flush(self) -> None:
        """Place everything that waits, after the trainer's last row."""
        pushed = 0
        while self._held:
            row = self._held.popleft()
            if self._run.step > self._last:
                self._add(row)
            else:
                self._open_row(self._last + 1, row)
                pushed += 1
        if pushed:
            logger.warning(
                "the given wandb run had no room in time for the last %d rows of telemetry: they stand at the steps up "
                "to %d there, and wandb drops what is logged at lower steps from now on; telemetry that is denser than "
                "the trainer's own logs is better off in a run of its own, WandbSink(project=...)",
                pushed,
                self._last,
            )

    def _watch(self, step: int) -> None:
        """Judge, whenever the trainer has moved its counter, whether that keeps up with the optimizer steps."""
        if self._run.step > self._seen:
            # It was moved when at least `_optimizer_step` steps were taken; whoever counts steps from zero is there.
            known = self._optimizer_step
            self._keeps_up = known >= _WATCH_STEPS and self._run.step >= known - 1
            self._seen = self._run.step
        self._optimizer_step = step

    def _place(self, row: dict[str, Any], *, below: int) -> bool:
        if self._run.step > self._last:
            self._add(row)
            return True
        target = self._last + 1
        if not (self._keeps_up and target < below):
            return False
        self._open_row(target, row)
        self._seen = target
        # The trainer's thread may have moved on between our look and our log; the row was then dropped: again.
        return self._run.step == target

    def _join(self, row: dict[str, Any]) -> bool:
        """Make ``row`` part of our row before it, where both are of one step: the last scalars of a run, mostly."""
        before = self._held[-1] if self._held else self._latest
        if before.get(STEP_KEY) != row[STEP_KEY] or (not self._held and self._run.step != self._last):
            return False
        nonfinite = before.get(NONFINITE_KEY, 0) + row.get(NONFINITE_KEY, 0)
        size = _size(before)
        before |= row | ({NONFINITE_KEY: nonfinite} if NONFINITE_KEY in before | row else {})
        if self._held:
            self._held_values += _size(before) - size
        else:
            self._add(before)
        return True

    def _hold(self, row: dict[str, Any]) -> None:
        if self._held_values + _size(row) > _MAX_HELD_VALUES:
            self._leave_out()
        else:
            self._held.append(row)
            self._held_values += _size(row)

    def _add(self, row: dict[str, Any]) -> None:
        self._run.log(row, commit=False)
        self._last, self._latest = max(self._last, self._run.step), row

    def _open_row(self, step: int, row: dict[str, Any]) -> None:
        self._run.log(row, step=step)
        self._last, self._latest = step, row

    def _leave_out(self) -> None:
        self._left_out += 1
        if self._left_out == 1:
            logger.warning(
                "telemetry comes more often than the rows of the given wandb run, and %d of its rows wait already: "
                "further ones are left out there (CsvSink keeps all); log less often, or give telemetry a run of "
                "its own with WandbSink(project=...)",
                len(self._held),
            )


def _size(row: dict[str, Any]) -> int:
    """Number of values in ``row``; a histogram has two a bin."""
    return sum(max(1, 2 * len(getattr(value, "histogram", ()))) for value in row.values())
