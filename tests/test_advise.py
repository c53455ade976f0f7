"""Advice on the fraction: what the rule concludes from runs whose truth is known, and what it refuses."""

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from advise_run import WIDTH, Matrix, lognormal, write
from bursts import bursts
from sample_run import one_row, run_info

from scion_telemetry.analysis import (
    CANDIDATES,
    Evidence,
    Limits,
    advise,
    advise_matrix,
    predicted_age,
    predicted_frequency,
    theory,
)
from scion_telemetry.analysis.evidence import gather
from scion_telemetry.analysis.records import LimitOptions
from scion_telemetry.analysis.simulate import simulate
from scion_telemetry.sinks import CsvSink
from scion_telemetry.store import Run, load_run


def evidence(**changes: Any) -> Evidence:
    """A flat matrix on one rank that breaks no limit at any fraction."""
    facts: dict[str, Any] = {
        "param": "w",
        "role": "hidden",
        "shape": (64, 256),
        "matrices": 1,
        "n": 64,
        "width": 256,
        "shards": 1,
        "scope": "local",
        "fraction": 0.25,
        "steps": 1000,
        "total_steps": 100_000,
        "ef_decay": 0.95,
        "lr": 0.02,
        "weight_decay": 0.01,
        "decays_selected": False,
        "source": "slices",
        "rates": np.ones((1, 64)),
        "never": 0.0,
        "age_p99": 3.0,
        "regret": None,
        "regret_at": {},
        "mass": {},
        "mass_source": "none",
    }
    return Evidence(**{**facts, **changes})


def one(limits: Limits | None = None, **changes: Any) -> Any:
    return advise_matrix(evidence(**changes), limits or Limits())


GPT = {0.0625: 0.118, 0.125: 0.211, 0.1875: 0.294, 0.25: 0.370, 0.375: 0.507, 0.5: 0.630, 0.75: 0.841}


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write(tmp_path_factory.mktemp("heavy") / "run", Matrix(name="w", scales=lognormal()))


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
        ({"max_age": 10, "starved": 1}, {}, 0.125, "age"),
        ({"max_age": 10}, {}, 0.125, "starved"),
        # lr λ age: 2e-4 · 15 > .0025 >= 2e-4 · 7.
        ({"drift": 0.0025}, {}, 0.125, "drift"),
        ({"drift": 0.0025}, {"decays_selected": True}, 0.0625, "none"),
        # Mass equals the fraction's square root.
        ({}, {"mass": {f: math.sqrt(f) for f in (0.0625, 0.125, 0.25, 0.5, 0.75)}}, 0.125, "mass"),
        ({"mass": 0.5}, {"mass": {f: math.sqrt(f) for f in (0.0625, 0.125, 0.25, 0.5, 0.75)}}, 0.25, "mass"),
        # Means of a small GPT trained at fraction 1: what lost much is refused, what lost little is not.
        ({}, {"mass": GPT}, 0.25, "mass"),
        ({"mass": 0.5}, {"mass": GPT}, 0.375, "mass"),
        # As flat as noise: the mass says nothing.
        ({}, {"mass": {f: theory.flat_mass(f, 256) for f in (0.0625, 0.125, 0.25, 0.5, 0.75)}}, 0.0625, "none"),
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


def test_starved_rows_bind() -> None:
    # 4 % of the rows come every 1/f = 64 steps at .25, every 128 at .125 and every 257 at .0625. Of those of period
    # 128 fewer than a quarter are older than 100, that is 1 % of all rows.
    rates = np.array([[1.0] * 96 + [0.06] * 4])
    found = [c for c in one(n=100, rates=rates, shape=(100, 256), age_p99=None).candidates if c.fraction <= 0.25]
    assert [c.starved for c in found] == [0, 0, 0.04, 0.04]
    assert [set(c.failed) for c in found] == [set(), set(), {"starved"}, {"starved", "age"}]
    assert found[2].failed["starved"] == pytest.approx(4)


def test_a_matrix_that_forgets_too_slowly_gets_another_decay() -> None:
    chosen = one(total_steps=8000).chosen
    assert chosen.ef_decay == pytest.approx(0.2) == pytest.approx(theory.matched_ef(0.0625))
    assert chosen.horizon == pytest.approx(320)
    assert one().chosen.ef_decay == 0.95


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
    assert one(age_p99=500.0, never=0.02).chosen.age_p99 == even == one(age_p99=None).chosen.age_p99


def test_ages_are_those_of_other_fractions_where_gradients_come_in_bursts() -> None:
    frequency, own = bursts(lognormal(), 0.25, 1.0)
    found = evidence(n=256, shape=(256, WIDTH), rates=frequency[None, :], age_p99=own)
    for fraction in (0.125, 0.5):
        _, truth = bursts(lognormal(), fraction, 1.0)
        assert predicted_age(found, fraction) == pytest.approx(truth, rel=0.15)
        assert predicted_age(replace(found, age_p99=None), fraction) < truth / 3
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


# Whole runs


def test_predictions_are_those_of_other_runs(heavy: Run) -> None:
    ((found,), _) = gather(heavy)
    for fraction in (0.125, 0.5):
        truth = simulate(lognormal(), fraction=fraction, width=WIDTH, burn_in=6000, steps=2000)
        f = predicted_frequency(found, fraction, sharpness=math.inf)[0]
        assert np.corrcoef(f, truth.frequency)[0, 1] >= 0.99
        assert np.abs(f - truth.frequency).mean() <= 0.017
        for steps, seen in (
            (10**6, truth),
            (400, simulate(lognormal(), fraction=fraction, width=WIDTH, steps=400, burn_in=0)),
        ):
            matrix = advise_matrix(found, Limits(total_steps=steps, sharpness=math.inf))
            candidate = next(c for c in matrix.candidates if c.fraction == fraction)
            assert candidate.starved == pytest.approx(theory.starved_share(seen.frequency, 100), abs=0.05)


def test_evidence_of_a_run(heavy: Run) -> None:
    ((found,), notes) = gather(heavy)
    assert (found.n, found.width, found.matrices, found.shape) == (256, WIDTH, 1, (256, WIDTH))
    assert (found.fraction, found.steps, found.total_steps, found.source) == (0.25, 1000, 1000, "slices")
    assert (found.lr, found.weight_decay, found.ef_decay) == (0.02, 0.01, 0.95)
    assert found.mass_source == "none"
    assert "mass rule was not applied to 1 of 1" in notes[0]
    assert 0 < found.never < 0.02
    assert [f"{found.never:.1%} of 'w'" in note for note in notes] == [False, True]


def test_a_window_at_fraction_1_in_the_same_run(tmp_path: Path) -> None:
    plan = ((100, 0.25), (200, 1.0), (1000, 0.25))
    ((found,), notes) = gather(write(tmp_path / "run", Matrix(name="w", scales=lognormal(), plan=plan)))
    assert found.mass_source == "calibration"
    assert (found.never, notes) == (0, [])
    # Lognormal rows: 62 % of the mass in a quarter, where momentum at .25 shows 28 %.
    assert found.mass[0.25] == pytest.approx(0.62, abs=0.05)
    truth = simulate(lognormal(), fraction=0.25, width=WIDTH, burn_in=6000, steps=2000).frequency
    assert np.abs(predicted_frequency(found, 0.25)[0] - truth).mean() < 0.02


def test_a_window_that_is_too_short_is_none(tmp_path: Path) -> None:
    plan = ((180, 1.0), (1000, 0.25))
    ((found,), _) = gather(write(tmp_path / "run", Matrix(name="w", scales=lognormal(), plan=plan)))
    assert found.mass_source == "none"


def test_another_run_as_calibration(tmp_path: Path, heavy: Run) -> None:
    whole = write(tmp_path / "run", Matrix(name="w", scales=lognormal(), plan=((300, 1.0),)))
    advice = advise(heavy, calibration=whole)
    assert advice.matrices[0].evidence.mass[0.25] == pytest.approx(0.62, abs=0.05)
    assert advice.matrices[0].chosen.mass is not None
    assert "mass" not in "".join(advice.notes)
    with pytest.raises(ValueError, match="is no calibration run"):
        advise(heavy, calibration=heavy)


def test_a_run_at_fraction_1_predicts_those_below(tmp_path: Path) -> None:
    scales = lognormal(sigma=0.5)
    noise = Matrix(name="w", scales=scales, plan=((1000, 1.0),), columns={"regret": 0.0}, snr=0.0)
    run = write(tmp_path / "run", noise, replace(noise, name="v"))
    (found, _), notes = gather(run)
    assert (found.source, found.fraction, found.mass_source, found.regret) == ("calibration", 1, "calibration", None)
    for fraction in (0.125, 0.5):
        truth = simulate(scales, fraction=fraction, snr=0.0, width=WIDTH, burn_in=4000, steps=3000)
        assert np.abs(predicted_frequency(found, fraction)[0] - truth.frequency).mean() < 0.025
        age = float(np.quantile(truth.ages, 0.99, method="inverted_cdf"))
        assert predicted_age(found, fraction) / 3 < age < predicted_age(found, fraction) * 3
    assert any("2 matrices selected everything" in note for note in notes)
    assert any("√fraction" in change for change in advise(run).groups[0].changes)


def test_gradient_mass_stands_in(tmp_path: Path) -> None:
    columns = {"grad_mass_at_0.25": 0.62, "grad_mass_at_0.5": 0.8}
    advice = advise(write(tmp_path / "run", Matrix(name="w", scales=lognormal(), columns=columns)))
    assert advice.matrices[0].evidence.mass_source == "gradient"
    assert "single, noisy steps" in advice.notes[0]


def test_frequency_curves_where_the_run_was_killed(tmp_path: Path, heavy: Run) -> None:
    matrix = Matrix(name="w", scales=lognormal())
    killed = write(tmp_path / "run", matrix, every=50, slices=False, frequencies=True)
    ((curve,), notes), ((exact,), _) = gather(killed), gather(heavy)
    assert curve.source == "curve"
    assert "frequency curves, whose tails are coarse" in notes[-1]
    for fraction in (0.125, 0.5):
        rough, fine = (np.sort(predicted_frequency(e, fraction)[0]) for e in (curve, exact))
        assert np.abs(rough - fine).mean() < 0.04
    low, high = (next(c for c in advise_matrix(curve, Limits()).candidates if c.fraction == f) for f in (0.125, 0.5))
    assert high.age_p99 < curve.age_p99 < low.age_p99  # type: ignore[operator]


def test_groups(tmp_path: Path) -> None:
    flat, spread = np.ones(256), lognormal(64, sigma=2)
    matrices = [Matrix(name=f"even.{i}", scales=flat) for i in range(6)]
    run = write(
        tmp_path / "run", *matrices, Matrix(name="odd", scales=spread), Matrix(name="e", scales=flat, role="expert")
    )
    advice = advise(run, total_steps=100_000)
    hidden, expert = advice.groups
    assert (hidden.role, hidden.matrices, expert.role, expert.matrices) == ("hidden", 7, "expert", 1)
    # The odd one has 4 % of the parameters: it does not hold the others back, but is named.
    assert hidden.accepted[0.0625] == pytest.approx(6 * 256 / (6 * 256 + 64))
    assert (hidden.fraction, hidden.binding, hidden.worst) == (0.0625, "none", "")
    assert any("a larger fraction of their own for 1 of 7 matrices: odd" in change for change in hidden.changes)
    strict = advise(run, total_steps=100_000, coverage=1.0).groups[0]
    assert strict.fraction == advice.matrices[6].fraction > 0.0625
    assert strict.worst == "odd"
    assert strict.worst_value > 1
    assert any("√fraction" in change for change in hidden.changes)
    assert any('decay_on="selected"' in change for change in hidden.changes)


def test_local_selection_that_loses_mass_is_advised_against(tmp_path: Path) -> None:
    flat, options = np.ones(256), {"shards": 2}
    cut = [
        Matrix(name=f"m{i}", scales=flat, options=options, columns={"regret": 0.16 if i == 0 else 0.01})
        for i in range(4)
    ]
    (group,) = advise(write(tmp_path / "run", *cut), total_steps=100_000).groups
    assert (group.fraction, group.scope, group.binding) == (0.0625, "global", "none")
    assert "more than 5% of the mass in 1 of 4 matrices (16% in m0)" in group.changes[0]
    # One of thirty does not decide for the others.
    more = [replace(cut[1], name=f"n{i}") for i in range(30)]
    advice = advise(write(tmp_path / "more", cut[0], *more), total_steps=100_000)
    assert (advice.groups[0].fraction, advice.groups[0].scope) == (0.0625, "local")
    assert advice.groups[0].changes[-1] == 'selection_scope="global" for 1 of 31 matrices: m0'
    assert (advice.matrices[0].fraction, advice.matrices[0].global_fraction) == (1, 0.0625)
    assert (advice.matrices[0].binding, advice.matrices[1].binding) == ("regret", "none")


def test_stacked_matrices_select_each_for_itself(tmp_path: Path) -> None:
    run = write(tmp_path / "run", Matrix(name="w", scales=np.ones(256), options={"num_heads": 4}))
    ((found,), _) = gather(run)
    assert (found.matrices, found.n, found.width, found.rates.shape) == (4, 64, WIDTH, (4, 64))


def test_caveat_and_power(heavy: Run) -> None:
    advice = advise(heavy)
    assert advice.seeds[0.002] == 7
    assert "takes 7 seeds per arm" in advice.caveat
    assert advise(heavy, seed_sd=0.0026).seeds[0.002] == 27


def test_frame_and_json(heavy: Run) -> None:
    advice = advise(heavy)
    frame = advice.to_frame()
    assert frame["fraction"].tolist() == list(CANDIDATES)
    assert frame.loc[frame["chosen"], "fraction"].tolist() == [advice.matrices[0].fraction]
    assert frame.loc[0, "accepted"]
    assert frame["mass"].isna().all()
    assert (frame["failed"] == "").tolist() == frame["accepted"].tolist()
    told = json.loads(advice.to_json())
    assert told["ranking"].startswith("L1 norm")
    assert told["matrices"][0]["candidates"][2]["fraction"] == 0.5
    assert "rates" not in told["matrices"][0]["evidence"]
    infinite = replace(advice.matrices[0].candidates[-1], age_p99=math.inf)
    changed = replace(advice, matrices=(replace(advice.matrices[0], candidates=(infinite,)),))
    assert json.loads(changed.to_json())["matrices"][0]["candidates"][0]["age_p99"] is None


def test_rows_that_were_selected_between_flushes_only(tmp_path: Path, heavy: Run) -> None:
    ((whole,), _) = gather(heavy)
    run = write(tmp_path / "run", Matrix(name="w", scales=lognormal()))
    table = pd.read_csv(tmp_path / "run" / "slices.csv", keep_default_na=False)
    rare = table["selected"].between(1, 20)
    table.loc[rare, "score"] = ""
    table.to_csv(tmp_path / "run" / "slices.csv", index=False)
    ((found,), _) = gather(run)
    assert rare.sum() > 5
    # Scores of one matrix are within 5 % of each other, but for those of the rows that are selected at once.
    assert found.rates == pytest.approx(whole.rates, rel=0.1)


# Refusals


def refused(run: Run, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        advise(run, **options)


def test_a_run_without_selection(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(run_info(selection_columns=()))
    sink.write(one_row(1, {"weight_rms": 1.0}))
    sink.close()
    refused(load_run(tmp_path), "no selection rows.*train with optim.Dion2")


def test_a_run_at_fraction_1(tmp_path: Path) -> None:
    matrix = Matrix(name="w", scales=lognormal(64), plan=((300, 1.0),))
    refused(write(tmp_path / "run", matrix, slices=False), "it is a calibration run.*tracker.close.*calibration=")


def test_too_few_steps(tmp_path: Path) -> None:
    run = write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), plan=((180, 0.25),)))
    refused(run, "too few steps at one fraction: 180 of 'w' at 0.25; log at least 200")


def test_too_few_flushes(tmp_path: Path) -> None:
    run = write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), plan=((400, 0.25),)), every=100)
    refused(run, r"only 4 times at 0.25; log at least 5 flushes \(every=20\)")


def test_a_fraction_that_never_rests(tmp_path: Path) -> None:
    plan = [(100, f) for f in (0.5, 0.25, 0.125)]
    run = write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), plan=plan))
    refused(run, "changes the fraction of 'w' too often.*keep one fraction for >= 200 steps")


def test_of_several_fractions_the_last_long_one_counts(tmp_path: Path) -> None:
    plan = [(400, 0.5), (400, 0.25), (100, 0.125)]
    ((found,), _) = gather(write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), plan=plan)))
    assert (found.fraction, found.steps, found.total_steps) == (0.25, 400, 900)


def test_mixed_scopes(tmp_path: Path) -> None:
    rows = lognormal(64)
    run = write(
        tmp_path / "run",
        Matrix(name="a", scales=rows, options={"selection_scope": "global"}),
        Matrix(name="b", scales=rows),
    )
    refused(run, "scopes are mixed.*'global': a, 'local': b.*one selection_scope")


def test_no_frequencies(tmp_path: Path) -> None:
    matrix = Matrix(name="w", scales=lognormal(64))
    refused(write(tmp_path / "a", matrix, slices=False), "call tracker.close.*every >= 32 steps")
    refused(write(tmp_path / "b", matrix, slices=False, frequencies=True), "counted over >= 32 steps")


def test_a_run_that_broke(tmp_path: Path) -> None:
    run = write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), columns={"captured_mass": math.nan}))
    refused(run, "momentum of 'w' holds NaN.*at step 1000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_age": 0}, "max_age must be >= 1 step, got 0"),
        ({"starved": 2}, r"starved must be in \[0, 1\], got 2"),
        ({"sharpness": 0.0}, "sharpness must be > 0, got 0.0"),
        ({"mu": 1.0}, r"mu must be in \[0, 1\), got 1.0"),
        ({"total_steps": 0}, "total_steps must be >= 1, got 0"),
        ({"candidates": (0.5, 0.0)}, r"candidates must be in \(0, 1\], got 0.0"),
        ({"seed_sd": 0.0}, "gap and sd must be > 0"),
    ],
)
def test_options_out_of_range(heavy: Run, options: dict[str, Any], message: str) -> None:
    refused(heavy, message, **options)


def test_keywords_of_advise_are_the_limits() -> None:
    assert set(LimitOptions.__annotations__) == {field.name for field in fields(Limits)} == set(asdict(Limits()))
