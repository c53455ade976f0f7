"""What a run could not say, in words for the reader of advice."""

from collections.abc import Sequence

from .records import Evidence


def notes_on(found: Sequence[Evidence], skipped: Sequence[str]) -> list[str]:
    """Every gap in the evidence once, with how many matrices it concerns and what would close it.

    Args:
        found: Evidence of every matrix.
        skipped: Parameters that select everything.
    """
    notes = []
    if without := [e.param for e in found if e.mass_source == "none"]:
        notes.append(
            f"the mass rule was not applied to {len(without)} of {len(found)} matrices ({without[0]!r}, …): momentum "
            "at a fraction below 1 always looks flat; add a calibration window (`scion-telemetry calibrate`) or log "
            "the gradient side"
        )
    if stand_in := sum(e.mass_source == "gradient" for e in found):
        notes.append(
            f"gradient mass stands in for a calibration window of {stand_in} matrices: it is of single, noisy steps"
        )
    if curve := sum(e.source == "curve" for e in found):
        notes.append(
            f"frequency curves, whose tails are coarse, stand in for slices.csv of {curve} matrices: close the tracker"
        )
    if whole := sum(e.source == "calibration" for e in found):
        notes.append(
            f"{whole} matrices selected everything: how rows grow is taken from the squares of their scores, as where "
            "gradients are nearly all noise; ages are within a factor of 2 or so, and what local selection loses is "
            "not known; advise again on a few hundred steps at the fraction"
        )
    if young := [e for e in found if e.never > 0]:
        worst = max(young, key=lambda e: e.never)
        notes.append(
            f"rows were never selected in {len(young)} of {len(found)} matrices ({worst.never:.1%} of "
            f"{worst.param!r}): a row first saves up for 1 / (1 - ef_decay) selections; a longer run tells more of them"
        )
    if skipped:
        notes.append(f"{len(skipped)} matrices always select everything and were left out ({skipped[0]!r}, …)")
    return notes
