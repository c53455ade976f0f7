"""What the benchmarks of the tracker share: turns, counters, a sink that watches its worker, an optimizer at rest."""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from scion_telemetry import Tracker
from scion_telemetry.optim.events import Looks, ObservableOptimizer, Observer, ParamFacts, StepEvent, StepSettings
from scion_telemetry.optim.layout import local
from scion_telemetry.rows import Batch, RunInfo, Sink


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """Seconds of one turn.

    Args:
        whole: All of it.
        part: Of a part that is of interest: inside ``optimizer.step()``.
        rows: From there until the rows were with the sinks.
    """

    whole: float
    part: float = 0.0
    rows: float = 0.0


def take_turns(variants: Mapping[str, Callable[[], Time]], repeats: int) -> dict[str, list[Time]]:
    """Times of every variant, in alternating order; a first turn of each is not counted."""
    times: dict[str, list[Time]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name in list(variants)[:: -1 if turn % 2 else 1]:
            found = variants[name]()
            if turn:
                times[name].append(found)
    return times


def slowest(ranks: Sequence[Sequence[Time]]) -> list[Time]:
    """Of every turn what the slowest rank took: the others wait for it."""
    return [
        Time(whole=max(t.whole for t in turn), part=max(t.part for t in turn), rows=max(t.rows for t in turn))
        for turn in zip(*ranks, strict=True)
    ]


_SENDS = re.compile("all_?to_?all|reduce|gather|scatter|broadcast|send|recv")
_IN_PLACE = frozenset({"allreduce_", "broadcast_", "reduce_", "allreduce_coalesced_"})


class Traffic(TorchDispatchMode):
    """Collectives of this rank, and the bytes that it puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and _SENDS.search(name):
            # What is put in comes second where it stands beside a place for what comes out.
            given = args[0] if func.namespace != "c10d" or name in _IN_PLACE else args[1]
            self.collectives += 1
            self.bytes += sum(t.nbytes for t in ([given] if isinstance(given, Tensor) else given))
        return func(*args, **(kwargs or {}))


class Watched:
    """A sink around a sink: counts rows, and reads the clock of the thread that writes.

    Args:
        inner: Where rows go; None to keep them here.
    """

    def __init__(self, inner: Sink | None = None) -> None:
        self.inner = inner
        self.last: Batch | None = None
        self.rows = 0
        self.clock: list[float] = []

    def open(self, run: RunInfo) -> None:
        if self.inner is not None:
            self.inner.open(run)

    def write(self, batch: Batch) -> None:
        if self.inner is not None:
            self.inner.write(batch)
        self.last, self.rows = batch, len(batch.layers) + len(batch.selection)
        self.clock.append(time.thread_time())  # of this thread only: finishing formulas and writing

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

    @property
    def cpu(self) -> float:
        """CPU seconds of the worker for one flush; the first is not counted."""
        return median(b - a for a, b in zip(self.clock[:-1], self.clock[1:], strict=True)) if self.clock[1:] else 0.0

    def values(self) -> dict[str, float]:
        """The latest numbers by column and parameter."""
        assert self.last is not None
        return {f"{column}/{r.param}": value for r in self.last.layers for column, value in r.values.items()}


class Still(torch.optim.Optimizer):
    """Moves nothing, so that what its step takes is what a tracker takes; shows updates, and has momenta.

    Args:
        params: The parameters.
        updates: What it shows; without, a tracker has to copy the weights.
        momenta: What it keeps.
    """

    def __init__(self, params: Sequence[Tensor], updates: Sequence[Tensor] = (), momenta: Sequence[Tensor] = ()):
        self._observers: OrderedDict[int, Observer] = OrderedDict()
        super().__init__(params, {"lr": 1.0})
        for param, momentum in zip(params, momenta, strict=False):
            self.state[param]["momentum"] = momentum
        self._shown = dict(zip(params, map(local, updates), strict=False))
        same: dict[tuple[int, ...], list[Tensor]] = {}
        for param in self._shown:
            same.setdefault(tuple(param.shape), []).append(param)
        self._groups = [tuple(group) for group in same.values()]

        assert isinstance(self, ObservableOptimizer)

    def register_step_observer(self, observer: Observer, *, grams: Looks | None = None) -> RemovableHandle:
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    def facts(self, param: Tensor) -> ParamFacts:
        return ParamFacts(algorithm="still", shows_update=param in self._shown)

    def settings(self, group: Mapping[str, Any]) -> StepSettings:
        return StepSettings(lr=group["lr"])

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self._groups if self._observers else ():
            directions = tuple(self._shown[p] for p in group)
            event = StepEvent(algorithm="still", params=group, lr=1.0, scale=1.0, directions=directions)
            for observer in tuple(self._observers.values()):
                observer(event)


def flush_time(optimizer: torch.optim.Optimizer, tracker: Tracker) -> Time:
    """One step of an optimizer at rest: until training goes on, and until the rows are with the sinks."""
    start = time.perf_counter()
    optimizer.step()
    stepped = time.perf_counter()
    tracker.flush()
    end = time.perf_counter()
    return Time(whole=end - start, part=stepped - start, rows=end - stepped)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Markdown, one line a row."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    lines = [heads, *([row.get(head, "") for head in heads] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])
