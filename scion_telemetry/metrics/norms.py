"""Partial results of norms and counts of many pieces at once.

Two ways give the same numbers:

* On an accelerator, and for float64, entries are squared in float64. Nothing is read back.
* On a CPU, float32 and narrower entries are squared and added in float32 over short chunks, and chunks in float64:
  norms of rows and columns within 1e-7 and whole norms within 5e-9 of the exact ones, at a fifth of the cost. A piece
  whose entries are so large or so small that float32 squares would overflow or vanish is done the other way, so 1e30
  and 1e-30 are as exact as 1; so is a small or a narrow one, where it costs nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 128
"""Longest chunk that is added up in float32 where only the whole norm is wanted; half of it for norms of rows, and a
quarter for those of short rows: the root that a chunk's norm is rounded to averages out over chunks."""
_SHORT = 16
"""Rows that are added up in float32, for columns: the kernel adds them one by one."""
_BLOCK = 1 << 16
"""Entries of a scratch block on a CPU: 256 KiB in float32, which stays in the cache of a core."""
_LITTLE = 1 << 12
"""Pieces of fewer entries, and of rows shorter than a chunk, are summed in float64."""
_LARGE = 1e17
"""Up to here a chunk of squares does not overflow in float32 (3e38), columns of 10,000 entries included."""
_SMALL = 1e-13
"""Chunk norms below may have lost squares to underflow (1e-38, where denormals are flushed)."""

WHOLE = ("pieces", "squares", "nonfinite", "largest", "magnitudes", "zeros")
"""Partial results of one number a piece."""
VECTORS = ("row_squares", "column_squares")
"""Partial results with a number for every row or column of every matrix of a piece."""


def measure(pieces: Sequence[Tensor], wanted: frozenset[str], scale: float = 1.0) -> dict[str, Tensor]:
    """The wanted partial results of pieces ``[B, R, C]``, times ``scale`` (>= 0) in the entries.

    Args:
        pieces: On one device; empty ones contribute zeros, and -inf to maxima.
        wanted: Of ``WHOLE`` and ``VECTORS``.
        scale: Factor on all entries.

    Returns:
        Float64 by name: ``[N]`` of ``WHOLE``; of ``VECTORS`` the numbers of all pieces one after another.
    """
    names = wanted - {"pieces"}
    found: list[dict[str, Tensor]] = [{}] * len(pieces)
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, x in enumerate(pieces):
        alike.setdefault((x.shape, x.dtype), []).append(i)
    for which in alike.values():
        for i, values in zip(which, _measure([pieces[i] for i in which], names), strict=True):
            found[i] = values
    results = {
        name: torch.stack([v[name] for v in found]) if name in WHOLE else torch.cat([v[name] for v in found])
        for name in (names if pieces else ())
    }
    if pieces and "pieces" in wanted:
        results["pieces"] = torch.ones(len(pieces), dtype=torch.float64, device=pieces[0].device)
    if scale != 1.0:
        for name in results.keys() & {"squares", *VECTORS}:
            results[name] *= scale**2
        for name in results.keys() & {"largest", "magnitudes"}:
            results[name] *= scale
    return results


def _measure(xs: Sequence[Tensor], wanted: frozenset[str]) -> list[dict[str, Tensor]]:
    """Partial results of pieces of one shape and dtype."""
    x = xs[0]
    if not x.numel():
        return [_empty(x, wanted)] * len(xs)
    if x.numel() < _LITTLE:  # together, because a call costs more than their sums
        together = exact(torch.stack(list(xs)).flatten(0, 1), wanted, len(xs))
        return [{name: values[i] for name, values in together.items()} for i in range(len(xs))]
    if x.size(2) < CHUNK or x.dtype == torch.float64 or not free_to_read(x):
        return [exact(x, wanted) for x in xs]
    careful = "row_squares" in wanted
    norms, ends = [], []
    for x in xs:
        norms.append(chunk_norms(x if x.dtype == torch.float32 else x.float(), careful=careful))
        if "largest" in wanted:
            ends.append(torch.stack(torch.aminmax(x)))  # while the piece is in the cache
    squares = torch.stack(norms).double().square_()
    rows = squares.sum(-1).flatten(1)
    found = {"squares": rows.sum(1), "nonfinite": torch.zeros(len(xs), dtype=torch.float64, device=x.device)}
    if ends:
        low, high = torch.stack(ends, dim=1).double()
        found["largest"] = torch.maximum(-low, high)
    chunks = squares.flatten(1)
    most, least = chunks.amax(1).tolist(), chunks.amin(1).tolist()
    results = []
    scratch = _Scratch()
    for i, x in enumerate(xs):
        # NaN too: its count needs the entries. Of entries below 1e-23 float32 squares are 0, as those of zeros are.
        if not most[i] <= _LARGE**2 or (most[i] < _SMALL**2 and bool(x.any())):
            results.append(exact(x, wanted))
            continue
        own = {name: values[i] for name, values in found.items() if name in wanted}
        if careful:  # where float32 may have flushed a square to zero, beside others that it has not
            flushed = 0 <= least[i] < _SMALL**2 and most[i] > 0
            own["row_squares"] = exact(x, frozenset(("row_squares",)))["row_squares"] if flushed else rows[i]
        results.append(own | scratch.others(x, wanted))
    return results


class _Scratch:
    """Partial results that need a copy of the entries; it is kept, because fresh memory costs more than sums."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def others(self, x: Tensor, wanted: frozenset[str]) -> dict[str, Tensor]:
        """Of ``column_squares``, ``magnitudes`` and ``zeros`` what is wanted, block by block."""
        found: dict[str, Tensor] = {}
        names = wanted & {"column_squares", "magnitudes", "zeros"}
        if not names:
            return found
        batch, rows, columns = x.shape
        by_column = torch.zeros(batch, columns, dtype=torch.float64, device=x.device)
        magnitudes = zeros = 0.0
        step = max(1, _BLOCK // columns // _SHORT) * _SHORT
        for b in range(batch):
            for start in range(0, rows, step):
                block = x[b, start : start + step]
                block = block if block.dtype == torch.float32 else block.float()
                if "column_squares" in names:
                    by_column[b] += column_sums(torch.mul(block, block, out=self._like(block)))
                if "magnitudes" in names:
                    magnitudes += float(torch.abs(block, out=self._like(block)).sum(dtype=torch.float64))
                if "zeros" in names:
                    zeros += block.numel() - int(block.count_nonzero())
        found["column_squares"] = by_column.flatten()
        found["magnitudes"] = torch.tensor(magnitudes, dtype=torch.float64, device=x.device)
        found["zeros"] = torch.tensor(zeros, dtype=torch.float64, device=x.device)
        return {name: found[name] for name in names}

    def _like(self, block: Tensor) -> Tensor:
        if self._memory is None or self._memory.numel() < block.numel():
            self._memory = torch.empty(max(_BLOCK, block.numel()), dtype=torch.float32, device=block.device)
        return self._memory[: block.numel()].view(block.shape)


def chunk_norms(x: Tensor, *, careful: bool) -> Tensor:
    """L2 norms of the chunks of every row of float32 ``[B, R, C]``: ``[B, R, K]``."""
    columns = x.size(-1)
    longest = CHUNK if not careful else CHUNK // 2 if columns >= 2 * CHUNK else CHUNK // 4
    count = -(-columns // longest)
    while columns % count and columns // count >= longest // 4:
        count += 1
    if columns % count and columns > longest:  # a prime, say
        cut = columns - columns % longest
        parts = (x[..., :cut], x[..., cut:])
        return torch.cat([chunk_norms(part, careful=careful) for part in parts], dim=-1)
    norms: Tensor = torch.linalg.vector_norm(x.view(*x.shape[:-1], count, columns // count), dim=-1)
    return norms


def column_sums(squares: Tensor) -> Tensor:
    """Sums of the columns of a float32 matrix ``[R, C]``: float64 ``[C]``."""
    whole = squares.size(0) // _SHORT * _SHORT
    total = squares[whole:].sum(dim=0).double()
    if whole:
        total += squares[:whole].view(-1, _SHORT, squares.size(1)).sum(dim=1).sum(dim=0, dtype=torch.float64)
    return total


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
    step = max(1, _BLOCK // columns) if x.device.type == "cpu" else rows
    together = batch if batch * rows * columns <= _BLOCK else 1
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


def _empty(x: Tensor, wanted: frozenset[str]) -> dict[str, Tensor]:
    none = torch.zeros((), dtype=torch.float64, device=x.device)
    found = {name: none for name in WHOLE if name != "pieces"} | {"largest": none - torch.inf}
    found["row_squares"] = none.expand(x.size(0) * x.size(1))
    found["column_squares"] = none.expand(x.size(0) * x.size(2))
    return {name: values for name, values in found.items() if name in wanted}


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Σ x·y of two pieces of one shape, as a float64 scalar."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for a, b in zip(torch.split(x.reshape(-1), _BLOCK), torch.split(y.reshape(-1), _BLOCK), strict=True):
        total += (a.double() * b.double()).sum()
    return total


def free_to_read(x: Tensor) -> bool:
    """Whether looking at a number of ``x`` costs nothing, so that it may decide how to go on."""
    return x.device.type == "cpu"
