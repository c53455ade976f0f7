"""Dion2's selection: L1 scores of rows or columns, and a deterministic top-k. Pure.

Scores are taken in float32 from the momentum as it is stored, whatever its dtype. (The reference ranks in bfloat16 when
the scope is global, which picks other rows in most cases that are at all close.)
"""

import math
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["local", "global"]


def selection_dim(rows: int, columns: int, *, rows_cut: bool, columns_cut: bool) -> int:
    """Dimension that is selected along: -2 (rows) or -1 (columns).

    The one that is cut over ranks, or else (neither or both) the shorter one, rows on a tie (microsoft/dion).
    """
    if rows_cut != columns_cut:
        return -2 if rows_cut else -1
    return -2 if rows <= columns else -1


def selected_count(fraction: float, n: int) -> int:
    """k = max(1, ⌈fraction · n⌉), and 0 where there is nothing to select.

    The product is rounded to 9 digits first, so that 0.07 of 100 is 7 and not the 8 of binary floating point.
    """
    return min(n, max(1, math.ceil(round(fraction * n, 9))))


def l1_scores(momentum: Tensor, dim: int) -> Tensor:
    """L1 norms of the rows (``dim=-2``) or columns (``dim=-1``) of ``[..., m, n]``, in float32."""
    return momentum.abs().sum(dim=-1 if dim == -2 else -2, dtype=torch.float32)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Ascending indices of the k largest scores along the last dimension; of equal scores the lower index wins.

    A NaN counts as larger than every number, so a poisoned row is selected and shows.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(dim=-1).values


def take(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """Selected rows or columns of ``[..., m, n]``; ``indices`` is ``[..., k]`` with the same leading dimensions."""
    if indices.ndim == 1:
        return x.index_select(dim, indices)
    return x.gather(dim, _expand(indices, x, dim))


def put_(x: Tensor, indices: Tensor, dim: int, values: Tensor) -> Tensor:
    """Write ``values`` over the selected rows or columns of ``x``, in place."""
    if indices.ndim == 1:
        return x.index_copy_(dim, indices, values)
    return x.scatter_(dim, _expand(indices, x, dim), values)


def _expand(indices: Tensor, x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = indices.size(-1)
    return indices.unsqueeze(-1 if dim == -2 else -2).expand(shape)
