"""Runs that advice is refused on, and what it says to do."""

import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from advise_run import Matrix, lognormal, write
from sample_run import NAMES, one_row, param, run_info

from scion_telemetry.analysis import (
    Limits,
    advise,
)
from scion_telemetry.analysis.evidence import gather
from scion_telemetry.analysis.limits import LimitOptions
from scion_telemetry.sinks import CsvSink
from scion_telemetry.store import Run, load_run


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write(tmp_path_factory.mktemp("heavy") / "run", Matrix(name="w", scales=lognormal()))


def refused(run: Run, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        advise(run, **options)


def test_a_run_without_selection(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(run_info(selection_columns=(), params=(replace(param(NAMES[0]), algorithm="scion"),)))
    sink.write(one_row(1, {"weight_rms": 1.0}))
    sink.close()
    refused(load_run(tmp_path), "no selection rows.*train with optim.Dion2")


def test_a_run_whose_selection_was_not_chosen(tmp_path: Path) -> None:
    write(tmp_path, Matrix(name="w", scales=lognormal(64)))
    (tmp_path / "selection.csv").unlink()
    refused(load_run(tmp_path), r'not chosen; use Tracker\(metrics="basic"\), or add "selection" to its metrics')


def test_a_run_at_fraction_1(tmp_path: Path) -> None:
    matrix = Matrix(name="w", scales=lognormal(64), plan=((300, 1.0),))
    refused(write(tmp_path / "run", matrix, slices=False), "it is a calibration run.*tracker.close.*calibration=")


def test_too_few_steps(tmp_path: Path) -> None:
    run = write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), plan=((180, 0.25),)))
    refused(run, "too few steps at one fraction: 180 of 'w' at 0.25; train at least 200 steps")


def test_too_few_flushes(tmp_path: Path) -> None:
    run = write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), plan=((400, 0.25),)), every=100)
    refused(run, r"only 4 times in 400 steps at 0.25, and 5 are needed.*schedule=every\(32\)\), and")


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
    refused(write(tmp_path / "a", matrix, slices=False), r"call tracker.close.*schedule=every\(32\)")
    refused(
        write(tmp_path / "b", matrix, slices=False, frequencies=True),
        "counted over >= 32 steps.*no more often than every 32 steps",
    )


def test_a_run_that_broke(tmp_path: Path) -> None:
    run = write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), columns={"captured_mass": math.nan}))
    refused(run, "momentum of 'w' holds NaN.*at step 1000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_age": 0}, "max_age must be None or >= 1 step, got 0"),
        ({"age_horizons": 0}, "age_horizons must be > 0, got 0"),
        ({"overdue": 2}, r"overdue must be in \[0, 1\], got 2"),
        ({"sharpness": 0.0}, "sharpness must be > 0, got 0.0"),
        ({"mu": 1.0}, r"mu must be in \[0, 1\), got 1.0"),
        ({"total_steps": 0}, "total_steps must be None or a whole number >= 1, got 0"),
        ({"total_steps": 1000.5}, "total_steps must be None or a whole number >= 1, got 1000.5"),
        ({"candidates": (0.5, 0.0)}, r"candidates must be numbers in \(0, 1\], got 0.0"),
        ({"candidates": (0.5, "a")}, r"candidates must be numbers in \(0, 1\], got 'a'"),
        ({"candidates": []}, r"candidates must name at least one fraction to try, got \[\]"),
        ({"seed_sd": 0.0}, "seed_sd must be > 0, the standard deviation of the final loss over seeds, got 0.0"),
        ({"seed_sd": math.nan}, "seed_sd must be > 0"),
    ],
)
def test_options_out_of_range(heavy: Run, options: dict[str, Any], message: str) -> None:
    refused(heavy, message, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": "10"}, "total_steps must be a number or None, got '10'"),
        ({"overdue": None}, "overdue must be a number, got None"),
        ({"overdue": True}, "overdue must be a number, got True"),
        ({"candidates": ".5"}, r"candidates must be a sequence of fractions, such as \(0.5, 0.25\), got '.5'"),
        ({"candidates": 0.5}, "candidates must be a sequence of fractions"),
        ({"seed_sd": "a"}, "seed_sd must be a number, the standard deviation of the loss over seeds, got 'a'"),
        ({"starved": 0.1}, "no limit 'starved'; did you mean 'overdue'. Limits are age_horizons, max_age, overdue"),
        ({"horizonshare": 0.1}, "no limit 'horizonshare'; did you mean 'horizon_share'"),
        ({"calibration": "runs/b"}, r"calibration must be a Run, got 'runs/b'; open a run directory with load_run"),
    ],
)
def test_options_of_another_kind(heavy: Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        advise(heavy, **options)


def test_a_path_for_a_run() -> None:
    with pytest.raises(TypeError, match=r"run must be a Run, got 'runs/a'; open a run directory with load_run"):
        advise("runs/a")  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(heavy: Run) -> None:
    kinds: dict[str, Any] = {"seed_sd": np.float64(0.01), "candidates": np.array([0.5, 0.25]), "mass": np.float32(0)}
    advice = advise(heavy, total_steps=np.int64(10), **kinds)  # type: ignore[arg-type]
    assert [c.fraction for c in advice.matrices[0].candidates] == [1, 0.5, 0.25]


def test_keywords_of_advise_are_the_limits() -> None:
    assert set(LimitOptions.__annotations__) == {field.name for field in fields(Limits)} == set(asdict(Limits()))
