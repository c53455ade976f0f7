"""Partial results of the L2-type and maximum norms: sums of squares by row and column, largest magnitude, counts.

Squares are formed and added in float64, block by block so that the wide copy stays in the cache. That is exact to the
last digits for every input dtype, needs no scaling for values up to 1e150, and costs about twice a float32 sum, which
would be off by 1e-7 for a row and by 1e-4 for a large matrix in one go.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 1 << 17
"""Entries a block on a CPU: 1 MiB in float64, about the L2 cache of a core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Squares:
    """Sums of squares of ``[B, R, C]``, float64.

    Args:
        rows: ``[B, R]``.
        columns: ``[B, C]``.
    """

    rows: Tensor
    columns: Tensor


def squares(x: Tensor) -> Squares:
    """Sums of squares by row and by column of ``[B, R, C]``; zeros for an empty piece. NaN and infinity propagate."""
    batch, rows, columns = x.shape
    by_row = torch.zeros(batch, rows, dtype=torch.float64, device=x.device)
    by_column = torch.zeros(batch, columns, dtype=torch.float64, device=x.device)
    step = max(1, _BLOCK // max(1, columns)) if x.device.type == "cpu" else max(1, rows)
    for b in range(batch):
        for start in range(0, rows, step):
            # double() copies unless x is float64 already, so squaring in place would change the caller's tensor.
            block = x[b, start : start + step].double().square()
            by_row[b, start : start + step] = block.sum(dim=1)
            by_column[b] += block.sum(dim=0)
    return Squares(rows=by_row, columns=by_column)


def largest(x: Tensor) -> Tensor:
    """max |x| as a float64 scalar; NaN when any entry is, -inf for an empty piece (neutral under MAX)."""
    if x.numel() == 0:
        return torch.full((), -torch.inf, dtype=torch.float64, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).double()


def nonfinite(x: Tensor, total: Tensor) -> Tensor:
    """Number of NaN and infinite entries, as a float64 scalar. ``total`` is the sum of the squares of ``x``.

    On a CPU, where looking at a number costs nothing, a finite total settles the count without a pass over ``x``.
    """
    if _free_to_read(total) and bool(torch.isfinite(total)):
        return torch.zeros_like(total)
    return (~torch.isfinite(x)).sum(dtype=torch.float64)


def _free_to_read(number: Tensor) -> bool:
    return number.device.type == "cpu"
