"""What to change together with the fraction, in words; what is worth most comes first."""

from collections.abc import Iterator, Sequence

import numpy as np

from .limits import SMALLEST_KNOWN, Limits
from .records import MatrixAdvice


def changes(matrices: Sequence[MatrixAdvice], best: int, binding: str, limits: Limits) -> Iterator[str]:
    """Lines on a fraction.

    Args:
        matrices: Of one role.
        best: Number of the candidate that is advised.
        binding: What stands against the next smaller one.
        limits: What was asked for.
    """
    fraction = matrices[0].candidates[best].fraction
    yield from _decay(matrices, best, limits)
    unknown = [m for m in matrices if m.evidence.mass_source == "none"]
    if unknown and (binding == "unmeasured" or fraction < SMALLEST_KNOWN):
        yield (
            f"measure the mass of {len(unknown)} of {len(matrices)} matrices before you go below {SMALLEST_KNOWN:g} "
            "(see the note): without it nothing but ages speaks against a small fraction, and below that each halving "
            "cost .05 to .13 in loss in the study"
        )
    now = float(np.median([m.evidence.fraction for m in matrices]))
    if abs(fraction - now) > 0.01:
        yield f"tune lr again: the RMS of a step goes with √fraction, here by {np.sqrt(fraction / now):.2f}"
    if binding in ("age", "overdue") and limits.max_age is None:
        yield (
            "try a smaller lr before a larger fraction: in the study, rows that wait as long were frequent at 2 and 4 "
            "times the best learning rate, and rare at the best"
        )
    yield from _drift(matrices, best, limits)
    yield from _others(matrices, best)


def _decay(matrices: Sequence[MatrixAdvice], best: int, limits: Limits) -> Iterator[str]:
    chosen = [m.candidates[best] for m in matrices]
    mended = [(c, m.evidence) for c, m in zip(chosen, matrices, strict=True) if c.ef_decay != m.evidence.ef_decay]
    if not mended:
        return
    worst, found = max(mended, key=lambda pair: pair[0].horizon)
    wanted = 1 / (1 - limits.mu)
    text = (
        f"ef_decay={worst.ef_decay:.3g} with fraction={worst.fraction:g}, instead of {found.ef_decay:.3g}: else "
        f"the momentum remembers {worst.horizon:.0f} steps, not the {wanted:.0f} of momentum {limits.mu:g}"
    )
    if worst.horizon < wanted:
        yield text
        return
    yield (
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
