"""What Dion2 selects: finishing formulas, over many parameters of one shape at once.

Dion2 takes the k rows (or columns) of the momentum with the largest **L1** norms; these are the scores r here, as they
are before the selected rows decay. Null values say what the same number would be if nothing were to be seen: for flat
rows (of independent Gaussian entries), or for rows that are selected at random.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from scion_telemetry.metrics.declare import Array

FRACTIONS = (
    *(1 / 64, 1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 5 / 16),
    *(3 / 8, 7 / 16, 1 / 2, 9 / 16, 5 / 8, 3 / 4, 7 / 8, 15 / 16),
)
"""Fractions at which curves are told."""
WORLDS = (2, 4, 8, 16, 32, 64)
"""Numbers of shards for which selection within each shard is tried."""
TAIL_LEAST = 1024
"""Scores that a tail index needs: of fewer its spread is as large as itself (lognormal rows, n = 64: 2.4 ± 1.1)."""
ALWAYS = 0.99
STARVED = 0.1
"""A row is starved when it is selected less often than this share of the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """The slices of G parameters of one shape: arrays ``[G, B, n]``, and ``[G]`` where nothing else is said.

    Args:
        scores: L1 norms, float64.
        selected: Selected at this step.
        before: Selected at the step before.
        ages: Steps since last selected, 0: now; since the tracker attached where never.
        counts: Times selected in the window.
        window: Steps over which they were counted: since a flush told of them before.
        length: Entries of a slice.
        fraction: The option of the optimizer; NaN where it is not known.
        ef_decay: What the selected part of the momentum is multiplied by; NaN where it is not known.
        energy: ‖M‖_F² after the step; None where it was not measured.
        kept: ‖M_selected‖_F² after the step.
        travels: Whether selected slices travel between ranks.
        gradient: L1 norms of the gradient's slices; None where they were not measured.
        shards: Slices of every piece, of parameters that are cut along what is selected from; else empty.
    """

    scores: Array
    selected: Array
    before: Array
    ages: Array
    counts: Array
    window: Array
    length: int
    fraction: Array
    ef_decay: Array
    energy: Array | None
    kept: Array
    travels: Array
    gradient: Array | None = None
    shards: tuple[Array, ...] = ()
    known: dict[str, Array] = field(default_factory=dict)

    def cached(self, name: str, make: Callable[[], Array]) -> Array:
        """What several columns share is computed once."""
        if name not in self.known:
            self.known[name] = make()
        return self.known[name]

    @property
    def n(self) -> int:
        """Slices of one matrix."""
        return int(self.scores.shape[-1])


# ---------------------------------------------------------------------- this step


def count(s: Selected) -> Array:
    """k, of all stacked matrices."""
    return np.asarray(s.selected.sum((-2, -1)), dtype=float)


def realised(s: Selected) -> Array:
    """k / n."""
    return np.asarray(count(s) / (s.scores.shape[-2] * s.n))


def captured_mass(s: Selected) -> Array:
    """Σ selected r / Σ r, the mean over stacked matrices. NaN where nothing has mass."""
    return np.asarray(_ratio((s.scores * s.selected).sum(-1), s.scores.sum(-1)).mean(-1))


def threshold(s: Selected) -> Array:
    """The smallest selected score; NaN where any score is."""
    smallest = np.where(s.selected, s.scores, np.inf).min((-2, -1))
    return np.where(np.isnan(s.scores).any((-2, -1)), np.nan, smallest)


def ties(s: Selected) -> Array:
    """Slices that were not selected although their score is as large as the smallest selected one."""
    smallest = np.where(s.selected, s.scores, np.inf).min(-1, keepdims=True)
    return np.asarray(((s.scores == smallest) & ~s.selected).sum((-2, -1)), dtype=float)


# ---------------------------------------------------------------------- distributions


def curve(values: Array, fractions: tuple[float, ...] = FRACTIONS) -> Array:
    """Σ of the ⌈fraction·n⌉ largest over Σ, ``[G, len(fractions)]``: the Lorenz curve from its top.

    The mean over stacked matrices. NaN where nothing has mass.
    """
    sums = _descending_sums(values)
    places = [min(values.shape[-1], max(1, math.ceil(round(f * values.shape[-1], 9)))) - 1 for f in fractions]
    return np.asarray(_ratio(sums[..., places], sums[..., -1:]).mean(-2))


def _descending_sums(values: Array) -> Array:
    """Sums of the 1, 2, … largest along the last axis."""
    return np.asarray(-np.sort(-values, axis=-1).cumsum(-1))


def gini(values: Array) -> Array:
    """Σ (2i - n - 1) r_(i) / (n Σ r) over ascending r: 0 for equal rows, towards 1 for one row that holds all."""
    r = np.sort(values, axis=-1)
    n = r.shape[-1]
    weights: Array = 2 * np.arange(1, n + 1) - n - 1
    return np.asarray(_ratio((r * weights).sum(-1), n * r.sum(-1)).mean(-1))


def participation_ratio(values: Array) -> Array:
    """(Σ r)² / (n Σ r²), in (0, 1]: the share of rows that carry the mass; 1 for equal rows."""
    return np.asarray(_ratio(values.sum(-1) ** 2, values.shape[-1] * (values**2).sum(-1)).mean(-1))


def hill(values: Array) -> Array:
    """Tail index of the largest tenth: 1 / mean ln(r_(i) / r_(k+1)); small is heavy, 80 and more is no tail."""
    k = max(1, values.shape[-1] // 10)
    top = -np.sort(-values, axis=-1)[..., : k + 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(top[..., :k] / top[..., k:]).mean(-1)
    tail = _ratio(np.ones_like(logs), logs).mean(-1)
    return np.where(np.isnan(values).any((-2, -1)), np.nan, tail)


def flat_spread(length: int) -> float:
    """Standard deviation over mean of the L1 norm of ``length`` independent Gaussian entries: √((π/2 - 1) / length)."""
    return math.sqrt((math.pi / 2 - 1) / length)


def flat_mass(fraction: Array, length: int) -> Array:
    """Captured mass of flat rows: α + φ(Φ⁻¹(1 - α)) · CV."""
    normal = NormalDist()
    z = np.array([normal.inv_cdf(1 - f) if 0 < f < 1 else np.inf for f in np.atleast_1d(fraction)])
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(np.atleast_1d(fraction) + density * flat_spread(length))


def excess_mass(s: Selected) -> Array:
    """(C - C_flat) / (1 - C_flat): 0 for flat rows, 1 where the selected rows hold everything."""
    flat = s.cached("flat", lambda: flat_mass(realised(s), s.length))
    return _ratio(captured_mass(s) - flat, 1 - flat)


# ---------------------------------------------------------------------- over time


def churn(s: Selected) -> Array:
    """Jaccard distance of the selections of this step and the one before: 1 - |∩| / |∪|; 0 the same, 1 disjoint."""
    both = (s.selected & s.before).sum((-2, -1))
    return np.asarray(1 - both / (s.selected | s.before).sum((-2, -1)))


def age_quantile(s: Selected, q: float) -> Array:
    """The smallest age that at least a share ``q`` of the slices does not exceed."""
    ages = s.ages.reshape(len(s.ages), -1)
    return np.asarray(np.quantile(ages, q, axis=-1, method="inverted_cdf"), dtype=float)


def frequency(s: Selected) -> Array:
    """Times selected a step, over the window, ``[G, B, n]``."""
    return np.asarray(s.counts / s.window[:, None, None])


def horizon(s: Selected) -> Array:
    """Steps over which a row's momentum averages: 1 / ((1 - ef_decay) · fraction)."""
    return _ratio(np.ones(len(s.scores)), (1 - s.ef_decay) * realised(s))


def unselected_energy(s: Selected) -> Array:
    """‖M_unselected‖_F / ‖M‖_F before the selected part decays."""
    assert s.energy is not None
    rest = np.where(s.selected.all((-2, -1)), 0.0, np.maximum(s.energy - s.kept, 0))
    return np.sqrt(_ratio(rest, rest + _ratio(s.kept, s.ef_decay**2)))


def ef_growth(s: Selected) -> Array:
    """‖M‖₁ / ‖G‖₁ over 1 / ((1 - ef_decay) · fraction), its value for a gradient that does not change."""
    assert s.gradient is not None
    return _ratio(s.scores.sum((-2, -1)), s.gradient.sum((-2, -1)) * horizon(s))


# ---------------------------------------------------------------------- within shards


def equal_shards(n: int, world: int) -> list[Array]:
    """Indices of n slices cut into ``world`` pieces as torch does: ⌈n / world⌉ each, the last smaller, none empty."""
    size = -(-n // world)
    return [np.arange(a, min(a + size, n)) for a in range(0, n, size)]


def regret(s: Selected, shards: list[Array]) -> Array:
    """1 - mass(the largest of every shard) / mass(as many, the largest of all); 0 where shards do not matter."""
    local, total = np.zeros(s.scores.shape[:-1]), np.zeros(len(s.scores), dtype=int)
    k = _of_largest(s, shards)
    by_size: dict[int, list[Array]] = {}
    for index in shards:
        by_size.setdefault(len(index), []).append(index)
    for size, alike in by_size.items():
        sums = _descending_sums(s.scores[..., np.stack(alike)])
        own = np.minimum(k, size)
        local += np.take_along_axis(sums, (own - 1)[:, None, None, None], axis=-1)[..., 0].sum(-1)
        total += own * len(alike)
    everywhere = s.cached("descending sums", lambda: _descending_sums(s.scores))
    best = np.take_along_axis(everywhere, (np.minimum(total, s.n) - 1)[:, None, None], axis=-1)[..., 0]
    return _known(s, np.maximum(0, 1 - _ratio(local, best)).mean(-1))


def overlap(s: Selected, shards: list[Array]) -> Array:
    """|the largest of every shard ∩ as many, the largest of all| / k."""
    local, most = np.zeros(s.scores.shape, dtype=bool), _of_largest(s, shards)
    for index in shards:
        local[..., index] = _largest(s.scores[..., index], np.minimum(most, len(index)))
    k = local.sum(-1)[:, 0]
    both = (local & _largest(s.scores, k)).sum(-1)
    return _known(s, (both / k[:, None]).mean(-1))


def imbalance(s: Selected, shards: list[Array]) -> Array:
    """How many more of the largest of all one shard has than its share: the most in one over the mean, minus 1."""
    chosen = _largest(s.scores, _counts(_nominal(s), s.n))
    sizes = np.array([len(index) for index in shards])
    shares = np.stack([chosen[..., index].sum(-1) for index in shards], axis=-1) / sizes
    return _known(s, (shares.max(-1) / (chosen.sum(-1) / s.n) - 1).mean(-1))


def _known(s: Selected, values: Array) -> Array:
    """NaN where a score is: what is compared with it, nobody can tell."""
    return np.where(np.isnan(s.scores).any((-2, -1)), np.nan, values)


def _of_largest(s: Selected, shards: list[Array]) -> Array:
    """k of every shard: as Dion2 has it, of the largest one; smaller shards give what they have."""
    return _counts(_nominal(s), max(map(len, shards)))


def _nominal(s: Selected) -> Array:
    """The option; what was realised where it is not known."""
    return np.where(np.isnan(s.fraction), realised(s), s.fraction)


def _counts(fractions: Array, n: int) -> Array:
    """k = max(1, ⌈fraction · n⌉), as Dion2 rounds it."""
    return np.clip(np.ceil(np.round(fractions * n, 9)), 1, n).astype(int)


def _largest(scores: Array, k: Array) -> Array:
    """Mask of the k largest along the last axis, of equal ones the first; ``k`` is ``[G]``."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(scores.shape[-1]), order.shape), axis=-1)
    return np.asarray(ranks < k.reshape(-1, *[1] * (scores.ndim - 1)))


def _ratio(over: Array, under: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(over / under)
