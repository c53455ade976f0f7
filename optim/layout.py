"""Where the pieces of a parameter live: the one place that knows sharding.

A ``Layout`` is read from a tensor. It answers which global indices of each tensor dimension this rank (or another one)
holds, for every placement that DTensor knows: replicated, sharded along any dimension, evenly or not, empty, sharded
twice, and right-to-left (``_StridedShard``, which FSDP2 over tensor parallelism makes).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

Runs = tuple[tuple[int, int], ...]
"""Global indices as ascending half-open intervals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One dimension of the device mesh, as this tensor uses it.

    Args:
        size: Number of ranks along it.
        coordinate: This rank's place.
        dim: Tensor dimension that it shards; None where it replicates.
        split_factor: More than 1 for ``_StridedShard``: the pieces the dimension had been cut into before.
    """

    size: int
    coordinate: int
    dim: int | None = None
    split_factor: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The global shape of a tensor and how each mesh dimension divides it.

    Args:
        shape: Global shape.
        axes: One entry a mesh dimension; empty for a plain tensor.
        mesh: The mesh, for its process groups. Not part of equality: equal axes mean equal pieces.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...] = ()
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Read the layout of a plain tensor or a DTensor.

        Raises:
            ValueError: For a ``Partial`` placement (the tensor is not reduced yet), for a placement of a kind that is
                not known, and for a DTensor whose local piece contradicts its declared global shape.
        """
        if not isinstance(tensor, DTensor):
            return cls(shape=tuple(tensor.shape))
        mesh = tensor.device_mesh
        coordinates = mesh.get_coordinate() or [0] * mesh.ndim
        axes = tuple(
            _axis(placement, mesh.size(i), coordinates[i], tensor.ndim) for i, placement in enumerate(tensor.placements)
        )
        layout = cls(shape=tuple(tensor.shape), axes=axes, mesh=mesh)
        actual = tuple(local(tensor).shape)
        if mesh.get_coordinate() is not None and actual != layout.local_shape:
            raise ValueError(
                f"the local piece has shape {actual}, but global shape {layout.shape} with placements "
                f"{tuple(tensor.placements)} gives {layout.local_shape}; pass shape= and stride= to DTensor.from_local"
            )
        return layout

    def runs(self, dim: int) -> Runs:
        """Global indices of tensor dimension ``dim`` that this rank holds."""
        runs: Runs = ((0, self.shape[dim]),)
        for axis in self.axes:
            if axis.dim == dim:
                runs = _cut(runs, axis)
        return runs

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece on this rank."""
        return tuple(length(self.runs(d)) for d in range(len(self.shape)))

    @property
    def sharded_dims(self) -> frozenset[int]:
        """Tensor dimensions that are cut over more than one rank."""
        return frozenset(a.dim for a in self.axes if a.dim is not None and a.size > 1)

    def at(self, coordinates: Sequence[int]) -> "Layout":
        """The same layout seen from the rank at other mesh coordinates."""
        axes = tuple(replace(a, coordinate=c) for a, c in zip(self.axes, coordinates, strict=True))
        return replace(self, axes=axes)

    def describe(self) -> str:
        """For people: ``whole``, ``Shard(0) x2``, ``Replicate x2, Shard(0) x4``."""
        return ", ".join(_name(a) for a in self.axes) or "whole"


def local(tensor: Tensor) -> Tensor:
    """The piece of ``tensor`` on this rank; a plain tensor is its own piece. No copy, no communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_mesh(tensor: Tensor) -> bool:
    """Whether this rank is one of those that ``tensor`` is laid out over."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def length(runs: Runs) -> int:
    """Number of indices in ``runs``."""
    return sum(stop - start for start, stop in runs)


def index_tensor(runs: Runs, *, device: torch.device | None = None) -> Tensor:
    """The indices of ``runs`` as an int64 tensor."""
    parts = [torch.arange(start, stop, device=device, dtype=torch.int64) for start, stop in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def take_piece(full: Tensor, layout: Layout) -> Tensor:
    """This rank's piece of a full tensor of the layout's global shape."""
    piece = full
    for dim in layout.sharded_dims:
        piece = piece.index_select(dim, index_tensor(layout.runs(dim), device=full.device))
    return piece


def split_rows(layout: Layout, parts: int) -> Layout:
    """A matrix ``[parts·h, d]`` seen as ``[parts, h, d]``.

    Raises:
        ValueError: When the rows are no multiple of ``parts``, or some rank's piece cuts a part.
    """
    rows, columns = layout.shape
    if rows % parts:
        raise ValueError(f"{rows} rows are no multiple of {parts} heads")
    axes = tuple(a if a.dim is None else replace(a, dim=2 * a.dim) for a in layout.axes)
    split = replace(layout, shape=(parts, rows // parts, columns), axes=axes)
    height = rows // parts
    for coordinates in product(*(range(a.size) for a in layout.axes)):
        mine, seen = layout.at(coordinates).runs(0), split.at(coordinates).runs(0)
        if _flat(mine) != _flat(tuple((start * height, stop * height) for start, stop in seen)):
            raise ValueError(
                f"the layout ({layout.describe()}) cuts heads of {height} rows; cut between heads or omit num_heads"
            )
    return split


def _flat(runs: Runs) -> Runs:
    """Runs with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _axis(placement: object, size: int, coordinate: int, ndim: int) -> Axis:
    if isinstance(placement, Replicate):
        return Axis(size=size, coordinate=coordinate)
    if isinstance(placement, Partial):
        raise ValueError(
            f"placement {placement} is an unreduced sum; reduce it first (redistribute to Replicate or Shard)"
        )
    if isinstance(placement, _StridedShard):
        return Axis(
            size=size,
            coordinate=coordinate,
            dim=placement.dim % ndim,
            split_factor=int(cast(int, placement.split_factor)),
        )
    if isinstance(placement, Shard):
        return Axis(size=size, coordinate=coordinate, dim=placement.dim % ndim)
    raise ValueError(f"placement {placement!r} is not known; known are Replicate, Shard and _StridedShard")


def _cut(runs: Runs, axis: Axis) -> Runs:
    # torch.chunk semantics at both levels: first into split_factor parts, then each part over the ranks.
    total = length(runs)
    part = -(-total // axis.split_factor) if total else 0
    kept: list[tuple[int, int]] = []
    for begin in range(0, total, part) if part else ():
        size = min(part, total - begin)
        chunk = -(-size // axis.size)
        start = min(chunk * axis.coordinate, size)
        stop = min(start + chunk, size)
        kept.extend(_slice(runs, begin + start, begin + stop))
    return tuple(kept)


def _slice(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    kept = []
    for low, high in runs:
        size = high - low
        first, last = max(start, 0), min(stop, size)
        if first < last:
            kept.append((low + first, low + last))
        start, stop = start - size, stop - size
    return kept


def _name(axis: Axis) -> str:
    if axis.dim is None:
        kind = "Replicate"
    elif axis.split_factor > 1:
        kind = f"StridedShard({axis.dim}, {axis.split_factor})"
    else:
        kind = f"Shard({axis.dim})"
    return f"{kind} x{axis.size}"
