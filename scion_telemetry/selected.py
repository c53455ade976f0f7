"""What Dion2 selects on this rank: two int32 a row between flushes, and one number a row when they are due.

At a flush a row's score, whether it is selected, whether it was at the step before, for how long it was not, and how
often it was since the last flush, travel together in one float64: the score is a float32, so 29 bits of the mantissa
are free. Adding zeros, which is all that merging does to a number that one rank has, keeps every bit of a finite one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scion_telemetry.metrics.declare import Array
from scion_telemetry.places import Slices

AGE_BITS = 16
"""Ages of more than 65,535 steps are shown as that."""
COUNT_BITS = 10
"""Counts of windows of more than 1,023 steps are shown in units of two, four, … selections."""
_COUNT = 1 << AGE_BITS
_BEFORE, _NOW, _BROKEN = (1 << AGE_BITS + COUNT_BITS + i for i in range(3))
_FREE = (1 << 29) - 1
_ZERO = 2.0**-150


class SelectionLog:
    """When each row was last selected, of all parameters that this rank tells of; no communication.

    Args:
        told: By parameter.
        device: Device of the scores.
        step: Steps taken so far; rows that were not selected yet count from here.
    """

    def __init__(self, told: Mapping[Tensor, Slices], device: torch.device, step: int) -> None:
        self._told = told
        self._start: dict[Tensor, int] = {}
        size = 0
        for param, entry in told.items():
            self._start[param] = size
            size += entry.count
        self.last = torch.full((size,), step, dtype=torch.int32, device=device)
        self.count = torch.zeros(size, dtype=torch.int32, device=device)
        self._since = step
        self._shown: dict[Tensor, int] = {}
        self._latest: dict[Tensor, int] = {}
        self._pending: list[tuple[Tensor, tuple[Tensor, ...], int]] = []
        self._cache: dict[tuple[object, ...], Tensor] = {}

    def __contains__(self, param: Tensor) -> bool:
        return param in self._told

    def note(self, params: Sequence[Tensor], indices: Sequence[Tensor], step: int) -> None:
        """Selected rows of parameters at a step: ``indices`` ``[k]``, or ``[B, k]`` for stacks."""
        if params:
            if any(self._latest.get(p) == step for p in params):  # the step raised, and is taken again
                region = self._region(params)
                again = self.last[region] == step
                self.count[region] -= again.int()
                self.last[region] -= again.int()
            chosen = self._flat(params, indices)
            self.last[chosen] = step
            self.count[chosen] += 1
            self._latest.update(dict.fromkeys(params, step))

    def show(
        self, params: Sequence[Tensor], scores: Sequence[Tensor], indices: Sequence[Tensor], step: int
    ) -> tuple[Tensor, list[int]]:
        """``note``, and what there is to tell; counts start again once it is told (``commit``).

        Returns:
            The packed numbers of all rows of the parameters, one parameter after another, and of each parameter the
            number of steps over which its rows were counted.
        """
        region = self._region(params)
        before = torch.zeros(region.numel(), dtype=torch.bool, device=self.last.device)
        if latest := {p: s for p in params if (s := self._latest.get(p)) is not None}:
            before = self.last[region] == self._each(params, [latest.get(p, -1) for p in params])
        self.note(params, indices, step)
        ages = step - self.last[region]
        windows = [step - self.shown(p) for p in params]
        shifts = self._each(params, [shift(w) for w in windows])
        # Rounded up: a row that was selected once has been selected.
        counts = (self.count[region] + (1 << shifts) - 1) >> shifts
        self._pending.append((region, tuple(params), step))
        return pack(torch.cat([s.reshape(-1) for s in scores]), before, ages, counts), windows

    def commit(self) -> None:
        """What was shown has been told: counts start again."""
        for region, params, step in self._pending:
            self.count[region] = 0
            self._shown.update(dict.fromkeys(params, step))
        self._pending.clear()

    def drop(self) -> None:
        """What was shown has not been told: the step raised."""
        self._pending.clear()

    def positions(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Where the rows of each parameter go among those of the whole."""
        return [self._told[p].positions for p in params]

    def piece(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """When the rows of a parameter were last selected, and how often in the window; to read and to write."""
        part = slice(self._start[param], self._start[param] + self._told[param].count)
        return self.last[part], self.count[part]

    def shown(self, param: Tensor) -> int:
        """Step at which the rows of a parameter were last told of."""
        return self._shown.get(param, self._since)

    def latest(self, param: Tensor) -> int | None:
        """Step of the latest selection from a parameter that was seen."""
        return self._latest.get(param)

    def restore(self, param: Tensor, last: Tensor, count: Tensor, *, latest: int | None, shown: int) -> None:
        """Go on from what another log had."""
        positions = self._told[param].positions
        for own, known in zip(self.piece(param), (last, count), strict=True):
            own.copy_(known if positions is None else known[positions])
        self._shown[param] = shown
        if latest is not None:
            self._latest[param] = latest

    def _each(self, params: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
        """A number for every row: that of its parameter."""
        rows = self._cached(
            ("rows", *params), lambda: torch.tensor([self._told[p].count for p in params], device=self.last.device)
        )
        values = torch.tensor(numbers, dtype=torch.int32, device=self.last.device)
        # With its size known, nobody waits for the device to tell it.
        return values.repeat_interleave(rows, output_size=sum(self._told[p].count for p in params))

    def _region(self, params: Sequence[Tensor]) -> Tensor:
        def make() -> Tensor:
            starts = [(self._start[p], self._told[p].count) for p in params]
            return torch.cat([torch.arange(a, a + n, device=self.last.device) for a, n in starts])

        return self._cached(("region", *params), make)

    def _flat(self, params: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
        """Positions of selected rows in ``last``."""

        def starts() -> Tensor:
            found = []
            for param, index in zip(params, indices, strict=True):
                matrices = 1 if index.ndim == 1 else index.size(0)
                rows = self._told[param].count // matrices
                found += [self._start[param] + b * rows for b in range(matrices)]
            return torch.tensor(found, device=self.last.device)

        flat = torch.cat([i.reshape(-1) for i in indices])
        counts = [n for i in indices for n in ([i.size(0)] if i.ndim == 1 else [i.size(1)] * i.size(0))]
        first = self._cached(("first", *params), starts)
        if len(set(counts)) == 1:
            return (flat.view(len(counts), -1) + first.unsqueeze(1)).view(-1)
        times = torch.tensor(counts, device=first.device)
        return flat + first.repeat_interleave(times, output_size=flat.numel())

    def _cached(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        if key not in self._cache:
            if len(self._cache) > 1000:  # gradients that come and go: every set of parameters is an entry
                self._cache.clear()
            self._cache[key] = make()
        return self._cache[key]


def shift(window: int) -> int:
    """By how many bits counts of a window of steps are shortened, so that they fit."""
    return max(0, window.bit_length() - COUNT_BITS)


def pack(scores: Tensor, before: Tensor, ages: Tensor, counts: Tensor) -> Tensor:
    """One float64 for each row.

    Args:
        scores: Float32, >= 0.
        before: Selected at the step before.
        ages: Steps since selected, 0: now.
        counts: Times selected since the last flush, < 1024.
    """
    broken = ~torch.isfinite(scores)  # the bits of a NaN need not survive an addition
    # Nor those of a subnormal number, which zero with a few bits is: zero is told as a number below every float32.
    bits = torch.where(broken, 0.0, scores.float()).double().clamp(min=_ZERO).view(torch.int64)
    bits |= ages.clamp(max=_COUNT - 1).long()
    bits |= counts.clamp(max=(1 << COUNT_BITS) - 1).long() * _COUNT
    bits |= before.long() * _BEFORE + (ages == 0).long() * _NOW + broken.long() * _BROKEN
    return bits.view(torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpacked:
    """What ``pack`` packed, on the host."""

    scores: Array
    selected: Array
    before: Array
    ages: Array
    counts: Array


def unpack(packed: Array) -> Unpacked:
    """The numbers of merged float64 values of any shape."""
    bits = np.ascontiguousarray(packed, dtype=np.float64).view(np.int64)
    scores = (bits & ~np.int64(_FREE)).view(np.float64)
    return Unpacked(
        scores=np.where(bits & _BROKEN, np.nan, np.where(scores <= _ZERO, 0.0, scores)),
        selected=(bits & _NOW).astype(bool),
        before=(bits & _BEFORE).astype(bool),
        ages=bits & (_COUNT - 1),
        counts=bits >> AGE_BITS & ((1 << COUNT_BITS) - 1),
    )
