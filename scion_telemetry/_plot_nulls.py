"""What selections would look like if nothing were to be seen: the dashed lines of the figures. Pure numpy.

Two nulls: **flat** rows, whose entries are independent Gaussians, and **random** selection of a fraction α of the rows
at every step. What has a closed form in :mod:`scion_telemetry.analysis.theory` is taken from there.
"""

import math
from statistics import NormalDist

import numpy as np

from scion_telemetry._plot_data import Floats
from scion_telemetry.analysis import theory

_NORMAL = NormalDist()


def width_of(flat_gini: float) -> int:
    """Entries of a row, from the Gini coefficient that flat rows of this length have: √((π/2 - 1) / d) / √π."""
    return max(1, round((math.pi / 2 - 1) / (math.pi * flat_gini**2)))


def flat_curve(fractions: Floats, width: int | None) -> Floats:
    """Captured-mass curve of flat rows; of rows that are all alike, C(α) = α, where their length is not known."""
    return fractions if width is None else np.array([theory.flat_mass(float(f), width) for f in fractions])


def binomial(steps: int, share: float) -> Floats:
    """Probability of 0, 1, …, T selections of a row in T random draws of a share of all rows, [T + 1]."""
    if not 0 < share < 1:
        return np.asarray(np.eye(steps + 1)[0 if share <= 0 else steps])
    count = np.arange(steps + 1)
    log = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, steps + 1)))])
    return np.asarray(
        np.exp(log[steps] - log - log[::-1] + count * math.log(share) + (steps - count) * math.log1p(-share))
    )


def binomial_quantile(steps: int, share: float, q: Floats) -> Floats:
    """Frequency (selections / T) that a share q of randomly selected rows does not exceed."""
    below = np.cumsum(binomial(steps, share))
    return np.asarray(np.searchsorted(below, np.asarray(q) - 1e-12).clip(0, steps) / steps)


def random_curve(fractions: Floats, steps: int, share: float) -> Floats:
    """Share of all selections that the most selected ``fractions`` of the rows have after T random draws."""
    chance = binomial(steps, share)[::-1]
    rows = np.concatenate([[0.0], np.cumsum(chance)])
    held = np.concatenate([[0.0], np.cumsum(chance * np.arange(steps, -1, -1))]) / (steps * share)
    return np.asarray(np.interp(fractions, rows, held))


def geometric_survival(ages: Floats, share: float) -> Floats:
    """P(age > a) = (1 - α)^(a + 1) of randomly selected rows; age 0 is selected at this step."""
    return np.asarray((1 - share) ** (np.asarray(ages) + 1))


def churn_of(share: Floats) -> Floats:
    """1 - α / (2 - α): Jaccard distance of two independent selections."""
    return np.asarray(1 - share / (2 - share))


def flat_regret(n: int, fraction: float, width: int, shards: int) -> float:
    """Mass that flat rows lose when each of W equal shards selects its own.

    A shard of m = n / W rows has a number of the globally largest that differs from its quota by some x, of variance
    m α (1 - α) (1 - 1 / W); x rows then cross the threshold, and the mass between it and the x-th next is
    x² / (2 m f), f the density of the scores at the threshold. Summed over shards, over the mass that is selected:

        (W - 1) α (1 - α) CV / (2 φ(z) n C(α)),   z = Φ⁻¹(1 - α)

    Every shard selects ⌈α m⌉ rows, which is a larger fraction where m is small.
    """
    rows = n / shards
    share = min(1.0, math.ceil(round(fraction * rows, 9)) / rows)
    if share == 1:
        return 0.0
    density = _NORMAL.pdf(_NORMAL.inv_cdf(1 - share))
    spread = theory.flat_gini(width) * math.sqrt(math.pi)
    lost = (shards - 1) * share * (1 - share) * spread / (2 * density * n)
    return lost / theory.flat_mass(share, width)
