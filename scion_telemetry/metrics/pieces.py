"""A piece of a parameter, seen as matrices with their places in the whole: the one view that every metric reads.

A parameter is B matrices ``[m, n]``: a matrix is B=1; a stack of experts ``[E, m, n]`` is B=E; a convolution
``[out, in, *kernel]`` is one matrix ``[out, in·∏kernel]``; a vector of n entries is the diagonal matrix it acts as, and
stored as ``[n, 1]``. A partial result of a piece is added at the place of the piece, so one rule serves every layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scion_telemetry.optim.layout import Layout, index_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixShape:
    """A parameter as B matrices of m rows and n columns, as stored.

    Args:
        batch: B.
        rows: m.
        columns: n.
        vector: It is a vector: a diagonal matrix of which the diagonal is stored.
        transposed: Norms are those of the transpose (an embedding ``[vocab, d]`` maps vocab to d).
        stacked: The first dimension counts matrices, even where that is one.
    """

    batch: int
    rows: int
    columns: int
    vector: bool = False
    transposed: bool = False
    stacked: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], role: str) -> "MatrixShape":
        """The view of a parameter by its global shape and role."""
        if role == "vector" or len(shape) < 2:
            return cls(batch=1, rows=math.prod(shape), columns=1, vector=True)
        if len(shape) == 3 and role != "conv":
            return cls(batch=shape[0], rows=shape[1], columns=shape[2], stacked=True)
        return cls(batch=1, rows=shape[0], columns=math.prod(shape[1:]), transposed=role == "embedding")

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.batch * self.rows * self.columns

    @property
    def d_out(self) -> int:
        """Output dimension of the map."""
        return self.columns if self.transposed else self.rows

    @property
    def d_in(self) -> int:
        """Input dimension of the map."""
        if self.vector:
            return self.rows
        return self.rows if self.transposed else self.columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which matrices, rows and columns of the whole a piece holds; None where it holds all of them in order.

    Args:
        batch: Indices of matrices, int64.
        rows: Indices of rows.
        columns: Indices of columns.
    """

    shape: MatrixShape
    batch: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None

    @classmethod
    def of(cls, layout: Layout, shape: MatrixShape, device: torch.device | None = None) -> "Place":
        """The place of this rank's piece."""

        def indices(dim: int) -> Tensor | None:
            return index_tensor(layout.runs(dim), device=device) if dim in layout.sharded_dims else None

        if shape.vector:
            return cls(shape=shape, rows=_flat(layout, range(len(layout.shape)), device))
        if shape.stacked:
            return cls(shape=shape, batch=indices(0), rows=indices(1), columns=indices(2))
        return cls(shape=shape, rows=indices(0), columns=_flat(layout, range(1, len(layout.shape)), device))

    def vector_index(self, dim: int) -> Tensor | None:
        """Positions of the piece's rows (``-2``) or columns (``-1``) in a flat ``[B·m]`` or ``[B·n]`` vector."""
        along = self.rows if dim == -2 else self.columns
        if self.batch is None and along is None:
            return None
        size = self.shape.rows if dim == -2 else self.shape.columns
        device = (along if along is not None else self.batch).device  # type: ignore[union-attr]
        along = torch.arange(size, device=device) if along is None else along
        batch = torch.arange(self.shape.batch, device=device) if self.batch is None else self.batch
        return (batch.unsqueeze(-1) * size + along).flatten()


def as_matrices(piece: Tensor, shape: MatrixShape) -> Tensor:
    """A local piece as ``[B, R, C]``, without a copy where strides allow it."""
    if shape.vector:
        return piece.reshape(1, -1, 1)
    if shape.stacked:
        return piece
    return piece.reshape(1, piece.size(0), -1) if piece.numel() else piece.new_empty(1, piece.size(0), _columns(piece))


def _columns(piece: Tensor) -> int:
    return math.prod(piece.shape[1:])


def _flat(layout: Layout, dims: range, device: torch.device | None) -> Tensor | None:
    """Positions of a piece in the flattened dimensions ``dims``."""
    if not any(d in layout.sharded_dims for d in dims):
        return None
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for d in dims:
        index = (index.unsqueeze(-1) * layout.shape[d] + index_tensor(layout.runs(d), device=device)).flatten()
    return index
