"""What to change together with the fraction, in words; what is worth most comes first."""

from collections.abc import Iterator, Sequence

import numpy as np

from . import theory
from .decay import mended_decay
from .limits import SMALLEST_KNOWN, Limits
from .records import Evidence, MatrixAdvice


def changes(
    matrices: Sequence[MatrixAdvice], best: int, binding: str, limits: Limits, scope: str = ""
) -> Iterator[str]:
    """Lines on a fraction.

    Args:
        matrices: Of one role.
        best: Number of the candidate that is advised.
        binding: What stands against the next smaller one.
        limits: What was asked for.
        scope: What to say of the selection scope, which comes after the decay; empty: nothing.
    """
    fraction = matrices[0].candidates[best].fraction
    yield from _decay(matrices, best, limits)
    if scope:
        yield scope
    unknown = [m for m in matrices if m.evidence.mass_source == "none"]
    if unknown and (binding == "unmeasured" or fraction < SMALLEST_KNOWN):
        yield (
            f"measure the mass of {len(unknown)} of {len(matrices)} matrices before you go below {SMALLEST_KNOWN:g} "
            "(see the note): without it nothing but ages speaks against a small fraction, and below that each halving "
            "cost .05 to .13 in loss in the study"
        )
    now = float(np.median([m.evidence.fraction for m in matrices]))
    if abs(fraction - now) > 0.01:
        yield (
            f"try lr again, from the present one on: the RMS of a step goes with √fraction, and is "
            f"{np.sqrt(fraction / now):.2f} times as large, but in the study the best of rates a factor of 2 apart was "
            "the same at every fraction"
        )
    waits = binding in ("age", "overdue") and any(m.evidence.source != "calibration" for m in matrices)
    if waits and fraction > now + 0.01 and limits.max_age is None:
        yield (
            "try a smaller lr before a larger fraction: in the study, rows that wait as long were frequent at 2 and 4 "
            "times the best learning rate, and rare at the best"
        )
    yield from _drift(matrices, best, limits)
    yield from _others(matrices, best)


def _decay(matrices: Sequence[MatrixAdvice], best: int, limits: Limits) -> Iterator[str]:
    """The decay of the fraction that is advised, and of the run's own, where it stays if nobody obeys."""
    advised = _longest([(m.evidence, m.candidates[best].fraction) for m in matrices], limits.mu)
    own = _longest([(m.evidence, m.evidence.fraction) for m in matrices], limits.mu)
    if advised is not None:
        yield _decay_line(*advised, limits.mu, f"with fraction={advised[1]:g}")
    if own is None or abs(own[1] - matrices[0].candidates[best].fraction) <= 0.01:
        return
    where = f"should fraction stay at {own[1]:.3g}"
    yield f"ef_decay={own[2]:.3g} {where}" if advised is not None else _decay_line(*own, limits.mu, where)


def _longest(pairs: Sequence[tuple[Evidence, float]], mu: float) -> tuple[Evidence, float, float] | None:
    """The matrix whose momentum remembers longest of those that need another decay, its fraction, and that decay."""
    found = [(e, f, mended_decay(e, f, mu)) for e, f in pairs]
    mended = [(e, f, ef) for e, f, ef in found if ef is not None and abs(ef - e.ef_decay) > 1e-9]
    return max(mended, key=lambda one: theory.horizon(one[1], one[0].ef_decay), default=None)


def _decay_line(e: Evidence, fraction: float, ef_decay: float, mu: float, where: str) -> str:
    remembers, wanted = theory.horizon(fraction, e.ef_decay), 1 / (1 - mu)
    text = (
        f"ef_decay={ef_decay:.3g} {where}, instead of {e.ef_decay:.3g}: else the momentum remembers {remembers:.0f} "
        f"steps, not the {wanted:.0f} of momentum {mu:g}"
    )
    if remembers < wanted:
        return text
    return (
        f"{text}; of what a smaller fraction lost in loss, this took back two thirds at .5, a third at .25, an "
        "eighth at .125 (a small GPT, one seed each)"
    )


def _drift(matrices: Sequence[MatrixAdvice], best: int, limits: Limits) -> Iterator[str]:
    chosen = [m.candidates[best] for m in matrices]
    drift = max(c.drift for c in chosen)
    if warned := [m for m, c in zip(matrices, chosen, strict=True) if c.warned]:
        yield (
            f"warning, no bar: weight decay shrinks waiting rows by up to {drift:.2g} between two steps, above "
            f"{limits.drift:g} in {len(warned)} of {len(matrices)} matrices; nothing shows that it harms, "
            'decay_on="selected" would end it'
        )
    elif drift > 0:
        yield f'decay_on="selected" would end the drift of waiting rows (now up to {drift:.2g})'


def _others(matrices: Sequence[MatrixAdvice], best: int) -> Iterator[str]:
    """Matrices that do not accept what is advised."""
    others = [m for m in matrices if not m.candidates[best].accepted]
    local = [m for m in others if set(m.candidates[best].failed) == {"regret"}]
    own = [m for m in others if m not in local]
    if local:
        names = ", ".join(m.evidence.param for m in local[:3])
        yield f'selection_scope="global" for {len(local)} of {len(matrices)} matrices: {names}'
    if own:
        names = ", ".join(f"{m.evidence.param} {m.global_fraction:g}" for m in own[:3])
        yield f"a larger fraction of their own for {len(own)} of {len(matrices)} matrices: {names}"
