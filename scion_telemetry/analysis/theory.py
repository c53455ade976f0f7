"""Closed forms of Dion2's selection: null values, error feedback as water-filling, ages, cost, and power.

Dion2 selects the k rows (or columns) of the momentum whose **L1 norms** are largest, orthonormalises them, and
multiplies only those by ``ef_decay``. What is not selected goes on growing until it is. Over many steps the growth g_i
of a row and what selections take away balance:

    g_i = (1 - ef) · (mean score when selected) · f_i

and since error feedback levels the scores to one threshold τ, the frequencies are those of water that fills up

    f_i(α) = min(1, g_i / θ),   Σ f_i = α n,   θ = (1 - ef) τ

so g_i measured at one fraction predicts how frequencies are spread at every other. In real training the norm of a
gradient varies from step to step, and min(1, x) gives way to (1 + x^-p)^(-1/p).
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from .estimators import Array, pooled_quantile

SHARPNESS = 3.0
"""p of :func:`water_fill` for gradients that are mostly noise, as those of real training are.

Measured by training a small GPT (18 matrices, 1000 steps) at .25 and selecting at others from the same gradients: the
mean error of the frequencies of the second half at .5 is .022 with 3, .040 with ∞; below .25, .008 and .009 with both.
"""

_NORMAL = NormalDist()


def flat_mass(fraction: float, width: int) -> float:
    """C(α) of i.i.d. Gaussian rows: α + φ(Φ⁻¹(1 - α)) · CV with CV = √((π/2 - 1) / d).

    Args:
        fraction: α in (0, 1].
        width: d, entries of a row.
    """
    _check_fraction(fraction)
    if fraction == 1:
        return 1.0
    return min(1.0, fraction + _NORMAL.pdf(_NORMAL.inv_cdf(1 - fraction)) * _variation(width))


def flat_gini(width: int) -> float:
    """Gini coefficient of the L1 norms of i.i.d. Gaussian rows of ``width`` entries: CV / √π."""
    return _variation(width) / math.sqrt(math.pi)


def excess_mass(mass: float, flat: float) -> float:
    """(C - C_flat) / (1 - C_flat): 0 as flat as noise, 1 all in the selected rows; 0 where everything is selected."""
    return (mass - flat) / (1 - flat) if flat < 1 else 0.0


def growth(score: ArrayLike, frequency: ArrayLike, ef_decay: float) -> Array:
    """g = (1 - ef) · score · f: growth of a row's score in a step, in units of the score, once it no longer rises.

    Args:
        score: Mean L1 score at selection.
        frequency: Selections a step.
        ef_decay: What a selected row keeps.
    """
    return np.asarray((1 - ef_decay) * np.asarray(score, dtype=float) * np.asarray(frequency, dtype=float))


def balanced_growth(
    score: ArrayLike, selected: ArrayLike, steps: ArrayLike, ef_decay: float, held: ArrayLike = 0.0
) -> Array:
    """g = ((1 - ef) · score · selected + held) / steps: what was taken from a row, and what it gained and still holds.

    A row that starts from nothing has to save up τ, which is 1 / (1 - ef) selections' worth, before its first
    selection; counts alone call it starved for so long. In simulation (lognormal rows, SNR 1, 400 steps from zero,
    ef .95) the mean error of the frequencies falls from .033 to .003 and the share of rows called starved from 11 % to
    none, which is the truth.

    Args:
        score: Mean L1 score at selection; whatever it is where ``selected`` is 0.
        selected: Times selected.
        steps: Steps in which that was counted.
        ef_decay: What a selected row keeps.
        held: Score at the end less that at the beginning; 0 where the momentum was in balance already.
    """
    count = np.asarray(selected, dtype=float)
    taken = np.where(count > 0, (1 - ef_decay) * np.asarray(score, dtype=float) * count, 0.0)
    return np.asarray((taken + np.asarray(held, dtype=float)) / np.asarray(steps, dtype=float))


def calibrated_growth(score: ArrayLike) -> Array:
    """g ∝ score²: growth from the mean scores of a run at fraction 1, where gradients are nearly all noise.

    The score goes with the scale of independent gradients, but the time to reach a threshold with its square. In real
    training the sorted frequencies at .5, .25, .125 and .0625 were off by .040, .035, .028 and .017, and by .074, .068,
    .048 and .028 with the score itself, which is right for a drift.
    """
    return np.asarray(np.asarray(score, dtype=float) ** 2)


def fill_level(rates: ArrayLike, fraction: float, *, sharpness: float = math.inf) -> Array:
    """θ with Σ f_i = α n, of every ``[..., n]``; f as in :func:`water_fill`; 0 where too few rows grow for any.

    Exact for p = ∞: with the j largest at 1, θ_j = Σ_{i>j} g_i / (α n - j), and the first j whose next rate is at most
    θ_j is the right one.
    """
    _check_fraction(fraction)
    g = _rates(rates)
    if not sharpness > 0:
        raise ValueError(f"sharpness must be > 0, got {sharpness!r}; inf lets a row be full at once")
    return _sharp_level(g, fraction) if math.isinf(sharpness) else _soft_level(g, fraction, sharpness)


def _sharp_level(g: Array, fraction: float) -> Array:
    g = np.sort(g, axis=-1)[..., ::-1]
    n = g.shape[-1]
    rest = np.flip(np.cumsum(np.flip(g, -1), axis=-1), -1)
    room = fraction * n - np.arange(n)
    with np.errstate(divide="ignore", invalid="ignore"):
        theta = np.where(room > 1e-9, rest / room, np.inf)
    fits = (g <= theta * (1 + 1e-12)) & (room > 1e-9)
    first = fits.argmax(-1)
    level = np.take_along_axis(theta, first[..., None], -1)[..., 0]
    # Nothing but full rows: all α n of them are at 1, and any level up to the smallest of them does.
    full = np.take_along_axis(g, np.full_like(first, min(n, max(1, round(fraction * n))) - 1)[..., None], -1)[..., 0]
    return np.asarray(np.where(fits.any(-1), level, full))


def _soft_level(g: Array, fraction: float, p: float) -> Array:
    wanted, growing = fraction * g.shape[-1], g > 0
    enough = growing.sum(-1, keepdims=True) > wanted
    # If all m growing rows were alike, each would have β = α n / m of the steps, at θ / g = (β^-p - 1)^(1/p); the
    # level of rows that differ lies between what that says of the smallest and of the largest.
    beta = np.where(enough, wanted / np.maximum(1, growing.sum(-1, keepdims=True)), 0.5)
    shift = -np.log(beta) + np.log(-np.expm1(p * np.log(beta))) / p
    rate = np.log(np.where(growing, g, 1.0))
    low = np.where(growing, rate, np.inf).min(-1, keepdims=True) + shift
    high = np.where(growing, rate, -np.inf).max(-1, keepdims=True) + shift
    low, high = np.where(enough, low, 0.0), np.where(enough, high, 0.0)
    for _ in range(100):
        middle = (low + high) / 2
        above = np.where(growing, _soft(rate - middle, p), 0.0).sum(-1, keepdims=True) > wanted
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.asarray(np.where(enough, np.exp(high), 0.0)[..., 0])


def _soft(log: Array, p: float) -> Array:
    """(1 + x^-p)^(-1/p) of log x, which no power overflows."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -p * log) / p))


def _filled(x: Array, p: float) -> Array:
    """How full a row of growth x, in units of the level, is."""
    if math.isinf(p):
        return np.asarray(np.minimum(1.0, x))
    with np.errstate(divide="ignore"):
        return _soft(np.log(x), p)


def water_fill(rates: ArrayLike, fraction: float, *, sharpness: float = math.inf) -> Array:
    """f_i = (1 + (θ / g_i)^p)^(-1/p) with Σ f_i = α n: how often rows are selected at a fraction, in [0, 1].

    p = ∞ is min(1, g_i / θ): right where a gradient is as large in every step. Where its norm varies, a row whose mean
    growth reaches θ is not selected always yet; it becomes full by and by, as :data:`SHARPNESS` has it. Where fewer
    than α n rows grow at all, these are always selected and the others share what is left.

    Args:
        rates: g ``[..., n]``, not negative, in any unit.
        fraction: α in (0, 1], best the realised k / n.
        sharpness: p > 0.

    Raises:
        ValueError: A rate is negative, NaN or infinite, the fraction is out of range, or the sharpness not positive.
    """
    g = _rates(rates)
    theta = fill_level(g, fraction, sharpness=sharpness)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        f = _filled(np.where(g > 0, g / theta, 0.0), sharpness)
    missing = fraction * g.shape[-1] - f.sum(-1, keepdims=True)
    idle = f == 0
    spread = np.where(idle, missing / np.maximum(1, idle.sum(-1, keepdims=True)), 0.0)
    return np.asarray(np.clip(f + np.where(missing > 1e-9, spread, 0.0), 0.0, 1.0))


def cold_fill(rates: ArrayLike, fraction: float, steps: int, ef_decay: float, *, sharpness: float = math.inf) -> Array:
    """What a run of T steps from zero momentum counts: f_i = min(1, (g_i - τ/T)⁺ / ((1 - ef) τ)); softly for p < ∞.

    τ is such that Σ f_i = α n: every row saves up τ before its first selection. For T → ∞, and where nothing decays
    (ef 1), this is :func:`water_fill`. To hold a prediction against the counts of a short run, use this one.

    Args:
        rates: g ``[..., n]``, not negative, in units of the score a step.
        fraction: α in (0, 1].
        steps: T.
        ef_decay: What a selected row keeps.
        sharpness: As of ``water_fill``, in which x^p stands for the quotient.

    Raises:
        ValueError: As ``water_fill``.
    """
    g, keep = _rates(rates), 1 - ef_decay
    wanted = fraction * g.shape[-1]
    if keep <= 0 or fraction == 1 or ((g > 0).sum(-1) <= wanted).any():
        return water_fill(g, fraction, sharpness=sharpness)

    def counted(tau: Array) -> Array:
        return _filled(np.maximum(0.0, (g - tau / steps) / (keep * tau)), sharpness)

    # θ / (1 - ef), the level without saving up, is too high: with it all rows get less.
    high = fill_level(g, fraction, sharpness=sharpness)[..., None] / keep
    low = 1e-12 * high
    for _ in range(100):
        middle = np.sqrt(low * high)
        above = counted(middle).sum(-1, keepdims=True) > wanted
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return counted(high)


def periodic_age(frequencies: ArrayLike, q: float) -> float:
    """Quantile of the age over all rows where a row comes every 1/f steps, as error feedback makes it.

    A row of period 1/f is of age 0, 1, …, 1/f - 1 equally often, so the share of rows of age <= a is
    mean min(1, (a + 1) f_i). Ages count as the logged ``age_p99``: 0 is selected at this step. In simulation it is
    exact to a step where the entries of a gradient drift (SNR 1 or more; the geometric law is off by a factor of 2 to
    4); the noisier they are the nearer the truth comes to :func:`geometric_age`.

    Args:
        frequencies: Of every row, any shape.
        q: Quantile in (0, 1).
    """
    f = np.asarray(frequencies, dtype=float).ravel()
    return pooled_quantile(lambda age: float(np.minimum(1.0, (age + 1) * f).mean()), q)


def geometric_age(frequencies: ArrayLike, q: float) -> float:
    """The same where every step draws anew, as random selection does.

    The share of rows of age <= a is mean 1 - (1 - f_i)^(a + 1).
    """
    f = np.asarray(frequencies, dtype=float).ravel()
    return pooled_quantile(lambda age: float((1 - (1 - f) ** (age + 1)).mean()), q)


def random_age(q: float, fraction: float) -> float:
    """ln(1 - q) / ln(1 - α): q-quantile of the age under random selection, not rounded to steps; 0 at fraction 1."""
    _check_fraction(fraction)
    return 0.0 if fraction == 1 else math.log(1 - q) / math.log(1 - fraction)


def random_jaccard(fraction: float) -> float:
    """α / (2 - α): |K ∩ K'| / |K ∪ K'| of two independent selections; the logged ``churn`` is one minus it."""
    _check_fraction(fraction)
    return fraction / (2 - fraction)


def random_coverage(fraction: float, steps: int) -> float:
    """1 - (1 - α)^T: share of rows that T random selections touch."""
    _check_fraction(fraction)
    return 1 - (1 - fraction) ** steps


def overdue_share(frequencies: ArrayLike, max_age: float) -> float:
    """Share of rows that come less often than once in ``max_age`` steps; the logged ``starved`` is another one."""
    return float((np.asarray(frequencies, dtype=float) < 1 / max_age * (1 - 1e-9)).mean())


def decay_drift(lr: float, weight_decay: float, age: float) -> float:
    """lr · λ · age: relative shrinkage of a row that weight decay meets ``age`` times before it is stepped again."""
    return 0.0 if lr * weight_decay == 0 else lr * weight_decay * age


def horizon(fraction: float, ef_decay: float) -> float:
    """1 / ((1 - ef) α): steps of gradient that the momentum remembers on average; infinite at ef_decay 1."""
    _check_fraction(fraction)
    return math.inf if ef_decay >= 1 else 1 / ((1 - ef_decay) * fraction)


def matched_ef(fraction: float, mu: float = 0.95) -> float:
    """ef' = 1 - (1 - µ) / α: the decay that gives fraction α the horizon 1 / (1 - µ) of momentum µ.

    Negative for α < 1 - µ: no decay forgets that fast.
    """
    _check_fraction(fraction)
    return 1 - (1 - mu) / fraction


def newton_schulz_flops(k: int, width: int) -> float:
    """FLOPs of one Newton-Schulz iteration of a ``[k, width]`` matrix: 4 r² l + 2 r³, r the smaller side."""
    small, large = sorted((k, width))
    return 4.0 * small**2 * large + 2.0 * small**3


def transport_bytes(k: int, width: int, shards: int, itemsize: int = 2) -> float:
    """Bytes a step between ranks of one matrix: all pieces but the owner's go there and back (bfloat16 unless told)."""
    return 2.0 * k * width * itemsize * (shards - 1) / shards


def selected_count(n: int, fraction: float, shards: int = 1, scope: str = "global") -> int:
    """Realised k: ⌈α n⌉ over all ranks, or with local scope ⌈α ⌈n/P⌉⌉ on every rank that has as many rows.

    17 rows, 4 ranks, .35: 6 globally, but 2 on each rank, 8, locally.
    """
    _check_fraction(fraction)
    if scope == "global" or shards == 1:
        return min(n, max(1, math.ceil(round(fraction * n, 9))))
    quota = max(1, math.ceil(round(fraction * math.ceil(n / shards), 9)))
    return sum(min(quota, size) for size in shard_sizes(n, shards))


def shard_sizes(n: int, shards: int) -> list[int]:
    """Rows of each of P contiguous pieces: ⌈n/P⌉ as long as there are any; later pieces may be empty."""
    piece = math.ceil(n / shards)
    return [max(0, min(piece, n - i * piece)) for i in range(shards)]


def seeds_per_arm(gap: float, sd: float, power: float = 0.8, level: float = 0.05) -> int:
    """⌈2 (z_{1-level/2} + z_power)² sd² / gap²⌉: runs on each side of an A/B that show a gap of the mean loss.

    Args:
        gap: Difference of the mean losses to be seen.
        sd: Standard deviation of the loss over seeds.
        power: Probability to see it.
        level: Two-sided error of the first kind.

    Raises:
        ValueError: ``gap`` or ``sd`` is not positive.
    """
    if not (gap > 0 and sd > 0):
        raise ValueError(f"gap and sd must be > 0, got gap={gap!r}, sd={sd!r}")
    z = _NORMAL.inv_cdf(1 - level / 2) + _NORMAL.inv_cdf(power)
    return max(2, math.ceil(2 * (z * sd / gap) ** 2))


def _variation(width: int) -> float:
    """Coefficient of variation of the L1 norm of a Gaussian row."""
    if width < 1:
        raise ValueError(f"width must be >= 1, got {width!r}")
    return math.sqrt((math.pi / 2 - 1) / width)


def _rates(rates: ArrayLike) -> Array:
    g = np.asarray(rates, dtype=float)
    if g.size == 0 or not np.isfinite(g).all() or (g < 0).any():
        raise ValueError(f"growth rates must be finite and >= 0, got {g!r}")
    return g


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction!r}")
