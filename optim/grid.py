"""Which ranks work together on a parameter, and which block of its matrices each of them holds.

A parameter is a matrix, a stack of matrices ``[E, m, n]``, a convolution ``[out, in, *kernel]`` or a vector. Mesh axes
that cut a stack along its matrices divide it into stacks of their own; over all other axes the ranks share the work:

    replica 0     block (0, 0)  block (0, 1)        rows cut in two, columns cut in two, held twice:
                  block (1, 0)  block (1, 1)        eight ranks, each holding one block
    replica 1     …
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Layout, index_tensor, length


@dataclass(frozen=True, kw_only=True, slots=True)
class Dims:
    """Tensor dimensions of the matrices' rows and columns; None for the columns of a vector."""

    rows: int
    columns: int | None

    @classmethod
    def of(cls, ndim: int, *, stacked: bool) -> "Dims":
        """Of a vector, a matrix, a stack of matrices, or a convolution (a matrix whose columns have further dims)."""
        if ndim < 2:
            return cls(rows=0, columns=None)
        return cls(rows=1, columns=2) if stacked else cls(rows=0, columns=1)


# No slots: cached_property keeps what follows from the layouts, once a parameter.
@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The blocks of a parameter's matrices over the ranks that share it.

    Args:
        group: Those ranks; None where this rank has whole matrices for itself alone.
        layouts: The layout as each of them sees it, in the order of the group.
        dims: Where the rows and columns are.
    """

    group: dist.ProcessGroup | None
    layouts: tuple[Layout, ...]
    dims: Dims

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return 0 if self.group is None else self.group.rank()

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """(row block, column block) of every rank."""
        rows, columns = self.numbers(self.dims.rows), self.numbers(self.dims.columns)
        return tuple(zip(rows, columns, strict=True))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Which copy of the whole every rank belongs to; a copy has every block once."""
        seen: dict[tuple[int, int], int] = {}
        found = []
        for block in self.blocks:
            found.append(seen.get(block, 0))
            seen[block] = found[-1] + 1
        return tuple(found)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of the piece on every rank."""
        return tuple(layout.local_shape for layout in self.layouts)

    def blocks_along(self, dim: int) -> int:
        """Number of blocks along the rows or the columns."""
        return 1 + max(self.numbers(dim))

    def cut(self, dim: int | None) -> bool:
        """Whether a dimension is cut over ranks of the group."""
        return dim is not None and self.blocks_along(dim) > 1

    def sizes(self, dim: int) -> tuple[int, ...]:
        """Length of every block along a dimension."""
        return self._sizes[dim]

    def number(self, dim: int) -> int:
        """This rank's block along a dimension."""
        return self.numbers(dim)[self.rank]

    def index(self, dim: int, device: torch.device) -> Tensor:
        """Global indices of this rank's piece along a dimension."""
        return index_tensor(self.layouts[self.rank].runs(dim), device=device)

    def numbers(self, dim: int | None) -> tuple[int, ...]:
        """The block along a dimension that each rank holds."""
        return self._numbers[dim]

    # What takes a look at every rank is done once a grid: there may be thousands of ranks, and steps are many.
    @cached_property
    def _numbers(self) -> dict[int | None, tuple[int, ...]]:
        return {dim: self._count(dim) for dim in (self.dims.rows, self.dims.columns)}

    @cached_property
    def _sizes(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for dim, numbers in self._numbers.items():
            if dim is not None and dim < len(self.layouts[0].shape):
                seen = dict(zip(numbers, self.layouts, strict=True))
                found[dim] = tuple(length(seen[b].runs(dim)) for b in range(len(seen)))
        return found

    def _count(self, dim: int | None) -> tuple[int, ...]:
        # By mesh coordinates and not by indices: two ranks with empty pieces hold two blocks.
        keys = [tuple(a.coordinate for a in x.axes if a.dim == dim and dim is not None) for x in self.layouts]
        order = {key: n for n, key in enumerate(sorted(set(keys)))}
        return tuple(order[key] for key in keys)


def shared_coordinates(layout: Layout, dims: Dims) -> list[list[int]]:
    """Mesh coordinates of all ranks that share matrices with this one: all but those of other parts of a stack."""
    stacked = dims.rows > 0
    ranges = [
        [axis.coordinate] if axis.dim is not None and stacked and axis.dim < dims.rows else range(axis.size)
        for axis in layout.axes
    ]
    return [list(c) for c in product(*ranges)]


def require_supported(layout: Layout, dims: Dims, name: str) -> None:
    """Refuse (ValueError, by name) a layout that cuts a convolution along its kernel."""
    beyond = sorted(d for d in layout.sharded_dims if dims.columns is not None and d > dims.columns)
    if beyond:
        raise ValueError(
            f"parameter {name!r} of shape {layout.shape} has the layout ({layout.describe()}), which cuts dimension "
            f"{beyond[0]}; supported are cuts along rows, columns and stacked matrices, dimensions 0 to {dims.columns}"
        )
