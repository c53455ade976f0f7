"""Advice on the fraction: one limit and one prediction at a time."""

import math
from typing import Any

import numpy as np
import pytest
from advise_evidence import FLAT, FRACTIONS, evidence, one
from advise_run import WIDTH, lognormal
from bursts import bursts

from scion_telemetry.analysis import (
    CANDIDATES,
    Limits,
    advise_matrix,
    predicted_age,
    predicted_frequency,
    theory,
)
from scion_telemetry.analysis.simulate import simulate

GPT = {0.0625: 0.118, 0.125: 0.211, 0.1875: 0.294, 0.25: 0.370, 0.375: 0.507, 0.5: 0.630, 0.75: 0.841}


ROOT = {f: math.sqrt(f) for f in FRACTIONS}

# One limit at a time


def test_flat_rows_go_as_low_as_is_tried() -> None:
    matrix = one()
    assert (matrix.fraction, matrix.binding) == (CANDIDATES[-1], "none")
    assert [c.age_p99 for c in matrix.candidates] == [0, *(math.ceil(1 / f) - 1 for f in CANDIDATES[1:])]
    assert matrix.chosen.k == 4


@pytest.mark.parametrize(
    ("limits", "changes", "fraction", "binding"),
    [
        # Ages of flat rows are 1/α - 1: 7 at .125, 15 at .0625.
        ({"max_age": 10, "overdue": 1}, {}, 0.125, "age"),
        ({"max_age": 10}, {}, 0.125, "overdue"),
        # 149 steps at .25, where the horizon is 80, are 599 at .0625, where it is 320; at .75, 74 against 27.
        ({"overdue": 1}, {"age_p99": 149.0}, 0.0625, "none"),
        ({"overdue": 1, "age_horizons": 2}, {"age_p99": 149.0}, 1.0, "age"),
        ({"overdue": 1, "age_horizons": 2, "max_age": 500}, {"age_p99": 149.0}, 1.0, "age"),
        ({"overdue": 1, "max_age": 500}, {"age_p99": 149.0}, 0.125, "age"),
        # Half the horizon allows half the age.
        ({"overdue": 1}, {"age_p99": 149.0, "ef_decay": 0.9}, 1.0, "age"),
        # Drift is no bar.
        ({"drift": 0.0}, {}, 0.0625, "none"),
        # Mass equals the fraction's square root.
        ({}, {"mass": ROOT}, 0.125, "mass"),
        ({"mass": 0.5}, {"mass": ROOT}, 0.25, "mass"),
        # Means of a small GPT trained at fraction 1: what lost much is refused, what lost little is not.
        ({}, {"mass": GPT}, 0.25, "mass"),
        ({"mass": 0.5}, {"mass": GPT}, 0.375, "mass"),
        ({}, {}, 0.0625, "none"),
        # As flat as noise, it says nothing, and that nobody has looked does not either.
        ({}, {"mass": FLAT}, 0.25, "flat"),
        ({"mass": 0.0}, {"mass": FLAT}, 0.0625, "none"),
        ({"mass": 0.1}, {"mass": FLAT}, 0.125, "flat"),
        ({"max_age": 2, "overdue": 1}, {"mass": FLAT}, 0.375, "age"),
        ({}, {"mass": {}, "mass_source": "none"}, 0.25, "unmeasured"),
        ({"mass": 0.0}, {"mass": {}, "mass_source": "none"}, 0.0625, "none"),
        ({"max_age": 2, "overdue": 1}, {"mass": {}, "mass_source": "none"}, 0.375, "age"),
        ({}, {"shards": 4, "regret": 0.04}, 0.0625, "none"),
        ({}, {"shards": 4, "regret": 0.06}, 1.0, "regret"),
        ({}, {"shards": 4, "regret": 0.06, "scope": "global"}, 0.0625, "none"),
        # 20/α steps of horizon against 2 % of 8000: 160 steps at .125; ef .2 makes it 20 again at .0625.
        ({}, {"total_steps": 8000}, 0.0625, "none"),
        # Momentum .9 remembers 10 steps, for which .0625 would need ef < 0.
        ({"mu": 0.9}, {"total_steps": 8000}, 0.125, "horizon"),
        ({"mu": 0.9, "total_steps": 16000}, {"total_steps": 8000}, 0.0625, "none"),
        # Of 4 rows one is selected from .25 down: less costs the same.
        ({}, {"n": 4, "rates": np.ones((1, 4)), "shape": (4, 256)}, 0.25, "saving"),
    ],
)
def test_the_limit_that_binds(limits: Any, changes: dict[str, Any], fraction: float, binding: str) -> None:
    matrix = one(Limits(**limits), **changes)
    assert (matrix.fraction, matrix.binding) == (fraction, binding)


@pytest.mark.parametrize("mu", [0.8, 0.95, 0.98, 0.99, 0.999])
@pytest.mark.parametrize("ef_decay", [0.9, 0.95, 0.99])
def test_a_horizon_that_is_asked_for_bars_nothing(mu: float, ef_decay: float) -> None:
    """Of 20 steps at most, 2 % of 1000, .99 asks for 100, of which 27 to 80 are no more than enough."""
    matrix = one(Limits(mu=mu), total_steps=1000, ef_decay=ef_decay)
    tried = [c for c in matrix.candidates if c.fraction >= 1 - mu]
    assert {name for c in tried for name in c.failed} == set()
    accepted = [c.accepted for c in matrix.candidates]
    assert accepted == sorted(accepted, reverse=True), "the smaller, the worse"


@pytest.mark.parametrize("options", [{"total_steps": 10}, {"total_steps": 10**6}, {"horizon_share": 0.0}])
def test_the_length_of_the_training_counts_where_no_decay_helps(options: Any) -> None:
    assert one(Limits(**options)).candidates == one().candidates
    low, high = (one(Limits(mu=0.9, **o), total_steps=8000) for o in (options, {"total_steps": 10**6}))
    assert [set(m.candidates[-1].failed) for m in (low, high)] == [
        {"horizon"} if options != {"total_steps": 10**6} else set(),
        set(),
    ]
    assert low.candidates[:-1] == high.candidates[:-1]


def test_scope_that_is_asked_for_does_not_rewrite_what_was_measured() -> None:
    found = evidence(shards=4, regret=0.06)
    matrix = advise_matrix(found, Limits(), scope="global")
    assert (matrix.scope, matrix.fraction, matrix.evidence.scope) == ("global", 0.0625, "local")
    assert matrix.evidence is found
    assert advise_matrix(found, Limits()).scope == "local"


def test_overdue_rows_bind() -> None:
    # 4 % of the rows come every 1/f = 64 steps at .25, every 128 at .125 and every 257 at .0625.
    rates = np.array([[1.0] * 96 + [0.06] * 4])
    matrix = one(Limits(max_age=100), n=100, rates=rates, shape=(100, 256))
    found = [c for c in matrix.candidates if c.fraction <= 0.25]
    assert [c.overdue for c in found] == [0, 0, 0.04, 0.04]
    assert [set(c.failed) for c in found] == [set(), set(), {"overdue"}, {"overdue"}]
    assert found[2].failed["overdue"] == pytest.approx(4)
    # In horizons of 20 steps over α the limit grows as the periods do: 240 for 64, 480 for 128, 960 for 257.
    assert [c.age_limit for c in one().candidates[-2:]] == pytest.approx([480, 960])
    assert not any(c.overdue for c in one(n=100, rates=rates, shape=(100, 256)).candidates)


def test_decay_drift_warns() -> None:
    # lr λ age: 2e-4 · 15 > .0025 >= 2e-4 · 7.
    found = one(Limits(drift=0.0025)).candidates[-2:]
    assert [set(c.warned) for c in found] == [set(), {"drift"}]
    assert all(c.accepted for c in found)
    assert found[1].warned["drift"] == pytest.approx(2e-4 * 15 / 0.0025)
    assert not one(Limits(drift=0.0025), decays_selected=True).chosen.warned


@pytest.mark.parametrize(
    ("fraction", "ef_decay", "mu", "expected"),
    [
        # From a horizon of 20/α steps back to 20, whatever the length of the training.
        (0.25, 0.95, 0.95, {1.0: 0.95, 0.5: 0.9, 0.25: 0.8, 0.0625: 0.2}),
        (0.25, 0.9, 0.9, {1.0: 0.9, 0.5: 0.8, 0.25: 0.6, 0.0625: 0.9}),  # .0625 would need ef < 0
        # It is 20 now, and stays so where the fraction grows.
        (0.25, 0.8, 0.95, {1.0: 0.95, 0.5: 0.9, 0.25: 0.8, 0.0625: 0.2}),
        # Shorter by choice.
        (0.25, 0.5, 0.95, {1.0: 0.5, 0.5: 0.5, 0.25: 0.5, 0.0625: 0.2}),
        (1.0, 0.99, 0.95, {1.0: 0.99, 0.5: 0.9}),
    ],
)
def test_the_decay_that_keeps_the_horizon(
    fraction: float, ef_decay: float, mu: float, expected: dict[float, float]
) -> None:
    for total_steps in (300, 10**6):
        matrix = one(Limits(mu=mu), fraction=fraction, ef_decay=ef_decay, total_steps=total_steps)
        told = {c.fraction: c.ef_decay for c in matrix.candidates if c.fraction in expected}
        assert told == pytest.approx(expected)
        assert matrix.candidates[-1].horizon == pytest.approx(16 / (1 - ef_decay))


def test_global_selection_is_named_where_it_would_allow_less() -> None:
    assert one(shards=4, regret=0.06).global_fraction == 0.0625


def test_costs() -> None:
    candidate = next(c for c in one(n=64, width=256, shards=4).candidates if c.fraction == 0.25)
    full = 4 * 64**2 * 256 + 2 * 64**3
    assert candidate.flops == pytest.approx((4 * 16**2 * 256 + 2 * 16**3) / full)
    assert candidate.bytes == 2 * 2 * 16 * 256 * 3 / 4
    assert candidate.cost == pytest.approx((candidate.flops + 0.25) / 2)


def test_noise_that_makes_rows_older_moves_the_prediction() -> None:
    even = one(age_p99=3.0).chosen.age_p99
    assert one(age_p99=7.0).chosen.age_p99 == pytest.approx((even + 1) * 8 / 4 - 1)
    assert predicted_age(evidence(age_p99=500.0), 0.0625) == pytest.approx((even + 1) * 501 / 4 - 1)
    chance = math.ceil(math.log(0.01) / math.log(1 - 1 / 16)) - 1  # of rows that are all selected by chance
    expected = pytest.approx(4 / 3 * (chance + 1) - 1)
    assert one(age_p99=500.0, never=0.02).chosen.age_p99 == expected == one(age_p99=None).chosen.age_p99


def test_ages_are_those_of_other_fractions_where_gradients_come_in_bursts() -> None:
    frequency, own = bursts(lognormal(), 0.25, 1.0)
    found = evidence(n=256, shape=(256, WIDTH), rates=frequency[None, :], age_p99=own)
    for fraction in (0.125, 0.5):
        _, truth = bursts(lognormal(), fraction, 1.0)
        assert predicted_age(found, fraction) == pytest.approx(truth, rel=0.15)
        assert theory.periodic_age(predicted_frequency(found, fraction), 0.99) < truth / 3
        # Older than by chance.
        assert theory.geometric_age(predicted_frequency(found, fraction), 0.99) < 0.8 * truth


def test_local_selection_predicts_every_shard_for_itself() -> None:
    rates = np.repeat([1.0, 9.0], 32)[None, :]
    local = predicted_frequency(evidence(rates=rates, shards=2), 0.25)
    whole = predicted_frequency(evidence(rates=rates, shards=2, scope="global"), 0.25, sharpness=math.inf)
    assert local == pytest.approx(np.full((1, 64), 0.25))
    assert whole == pytest.approx(np.where(rates == 1, 0.05, 0.45))


def test_local_selection_of_uneven_shards_is_that_of_a_simulation() -> None:
    scales = lognormal(250) * np.repeat([1.0, 3.0], 125)
    seen = simulate(scales, fraction=0.25, shards=4, burn_in=3000, steps=1000)
    rates = theory.growth(seen.score, seen.frequency, 0.95)[None, :]
    for fraction in (0.125, 0.5):
        truth = simulate(scales, fraction=fraction, shards=4, burn_in=6000, steps=1000).frequency
        facts: dict[str, Any] = {"rates": rates, "n": 250, "shape": (250, 32), "shards": 4}
        f = predicted_frequency(evidence(**facts), fraction, sharpness=math.inf)[0]
        assert f.sum() == pytest.approx(theory.selected_count(250, fraction, 4, "local"))
        assert np.abs(f - truth).mean() <= 0.017
        whole = predicted_frequency(evidence(**facts, scope="global"), fraction, sharpness=math.inf)[0]
        assert np.abs(whole - truth).mean() > 0.05
