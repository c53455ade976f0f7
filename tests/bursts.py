"""Selection by error feedback where the norm of a row's gradient comes in bursts, as in real training."""

import math

import numpy as np


def bursts(rates: np.ndarray, fraction: float, spread: float) -> tuple[np.ndarray, float]:
    """Frequencies of rows that grow by lognormal amounts of mean ``rates``, and the 99th percentile of the age.

    Args:
        rates: ``[n]``.
        fraction: α.
        spread: σ of the logarithm of the amounts, which remember 50 steps; 0: the same in every step.
    """
    rng, n = np.random.default_rng(0), len(rates)
    k = round(fraction * n)
    score, count, last, state = np.zeros(n), np.zeros(n), np.zeros(n), rng.standard_normal(n)
    ages = []
    for step in range(6000):
        state = 0.98 * state + math.sqrt(1 - 0.98**2) * rng.standard_normal(n)
        score += rates * np.exp(spread * state - spread**2 / 2)
        chosen = np.argpartition(-score, k - 1)[:k]
        last[chosen] = step
        if step >= 2000:
            count[chosen] += 1
            ages.append(step - last)
        score[chosen] *= 0.95
    return count / 4000, float(np.quantile(ages[::10], 0.99, method="inverted_cdf"))
