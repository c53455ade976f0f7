"""The sharded reducer: one flat buffer a merge, laid out the same on every rank, one collective each.

    add() at the place of a piece, on every rank  ->  reduce(): one all-reduce SUM, one MAX  ->  to_host()

Numbers are float64 on the way. Slots that a rank has nothing for keep the neutral element (0 for SUM, -inf for MAX), so
a rank without a parameter, a piece or a gradient takes part without a special case.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.metrics.catalogue import Merge, Partial
from scion_telemetry.metrics.pieces import MatrixShape

Key = tuple[int, str, str]
"""(number of the parameter in the plan, quantity, partial result)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a partial result lies in its buffer."""

    merge: Merge
    start: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The layout of both buffers; frozen when the tracker attaches.

    Args:
        slots: By key.
        sum_size: Numbers in the SUM buffer.
        max_size: Numbers in the MAX buffer.
    """

    slots: Mapping[Key, Slot]
    sum_size: int
    max_size: int

    @classmethod
    def of(cls, entries: Iterable[tuple[int, str, Partial, MatrixShape]]) -> "Schema":
        """Lay out partial results one after another, in the order given."""
        slots: dict[Key, Slot] = {}
        used = {Merge.SUM: 0, Merge.MAX: 0}
        for number, quantity, partial, shape in entries:
            size = partial.size(shape)
            slots[(number, quantity, partial.name)] = Slot(merge=partial.merge, start=used[partial.merge], size=size)
            used[partial.merge] += size
        return cls(slots=slots, sum_size=used[Merge.SUM], max_size=used[Merge.MAX])


def own_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A process group of our own over the ranks of another one (None: all), so that collectives never interleave.

    None where a single process is all there is.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    theirs: Any = process_group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(theirs)
    if len(ranks) == 1:
        return None
    # A part of the ranks must not wait for the others to create a group that they are not in.
    group: dist.ProcessGroup | None = dist.new_group(
        ranks, timeout=_timeout(theirs), use_local_synchronization=process_group is not None
    )
    return group


def drop_group(group: dist.ProcessGroup | None) -> None:
    """Give back what ``own_group`` took: a few sockets and threads, once all ranks are done with it."""
    if type(group) is dist.ProcessGroup:  # torch's test group on threads, a subclass, cannot be destroyed by itself
        dist.destroy_process_group(group)


def _timeout(group: Any) -> timedelta | None:
    # A new group waits for half an hour otherwise, whatever the user chose for the group beside it.
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if (timeout := getattr(options, "_timeout", None)) is not None:
            return timedelta(seconds=timeout.total_seconds())
    return None


class Buffers:
    """Partial results of one flush.

    Args:
        schema: Their layout.
        device: Device of the parameters.
        extra: Further numbers to add up, behind the schema's own (logged scalars).
    """

    def __init__(self, schema: Schema, device: torch.device, extra: int = 0) -> None:
        self.schema = schema
        self.extra = extra
        self._sum = torch.zeros(schema.sum_size + extra, dtype=torch.float64, device=device)
        self._max = torch.full((schema.max_size,), -torch.inf, dtype=torch.float64, device=device)

    def __contains__(self, key: Key) -> bool:
        return key in self.schema.slots

    def view(self, key: Key) -> Tensor:
        """The numbers of a slot; writing to them writes to the buffer."""
        slot = self.schema.slots[key]
        buffer = self._sum if slot.merge is Merge.SUM else self._max
        return buffer[slot.start : slot.start + slot.size]

    @property
    def tail(self) -> Tensor:
        """The further numbers."""
        return self._sum[self.schema.sum_size :]

    def add(self, key: Key, values: Tensor, index: Tensor | None = None) -> None:
        """Merge ``values`` into a slot, at positions ``index`` (all, in order, when None); nothing without the slot."""
        if key not in self.schema.slots:
            return
        view, flat = self.view(key), values.reshape(-1).to(torch.float64)
        if self.schema.slots[key].merge is Merge.MAX:
            torch.maximum(view, flat, out=view)
        elif index is None:
            view.add_(flat)
        else:
            view.index_add_(0, index, flat)

    def reduce(self, group: dist.ProcessGroup | None) -> int:
        """Merge over all ranks; returns the number of collectives, at most two."""
        if group is None or group.size() == 1:
            return 0
        count = 0
        for buffer, op in ((self._sum, dist.ReduceOp.SUM), (self._max, dist.ReduceOp.MAX)):
            if buffer.numel():
                dist.all_reduce(buffer, op=op, group=group)
                count += 1
        return count

    def to_host(self) -> "HostBuffers":
        """Start copying to the host; on an accelerator the copy is asynchronous, so wait before reading."""
        return HostBuffers(self)


class HostBuffers:
    """Merged partial results on the host."""

    def __init__(self, buffers: Buffers) -> None:
        self.schema = buffers.schema
        accelerated = buffers._sum.device.type != "cpu"
        self._sum = buffers._sum.to("cpu", non_blocking=accelerated)
        self._max = buffers._max.to("cpu", non_blocking=accelerated)
        self._event: torch.Event | None = None
        if accelerated:
            self._event = torch.Event(buffers._sum.device)
            self._event.record()

    def wait(self) -> None:
        """Return once the copy has arrived."""
        if self._event is not None:
            self._event.synchronize()

    def get(self, key: Key) -> Tensor:
        """The numbers of a slot; none where the schema has no such slot."""
        slot = self.schema.slots.get(key, Slot(merge=Merge.SUM, start=0, size=0))
        buffer = self._sum if slot.merge is Merge.SUM else self._max
        return buffer[slot.start : slot.start + slot.size]

    @property
    def tail(self) -> Tensor:
        """The further numbers."""
        return self._sum[self.schema.sum_size :]
