"""Finishing formulas that need more than one number: operator norms, rows, ratios, cosines, totals, histograms."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from scion_telemetry.metrics.declare import Array, Measured

Where: TypeAlias = Callable[[Measured, str], Array]

BINS_PER_OCTAVE = 4
DEAD = 0.01
"""A row is dead when its norm is at most this share of the median row's."""


def is_matrix(m: Measured, quantity: str) -> Array:
    """Parameters that are no vectors."""
    return np.asarray(~m.shapes.vector)


def is_single(m: Measured, quantity: str) -> Array:
    """Parameters of one matrix, of which a rank can be told."""
    return np.asarray(~m.shapes.vector & (m.shapes.batch == 1))


def ratio(over: Array, under: Array) -> Array:
    """over / under; where under is 0, NaN for 0 / 0 and infinity otherwise."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(over / under)


def rms_to_rms(m: Measured, quantity: str) -> Array:
    """σ₁ √(d_in / d_out); of a vector, which is a diagonal, max |entry|."""
    return m.sigma(quantity) * np.where(m.shapes.vector, 1.0, np.sqrt(m.shapes.d_in / m.shapes.d_out))


def l1_to_rms(m: Measured, quantity: str) -> Array:
    """max column L2 norm / √d_out."""
    return m.longest(quantity, "column_squares") / np.sqrt(m.shapes.d_out)


def rms_to_inf(m: Measured, quantity: str) -> Array:
    """√d_in · max row L2 norm."""
    return m.longest(quantity, "row_squares") * np.sqrt(m.shapes.d_in)


def natural_norm(m: Measured, quantity: str) -> Array:
    """The norm in which the rule of each parameter measures a step; NaN where it has none or it is not known."""

    def make() -> Array:
        if not len(m.norms):
            return np.full(len(m.shapes.numel), np.nan)
        sigma = np.where(m.has_sigma(quantity), rms_to_rms(m, quantity), np.nan)
        known = {
            "rms_to_rms": sigma,
            "l1_to_rms": l1_to_rms(m, quantity),
            "rms_to_inf": rms_to_inf(m, quantity),
            "spectral": np.where(m.has_sigma(quantity), m.sigma(quantity), np.nan),
            "max_abs": m.merged(quantity, "largest"),
            "rms": m.frobenius(quantity) / np.sqrt(m.shapes.numel),
        }
        return np.select([m.norms == name for name in known], list(known.values()), np.nan)

    return m.cached((quantity, "natural_norm"), make)


def row_median(m: Measured, quantity: str) -> Array:
    """Median L2 norm of the rows."""
    return m.cached(
        (quantity, "row_median"),
        lambda: np.array([np.median(np.sqrt(x)) if x.size else np.nan for x in m.parts(quantity, "row_squares")]),
    )


def dead_rows(m: Measured, quantity: str) -> Array:
    """Share of rows that are at most ``DEAD`` times as long as the median row."""
    limits = (DEAD * row_median(m, quantity)) ** 2
    return np.array(
        [
            np.nan if np.isnan(limit) or not x.size else float((x <= limit).mean())
            for x, limit in zip(m.parts(quantity, "row_squares"), limits, strict=True)
        ]
    )


def worst_row_ratio(m: Measured, quantity: str) -> Array:
    """Largest ‖row of update‖ / ‖row of weight‖; rows that both are 0 do not count."""

    def worst(x: Array, w: Array) -> float:
        if x.size != w.size or not x.size:
            return np.nan
        shares = ratio(x, w)[~((x == 0) & (w == 0))]
        return float(np.sqrt(shares.max())) if shares.size else 0.0

    pairs = zip(m.parts(quantity, "row_squares"), m.parts("weight", "row_squares"), strict=True)
    return np.array([worst(x, w) for x, w in pairs])


def cosine(m: Measured, quantity: str, product: str, other: Array) -> Array:
    """Inner product over both lengths, within [-1, 1]; NaN where one length is 0."""
    return np.clip(ratio(m.merged(quantity, product), m.frobenius(quantity) * other), -1, 1)


def total_frobenius(m: Measured, quantity: str, mask: Array) -> float:
    """Frobenius norm of several parameters together."""
    return float(np.sqrt(m.merged(quantity, "squares")[mask].sum()))


def histogram(values: Array) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Log2 of the lower edges, counts and masses of the bins that are not empty, a quarter octave wide.

    Zeros have the edge -inf; what is not finite has the edge NaN, and comes last.
    """
    finite = np.isfinite(values)
    with np.errstate(divide="ignore"):
        # The largest float below an edge may have the logarithm of the edge: a value counts where 2^edge <= value.
        edges = np.floor(np.log2(values[finite]) * BINS_PER_OCTAVE) / BINS_PER_OCTAVE
    log2, inverse = np.unique(edges, return_inverse=True)
    count = np.bincount(inverse, minlength=len(log2)).astype(float)
    mass = np.bincount(inverse, weights=values[finite], minlength=len(log2))
    if not finite.all():
        log2, count, mass = (np.append(a, b) for a, b in ((log2, np.nan), (count, (~finite).sum()), (mass, np.nan)))
    return tuple(log2.tolist()), tuple(count.tolist()), tuple(mass.tolist())
