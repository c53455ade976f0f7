"""Scalars that the user logs: any name, at any step, on any rank; the mean over the ranks that logged it.

Values wait on the device until the next flush and travel in the tail of its SUM buffer: for every agreed name and every
step since the flush before, a sum and a count. Positions follow from names and steps that all ranks know, so ranks
need not log the same things. A name that was not agreed yet raises a flag in the same buffer; at the next flush all
ranks see the flag, agree on the names and look back one flush further. No value is lost, and nothing is sent off
schedule.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from scion_telemetry.plan import agree
from scion_telemetry.reduce import HostBuffers
from scion_telemetry.rows import Scalar

Number = float | int | Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What the tail of one flush holds: a sum and a count by name and step in ``[first, end)``, and a flag."""

    names: tuple[str, ...]
    first: int
    end: int

    @property
    def size(self) -> int:
        """Numbers in the tail."""
        return 2 * len(self.names) * (self.end - self.first) + 1

    def read(self, tail: Tensor) -> tuple[Scalar, ...]:
        """The means, in ascending order of step."""
        table = tail[:-1].view(self.end - self.first, len(self.names), 2)
        sums, counts = table.unbind(-1)
        logged = counts > 0
        means, places = (sums / counts)[logged].tolist(), logged.nonzero().tolist()  # one by one takes 10 us a number
        return tuple(
            Scalar(step=self.first + s, name=self.names[n], value=mean)
            for (s, n), mean in zip(places, means, strict=True)
        )


class ScalarLog:
    """Pending scalars of one rank.

    Args:
        group: Ranks to average over; None for one process.
        step: Steps taken so far.
    """

    def __init__(self, group: dist.ProcessGroup | None, step: int) -> None:
        self._group = group
        self._names: tuple[str, ...] = ()
        self._pending: list[tuple[int, str, Number]] = []
        self._last = Window(names=(), first=step, end=step)
        self._merged: HostBuffers | None = None
        self._agreed = False

    def add(self, step: int, values: Mapping[str, Number]) -> None:
        """Keep values of a step; tensors stay on their device.

        Raises:
            TypeError: For a value that is not a number or a tensor of one number.
        """
        self._pending += [(step, name, _number(name, value)) for name, value in values.items()]

    def open(self, end: int, *, agreed: bool = False) -> Window:
        """The window of a flush that takes every step before ``end``; agrees on names when some rank has new ones.

        Args:
            end: First step that is not taken.
            agreed: Agree in any case: the last flush has no successor that could look back.
        """
        flagged = False
        if self._merged is not None:
            self._merged.wait()
            flagged = float(self._merged.tail[-1]) > 0
        if agreed or flagged or not self._agreed:
            self._agreed = True
            union = dict.fromkeys(self._names)
            for names in agree(lambda: list(dict.fromkeys(n for _, n, _ in self._pending)), self._group):
                union.update(dict.fromkeys(names))
            self._names = tuple(union)
        first = self._last.first if flagged else self._last.end
        return Window(names=self._names, first=first, end=max(end, first))

    def fill(self, tail: Tensor, window: Window) -> None:
        """Write this rank's values into the tail of the buffers and keep what does not belong there yet."""
        places: list[int] = []
        values: list[Number] = []
        kept: list[tuple[int, str, Number]] = []
        numbers = {name: n for n, name in enumerate(window.names)}
        unknown = False
        for step, name, value in self._pending:
            if step < window.end and name in numbers:
                places.append(2 * ((step - window.first) * len(numbers) + numbers[name]))
                values.append(value)
            else:
                unknown = unknown or name not in numbers
                kept.append((step, name, value))
        if places:
            index = torch.tensor(places, device=tail.device)
            tail.index_add_(0, index, _stack(values, tail.device))
            tail.index_add_(0, index + 1, torch.ones(len(places), dtype=torch.float64, device=tail.device))
        tail[-1] += float(unknown)
        self._pending = kept
        self._last = window

    def close(self, merged: HostBuffers | None) -> None:
        """Keep the merged buffers: the next flush looks at their flag.

        None after values were sent between flushes, with all names agreed on: the last step of the window may get more.
        """
        self._merged = merged
        if merged is None:
            self._last = replace(self._last, end=max(self._last.first, self._last.end - 1))


def _number(name: str, value: Any) -> Tensor | float:
    """A value to keep: a float, or a float64 scalar on its device."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(f"scalar {name!r} must be one real number, got a tensor of shape {tuple(value.shape)}")
        # A copy: the caller may go on to change the tensor in place, and its graph must not be kept alive.
        return value.detach().reshape(()).to(torch.float64, copy=True)
    if getattr(value, "size", None) == 1:  # a numpy array of one number
        value = value.item()
    if isinstance(value, bool) or not hasattr(value, "__float__") or hasattr(value, "__len__"):
        raise TypeError(f"scalar {name!r} must be a number or a tensor of one number, got {value!r}")
    return float(value)


def _stack(values: list[Number], device: torch.device) -> Tensor:
    stacked = torch.tensor(
        [math.nan if isinstance(v, Tensor) else v for v in values], dtype=torch.float64, device=device
    )
    where = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
    if where:
        tensors = torch.stack([v.to(device) for v in values if isinstance(v, Tensor)])
        stacked[torch.tensor(where, device=device)] = tensors
    return stacked
