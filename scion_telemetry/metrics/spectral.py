"""The largest singular value without an SVD: Lanczos on WᵀW with full reorthogonalisation, and a certificate.

A Krylov method approaches σ₁ from below, so every estimate carries an upper bound. With Ritz values θ₁ ≥ θ₂ ≥ … of
WᵀW, Cauchy interlacing gives σⱼ² ≥ θⱼ, and therefore

    θ₁ <= σ₁² <= ‖W‖_F² - Σ_{j≥2} θⱼ,

which is closed once the Krylov space holds the whole row space. (A small residual would only certify closeness to
*some* singular value.) Rounding of float32 products moves θ₁ by about 1e-7 of itself; the interval is widened by
``SLACK``.

Where a matrix lies in pieces the same recurrence runs on all matrices at once, with one sum over ranks an iteration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLACK = 4e-6
"""Relative width added to each end of an interval, for float32 rounding."""

COLD_STEPS = 20  # at most 0.92 % off on weights, gradients, momenta and updates of a real run
WARM_STEPS = 4  # at most 0.58 % off on weights once the vectors are warm
EXACT_SIZE = 128  # below, the Gram matrix and its eigenvalues are exact and cheaper than Lanczos

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold pieces; the identity where one rank holds all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """σ₁ of one matrix, within ``[lower, upper]``. Float64 scalars on the device."""

    lower: Tensor
    upper: Tensor


@dataclass(slots=True)
class Krylov:
    """One matrix on its way: the recurrence in float32, its coefficients in float64.

    Args:
        piece: This rank's piece ``[R, C]``, oriented so that it maps the iterated vector forward; empty on ranks that
            hold none.
        place: Positions of the piece's columns in the iterated vector; None for all.
        rows: Positions of the piece's rows in W v, and the length of W v, where W v itself lies in pieces; None where
            every piece holds whole rows.
        start: First vector ``[n]``, not zero.
        squares: ‖W‖_F², float64.
    """

    piece: Tensor
    place: Tensor | None
    rows: tuple[Tensor | None, int] | None
    start: Tensor
    squares: Tensor
    basis: list[Tensor] = field(default_factory=list)
    diagonal: list[Tensor] = field(default_factory=list)
    beside: list[Tensor] = field(default_factory=list)
    ritz: Tensor | None = None
    scale: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if self.piece.dtype.itemsize < 4:
            self.piece = self.piece.float()
        self.basis = [self.start / self.start.norm()]
        # A power of two near 1/‖W‖_F keeps products in the range of float32.
        exponent = torch.frexp(self.squares.sqrt()).exponent
        unit = torch.ones_like(self.squares)
        self.scale = torch.where(torch.isfinite(self.squares), torch.ldexp(unit, -exponent), unit)

    def forward(self) -> Tensor:
        """This rank's part of W v."""
        v = self.basis[-1]
        v = v if self.place is None else v[self.place]
        return (self.piece @ v.to(self.piece.dtype)).float() * self.scale.float()

    def backward(self, u: Tensor) -> Tensor:
        """This rank's part of Wᵀ u, in a vector of full length."""
        z = (self.piece.mT @ u.to(self.piece.dtype)).float() * self.scale.float()
        if self.place is None:
            return z
        return torch.zeros_like(self.start).index_add_(0, self.place, z)

    def extend(self, z: Tensor) -> None:
        """Take WᵀW v and make the next basis vector."""
        v = self.basis[-1]
        self.diagonal.append(torch.dot(v, z).double())
        stack = torch.stack(self.basis)
        for _ in range(2):  # twice is enough (Kahan, Parlett)
            z = z - stack.mT @ (stack @ z)
        beta = z.norm()
        self.beside.append(beta.double())
        # Once the basis spans the whole space, what is left of z is rounding and no direction.
        full = len(self.basis) >= z.numel()
        alive = (beta > 1e-6 * self.diagonal[0].float().abs()) & (not full)
        self.basis.append(torch.where(alive, z / beta, torch.zeros_like(z)))

    def estimate(self) -> Estimate:
        """The interval after the steps so far; keeps the Ritz vectors for ``next_start``."""
        size = len(self.diagonal)
        tri = torch.diag(torch.stack(self.diagonal))
        for j in range(size - 1):
            alive = (self.basis[j + 1] != 0).any()
            tri[j, j + 1] = tri[j + 1, j] = torch.where(alive, self.beside[j], 0.0)
        finite = torch.isfinite(tri).all()
        values, vectors = torch.linalg.eigh(torch.where(finite, tri, torch.zeros_like(tri)))
        self.ritz = torch.stack(self.basis[:size]).mT @ vectors[:, -2:].float()
        undo = self.scale.double() ** -2
        theta = values.clamp(min=0) * undo
        rest = self.squares - theta[:-1].sum()
        lower, upper = theta[-1], torch.maximum(torch.minimum(rest, self.squares), theta[-1])
        broken = torch.full_like(lower, torch.nan)
        ok = finite & torch.isfinite(self.squares)
        return Estimate(
            lower=torch.where(ok, lower.sqrt() * (1 - SLACK), broken),
            upper=torch.where(ok, upper.sqrt() * (1 + SLACK), broken),
        )

    def next_start(self, generator: torch.Generator) -> Tensor:
        """First vector of the next, warm run: two Ritz vectors, so that σ₁ and σ₂ may cross, and noise."""
        assert self.ritz is not None
        noise = random_start(self.start.numel(), generator, self.start.device)
        warm = self.ritz[:, -1] + 0.3 * self.ritz[:, 0] + 0.1 * noise
        return torch.where(torch.isfinite(warm).all(), warm, noise)


def run(problems: Sequence[Krylov], *, steps: int, total: Sum) -> None:
    """Advance all problems together; one sum over ranks a step, two where a matrix is cut along both sides."""
    for _ in range(steps):
        firsts = [p.forward() for p in problems]
        split = [i for i, p in enumerate(problems) if p.rows is not None]
        if split:
            parts = [_spread(firsts[i], problems[i]) for i in split]
            summed = torch.split_with_sizes(total(torch.cat(parts)), [p.numel() for p in parts])
            for i, u in zip(split, summed, strict=True):
                rows = problems[i].rows
                assert rows is not None
                firsts[i] = u if rows[0] is None else u[rows[0]]
        seconds = [p.backward(u) for p, u in zip(problems, firsts, strict=True)]
        merged = torch.split_with_sizes(total(torch.cat(seconds)), [z.numel() for z in seconds])
        for p, z in zip(problems, merged, strict=True):
            p.extend(z)


def largest_singular_value(w: Tensor, *, steps: int = COLD_STEPS, seed: int = 0) -> Estimate:
    """σ₁ of a whole matrix ``[m, n]`` on this rank, from a cold start.

    Exact (the interval is closed up to rounding) where the shorter side is at most ``EXACT_SIZE``. NaN for a matrix
    with a non-finite entry. Costs ``2·steps`` products of the matrix with a vector: 5 % of an SVD at 768².
    """
    side = min(w.shape)
    if side <= EXACT_SIZE:
        return _by_gram(w)
    work = w if w.size(-1) <= w.size(-2) else w.mT
    total = w.double().square().sum()
    generator = torch.Generator().manual_seed(seed)
    problem = Krylov(
        piece=work,
        place=None,
        rows=None,
        start=random_start(side, generator, w.device),
        squares=total,
    )
    run([problem], steps=min(steps, side), total=lambda t: t)
    return problem.estimate()


def random_start(size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """A unit vector in a random direction; no fixed vector is safe from being orthogonal to the leading one."""
    start = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(device)
    unit: Tensor = start / start.norm()
    return unit


def _by_gram(w: Tensor) -> Estimate:
    x = w.double()
    peak = x.abs().amax() if x.numel() else x.new_zeros(())
    ok = torch.isfinite(peak)
    unit = torch.where(ok & (peak > 0), peak, 1.0)
    x = torch.where(ok, x / unit, 0.0)
    gram = x @ x.mT if x.size(0) <= x.size(1) else x.mT @ x
    top = torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt() * unit if gram.numel() else x.new_zeros(())
    top = torch.where(ok, top, torch.nan)
    return Estimate(lower=top, upper=top * (1 + SLACK))


def _spread(u: Tensor, problem: Krylov) -> Tensor:
    assert problem.rows is not None
    index, size = problem.rows
    return u if index is None else torch.zeros(size, device=u.device).index_add_(0, index, u)
