"""Runs that cannot be advised on, each with what to do about it."""

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard

import pandas as pd

from scion_telemetry.store import Run

from .growth import rarest_window
from .stretches import FEWEST_ROWS, FEWEST_STEPS, Stretch, longest_last


def refuse_arguments(run: object, calibration: object, seed_sd: object, candidates: object) -> None:
    """Arguments of another kind than advice takes, before any work is done."""
    for name, value in (("run", run), ("calibration", calibration)):
        if not isinstance(value, Run) and (name == "run" or value is not None):
            raise TypeError(f"{name} must be a Run, got {value!r}; open a run directory with load_run(...)")
    if not _is_number(seed_sd):
        raise TypeError(f"seed_sd must be a number, the standard deviation of the loss over seeds, got {seed_sd!r}")
    if not 0 < seed_sd < math.inf:
        raise ValueError(f"seed_sd must be > 0, the standard deviation of the final loss over seeds, got {seed_sd!r}")
    if isinstance(candidates, str) or not isinstance(candidates, Collection):
        raise TypeError(f"candidates must be a sequence of fractions, such as (0.5, 0.25), got {candidates!r}")
    if not len(candidates):
        raise ValueError(f"candidates must name at least one fraction to try, got {candidates!r}")
    for fraction in candidates:
        if not _is_number(fraction) or not 0 < fraction <= 1:
            raise ValueError(f"candidates must be numbers in (0, 1], got {fraction!r}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse_without_selection(run: Run) -> None:
    """A run whose tables say nothing of selections."""
    if not run.selection.empty and "fraction" in run.selection:
        return
    where = f"{str(run.path)!r} has no selection rows"
    if not any(str(name).startswith("dion") for name in run.params["algorithm"]):
        raise ValueError(f"{where}: no parameter of it was stepped by Dion2 or Dion3; train with optim.Dion2")
    raise ValueError(
        f'{where}, though Dion2 or Dion3 steps it: selections were not chosen; use Tracker(metrics="basic"), or add '
        '"selection" to its metrics ("norms" alone has none)'
    )


def refuse_mixed_scopes(options: Mapping[str, Mapping[str, Any]]) -> None:
    """A run that selects locally in one parameter and globally in another."""
    example = {str(o.get("selection_scope", "local")): name for name, o in options.items()}
    if len(example) > 1:
        raise ValueError(
            f"selection scopes are mixed ({', '.join(f'{s!r}: {n}' for s, n in sorted(example.items()))}), of "
            "which one answer cannot tell; train with one selection_scope for all that selects, and advise on that run"
        )


def refuse_few(run: Run, parts: Mapping[str, list[Stretch]], largest: float) -> None:
    """A run with too few steps or flushes at a fraction of at most ``largest``, or one that broke."""
    where = repr(str(run.path))
    live = {name: [p for p in found if p.fraction <= largest] for name, found in parts.items()}
    live = {name: found for name, found in live.items() if found}
    if not live:
        raise ValueError(
            f"{where} selects everything (fraction 1) at every step: it is a calibration run, and tells without "
            "slices.csv (written when the tracker closes: call tracker.close()) the mass that rows would have but not "
            "how often they would be selected; give it as calibration= beside a run at a smaller fraction, of "
            f">= {FEWEST_STEPS} steps"
        )
    name, found = min(live.items(), key=lambda item: longest_last(item[1]).steps)
    best = longest_last(found)
    if best.steps < FEWEST_STEPS and len(found) > 1:
        values = ", ".join(f"{p.fraction:.3g} up to step {p.end}" for p in found[:4])
        raise ValueError(
            f"{where} changes the fraction of {name!r} too often ({values}, …): the longest stretch is {best.steps} "
            f"steps; keep one fraction for >= {FEWEST_STEPS} steps (set_fraction between two steps)"
        )
    if best.steps < FEWEST_STEPS:
        raise ValueError(
            f"{where} has too few steps at one fraction: {best.steps} of {name!r} at {best.fraction:.3g}; train at "
            f"least {FEWEST_STEPS} steps at it"
        )
    for name, found in live.items():
        _refuse_rare(run, name, longest_last(found))
    _refuse_broken({name: longest_last(found).rows for name, found in live.items()})


def _refuse_rare(run: Run, name: str, best: Stretch) -> None:
    if len(best.rows) >= FEWEST_ROWS:
        return
    # Rarely enough for frequency curves, should the tracker never be closed, but often enough.
    often = min(best.steps // FEWEST_ROWS, max(best.steps // 20, rarest_window(best.fraction)))
    raise ValueError(
        f"{str(run.path)!r} measured the selection of {name!r} only {len(best.rows)} times in {best.steps} steps at "
        f"{best.fraction:.3g}, and {FEWEST_ROWS} are needed: its schedule is {run.info.get('schedule')!r}; use "
        f"Tracker(schedule=every({often})), and 1 where metrics is a dictionary that says how often "
        '"selection" is measured'
    )


def _refuse_broken(tables: Mapping[str, pd.DataFrame]) -> None:
    for name, rows in tables.items():
        # A momentum of zeros has no mass either, but only before its first gradient.
        if "captured_mass" in rows and math.isnan(rows["captured_mass"].iloc[-1]):
            raise ValueError(
                f"the momentum of {name!r} holds NaN, infinity or nothing at step {rows['step'].iloc[-1]}: a run that "
                "broke cannot be advised on; advise on one that ended before"
            )


def refuse_as_calibration(run: Run, whole: Sequence[Stretch]) -> None:
    """What was given as a calibration and holds none; ``whole`` are its stretches at fraction 1."""
    longest = max((part.steps for part in whole), default=0)
    raise ValueError(
        f"{str(run.path)!r} is no calibration run: it needs >= {FEWEST_STEPS} steps at fraction 1 (found {longest}) "
        "with the columns mass_at_… in its selection table; `scion-telemetry calibrate` shows how"
    )


def refuse_unknown_rows(name: str, fraction: float) -> None:
    """Neither slices.csv nor frequency curves."""
    needed = rarest_window(fraction)
    raise ValueError(
        f"nothing says how often single rows of {name!r} were selected: there is no slices.csv for it (written when "
        f"the tracker closes: call tracker.close()), and no curve frequency_at_… counted over >= {needed} steps; close "
        f"the tracker, or measure the selection no more often than every {needed} steps: "
        f"Tracker(schedule=every({needed}))"
    )
