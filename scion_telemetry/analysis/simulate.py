"""Dion2's selection on made-up gradients: enough of the optimizer to hold the closed forms against. Pure numpy.

    M <- M + G,   K = the k rows of M of largest **L1 norm**,   M[K] <- ef M[K]

Orthonormalisation and weights are left out: they do not touch the momentum.
"""

from dataclasses import dataclass

import numpy as np

from .estimators import Array, captured_mass
from .theory import selected_count, shard_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What was counted after the burn-in.

    Args:
        selected: How often each row was selected, ``[n]``.
        steps: Steps counted.
        score: Mean L1 score of a row when it was selected, NaN where it never was, ``[n]``.
        score_all: Mean L1 score over all steps, ``[n]``.
        selected_late: How often each row was selected in the last ``steps_late`` steps, ``[n]``.
        steps_late: The later half of the steps counted.
        score_all_late: Mean L1 score over these, ``[n]``.
        momentum_mass: C(α) of the momentum before the selected rows decay, the mean over steps.
        grad_mass: C(α) of the gradient, the mean over steps.
        jaccard: |K ∩ K'| / |K ∪ K'| of consecutive steps, the mean.
        ages: Ages of all rows after every tenth step, ``[steps // 10, n]``; 0 is selected in this step.
        momentum_growth: ‖M‖₁ / ‖G‖₁ · (1 - ef) α, the mean; 1 where rows only drift. In real training, where gradients
            are nearly all noise, it was .07 at .25.
    """

    selected: Array
    steps: int
    score: Array
    score_all: Array
    selected_late: Array
    steps_late: int
    score_all_late: Array
    momentum_mass: float
    grad_mass: float
    jaccard: float
    ages: Array
    momentum_growth: float

    @property
    def frequency(self) -> Array:
        """Selections a step, ``[n]``."""
        return self.selected / self.steps


def simulate(
    scales: Array,
    *,
    fraction: float,
    ef_decay: float = 0.95,
    snr: float = 1.0,
    width: int = 32,
    steps: int = 2000,
    burn_in: int = 2000,
    seed: int = 0,
    shards: int = 1,
    random: bool = False,
    ends: Array | None = None,
) -> Simulated:
    """Run error-feedback selection on gradients G_t = s_i (snr · drift + noise_t), drift and noise standard normal.

    Args:
        scales: s ``[n]``: how large the gradient of each row is.
        fraction: α; with ``shards`` > 1 each contiguous piece selects its own share (local scope).
        ef_decay: What selected rows keep.
        snr: Drift over noise of an entry; infinite: no noise.
        width: Entries of a row.
        steps: Steps counted.
        burn_in: Steps before.
        seed: Of drift, noise and random selection.
        shards: Pieces that select for themselves.
        random: Not by L1 norm but by chance.
        ends: Scales at the last step, if they drift there in equal ratios.
    """
    rng = np.random.default_rng(seed)
    n = len(scales)
    drift = rng.standard_normal((n, width)) * (1.0 if np.isinf(snr) else snr)
    momentum, ratio = np.zeros((n, width)), np.ones(n) if ends is None else ends / scales
    tally = _Tally(n, fraction, ef_decay, half=burn_in + steps - steps // 2)
    for step in range(burn_in + steps):
        scale = (scales * ratio ** (step / (burn_in + steps)))[:, None]
        gradient = scale * (drift + rng.standard_normal((n, width)) if np.isfinite(snr) else drift)
        momentum += gradient
        scores = np.abs(momentum).sum(1)
        chosen = _select(rng.random(n) if random else scores, fraction, shards)
        tally.note(step, chosen, scores, gradient, counted=step >= burn_in)
        momentum[chosen] *= ef_decay
    return tally.result(steps)


def _select(scores: Array, fraction: float, shards: int) -> np.ndarray:
    chosen, start = np.zeros(len(scores), dtype=bool), 0
    sizes = shard_sizes(len(scores), shards)
    quota = selected_count(sizes[0], fraction)
    for size in sizes:
        if k := min(quota, size):
            chosen[start + np.argpartition(-scores[start : start + size], k - 1)[:k]] = True
        start += size
    return chosen


class _Tally:
    """Sums over the counted steps."""

    def __init__(self, n: int, fraction: float, ef_decay: float, half: int) -> None:
        self.fraction, self.ef, self.half = fraction, ef_decay, half
        self.selected_late, self.score_all_late = np.zeros(n), np.zeros(n)
        self.selected, self.score, self.score_all = np.zeros(n), np.zeros(n), np.zeros(n)
        self.last, self.before = np.zeros(n), np.zeros(n, dtype=bool)
        self.masses: list[tuple[float, float, float, float]] = []
        self.ages: list[Array] = []

    def note(self, step: int, chosen: np.ndarray, scores: Array, gradient: Array, *, counted: bool) -> None:
        self.last[chosen] = step
        if counted:
            self.selected += chosen
            self.score += scores * chosen
            self.score_all += scores
            if step >= self.half:
                self.selected_late += chosen
                self.score_all_late += scores
            shared = (chosen & self.before).sum() / (chosen | self.before).sum()
            rows = np.abs(gradient).sum(1)
            growth = scores.sum() / rows.sum() * (1 - self.ef) * self.fraction
            masses = (float(captured_mass(x, self.fraction)) for x in (scores, rows))
            self.masses.append((*masses, float(shared), float(growth)))  # type: ignore[arg-type]
            if step % 10 == 0:
                self.ages.append(step - self.last)
        self.before = chosen

    def result(self, steps: int) -> Simulated:
        momentum, gradient, jaccard, growth = (float(x) for x in np.mean(self.masses, axis=0))
        with np.errstate(invalid="ignore"):
            score = self.score / self.selected
        return Simulated(
            selected=self.selected,
            steps=steps,
            score=score,
            score_all=self.score_all / steps,
            selected_late=self.selected_late,
            steps_late=steps // 2,
            score_all_late=self.score_all_late / max(1, steps // 2),
            momentum_mass=momentum,
            grad_mass=gradient,
            jaccard=jaccard,
            ages=np.array(self.ages),
            momentum_growth=growth,
        )
