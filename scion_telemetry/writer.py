"""The worker thread of rank 0: finishing formulas and sinks, off the training thread.

The queue is bounded: when sinks are slower than training, training waits, and nothing is dropped. A failing sink is
reported with its trace when it starts to fail and again when it recovers (a disk may have space again); the others and
training go on.
"""

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from scion_telemetry.rows import Batch, RunInfo, Sink

logger = logging.getLogger(__name__)

Make = Callable[[], Batch | RunInfo]
_QUEUE_SIZE = 16


class Writer:
    """Hands batches to sinks, in order.

    Args:
        sinks: Opened sinks.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._failing: dict[int, int] = {}
        self._queue: queue.Queue[Make | None] = queue.Queue(maxsize=_QUEUE_SIZE)
        self._thread = threading.Thread(target=self._work, name="scion-telemetry-writer", daemon=True)
        self._thread.start()
        atexit.register(self.flush)  # a tracker that nobody closed: what is queued is not lost

    def put(self, make: Make) -> None:
        """Queue a batch, or a run whose parameters grew; ``make`` is called on the worker. Waits while it is full."""
        self._queue.put(make)

    def flush(self) -> None:
        """Return once everything queued so far is with the sinks. In a forked child nothing happens."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:  # a sink that asks for it
            self._queue.join()

    def close(self) -> None:
        """Finish the queue and close the sinks."""
        atexit.unregister(self.flush)
        self._queue.put(None)
        self._thread.join()
        for sink in self._sinks:
            _close(sink)
        self._sinks = []

    def _work(self) -> None:
        while (make := self._queue.get()) is not None:
            try:
                self._write(make())
            except BaseException:  # also SystemExit: the worker must live, or the next put would wait for ever
                logger.exception("a batch of telemetry could not be finished and is left out")
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, batch: Batch | RunInfo) -> None:
        if isinstance(batch, RunInfo):
            for sink in self._sinks:
                _extend(sink, batch)
            return
        for sink in self._sinks:
            name = type(sink).__name__
            try:
                sink.write(batch)
            except BaseException:  # isolated: reported once, then tried again with every batch
                if id(sink) not in self._failing:
                    logger.exception("%s failed at step %d; training goes on", name, batch.step)
                self._failing[id(sink)] = self._failing.get(id(sink), 0) + 1
            else:
                if lost := self._failing.pop(id(sink), 0):
                    logger.warning("%s works again at step %d; %d batches are missing from it", name, batch.step, lost)


def open_sinks(sinks: Sequence[Sink], start: Callable[[Sink], None]) -> None:
    """Open all sinks, or none: those already open are closed again when one cannot start.

    A sink that has ``discard()`` is asked for that, so that its files do not stand in the way of the next try.
    """
    opened: list[Sink] = []
    for sink in sinks:
        try:
            start(sink)
        except Exception:  # of whatever kind: those that are open must not stay open; it is raised again
            for other in opened:
                _close(other, discard=True)
            raise
        opened.append(sink)


def _extend(sink: Sink, run: RunInfo) -> None:
    try:
        getattr(sink, "extend", lambda run: None)(run)
    except Exception:  # isolated, as in writing
        logger.exception("%s did not take new parameters", type(sink).__name__)


def _close(sink: Sink, *, discard: bool = False) -> None:
    try:
        (getattr(sink, "discard", sink.close) if discard else sink.close)()
    except Exception:  # a sink's fault must not hide the user's own exception, nor keep others open
        logger.exception("closing %s failed", type(sink).__name__)
