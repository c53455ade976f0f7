"""Which ``ef_decay`` belongs to a fraction."""

from . import theory
from .records import Evidence


def mended_decay(e: Evidence, fraction: float, mu: float) -> float | None:
    """ef' = 1 - (1 - µ) / α where the momentum would remember otherwise than that of µ does at fraction 1, else None.

    Longer memories are mended at fractions below 1. Shorter ones are left alone where they were so before, and so is
    fraction 1, where they are the user's choice. None also where no decay forgets that fast: α < 1 - µ.

    Args:
        e: Of the matrix.
        fraction: α that it would be trained at.
        mu: µ.
    """
    wanted, matched = 1 / (1 - mu), theory.matched_ef(fraction, mu)
    horizon, now = (theory.horizon(f, e.ef_decay) for f in (fraction, e.fraction))
    otherwise = (fraction < 1 and horizon > longest_kept(mu)) or now > 0.95 * wanted > horizon
    return matched if otherwise and matched >= 0 else None


def longest_kept(mu: float) -> float:
    """Horizon up to which the momentum remembers no longer than is wanted, in steps: 1.05 / (1 - µ)."""
    return 1.05 / (1 - mu)
