"""Growth of rows from the later part of a run: where it drifts, where it does not, and where it cannot be told."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from advise_run import WIDTH, Matrix, lognormal, write

from scion_telemetry.analysis import theory
from scion_telemetry.analysis.evidence import gather
from scion_telemetry.analysis.growth import late_growth, whole_growth
from scion_telemetry.analysis.records import Evidence
from scion_telemetry.analysis.simulate import simulate


def found_in(path: Path, **changes: Any) -> tuple[Evidence, list[str]]:
    late = changes.pop("late", True)
    ((found,), notes) = gather(write(path, Matrix(**{"name": "w", "scales": lognormal(), **changes}), late=late))
    return found, notes


@pytest.mark.parametrize("snr", [1.0, 0.1])
def test_where_growth_drifts_the_later_part_says_more_of_what_comes(snr: float, tmp_path: Path) -> None:
    """Rows that grow become others: every one ends with the scale of another."""
    ends = lognormal(seed=2)
    late, notes = found_in(tmp_path / "late", ends=ends, snr=snr)
    whole, told = found_in(tmp_path / "whole", ends=ends, snr=snr, late=False)
    assert (late.late, whole.late) == (500, 0)
    assert ["averaged over the whole run" in "".join(n) for n in (notes, told)] == [False, True]
    for fraction in (0.125, 0.25, 0.5):
        # The very same gradients, selected from at another fraction; counted in the second half.
        options: dict[str, Any] = {"width": WIDTH, "snr": snr, "steps": 500, "burn_in": 500}
        truth = simulate(lognormal(), ends=ends, fraction=fraction, **options).frequency
        errors, correlations = [], []
        for evidence in (late, whole):
            f = theory.water_fill(evidence.rates[0], fraction)
            errors.append(float(np.abs(f - truth).mean()))
            correlations.append(float(np.corrcoef(f, truth)[0, 1]))
        assert errors[0] < 0.7 * errors[1], fraction
        assert correlations[0] > max(0.97, correlations[1] + 0.01), fraction


@pytest.mark.parametrize("snr", [1.0, 0.1])
def test_where_growth_does_not_drift_half_the_steps_say_as_much(snr: float, tmp_path: Path) -> None:
    """Also of rows that wait for their first selection until late in the run, or to its end."""
    late, _ = found_in(tmp_path / "run", snr=snr)
    assert late.never > 0
    for fraction in (0.125, 0.5):
        settled = simulate(lognormal(), fraction=fraction, width=WIDTH, snr=snr, burn_in=6000, steps=2000).frequency
        f = theory.water_fill(late.rates[0], fraction)
        assert np.abs(f - settled).mean() < {1.0: 0.01, 0.1: 0.025}[snr]
        assert np.corrcoef(f, settled)[0, 1] > 0.99
        rare = settled < 0.1 * fraction
        assert np.abs(f - settled)[rare].mean() < 0.25 * settled[rare].mean() + 0.003


def row(steps: int, tau: float, g: float, ef: float, half: int) -> dict[str, float]:
    """A row that grows by g a step and is selected, which leaves ef of it, whenever it has reached τ."""
    score, scores, chosen = 0.0, [], []
    for _ in range(steps):
        score += g
        scores.append(score)
        chosen.append(score >= tau)
        score *= ef if chosen[-1] else 1
    seen = [s for s, c in zip(scores, chosen, strict=True) if c]
    return {
        "selected": sum(chosen),
        "steps": steps,
        "score": float(np.mean(seen)) if seen else math.nan,
        "score_all": float(np.mean(scores)),
        "selected_late": sum(chosen[half:]),
        "steps_late": steps - half,
        "score_all_late": float(np.mean(scores[half:])),
    }


def test_rates_of_rows_that_grow_at_a_steady_pace_are_exact() -> None:
    """From rows that are always selected to rows that never are, in the first half, the second, or both."""
    tau, ef, steps, half = 1.0, 0.9, 1000, 450
    rates = np.array([2.0, 0.1, 0.01, 0.003, 0.0019, 0.0012, 0.0009, 0.0002, 0.0])
    table = pd.DataFrame([row(steps, tau, g, ef, half) for g in rates])
    assert set(table["selected"] - table["selected_late"] > 0) == {True, False}
    assert set(table["selected_late"] > 0) == {True, False}
    late, whole = (grow(table, tau, ef, cold=True) for grow in (late_growth, whole_growth))
    # Selections in a window are known to one of them, which takes (1 - ef) τ.
    assert late == pytest.approx(rates, rel=0.01, abs=1.01 * (1 - ef) * tau / (steps - half))
    assert whole == pytest.approx(rates, rel=0.01, abs=1.01 * (1 - ef) * tau / steps)
    # A tracker that came later knows nothing of zero momentum.
    warm = late_growth(table, tau, ef, cold=False)
    assert warm[:3] == pytest.approx(late[:3])
    assert warm[-3:].tolist() == [0, 0, 0]


def test_counts_after_a_change_of_the_fraction_wait_until_rows_are_level(tmp_path: Path) -> None:
    """Ten horizons of 80 steps at .25."""
    after = {steps: found_in(tmp_path / str(steps), plan=((200, 1.0), (steps, 0.25)))[0] for steps in (1000, 1800)}
    assert {steps: found.late for steps, found in after.items()} == {1000: 0, 1800: 900}
    truth = simulate(lognormal(), fraction=0.25, width=WIDTH, burn_in=6000, steps=2000).frequency
    for found in after.values():
        assert np.abs(theory.water_fill(found.rates[0], 0.25) - truth).mean() < 0.02
    last, _ = found_in(tmp_path / "other", plan=((900, 0.25), (100, 1.0)))
    assert (last.fraction, last.late) == (0.25, 0), "the later part is at 1"
