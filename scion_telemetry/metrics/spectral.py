"""The largest singular values without an SVD: block Krylov on WᵀW, and a certificate.

A Krylov method approaches σ₁ from below, so every estimate carries an upper bound. With Ritz values θ₁ ≥ θ₂ ≥ … of
WᵀW, Cauchy interlacing gives σⱼ² ≥ θⱼ, and therefore

    θ₁ <= σ₁² <= ‖W‖_F² - Σ_{j≥2} θⱼ,

which is closed once the Krylov space holds the whole row space. (A small residual would only certify closeness to
*some* singular value.) Rounding of float32 products moves θ₁ by about 1e-7 of itself; the interval is widened by
``SLACK``.

Where matrices lie in pieces the iteration runs on all of them at once, with one sum over ranks a step. A block of
vectors does more with every sum, and its Ritz vectors start the next run, one of them replaced by a random one: a
single vector follows σ₁ only until σ₂ overtakes it, and was 7 % low on the weights of a real run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scion_telemetry.metrics import krylov
from scion_telemetry.metrics.krylov import Problem, Sum

__all__ = ["Problem", "Solved", "Sum", "random_start", "solve", "solve_whole", "steps_for", "sum_of_squares"]

SLACK = 4e-6
"""Relative width added to each end of an interval, for float32 rounding."""

BLOCK = 8
"""Vectors a block, on pieces."""
WIDE_BLOCK = 24
"""The same for orthogonalised updates that no rank holds whole: their leaders change with every step, so that no start
is warm. At most 0.8 % low after ``WARM_STEPS``, where ``BLOCK`` vectors are 2 % low."""
COLD_STEPS = 8
"""Steps of a first run on pieces: at most 0.3 % low on weights, gradients, momenta and updates of a real run."""
FEWER_STEPS = ((2, 2), (5, 3))
"""(optimizer steps since the last flush, block steps), ascending: fewer where matrices have hardly moved."""
WARM_STEPS = 4
"""Steps of later runs otherwise: at most 0.3 % low on weights after 10 or 100 steps, exact on gradients and momenta."""
WHOLE_BLOCK = 3
"""Vectors a block on a whole matrix: three cost a tenth more than one there."""
WHOLE_STEPS = 13
"""Steps on a whole matrix, from a cold start: at most 0.5 % low on weights of a real run."""
UPDATE_STEPS = 9
"""The same for orthogonalised updates: at most 0.7 % low."""
_AT_ONCE = 1 << 17
"""Entries of bases that are finished at once, in float64: 64 vectors of 2,048 entries take 2 MiB of copies."""
_FINE = 1 << 12
"""Entries of a matrix below which float64 costs nothing."""
EXACT_SIZE = 96
"""Up to this shorter side the eigenvalues of the Gram matrix are exact and cheaper than iterating."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """What was found of P matrices: float64 on the device, the same on all ranks.

    Args:
        lower: σ₁ from below, ``[P]``; NaN for a matrix with an entry that is not finite.
        upper: σ₁ from above, ``[P]``.
        second: σ₂ from below, ``[P]``; 0 where it is less than σ₁ / 500, which is as far as float32 products see.
        starts: First blocks of the next, warm run.
    """

    lower: Tensor
    upper: Tensor
    second: Tensor
    starts: list[Tensor]


def steps_for(*, warm: bool, since: int) -> int:
    """Number of block steps.

    Args:
        warm: All matrices start from a run before.
        since: Optimizer steps since that run.
    """
    if not warm:
        return COLD_STEPS
    return next((steps for most, steps in FEWER_STEPS if since <= most), WARM_STEPS)


def random_start(size: int, width: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """``[size, width]`` vectors of about unit length in random directions.

    No fixed vector is safe from being orthogonal to the leading one. Drawn on the CPU, so that every rank and device
    draws the same.
    """
    start = torch.randn(size, width, generator=generator, dtype=torch.float32, device="cpu").to(device)
    unit: Tensor = start / size**0.5
    return unit


# ---------------------------------------------------------------------- matrices in pieces


@dataclass(slots=True)
class _Group:
    """Problems of equal size, with their bases stacked.

    Args:
        members: Numbers of the problems.
        scale: Powers of two near 1/‖W‖_F that keep products in the range of float32, ``[L, 1, 1]``.
        basis: ``[L, m, n]``, block after block.
        images: WᵀW of the basis, ``[L, m, n]``, scaled twice.
        width: Vectors a block.
        steps: Blocks; no more than fill the space.
    """

    members: list[int]
    scale: Tensor
    basis: Tensor
    images: Tensor
    width: int
    steps: int

    @classmethod
    def of(cls, members: list[int], problems: Sequence[Problem], steps: int) -> "_Group":
        start = torch.stack([problems[i].start.mT for i in members])
        squares = torch.stack([problems[i].squares for i in members])
        count, width, size = start.shape
        steps = min(steps, -(-size // width)) if size else 0
        exponent = torch.frexp(squares.sqrt()).exponent.clamp(min=-126)
        unit = torch.ones_like(squares)
        scale = torch.where(torch.isfinite(squares), torch.ldexp(unit, -exponent), unit)
        basis = start.new_empty(count, width * steps, size)
        if steps:
            basis[:, :width] = krylov.orthonormal(start)
        return cls(
            members=members,
            scale=scale.float().view(-1, 1, 1),
            basis=basis,
            images=torch.empty_like(basis),
            width=width,
            steps=steps,
        )

    def block(self, step: int) -> slice:
        return slice(step * self.width, (step + 1) * self.width)


def solve(problems: Sequence[Problem], *, steps: int | Sequence[int], total: Sum, generator: torch.Generator) -> Solved:
    """σ₁ and σ₂ of all problems together.

    One sum over ranks a step, two where a matrix is cut along both sides. All ranks pass the same problems in the same
    order, with generators in the same state.

    Args:
        problems: The matrices.
        steps: Block steps, see ``steps_for``; of every problem, or of all.
        total: Sums over ranks; may work in place.
        generator: Of the random vectors in the next starts.
    """
    each = [steps] * len(problems) if isinstance(steps, int) else steps
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, (problem, own) in enumerate(zip(problems, each, strict=True)):
        alike.setdefault((own, *problem.start.shape), []).append(i)
    groups = [_Group.of(members, problems, own) for (own, *_), members in alike.items()]
    scratch = krylov.make_scratch(problems)
    for step in range(max((g.steps for g in groups), default=0)):
        _advance([g for g in groups if step < g.steps], problems, step, total, scratch)
    return _finish(groups, problems, generator)


def _advance(
    groups: Sequence[_Group], problems: Sequence[Problem], step: int, total: Sum, scratch: Tensor | None
) -> None:
    """Images of the latest blocks, summed over ranks, and the next blocks."""
    sizes = [g.basis[:, g.block(step)].numel() for g in groups]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=groups[0].basis.device)
    waiting: list[krylov.Waiting] = []
    for g, sent in zip(groups, torch.split_with_sizes(flat, sizes), strict=True):
        vectors = g.basis[:, g.block(step)] * g.scale
        sent = sent.view_as(vectors)
        for i, v, out in zip(g.members, vectors, sent, strict=True):
            waiting += krylov.product(problems[i], v, out, scratch)
    if waiting:
        krylov.way_back(waiting, total, scratch)
    for g, image in zip(groups, torch.split_with_sizes(total(flat), sizes), strict=True):
        images = g.images[:, g.block(step)]
        torch.mul(image.view_as(images), g.scale, out=images)
        if step + 1 < g.steps:
            g.basis[:, g.block(step + 1)] = krylov.next_block(g.basis[:, : g.block(step).stop], images)


def _finish(groups: Sequence[_Group], problems: Sequence[Problem], generator: torch.Generator) -> Solved:
    device = problems[0].squares.device if problems else torch.device("cpu")
    found = torch.zeros(3, len(problems), dtype=torch.float64, device=device)
    starts = [problem.start for problem in problems]
    for g in groups:
        if not g.steps:
            continue
        together = max(1, _AT_ONCE // g.basis[0].numel())
        for first in range(0, len(g.members), together):
            part = slice(first, first + together)
            members, scale = g.members[part], g.scale[part].view(-1).double()
            leading = krylov.ritz(g.basis[part], g.images[part], g.width)
            squares = torch.stack([problems[i].squares for i in members])
            found[:, torch.tensor(members, device=device)] = _interval(leading, squares, scale)
            for i, start in zip(members, _next_starts(leading.vectors, generator), strict=True):
                starts[i] = start
    return Solved(lower=found[0], upper=found[1], second=found[2], starts=starts)


def _interval(leading: krylov.Ritz, squares: Tensor, scale: Tensor) -> Tensor:
    """σ₁ from below and above and σ₂ from below, ``[3, L]``."""
    theta = leading.values / scale.unsqueeze(-1).square()
    # Each Ritz value may be rounding noise of the largest: only what is surely there tightens the bound.
    sure = (theta[:, 1:] - krylov.NOISE * theta[:, :1]).clamp(min=0)
    lower = theta[:, 0]
    upper = torch.maximum(torch.minimum(squares - sure.sum(dim=-1), squares), lower)
    second = (theta[:, 1] - 10 * krylov.NOISE * lower).clamp(min=0) if theta.size(1) > 1 else torch.zeros_like(lower)
    low, high = 1 - SLACK, 1 + SLACK
    found = torch.stack([lower.sqrt() * low, upper.sqrt() * high, second.sqrt() * low])
    return torch.where(leading.finite & torch.isfinite(squares), found, torch.nan)


def _next_starts(vectors: Tensor, generator: torch.Generator) -> Tensor:
    """``[L, n, p]``: the leading Ritz vectors, and a random vector in place of the last for what they miss."""
    count, width, size = vectors.shape
    # Neighbouring windows of one random sequence serve as random vectors wherever there is no Ritz vector.
    noise = random_start(count * (size + width), 1, generator, vectors.device).view(count, -1)
    noise = noise.unfold(1, size, 1)[:, :width] * count**0.5
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    known = (length > 0) & torch.isfinite(length)
    known[:, width - 1] = False
    return torch.where(known, vectors / length, noise).mT


# ---------------------------------------------------------------------- whole matrices


def solve_whole(
    matrices: Sequence[Tensor], *, seeds: Sequence[int], steps: int = WHOLE_STEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """σ₁ from below and above and σ₂ from below of N matrices that are whole on this rank, float64 ``[N]`` each.

    From a cold start. Exact (the interval is closed up to rounding) where the shorter side is at most ``EXACT_SIZE``.
    NaN for a matrix with an entry that is not finite.

    Args:
        matrices: Of any shapes and dtypes, on one device.
        seeds: Of the random starts, one a matrix.
        steps: Block steps of larger ones.
    """
    device = matrices[0].device if matrices else torch.device("cpu")
    found = torch.zeros(3, len(matrices), dtype=torch.float64, device=device)
    exact: dict[tuple[int, ...], list[int]] = {}
    for i, w in enumerate(matrices):
        if 0 < min(w.shape) <= EXACT_SIZE:
            exact.setdefault(tuple(w.shape), []).append(i)
    for members in exact.values():
        found[:, torch.tensor(members, device=device)] = _by_gram(torch.stack([matrices[i] for i in members]))
    large = [i for i, w in enumerate(matrices) if min(w.shape) > EXACT_SIZE]
    if large:
        problems = [_whole(matrices[i], seeds[i]) for i in large]
        solved = solve(problems, steps=steps, total=lambda t: t, generator=torch.Generator().manual_seed(0))
        found[:, torch.tensor(large, device=device)] = torch.stack([solved.lower, solved.upper, solved.second])
    return found[0], found[1], found[2]


def _whole(w: Tensor, seed: int) -> Problem:
    work = w if w.size(1) <= w.size(0) else w.mT
    generator = torch.Generator().manual_seed(seed)
    start = random_start(work.size(1), WHOLE_BLOCK, generator, w.device)
    return Problem(piece=work, place=None, rows=None, start=start, squares=sum_of_squares(w))


def sum_of_squares(w: Tensor) -> Tensor:
    """‖W‖_F², float64, within 1e-7 of itself: float32 sums by row where these are in range, a third of the cost."""
    if w.device.type == "cpu" and w.dtype != torch.float64:  # looking at a number costs nothing there
        quick: Tensor = torch.linalg.vector_norm(w, dim=1, dtype=torch.float32).double().square().sum()
        if 1e-20 < float(quick) < 1e30:
            return quick
    exact: Tensor = torch.linalg.vector_norm(w, dtype=torch.float64).square()
    return exact


def _by_gram(w: Tensor) -> Tensor:
    """The same three numbers of a stack ``[L, m, n]``, ``[3, L]``.

    Small matrices in float64; of larger ones the Gram matrix is formed in float32, which moves σ₁ by 3e-7 of itself
    and takes a seventh of the time.
    """
    fine = w.dtype == torch.float64 or w[0].numel() < _FINE
    x = w.double() if fine else w.float()
    peak = torch.maximum(x.amax(dim=(1, 2), keepdim=True), -x.amin(dim=(1, 2), keepdim=True))
    ok = torch.isfinite(peak)
    # Powers of two: products neither overflow nor vanish, and no digit is lost.
    exponent = torch.frexp(torch.where(ok & (peak > 0), peak, 1.0)).exponent.clamp(min=-126)
    unit = torch.ldexp(torch.ones_like(peak), -exponent)
    x = torch.where(ok, x * unit, 0.0)
    gram = torch.bmm(x, x.mT) if x.size(1) <= x.size(2) else torch.bmm(x.mT, x)
    sigma = torch.linalg.eigvalsh(gram.double()).clamp(min=0).sqrt()
    sigma = torch.where(ok.view(-1, 1), sigma / unit.double().view(-1, 1), torch.nan)
    top = sigma[:, -1]
    # Eigenvalues of a Gram matrix are known to a rounding error of the largest: what is below tells nothing.
    below = sigma[:, -2] if sigma.size(1) > 1 else torch.zeros_like(top)
    second = torch.where(below < (1e-6 if fine else 2e-3) * top, 0.0, below)
    return torch.stack([top if fine else top * (1 - SLACK), top * (1 + SLACK), second])
