"""How fast the score of every row grows, from ``slices.csv`` or from frequency curves.

Growth drifts over a training, so counts of its later part say more of what comes than those of the whole: on the same
gradients the frequencies that follow correlate by .99 with what came at half and at double the fraction, not by .93 and
.95 (a small GPT, 1000 steps, 3 seeds).
"""

import math

import numpy as np
import pandas as pd

from .estimators import Array
from .theory import balanced_growth

LATE = ("selected_late", "steps_late", "score_all_late")
"""Columns of the later part; older runs have none."""


def has_late(slices: pd.DataFrame) -> bool:
    """Whether every row was counted in the later part of the run by itself."""
    return set(LATE) <= set(slices.columns) and bool(slices[list(LATE)].notna().all(axis=None))


def whole_growth(slices: pd.DataFrame, threshold: float | None, ef_decay: float, *, cold: bool) -> Array:
    """g = ((1 - ef) · score · selected + held) / steps, summed over the whole run: right for any schedule of fractions.

    Args:
        slices: Of one parameter, in the order of its rows.
        threshold: τ, of the later flushes; None where it was not logged.
        ef_decay: What a selected row keeps.
        cold: The run starts from zero momentum, so that all that a row holds at its end was gained in it.
    """
    selected, steps = slices["selected"].to_numpy(float), np.maximum(1.0, slices["steps"].to_numpy(float))
    # A row that was selected between flushes only: error feedback levels scores, so it had about the threshold.
    score = slices["score"].fillna(slices["score"].median() if threshold is None else threshold).to_numpy(float)
    held = np.zeros_like(score)
    if cold and threshold is not None:
        now = 2 * slices["score_all"].to_numpy(float) if "score_all" in slices else np.full_like(score, threshold)
        held = np.minimum(threshold, np.where(np.isfinite(now), now, threshold))
    return balanced_growth(score, selected, steps, ef_decay, held)


def late_growth(slices: pd.DataFrame, threshold: float, ef_decay: float, *, cold: bool) -> Array:
    """The same of the later part: g = ((1 - ef) · max(τ, score_all_late) · selected_late + held) / steps_late.

    A row holds about τ once it was selected, and from one that is selected always its mean score is taken. One that
    waits for its first selection holds more at the end than when the later part began: at a steady pace, twice its mean
    score before, and as much above its mean score since as it was below it.

    Args:
        slices: Of one parameter, in the order of its rows, with the columns ``LATE``.
        threshold: τ, of the later flushes.
        ef_decay: What a selected row keeps.
        cold: The run starts from zero momentum.
    """
    selected, steps, late = (slices[name].to_numpy(float) for name in LATE)
    held = np.zeros_like(late)
    if cold:
        early_steps = np.maximum(1.0, slices["steps"].to_numpy(float) - steps)
        early = (slices["score_all"].to_numpy(float) * (early_steps + steps) - late * steps) / early_steps
        waited = slices["selected"].to_numpy(float) == selected
        begin = np.where(waited, np.clip(2 * early, 0.0, threshold), threshold)
        end = np.where(selected > 0, threshold, np.clip(2 * late - begin, begin, threshold))
        held = np.where(np.isfinite(end - begin), end - begin, 0.0)
    return balanced_growth(np.maximum(threshold, late), selected, steps, ef_decay, held)


def curve_growth(curve: dict[float, float], fraction: float, n: int) -> Array:
    """Frequencies in units of θ from the mean Lorenz curve; rows at 1 may grow faster than it shows.

    Args:
        curve: Share of the selections that the most selected have, by their share of the rows.
        fraction: At which it was counted.
        n: Rows.
    """
    at = np.array([0.0, *curve, 1.0])
    share = np.maximum.accumulate(np.array([0.0, *curve.values(), 1.0]))
    cumulated = np.interp(np.arange(n + 1) / n, at, share)
    return np.minimum(1.0, np.diff(cumulated) * fraction * n)


def rarest_window(fraction: float) -> int:
    """Steps a flush has to count for its curve to tell rare rows apart: 8 selections of a mean row."""
    return math.ceil(8 / fraction)
