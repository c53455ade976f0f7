"""Partial results of norms and counts of many pieces at once.

Two ways give the same numbers:

* On an accelerator, and for float64, entries are squared in float64. Nothing is read back.
* On a CPU, float32 and narrower entries are squared and added in float32 over short chunks, and chunks in float64:
  norms of the whole, of rows and of the longest columns within 1e-7 of the exact ones, at a fifth of the cost. What has
  entries so large or so small that float32 squares would overflow or vanish, or roundings that cannot average out, is
  done the other way, so 1e30 and 1e-30 are as exact as 1; so is a small or a narrow piece, where it costs nothing.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from scion_telemetry.metrics.exact import BLOCK, VECTORS, WHOLE, exact, neutral

__all__ = ["CHUNK", "VECTORS", "WHOLE", "dot", "free_to_read", "measure"]

CHUNK = 64
"""Longest chunk that is added up in float32, four or eight entries to a lane of the processor; half of it for norms of
short rows: the root that a chunk's norm is rounded to averages out over chunks."""
_SHORT = 8
"""Rows that are added up in float32, for columns: the kernel adds them one by one."""
_ALIKE, _FEW, _MANY = 1e-4, 0.05, 0.25
"""Where sums of more than a few neighbouring chunks (of the few of a row, many) differ by less, entries may be of one
size, as those of signs are, and roundings all go the same way: 1e-7 and more."""
_NEIGHBOURS, _LOOK = 256, 6
"""Neighbours that are looked at, of a piece, and chunks of a row."""
_MOST = 0.5
"""So it is where a chunk holds more than this share of the whole: its roundings do not average out."""
_LITTLE = 1 << 12
"""Pieces of fewer entries are summed in float64; so are those of short rows, where norms of rows are wanted."""
_SMALL_PIECE = 1 << 14
"""Up to here pieces of a shape are copied together, to be summed by one call."""
_LARGE = 1e17
"""Up to here a chunk of squares does not overflow in float32 (3e38), columns of 10,000 entries included."""
_SMALL = 1e-13
"""Chunk norms below may have lost squares to underflow (1e-38, where denormals are flushed)."""


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
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, x in enumerate(pieces):
        alike.setdefault((x.shape, x.stride(), x.dtype), []).append(i)
    groups = [_alike([pieces[i] for i in which], names) for which in alike.values()]
    order = [i for which in alike.values() for i in which]
    results = {name: _in_order([g[name] for g in groups], order, name in WHOLE) for name in names if groups}
    if pieces and "pieces" in wanted:
        results["pieces"] = torch.ones(len(pieces), dtype=torch.float64, device=pieces[0].device)
    if scale != 1.0:
        for name in results.keys() & {"squares", *VECTORS}:
            results[name] *= scale**2
        for name in results.keys() & {"largest", "magnitudes"}:
            results[name] *= scale
    return results


def _in_order(groups: Sequence[Tensor], order: Sequence[int], whole: bool) -> Tensor:
    """Results of groups ``[n]`` or ``[n, L]`` as those of the pieces one after another."""
    if order == sorted(order):
        return torch.cat([g.flatten() for g in groups])
    rows = [row for g in groups for row in g.unbind()]
    back: list[Tensor] = [rows[0]] * len(rows)
    for i, row in zip(order, rows, strict=True):
        back[i] = row
    return torch.stack(back) if whole else torch.cat(back)


def _alike(xs: Sequence[Tensor], wanted: frozenset[str]) -> dict[str, Tensor]:
    """Partial results of n pieces of one shape, stride and dtype: ``[n]`` and ``[n, L]``."""
    x = xs[0]
    if not x.numel():
        return {name: values.expand(len(xs), *values.shape).clone() for name, values in neutral(x, wanted).items()}
    if x.numel() < _LITTLE:  # together, because a call costs more than their sums
        return exact(torch.stack(list(xs)).flatten(0, 1), wanted, len(xs))
    longest = _chunk(x, rows="row_squares" in wanted)
    if longest is None or x.dtype == torch.float64 or not free_to_read(x):
        found = [exact(x, wanted) for x in xs]
        return {name: torch.stack([f[name] for f in found]) for name in wanted}
    return _quick(xs, wanted, longest)


def _quick(xs: Sequence[Tensor], wanted: frozenset[str], longest: int) -> dict[str, Tensor]:
    """The same in float32 by chunks, on a CPU; what float32 does not hold is done again in float64."""
    chunks, lows, highs = [], [], []
    by_row = "row_squares" in wanted
    # A call costs more than the copy of a small piece; a large one is read while it is in the cache.
    for x in torch.stack(list(xs)).unsqueeze(0) if xs[0].numel() <= _SMALL_PIECE else (x.unsqueeze(0) for x in xs):
        wide = x.contiguous() if x.dtype == torch.float32 else x.float().contiguous()
        chunks.append(chunk_norms(wide if by_row else wide.view(len(x), 1, 1, -1), longest))
        if "largest" in wanted:
            low, high = (x.amin((1, 2, 3)), x.amax((1, 2, 3))) if len(x) > 1 else torch.aminmax(x)
            lows.append(low.view(-1))
            highs.append(high.view(-1))
    squares = torch.cat(chunks).double().square_()
    rows = squares.sum(-1).flatten(1)
    found = {"squares": rows.sum(1), "row_squares": rows}
    found["nonfinite"] = torch.zeros_like(found["squares"])
    if lows:
        found["largest"] = torch.maximum(-torch.cat(lows), torch.cat(highs)).double()
    found |= _others(xs, wanted)
    wrong_rows = _doubtful_rows(squares, rows) if by_row else None
    for i, wrong in enumerate(_doubtful_pieces(squares.flatten(1), found["squares"])):
        if wrong is None and not bool(xs[i].any()):
            continue  # nothing but zeros
        if wrong is not False:
            for name, values in exact(xs[i], wanted).items():
                found[name][i] = values
        elif wrong_rows is not None and bool((some := wrong_rows[i]).any()):
            rows[i, some] = exact(xs[i].flatten(0, 1)[some].unsqueeze(0), frozenset(("row_squares",)))["row_squares"]
            found["squares"][i] = rows[i].sum()
    return {name: values for name, values in found.items() if name in wanted}


def _doubtful_pieces(chunks: Tensor, total: Tensor) -> list[bool | None]:
    """Of squared norms of chunks ``[n, K]`` and their sums whether to do a piece again; None: if it is not zero."""
    most = chunks.amax(1)
    again = ((alike_share(chunks) > _FEW) | (most > _MOST * total)).tolist()
    # NaN too: its count needs the entries. Of entries below 1e-23 float32 squares are 0, as those of zeros are.
    return [
        True if wrong or not high <= _LARGE**2 else None if high < _SMALL**2 else False
        for wrong, high in zip(again, most.tolist(), strict=True)
    ]


def _doubtful_rows(chunks: Tensor, total: Tensor) -> Tensor:
    """Of squared norms of chunks ``[n, B, R, K]`` and of rows ``[n, B·R]`` which rows to do again."""
    low, high = chunks.amin(-1).flatten(1), chunks.amax(-1).flatten(1)
    alike = alike_share(chunks[..., :_LOOK].flatten(0, 2)).view_as(total)
    # Squares may have been flushed to zero beside others that were not, or they are zeros.
    return (low < _SMALL**2) | (high > _MOST * total) | (alike > _MANY)


def _others(xs: Sequence[Tensor], wanted: frozenset[str]) -> dict[str, Tensor]:
    """Partial results that need a copy of the entries, block by block: the room for one is kept."""
    names = wanted & {"column_squares", "magnitudes", "zeros"}
    found = {}
    if names:
        count, (batch, rows, columns), device = len(xs), xs[0].shape, xs[0].device
        by_column = torch.zeros(count, batch, columns, dtype=torch.float64, device=device)
        magnitudes, zeros = torch.zeros(2, count, dtype=torch.float64, device=device)
        step = max(1, BLOCK // columns // _SHORT) * _SHORT
        room = torch.empty(min(step, rows) * columns, dtype=torch.float32, device=device)
        for i, b in product(range(count), range(batch)):
            for part in torch.split(xs[i][b], step):
                block = part if part.dtype == torch.float32 else part.float()
                scratch = room[: block.numel()].view(block.shape)
                if "column_squares" in names:
                    by_column[i, b] += column_sums(torch.mul(block, block, out=scratch))
                if names & {"magnitudes", "zeros"}:
                    torch.abs(block, out=scratch)
                if "magnitudes" in names:
                    magnitudes[i] += short_sums(scratch.view(-1)).sum(dtype=torch.float64)
                if "zeros" in names and not float(scratch.amin()) > 0:  # which is sooner found than they are counted
                    zeros[i] += block.numel() - block.count_nonzero()
        found = {"column_squares": by_column.flatten(1), "magnitudes": magnitudes, "zeros": zeros}
    return {name: found[name] for name in names}


def _chunk(x: Tensor, *, rows: bool) -> int | None:
    """Longest chunk that serves a piece ``[B, R, C]``; None where float64 is as good.

    Args:
        x: The piece.
        rows: Whether norms of rows are wanted; otherwise chunks may go from one row into the next.
    """
    if not rows or x.size(2) >= 4 * CHUNK:
        return CHUNK
    return CHUNK // 2 if x.size(2) >= 2 * CHUNK else None


def chunk_norms(x: Tensor, longest: int) -> Tensor:
    """L2 norms of chunks of the last dimension of float32 ``[..., C]``: ``[..., K]``."""
    columns = x.size(-1)
    size = next((n for n in range(min(longest, columns), longest // 4, -1) if columns % n == 0), None)
    if size is None:  # a prime, say
        cut = columns - columns % longest
        parts = [x[..., :cut].view(*x.shape[:-1], cut // longest, longest), x[..., cut:].unsqueeze(-2)]
        return torch.cat([torch.linalg.vector_norm(part, dim=-1) for part in parts if part.size(-2)], dim=-1)
    norms: Tensor = torch.linalg.vector_norm(x.view(*x.shape[:-1], columns // size, size), dim=-1)
    return norms


def short_sums(x: Tensor) -> Tensor:
    """Sums of short parts of a float32 vector ``[N]``."""
    whole = x.numel() // CHUNK * CHUNK
    return torch.cat([x[:whole].view(-1, CHUNK).sum(dim=1), x[whole:].sum().unsqueeze(0)])


def alike_share(sums: Tensor) -> Tensor:
    """Share of neighbours among the sums of parts ``[n, K]`` that are nearly the same, ``[n]``; zeros do not count.

    Of some hundreds of neighbours, spread over all of them.
    """
    step = max(1, sums.size(1) // _NEIGHBOURS)
    one, other = sums[:, :-1:step], sums[:, 1::step]
    near = (other - one).abs() < _ALIKE * other.abs()
    return near.sum(1) / (other != 0).sum(1).clamp(min=1)


def column_sums(squares: Tensor) -> Tensor:
    """Sums of the columns of a float32 matrix ``[R, C]``: float64 ``[C]``."""
    whole = squares.size(0) // _SHORT * _SHORT
    total = squares[whole:].sum(dim=0).double()
    if whole:
        total += squares[:whole].view(-1, _SHORT, squares.size(1)).sum(dim=1).sum(dim=0, dtype=torch.float64)
    return total


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Σ x·y of two pieces of one shape, as a float64 scalar; within 1e-7 of ‖x‖‖y‖."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        return total
    parts = list(zip(torch.split(x.reshape(-1), BLOCK), torch.split(y.reshape(-1), BLOCK), strict=True))
    if torch.float64 not in (x.dtype, y.dtype) and free_to_read(x):
        sums = torch.cat([short_sums(torch.mul(a.float(), b.float())) for a, b in parts])
        total += sums.sum(dtype=torch.float64)
        # Of a small one products may have vanished in float32.
        if alike_share(sums.unsqueeze(0)) <= _FEW and _SMALL < abs(float(total)) < torch.inf:
            return total
        total.zero_()
    for a, b in parts:
        total += (a.double() * b.double()).sum()
    return total


def free_to_read(x: Tensor) -> bool:
    """Whether looking at a number of ``x`` costs nothing, so that it may decide how to go on."""
    return x.device.type == "cpu"
