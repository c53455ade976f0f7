"""The sharded reducer: two flat buffers a flush, laid out the same on every rank, one collective each.

    add() at the place of a piece, on every rank  ->  reduce(): one all-reduce MAX, one SUM  ->  to_host()

Numbers are float64 on the way. Slots that a rank has nothing for keep the neutral element (0 for SUM, -inf for MAX), so
a rank without a parameter, a piece or a gradient takes part without a special case. What must be the same on all ranks
travels ahead in the MAX buffer with its negative: where the largest is not the smallest, ranks differ, and say so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.metrics.declare import Array, Block, Merge, Partial
from scion_telemetry.metrics.pieces import MatrixShape

Kind: TypeAlias = tuple[str, str]
"""(quantity, partial result)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Where a kind of partial result lies in its buffer: parameter n at ``[offsets[n], offsets[n + 1])``."""

    merge: Merge
    offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schema:
    """The layout of both buffers: by kind, then by parameter. Follows from the plan, so all ranks have the same.

    Args:
        spans: By kind.
        sum_size: Numbers in the SUM buffer.
        max_size: Numbers in the MAX buffer, without the header.
    """

    spans: Mapping[Kind, Span]
    sum_size: int
    max_size: int

    @classmethod
    def of(cls, kinds: Iterable[tuple[str, Partial, Iterable[MatrixShape | None]]]) -> "Schema":
        """Lay out kinds one after another; a parameter whose shape is None has no numbers of that kind."""
        spans: dict[Kind, Span] = {}
        used = {Merge.SUM: 0, Merge.MAX: 0}
        for quantity, partial, shapes in kinds:
            offsets = [used[partial.merge]]
            for shape in shapes:
                offsets.append(offsets[-1] + (0 if shape is None else partial.size(shape)))
            spans[(quantity, partial.name)] = Span(merge=partial.merge, offsets=tuple(offsets))
            used[partial.merge] = offsets[-1]
        return cls(spans=spans, sum_size=used[Merge.SUM], max_size=used[Merge.MAX])

    def span(self, kind: Kind, number: int) -> tuple[int, int]:
        """Where the numbers of a parameter lie; an empty interval where it has none."""
        offsets = self.spans[kind].offsets
        return offsets[number], offsets[number + 1]


def own_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to reduce over: one of our own over all ranks, so that collectives never interleave; or the given one.

    A group of some ranks is used as it is: torch names new groups of a part of the world by how many each rank has
    made, and waits for ever where these numbers differ. Our collectives are made by the training thread in the order
    of the program, as everybody's are. None where a single process is all there is.

    Raises:
        ValueError: When this rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ValueError("this rank is not in process_group; make a tracker only on ranks that are")
    theirs: Any = process_group or dist.group.WORLD
    if theirs.size() == 1:
        return None
    if process_group is not None:
        return process_group
    group: dist.ProcessGroup | None = dist.new_group(timeout=_timeout(theirs))
    return group


def drop_group(group: dist.ProcessGroup | None, given: dist.ProcessGroup | None) -> None:
    """Give back what ``own_group`` took: a few sockets and threads, once all ranks are done with it."""
    if group is not given and type(group) is dist.ProcessGroup:  # torch's test group on threads cannot be destroyed
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
        header: Numbers that must be the same on all ranks, by what they are called.
        flags: Further numbers of which the largest is wanted.
    """

    def __init__(
        self,
        schema: Schema,
        device: torch.device,
        *,
        extra: int = 0,
        header: Mapping[str, float] | None = None,
        flags: int = 0,
    ) -> None:
        self.schema = schema
        self.header = dict(header or {})
        self.flags = flags
        self._sum = torch.zeros(schema.sum_size + extra, dtype=torch.float64, device=device)
        head = [*self.header.values(), *(-v for v in self.header.values()), *[0.0] * flags]
        self._max = torch.full((schema.max_size + len(head),), -torch.inf, dtype=torch.float64, device=device)
        if head:
            self._max[schema.max_size :] = torch.tensor(head, dtype=torch.float64, device=device)

    def __contains__(self, kind: Kind) -> bool:
        return kind in self.schema.spans

    @property
    def numbers(self) -> int:
        """Numbers that travel."""
        return self._sum.numel() + self._max.numel()

    def view(self, kind: Kind, number: int) -> Tensor:
        """The numbers of a parameter; writing to them writes to the buffer."""
        start, end = self.schema.span(kind, number)
        return self._buffer(kind)[start:end]

    @property
    def tail(self) -> Tensor:
        """The further numbers to add up."""
        return self._sum[self.schema.sum_size :]

    @property
    def raised(self) -> Tensor:
        """The flags."""
        return self._max[self._max.numel() - self.flags :]

    def put(self, kind: Kind, positions: Tensor, values: Tensor) -> None:
        """Merge float64 ``values`` at absolute ``positions``; nothing where the schema lacks the kind."""
        if kind not in self.schema.spans or not positions.numel():
            return
        buffer = self._buffer(kind)
        if self.schema.spans[kind].merge is Merge.MAX:
            buffer.scatter_reduce_(0, positions, values, "amax")
        else:
            buffer.index_add_(0, positions, values)

    def reduce(self, group: dist.ProcessGroup | None) -> int:
        """Merge over all ranks; returns the number of collectives, at most two.

        Raises:
            ValueError: On all ranks, where something that must be the same is not. On an accelerator ``check`` of the
                merged numbers on the host says so later, because nobody waits for them here.
        """
        if group is None or group.size() == 1:
            return 0
        count = 0
        if self._max.numel():
            dist.all_reduce(self._max, op=dist.ReduceOp.MAX, group=group)
            count += 1
            if self._max.device.type == "cpu":
                check(self.header, self._max[self.schema.max_size :])
        if self._sum.numel():
            dist.all_reduce(self._sum, op=dist.ReduceOp.SUM, group=group)
            count += 1
        return count

    def to_host(self) -> "HostBuffers":
        """Start copying to the host; on an accelerator the copy is asynchronous, so wait before reading."""
        return HostBuffers(self)

    def _buffer(self, kind: Kind) -> Tensor:
        return self._sum if self.schema.spans[kind].merge is Merge.SUM else self._max


def check(header: Mapping[str, float], merged: Tensor) -> None:
    """Refuse (ValueError) merged headers that say that ranks differ."""
    n = len(header)
    for (what, mine), highest, lowest in zip(
        header.items(), merged[:n].tolist(), (-merged[n : 2 * n]).tolist(), strict=True
    ):
        if highest != lowest:
            raise ValueError(
                f"ranks measure at the same time but differ in {what}: from {lowest:.17g} to {highest:.17g}, "
                f"{mine:.17g} on this rank; all ranks must step their optimizers together"
            )


class HostBuffers:
    """Merged partial results on the host."""

    def __init__(self, buffers: Buffers) -> None:
        self.schema = buffers.schema
        self._header, self._flags = buffers.header, buffers.flags
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

    def check(self) -> None:
        """Refuse (ValueError) numbers of ranks that differ in what must be the same."""
        check(self._header, self._max[self.schema.max_size :])

    def has(self, kind: Kind) -> bool:
        """Whether the kind was measured."""
        return kind in self.schema.spans

    def block(self, kind: Kind) -> Block | None:
        """Numbers of all parameters and where they begin; None where the schema has no such kind."""
        span = self.schema.spans.get(kind)
        if span is None:
            return None
        start, end = span.offsets[0], span.offsets[-1]
        offsets: Array = np.array(span.offsets)
        return (self._sum if span.merge is Merge.SUM else self._max)[start:end].numpy(), offsets - start

    @property
    def tail(self) -> Tensor:
        """The further numbers that were added up."""
        return self._sum[self.schema.sum_size :]

    @property
    def raised(self) -> Tensor:
        """The largest of every flag."""
        return self._max[self._max.numel() - self._flags :]
