"""Partial results of norms and counts in float64 throughout, on any device; see ``norms``."""

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Entries of a scratch block on a CPU: 256 KiB in float32, which stays in the cache of a core."""
WHOLE = ("pieces", "squares", "nonfinite", "largest", "magnitudes", "zeros")
"""Partial results of one number a piece."""
VECTORS = ("row_squares", "column_squares")
"""Partial results with a number for every row or column of every matrix of a piece."""


def exact(x: Tensor, wanted: frozenset[str], pieces: int = 0) -> dict[str, Tensor]:
    """Partial results in float64 throughout, without reading a number back. NaN and infinity propagate.

    Args:
        x: ``[B, R, C]``; of several pieces, one after another, ``[N·B, R, C]``.
        wanted: Of ``WHOLE`` and ``VECTORS``.
        pieces: N; results then have a leading dimension of that size. 0: one piece, and none.
    """
    lead = (pieces,) if pieces else ()

    def by_piece(values: Tensor) -> Tensor:
        return values.reshape(*lead, -1)

    found: dict[str, Tensor] = {}
    if not wanted.isdisjoint(("squares", "row_squares", "column_squares", "magnitudes")):
        by_row, by_column, by_matrix = _sums(x, wanted)
        found = {
            "squares": by_piece(by_row).sum(-1),
            "row_squares": by_piece(by_row),
            "column_squares": by_piece(by_column),
            "magnitudes": by_piece(by_matrix).sum(-1),
        }
    if "nonfinite" in wanted:
        found["nonfinite"] = by_piece(~torch.isfinite(x)).sum(-1, dtype=torch.float64)
    if "largest" in wanted:
        low, high = torch.aminmax(by_piece(x), dim=-1)
        found["largest"] = torch.maximum(-low, high).double()
    if "zeros" in wanted:
        found["zeros"] = by_piece(x == 0).sum(-1, dtype=torch.float64)
    return {name: values for name, values in found.items() if name in wanted}


def _sums(x: Tensor, wanted: frozenset[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of squares by row ``[B, R]`` and column ``[B, C]``, and sums of magnitudes by matrix ``[B]``."""
    batch, rows, columns = x.shape
    by_row = torch.zeros(batch, rows, dtype=torch.float64, device=x.device)
    by_column = torch.zeros(batch, columns, dtype=torch.float64, device=x.device)
    magnitudes = torch.zeros(batch, dtype=torch.float64, device=x.device)
    step = max(1, BLOCK // columns) if x.device.type == "cpu" else rows
    together = batch if batch * rows * columns <= BLOCK else 1
    for b in range(0, batch, together):
        for start in range(0, rows, step):
            # double() copies unless x is float64 already, so squaring in place would change the caller's tensor.
            block = x[b : b + together, start : start + step].double()
            if "magnitudes" in wanted:
                magnitudes[b : b + together] += block.abs().sum((1, 2))
            block = block.square()
            by_row[b : b + together, start : start + step] = block.sum(dim=2)
            if "column_squares" in wanted:
                by_column[b : b + together] += block.sum(dim=1)
    return by_row, by_column, magnitudes


def neutral(x: Tensor, wanted: frozenset[str]) -> dict[str, Tensor]:
    """What an empty piece ``[B, R, C]`` contributes."""
    none = torch.zeros((), dtype=torch.float64, device=x.device)
    found = {name: none for name in WHOLE if name != "pieces"} | {"largest": none - torch.inf}
    found["row_squares"] = none.expand(x.size(0) * x.size(1))
    found["column_squares"] = none.expand(x.size(0) * x.size(2))
    return {name: values for name, values in found.items() if name in wanted}
