"""What a run could not say, in words for the reader of advice."""

from collections.abc import Iterator, Sequence

from .limits import SMALLEST_KNOWN
from .records import Evidence
from .stretches import FEWEST_STEPS, Stretch


def notes_on(found: Sequence[Evidence], skipped: Sequence[str], window: Stretch | None = None) -> list[str]:
    """Every gap in the evidence once, with how many matrices it concerns and what would close it.

    Args:
        found: Evidence of every matrix.
        skipped: Parameters that select everything.
        window: The longest stretch at fraction 1 of a run that is below it elsewhere; None where there is none.
    """
    notes = [*_on_mass(found, window), *_on_growth(found), *_on_regret(found), *_on_never(found)]
    if skipped:
        notes.append(f"{len(skipped)} matrices always select everything and were left out ({skipped[0]!r}, …)")
    return notes


def note_on_flat(flat: Sequence[Evidence], of: int) -> list[str]:
    """That the mass of these matrices, of so many, decides nothing; empty where there are none."""
    if not flat:
        return []
    return [
        f"the mass says nothing of {len(flat)} of {of} matrices ({flat[0].param!r}, …): it is as flat as noise at "
        f"every fraction, which speaks neither against a small one nor for it; none below {SMALLEST_KNOWN:g} is taken "
        "on that alone; a mass limit of 0 takes it"
    ]


def _on_mass(found: Sequence[Evidence], window: Stretch | None) -> Iterator[str]:
    if without := [e.param for e in found if e.mass_source == "none"]:
        what = "add a calibration window at fraction 1 (`scion-telemetry calibrate`)"
        if window is not None:
            what = (
                f"its window at fraction 1 has {window.steps} steps up to step {window.end}, make it {FEWEST_STEPS} or "
                "more in which mass_at_… is measured"
            )
        yield (
            f"the mass rule was not applied to {len(without)} of {len(found)} matrices ({without[0]!r}, …): momentum "
            f'at a fraction below 1 always looks flat; {what}, or add "selection_gradient" to the metrics'
        )
    if stand_in := sum(e.mass_source == "gradient" for e in found):
        yield f"gradient mass stands in for a calibration window of {stand_in} matrices: it is of single, noisy steps"


def _on_growth(found: Sequence[Evidence]) -> Iterator[str]:
    if curve := sum(e.source == "curve" for e in found):
        yield (
            f"frequency curves, whose tails are coarse, stand in for slices.csv of {curve} matrices: close the tracker"
        )
    if averaged := [e for e in found if e.source == "slices" and not e.late]:
        yield (
            f"growth of {len(averaged)} matrices is averaged over the whole run, though it drifts: slices.csv says "
            "nothing of its later part (an older run, or flushes in the second half only), or the fraction had just "
            "changed there"
        )
    if whole := sum(e.source == "calibration" for e in found):
        yield (
            f"{whole} matrices selected everything: how rows grow is taken from the squares of their scores, as where "
            "gradients are nearly all noise; ages are within a factor of 2 or so, and what local selection loses is "
            "not known; advise again on a few hundred steps at the fraction"
        )


def _on_regret(found: Sequence[Evidence]) -> Iterator[str]:
    if as_if := [e for e in found if e.regret_at and not (e.shards > 1 and e.scope == "local")]:
        yield (
            f"regret_at_W of {len(as_if)} matrices is what cutting a selection that was made as a whole into W shards "
            "would lose. Selecting within shards loses more, since each levels its rows to a threshold of its own: 15 "
            "times as much in the one run that was compared (.0165 for .0011, 2 shards, fraction .25). Only a run "
            'whose matrices are cut into shards, with selection_scope="local", tells'
        )


def _on_never(found: Sequence[Evidence]) -> Iterator[str]:
    young = [e for e in found if e.never > 0]
    if not young:
        return
    worst = max(young, key=lambda e: e.never)
    bound = "at most " if worst.source == "curve" else ""
    certain = all(e.source != "curve" for e in young)
    yield (
        f"rows {'were' if certain else 'may have been'} never selected in {len(young)} of {len(found)} matrices "
        f"({bound}{worst.never:.1%} of {worst.param!r}): a row first saves up for 1 / (1 - ef_decay) selections; where "
        "they are more than .5 %, ages are predicted by chance and not from the measured one; a longer run tells more "
        "of them"
    )
