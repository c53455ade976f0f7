"""Block Krylov iteration on WᵀW for many matrices at once: products with pieces, the next blocks, Ritz values.

Vectors are rows, ``[p, n]``: products with narrow matrices are up to four times faster that way. What is done on bases
is done for a stack of equally large ones, ``[L, p, n]``, and takes a microsecond a matrix; the products are one
call a matrix. A block is projected once against those before it. What rounding leaves of that is in the Gram matrix of
the basis, which the Rayleigh-Ritz procedure takes into account, in float64: no Ritz value exceeds σ₁² because a basis
is skew, and rows that add nothing are left out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Entries of a large piece that a CPU reads at once: 1 MiB in float32 is still in its cache on the way back."""
_ALIVE = 0.1
"""A unit row adds to a basis when its squared distance from the span of the rows before exceeds this."""
_LEADING = 0.01
"""Ritz values below this share of the largest take no part in the last half step."""
_LEAP = 4.0
"""A half step that gains more than this factor started from rounding: its gain is not believed."""
NOISE = 3e-7
"""Rounding of a Ritz value, relative to the largest."""


Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold pieces; the identity where one rank holds all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One matrix in pieces.

    Args:
        piece: This rank's piece ``[R, C]``, oriented so that it maps the iterated vectors forward; ``[0, n]`` on ranks
            that hold none.
        place: Positions of the piece's columns in the iterated vectors; None for all.
        rows: Positions of the piece's rows in W V, and the length of W V, where W V itself lies in pieces; None where
            every piece holds whole rows.
        start: First block ``[n, p]``, p <= n, of any vectors that are not zero. All ranks start alike.
        squares: ‖W‖_F², float64, of the scaled matrix where there is a scale.
        row_scale: ``[R]``: work on diag(row_scale) W, without a copy of W.
        column_scale: ``[C]``: work on W diag(column_scale); of a flipped piece these are the rows.
    """

    piece: Tensor
    place: Tensor | None
    rows: tuple[Tensor | None, int] | None
    start: Tensor
    squares: Tensor
    row_scale: Tensor | None = None
    column_scale: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ritz:
    """What a Krylov space tells of each of L matrices, float64.

    Args:
        values: Ritz values of WᵀW, descending, ``[L, m]``: the j-th is at most σⱼ², up to rounding.
        vectors: Leading right Ritz vectors, best first, of any length, ``[L, p, n]``; zero or NaN where there is none.
        finite: Whether all that was found is finite, ``[L]``; values are zero where it is not.
    """

    values: Tensor
    vectors: Tensor
    finite: Tensor


def orthonormal(x: Tensor) -> Tensor:
    """Orthonormal rows with the span of those of ``[L, p, n]``, p <= n; arbitrary ones in place of dependent rows."""
    q: Tensor = torch.linalg.qr(x.mT).Q
    return q.mT


def next_block(basis: Tensor, image: Tensor) -> Tensor:
    """``[L, p, n]``: what the latest image WᵀW v adds to the basis ``[L, m, n]``, as orthonormal rows."""
    return orthonormal(torch.baddbmm(image, torch.bmm(image, basis.mT), basis, alpha=-1))


def make_scratch(problems: Sequence[Problem]) -> Tensor | None:
    """Room for the float32 copy of a chunk, where a piece is not float32; whole copies would be as large as a model."""
    others = [p.piece for p in problems if p.piece.dtype != torch.float32]
    if not others:
        return None
    size = max(_chunk_rows(piece) * piece.size(1) for piece in others)
    return torch.empty(size, dtype=torch.float32, device=others[0].device)


def _chunk_rows(piece: Tensor) -> int:
    rows, columns = piece.shape
    fits = piece.numel() <= 2 * CHUNK
    # Rows of a flipped piece lie scattered: reading them chunk by chunk costs more than it saves.
    scattered = piece.dtype == torch.float32 and piece.stride(1) != 1
    return rows if piece.device.type != "cpu" or fits or scattered else max(1, CHUNK // max(1, columns))


def chunks(piece: Tensor, scratch: Tensor | None) -> Iterable[Tensor]:
    """The piece in float32, some rows at a time. A chunk is valid until the next one is asked for."""
    rows = _chunk_rows(piece)
    if piece.dtype == torch.float32:
        return (piece,) if rows == piece.size(0) else torch.split_with_sizes(piece, _even(piece.size(0), rows))
    return (_float(part, scratch) for part in torch.split_with_sizes(piece, _even(piece.size(0), rows)))


def _even(size: int, most: int) -> list[int]:
    full, rest = divmod(size, max(1, most))
    return [most] * full + ([rest] if rest else [])


def _float(part: Tensor, scratch: Tensor | None) -> Tensor:
    assert scratch is not None
    room = scratch[: part.numel()]
    copy = room.view(part.mT.shape).mT if part.stride(0) == 1 else room.view(part.shape)
    return copy.copy_(part)


def normal_product(piece: Tensor, v: Tensor, row_scale: Tensor | None, out: Tensor, scratch: Tensor | None) -> None:
    """V Wᵀ D² W into ``out [p, C]``, for a piece W ``[R, C]``, R > 0, rows V ``[p, C]`` and D = diag(row_scale).

    Every chunk serves both ways before the next one is read: that halves the traffic of pieces beyond the cache.
    """
    start = 0
    for chunk in chunks(piece, scratch):
        u = torch.mm(v, chunk.mT)
        if row_scale is not None:
            part = row_scale[start : start + chunk.size(0)]
            u = u.mul_(part).mul_(part)  # one after the other: the square may leave the range
        if start == 0:
            torch.mm(u, chunk, out=out)
        else:
            out.addmm_(u, chunk)
        start += chunk.size(0)


def forward(piece: Tensor, v: Tensor, scratch: Tensor | None) -> Tensor:
    """V Wᵀ, ``[p, R]``."""
    parts = [torch.mm(v, chunk.mT) for chunk in chunks(piece, scratch)]
    return torch.cat(parts, dim=1) if parts else v.new_zeros(v.size(0), 0)


def backward(piece: Tensor, u: Tensor, out: Tensor, scratch: Tensor | None) -> None:
    """U W into ``out [p, C]``."""
    start = 0
    out.zero_()
    for chunk in chunks(piece, scratch):
        out.addmm_(u[:, start : start + chunk.size(0)], chunk)
        start += chunk.size(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A matrix that is cut along both sides, between the ways: its V Wᵀ at its places in the whole."""

    problem: Problem
    u: Tensor
    out: Tensor


def product(problem: Problem, v: Tensor, out: Tensor, scratch: Tensor | None) -> list[Waiting]:
    """This rank's part of V WᵀW into ``out``; what has to be summed in between waits."""
    v = v if problem.place is None else v[:, problem.place]
    v = v if problem.column_scale is None else v * problem.column_scale
    if problem.rows is None:
        if problem.piece.size(0) == 0:
            out.zero_()
        elif problem.place is None and problem.column_scale is None:
            normal_product(problem.piece, v, problem.row_scale, out, scratch)
        else:
            part = torch.empty_like(v)
            normal_product(problem.piece, v, problem.row_scale, part, scratch)
            _put(problem, part, out)
        return []
    index, size = problem.rows
    u = forward(problem.piece, v, scratch)
    u = u if problem.row_scale is None else u * problem.row_scale
    u = u if index is None else u.new_zeros(u.size(0), size).index_add_(1, index, u)
    return [Waiting(problem=problem, u=u, out=out)]


def way_back(waiting: Sequence[Waiting], total: Sum, scratch: Tensor | None) -> None:
    """Sum the first halves over ranks, and go back."""
    flat = total(torch.cat([w.u.reshape(-1) for w in waiting]))
    for w, summed in zip(waiting, torch.split_with_sizes(flat, [w.u.numel() for w in waiting]), strict=True):
        assert w.problem.rows is not None
        index, _ = w.problem.rows
        u = summed.view_as(w.u)
        u = u if index is None else u[:, index]
        u = u if w.problem.row_scale is None else u * w.problem.row_scale
        part = u.new_empty(u.size(0), w.problem.piece.size(1))
        backward(w.problem.piece, u, part, scratch)
        _put(w.problem, part, w.out)


def _put(problem: Problem, part: Tensor, out: Tensor) -> None:
    """Columns of the product to their places."""
    part = part if problem.column_scale is None else part * problem.column_scale
    if problem.place is None:
        out.copy_(part)
    else:
        out.zero_().index_add_(1, problem.place, part)


def ritz(basis: Tensor, images: Tensor, leading: int) -> Ritz:
    """Rayleigh-Ritz on a basis S ``[L, m, n]`` of about unit rows, with images Z = S WᵀW.

    First the Ritz values θ of WᵀW on the span of S. Of the ``leading`` ones, u = W y / √θ are orthonormal on the other
    side, and Wᵀ u are combinations of Z: the Ritz values of W Wᵀ on their span come at no product more, and are those
    of half a step further. Their right vectors Wᵀ u are, too.
    """
    s, z = basis.double(), images.double()
    gram, projected = s @ s.mT, s @ z.mT
    finite = torch.isfinite(projected).flatten(1).all(dim=1)
    every = finite.view(-1, 1, 1)
    q = _whitening(torch.where(every, gram, 0.0))
    theta, e = torch.linalg.eigh(q @ torch.where(every, projected + projected.mT, 0.0).mul_(0.5) @ q.mT)
    theta = theta.flip(-1).clamp(min=0)
    top = theta[:, :leading]
    believed = top > _LEADING * theta[:, :1]
    size = torch.where(believed, top.sqrt(), torch.where(top > 0, top, 1.0))  # others become about unit vectors
    c = (e.flip(-1)[..., :leading] / size.unsqueeze(-2)).mT @ q
    y = c @ z
    tau, e = torch.linalg.eigh(torch.where(believed.unsqueeze(-1) & believed.unsqueeze(-2) & every, y @ y.mT, 0.0))
    tau = tau.flip(-1)
    values = theta.clone()
    values[:, :leading] = torch.where(tau[:, :1] <= _LEAP * theta[:, :1], torch.maximum(tau, top), top)
    return Ritz(values=values, vectors=torch.bmm((e.flip(-1).mT @ c).float(), images), finite=finite)


def _whitening(gram: Tensor) -> Tensor:
    """Q with Q G Qᵀ = 1 on rows that add to the span of those before, and zero rows for the others; ``[L, m, m]``."""
    size = torch.diagonal(gram, dim1=-2, dim2=-1)
    unit = torch.where(size > 0, size, 1.0).rsqrt()
    gram = gram * unit.unsqueeze(-1) * unit.unsqueeze(-2)
    one = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
    distance = torch.diagonal(torch.linalg.cholesky_ex(gram + 1e-6 * one).L, dim1=-2, dim2=-1).square()
    alive = distance > _ALIVE
    gram = torch.where(alive.unsqueeze(-1) & alive.unsqueeze(-2), gram, one)
    factor = torch.linalg.cholesky_ex(gram).L
    inverse = torch.linalg.solve_triangular(factor, one.expand_as(factor), upper=False)
    q: Tensor = inverse * (unit * alive).unsqueeze(-2) * alive.unsqueeze(-1)
    return q
