"""Closed forms of Dion2's selection against brute force, and against a simulation of it with fixed seeds."""

import math

import numpy as np
import pytest
from bursts import bursts

from scion_telemetry.analysis import estimators, theory
from scion_telemetry.analysis.simulate import Simulated, simulate


@pytest.fixture(scope="module")
def scales() -> np.ndarray:
    return np.exp(np.random.default_rng(1).standard_normal(512))


@pytest.fixture(scope="module")
def runs(scales: np.ndarray) -> dict[float, Simulated]:
    """Long after the start, at SNR 1."""
    return {a: simulate(scales, fraction=a, burn_in=6000, steps=3000, width=16) for a in (0.125, 0.25, 0.5)}


# Flat rows


def test_flat_null_of_768_entries() -> None:
    assert theory.flat_mass(0.25, 768) == pytest.approx(0.2587, abs=5e-5)
    assert theory.flat_gini(768) == pytest.approx(0.0154, abs=5e-5)
    rows = np.abs(np.random.default_rng(0).standard_normal((16, 1024, 768), dtype=np.float32)).sum(-1)
    assert estimators.captured_mass(rows, 0.25).mean() == pytest.approx(0.2587, abs=1e-3)
    assert estimators.gini(rows).mean() == pytest.approx(0.0154, abs=1e-3)
    for fraction in (1 / 16, 0.5, 0.75):
        assert estimators.captured_mass(rows, fraction).mean() == pytest.approx(
            theory.flat_mass(fraction, 768), abs=1e-3
        )


def test_excess_mass_is_0_for_flat_rows_and_1_for_one_row() -> None:
    flat = theory.flat_mass(0.25, 768)
    assert theory.excess_mass(flat, flat) == 0
    assert theory.excess_mass(1.0, flat) == 1
    assert theory.excess_mass(1.0, theory.flat_mass(1.0, 768)) == 0


# Estimators: mean over many samples of the lognormal law, and its standard deviation


@pytest.mark.parametrize(
    ("n", "mass", "gini", "ratio", "hill"),
    [
        (64, (0.619, 0.045), (0.508, 0.048), (0.43, 0.10), (2.44, 1.10)),
        (1024, (0.627, 0.012), (0.519, 0.014), (0.38, 0.05), (2.11, 0.18)),
        (16384, (0.627, 0.003), (0.520, 0.003), (0.37, 0.016), (2.12, 0.05)),
    ],
)
def test_estimators_of_lognormal_scores(
    n: int, mass: tuple[float, float], gini: tuple[float, float], ratio: tuple[float, float], hill: tuple[float, float]
) -> None:
    samples = np.exp(np.random.default_rng(2).standard_normal((200, n)))
    found = {
        mass: estimators.captured_mass(samples, 0.25),
        gini: estimators.gini(samples),
        ratio: estimators.participation_ratio(samples),
        hill: estimators.hill(samples),
    }
    for (mean, sd), values in found.items():
        # The table is rounded, and is of other samples: a third of a standard deviation covers both.
        assert values.mean() == pytest.approx(mean, abs=sd / 3)
        assert 0.6 < values.std() / sd < 1.5


def test_estimators_have_the_values_of_the_lognormal_law() -> None:
    samples = np.exp(np.random.default_rng(3).standard_normal((20, 1 << 16)))
    normal = theory._NORMAL
    assert estimators.captured_mass(samples, 0.25).mean() == pytest.approx(
        normal.cdf(1 - normal.inv_cdf(0.75)), abs=1e-3
    )
    assert estimators.gini(samples).mean() == pytest.approx(math.erf(0.5), abs=1e-3)
    assert estimators.participation_ratio(samples).mean() == pytest.approx(math.exp(-1), abs=5e-3)


def test_estimators_against_brute_force() -> None:
    r = np.array([3.0, 1.0, 0.0, 8.0, 4.0])
    assert estimators.captured_mass(r, 0.3) == 12 / 16
    assert estimators.captured_mass(r, 1.0) == 1
    assert estimators.gini(r) == pytest.approx(np.abs(r[:, None] - r).sum() / (2 * 5**2 * r.mean()))
    assert estimators.participation_ratio(r) == 16**2 / (5 * 90)
    assert estimators.hill(np.exp(np.arange(20.0)), 0.1) == pytest.approx(1 / 1.5)


# Water


@pytest.mark.parametrize("fraction", [0.01, 0.125, 0.25, 0.5, 0.9, 1.0])
def test_water_filling_solves_its_equations(fraction: float) -> None:
    rates = np.exp(2 * np.random.default_rng(5).standard_normal((4, 3, 100)))
    f = theory.water_fill(rates, fraction)
    assert f.sum(-1) == pytest.approx(fraction * 100)
    theta = theory.fill_level(rates, fraction)[..., None]
    assert f == pytest.approx(np.minimum(1, rates / theta))
    assert theory.water_fill(7 * rates, fraction) == pytest.approx(f)
    # Against a bisection of the same equation.
    low, high = np.zeros((4, 3, 1)), np.full((4, 3, 1), 1e9)
    for _ in range(200):
        middle = (low + high) / 2
        above = np.minimum(1, rates / middle).sum(-1, keepdims=True) > fraction * 100
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    assert f == pytest.approx(np.minimum(1, rates / high), abs=1e-9)


def test_water_filling_where_few_rows_grow() -> None:
    assert theory.water_fill([5.0, 0.0, 0.0, 1.0], 0.5).tolist() == [1, 0, 0, 1]
    assert theory.water_fill([5.0, 0.0, 0.0, 0.0], 0.5).tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert theory.water_fill([0.0, 0.0], 0.5).tolist() == [0.5, 0.5]
    assert theory.water_fill([2.0, 1.0, 1.0], 1.0).tolist() == [1, 1, 1]


@pytest.mark.parametrize("fraction", [0.01, 0.125, 0.5, 0.9])
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0, 300.0])
def test_soft_water_filling_solves_its_equations(fraction: float, sharpness: float) -> None:
    rates = np.exp(2 * np.random.default_rng(5).standard_normal((4, 3, 100)))
    f = theory.water_fill(rates, fraction, sharpness=sharpness)
    assert f.sum(-1) == pytest.approx(fraction * 100, rel=1e-9)
    theta = theory.fill_level(rates, fraction, sharpness=sharpness)[..., None]
    x = rates / theta
    power = np.minimum(x, 1 / x) ** sharpness
    assert f == pytest.approx(np.minimum(1, x) * (1 + power) ** (-1 / sharpness), rel=1e-9)
    assert theory.water_fill(1e200 * rates, fraction, sharpness=sharpness) == pytest.approx(f)


def test_soft_water_filling_by_hand_and_in_the_limit(scales: np.ndarray) -> None:
    # p = 1, θ = 2: g / (g + 2).
    assert theory.water_fill([2.0, 6.0], 0.625, sharpness=1) == pytest.approx([0.5, 0.75])
    assert theory.fill_level([2.0, 6.0], 0.625, sharpness=1) == pytest.approx(2)
    assert theory.water_fill(scales, 0.5, sharpness=1e4) == pytest.approx(theory.water_fill(scales, 0.5), abs=1e-4)
    assert theory.water_fill(np.ones((2, 8)), 0.3, sharpness=3) == pytest.approx(np.full((2, 8), 0.3))
    assert theory.water_fill([5.0, 0.0, 0.0, 0.0], 0.5, sharpness=3) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert theory.water_fill([5.0, 0.0, 1.0], 1.0, sharpness=3).tolist() == [1, 1, 1]
    for sharpness in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="sharpness must be > 0"):
            theory.water_fill([1.0, 2.0], 0.5, sharpness=sharpness)


@pytest.mark.parametrize("rates", [[1.0, -1.0], [1.0, math.nan], [math.inf, 1.0], []])
def test_rates_that_are_none(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="finite and >= 0"):
        theory.water_fill(rates, 0.5)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, math.nan])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        theory.water_fill([1.0, 2.0], fraction)
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        theory.horizon(fraction, 0.95)


# Error feedback, simulated


def test_error_feedback_levels_the_momentum(runs: dict[float, Simulated]) -> None:
    assert runs[0.25].grad_mass == pytest.approx(0.62, abs=0.02)
    assert runs[0.25].momentum_mass == pytest.approx(0.276, abs=0.01)


def test_water_filling_law(runs: dict[float, Simulated]) -> None:
    for fraction, run in runs.items():
        f = theory.water_fill(theory.growth(run.score, run.frequency, 0.95), fraction)
        assert np.abs(f - run.frequency).mean() < 0.005


@pytest.mark.parametrize("fraction", [0.125, 0.25, 0.5])
def test_rows_whose_gradients_vary_become_full_by_and_by(scales: np.ndarray, fraction: float) -> None:
    for spread in (0.0, 1.0):
        truth, _ = bursts(scales[:256], fraction, spread)
        sharp, soft = (theory.water_fill(scales[:256], fraction, sharpness=p) for p in (math.inf, theory.SHARPNESS))
        errors = [float(np.abs(f - truth).mean()) for f in (sharp, soft)]
        if spread:
            assert errors[1] < 0.95 * errors[0]
            assert abs((soft > 0.99).mean() - (truth > 0.99).mean()) <= abs(
                (sharp > 0.99).mean() - (truth > 0.99).mean()
            )
        else:
            assert errors[0] < 0.005 < 0.5 * errors[1] + 0.005


def test_growth_is_that_of_the_gradient() -> None:
    scales = np.exp(np.random.default_rng(1).standard_normal(256))
    run = simulate(scales, fraction=0.25, snr=math.inf, burn_in=4000, steps=4000)
    drift = np.abs(scales[:, None] * np.random.default_rng(0).standard_normal((256, 32))).sum(1)
    # With a drift alone a row's score grows by its gradient's norm: exact but for the ends of the window.
    assert theory.growth(run.score, run.frequency, 0.95) == pytest.approx(drift, rel=0.06)


def test_one_fraction_predicts_the_others(runs: dict[float, Simulated]) -> None:
    rates = theory.growth(runs[0.25].score, runs[0.25].frequency, 0.95)
    for fraction in (0.125, 0.5):
        f = theory.water_fill(rates, fraction)
        assert np.corrcoef(f, runs[fraction].frequency)[0, 1] >= 0.99
        assert np.abs(f - runs[fraction].frequency).mean() <= 0.017


@pytest.mark.parametrize("snr", [1.0, 0.1])
def test_a_short_run_predicts_the_long_one_once_what_rows_hold_is_counted(scales: np.ndarray, snr: float) -> None:
    short = simulate(scales, fraction=0.25, snr=snr, steps=400, burn_in=0)
    held = np.minimum(np.nanmedian(short.score), 2 * short.score_all)
    rates = theory.balanced_growth(short.score, short.selected, 400, 0.95, held)
    counts_alone = theory.balanced_growth(short.score, short.selected, 400, 0.95)
    long = simulate(scales, fraction=0.25, snr=snr, burn_in=6000, steps=2000).frequency
    error, naive = (float(np.abs(theory.water_fill(g, 0.25) - long).mean()) for g in (rates, counts_alone))
    assert error < {1.0: 0.005, 0.1: 0.017}[snr]
    assert naive > 2 * error
    assert theory.overdue_share(theory.water_fill(counts_alone, 0.25), 100) > 0.1
    assert theory.overdue_share(theory.water_fill(rates, 0.25), 100) < 0.005 > theory.overdue_share(long, 100)


@pytest.mark.parametrize("fraction", [0.125, 0.25, 0.5])
def test_what_a_short_run_counts(scales: np.ndarray, fraction: float) -> None:
    seen = simulate(scales, fraction=0.25, steps=400, burn_in=0)
    held = np.minimum(np.nanmedian(seen.score), 2 * seen.score_all)
    rates = theory.balanced_growth(seen.score, seen.selected, 400, 0.95, held)
    counted = simulate(scales, fraction=fraction, steps=400, burn_in=0).frequency
    f = theory.cold_fill(rates, fraction, 400, 0.95)
    assert f.sum() == pytest.approx(fraction * 512)
    assert np.corrcoef(f, counted)[0, 1] > 0.99
    assert np.abs(f - counted).mean() < 0.017 < np.abs(theory.water_fill(rates, fraction) - counted).mean()


def test_a_cold_run_that_is_long_is_water_filling(scales: np.ndarray) -> None:
    for ef in (0.95, 1.0):
        assert theory.cold_fill(scales, 0.25, 10**7, ef) == pytest.approx(theory.water_fill(scales, 0.25), abs=1e-4)
    assert theory.cold_fill([[2.0, 1.0], [0.0, 1.0]], 0.5, 10**7, 0.5) == pytest.approx(
        np.array([[2 / 3, 1 / 3], [0, 1]]), abs=1e-5
    )
    assert theory.cold_fill([1.0, 1.0, 0.0, 0.0], 0.75, 100, 0.9) == pytest.approx([1, 1, 0.5, 0.5])


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_a_soft_cold_run_solves_its_equations(scales: np.ndarray, fraction: float) -> None:
    f = theory.cold_fill(scales, fraction, 300, 0.95, sharpness=3)
    assert f.sum() == pytest.approx(fraction * 512)
    # x = (g - τ/T) / ((1 - ef) τ) is what f (1 - f^p)^(-1/p) undoes: the same τ for all rows that come.
    between = (f > 1e-3) & (f < 0.99)
    x = f[between] * (1 - f[between] ** 3) ** (-1 / 3)
    tau = scales[between] / (0.05 * x + 1 / 300)
    assert tau == pytest.approx(tau[0])
    long = theory.cold_fill(scales, fraction, 10**9, 0.95, sharpness=3)
    assert long == pytest.approx(theory.water_fill(scales, fraction, sharpness=3), abs=1e-5)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_a_cold_run_solves_its_equations(scales: np.ndarray, fraction: float) -> None:
    rates = scales.reshape(2, 256)
    f = theory.cold_fill(rates, fraction, 300, 0.95)
    assert f.sum(-1) == pytest.approx(fraction * 256)
    for g, row in zip(rates, f, strict=True):
        # Rows that come, but not always: (g - τ/T) / ((1 - ef) τ) = f has the same τ for all of them.
        between = (row > 0) & (row < 1)
        tau = g[between] / (0.05 * row[between] + 1 / 300)
        assert tau == pytest.approx(tau[0])
        assert (g[row == 0] * 300 <= tau[0] * (1 + 1e-9)).all()
        assert (g[row == 1] >= tau[0] * (0.05 + 1 / 300) * (1 - 1e-9)).all()


def test_scores_at_fraction_1_predict_in_squares_where_gradients_are_noise(scales: np.ndarray) -> None:
    for snr in (0.0, math.inf):
        whole = simulate(scales, fraction=1.0, snr=snr, burn_in=100, steps=2000, width=16).score_all
        for fraction in (0.125, 0.5):
            truth = simulate(scales, fraction=fraction, snr=snr, burn_in=2000, steps=2000, width=16).frequency
            square = theory.water_fill(theory.calibrated_growth(whole), fraction, sharpness=theory.SHARPNESS)
            plain = theory.water_fill(whole, fraction)
            errors = [float(np.abs(np.sort(f) - np.sort(truth)).mean()) for f in (square, plain)]
            assert errors[snr > 0] < 0.01
            assert errors[snr == 0] > 0.04


# Ages


def test_ages_of_a_period() -> None:
    # Rows that come every 1, 2 and 4 steps: ages 0; 0, 1; 0 to 3.
    frequencies = np.array([1.0, 0.5, 0.25])
    pooled = np.sort(np.concatenate([[0] * 4, [0, 1] * 2, range(4)]))
    for q in (0.1, 0.5, 0.6, 0.75, 0.9, 0.99):
        assert theory.periodic_age(frequencies, q) == np.quantile(pooled, q, method="inverted_cdf")
    assert theory.periodic_age([1.0, 0.0], 0.99) == math.inf
    assert theory.periodic_age([0.001], 0.999) == 998


def test_ages_under_random_selection() -> None:
    run = simulate(np.ones(512), fraction=0.25, random=True, steps=4000, burn_in=200, width=1)
    for q in (0.5, 0.9, 0.99, 0.999):
        age = theory.geometric_age([0.25], q)
        assert abs(age - np.quantile(run.ages, q, method="inverted_cdf")) <= (1 if q == 0.999 else 0)
        # The smallest whole age a with 1 - .75^(a + 1) >= q.
        assert age == math.ceil(theory.random_age(q, 0.25) - 1e-9) - 1
    assert [round(theory.random_age(0.999, f)) for f in (0.5, 0.25, 0.125)] == [10, 24, 52]
    assert theory.random_age(0.5, 0.25) == pytest.approx(math.log(0.5) / math.log(0.75))


@pytest.mark.parametrize("fraction", [0.125, 0.25, 0.5])
def test_ages_of_error_feedback_are_those_of_a_period(runs: dict[float, Simulated], fraction: float) -> None:
    f = runs[fraction].frequency
    seen = np.quantile(runs[fraction].ages, 0.99, method="inverted_cdf")
    assert theory.periodic_age(f, 0.99) == pytest.approx(seen, abs=max(1, 0.05 * seen))
    assert theory.geometric_age(f, 0.99) > 2 * seen


def test_noise_moves_ages_from_the_periodic_law_towards_the_geometric_one() -> None:
    ages = {}
    for snr in (math.inf, 0.3, 0.1):
        run = simulate(np.ones(512), fraction=0.25, snr=snr)
        seen = float(np.quantile(run.ages, 0.99, method="inverted_cdf"))
        assert theory.periodic_age(run.frequency, 0.99) <= seen <= theory.geometric_age(run.frequency, 0.99)
        ages[snr] = seen
    assert ages[math.inf] == 4 < ages[0.3] < ages[0.1]


# Random selection


@pytest.mark.parametrize(("fraction", "overlap"), [(0.5, 0.333), (0.25, 0.143), (0.125, 0.067)])
def test_churn_of_random_selection(fraction: float, overlap: float) -> None:
    assert theory.random_jaccard(fraction) == pytest.approx(overlap, abs=5e-4)
    run = simulate(np.ones(512), fraction=fraction, random=True, steps=2000, burn_in=0, width=1)
    assert run.jaccard == pytest.approx(overlap, abs=3e-3)


def test_flat_rows_rotate_and_heavy_rows_stick(runs: dict[float, Simulated]) -> None:
    flat = simulate(np.ones(512), fraction=0.25)
    assert flat.jaccard < 0.05 < theory.random_jaccard(0.25) < runs[0.25].jaccard + 0.02
    assert flat.momentum_mass == pytest.approx(0.257, abs=0.005)
    drifting = simulate(np.ones(512), fraction=0.25, snr=math.inf)
    assert drifting.momentum_growth == pytest.approx(1, abs=0.05)


def test_coverage_of_random_selection() -> None:
    run = simulate(np.ones(4096), fraction=0.25, random=True, steps=8, burn_in=0, width=1)
    assert (run.selected > 0).mean() == pytest.approx(theory.random_coverage(0.25, 8), abs=0.02)


def test_local_selection_takes_the_same_share_of_every_shard() -> None:
    run = simulate(np.arange(1.0, 65), fraction=0.25, shards=4, steps=200, burn_in=0)
    assert run.frequency.reshape(4, 16).mean(1) == pytest.approx([0.25] * 4)


# What it costs, and what it changes


def test_overdue_decay_and_horizon() -> None:
    assert theory.overdue_share([0.009, 0.01, 0.5, 1.0], 100) == 0.25
    assert theory.decay_drift(0.02, 0.1, 50) == pytest.approx(0.1)
    assert theory.decay_drift(0.02, 0.0, math.inf) == 0
    assert theory.horizon(0.25, 0.95) == pytest.approx(80)
    assert theory.horizon(0.25, theory.matched_ef(0.25, 0.95)) == pytest.approx(20)
    assert theory.matched_ef(0.25) == pytest.approx(0.8)
    assert theory.matched_ef(0.01) < 0
    assert theory.horizon(0.5, 1.0) == math.inf


def test_flops_and_bytes() -> None:
    # Products of [r, l] x [l, r], [r, r] x [r, r] and [r, r] x [r, l], two operations each.
    assert theory.newton_schulz_flops(3, 5) == theory.newton_schulz_flops(5, 3) == 2 * (3 * 3 * 5 + 3**3 + 3 * 3 * 5)
    assert theory.newton_schulz_flops(256, 1024) / theory.newton_schulz_flops(1024, 1024) == pytest.approx(0.046875)
    assert theory.transport_bytes(256, 1024, 1) == 0
    assert theory.transport_bytes(256, 1024, 4) == 2 * 2 * 256 * 1024 * 3 / 4


def test_realised_k_of_17_rows_on_4_ranks() -> None:
    assert theory.shard_sizes(17, 4) == [5, 5, 5, 2]
    assert theory.selected_count(17, 0.35, 4, "local") == 8
    assert theory.selected_count(17, 0.35, 4, "global") == 6
    assert theory.shard_sizes(5, 4) == [2, 2, 1, 0]
    assert theory.selected_count(5, 0.1, 4, "local") == 3
    assert theory.selected_count(100, 0.07) == 7


def test_seeds_per_arm() -> None:
    assert theory.seeds_per_arm(0.002, 0.0013) == 7
    # Against simulated experiments.
    rng, seeds = np.random.default_rng(6), theory.seeds_per_arm(0.5, 1.0)
    assert seeds == 63
    gaps = rng.normal(0.5, 1, (20000, seeds)).mean(1) - rng.normal(0, 1, (20000, seeds)).mean(1)
    assert (np.abs(gaps) / math.sqrt(2 / seeds) > 1.96).mean() == pytest.approx(0.8, abs=0.015)
    with pytest.raises(ValueError, match="gap and sd must be > 0"):
        theory.seeds_per_arm(0.0, 1.0)
