"""The study of the fraction runs in seconds, resumes, and tells what stands in its run directories."""

import csv
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = {
    "fraction1-seed0",
    "fraction0.25-seed0",
    "fraction0.25-seed0-ranks2-local",
    "fraction0.25-seed0-ranks2-global",
}
FIGURES = {"loss", "frequencies", "mass", "ages", "shards", "cost"}


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("tune_fraction")


@pytest.fixture(scope="module")
def out(study: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune")
    study.train_all(path, quick=True, jobs=1)
    study.report(path, None)
    return path


@pytest.fixture(scope="module")
def tables(out: Path) -> dict[str, dict[str, Any]]:
    return {table["title"]: table for table in json.loads((out / "tables.json").read_text())}


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def scalar(run: Path, name: str) -> list[float]:
    with (run / "scalars.csv").open(newline="") as file:
        return [float(row["value"]) for row in csv.DictReader(file) if row["name"] == name]


def selection(run: Path, column: str) -> list[float]:
    """A column in the second half of a run."""
    with (run / "selection.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    last = max(int(line["step"]) for line in lines)
    return [float(line[column]) for line in lines if int(line["step"]) > last / 2]


def test_every_run_is_there_with_its_files_and_finite_losses(out: Path) -> None:
    assert {path.parent.name for path in out.glob("*/done.json")} == NAMES
    for name in NAMES:
        losses = [*scalar(out / name, "train_loss"), *scalar(out / name, "val_loss")]
        assert len(losses) == 13
        assert all(math.isfinite(loss) for loss in losses)
        assert json.loads((out / name / "done.json").read_text())["val_loss"] == pytest.approx(losses[-1], rel=1e-8)


def test_figures_are_small_and_not_blank(out: Path) -> None:
    assert {path.stem for path in (out / "figures").glob("*.png")} == FIGURES
    for path in (out / "figures").glob("*.png"):
        assert 2_000 < path.stat().st_size < 80_000


def test_losses_are_those_of_the_run_directories(out: Path, tables: dict[str, dict[str, Any]]) -> None:
    told = rows(tables["Validation loss, nats a byte"])
    assert [row["fraction"] for row in told] == [1.0, 0.25]
    for row in told:
        assert row["seed 0"] == row["mean"] == scalar(out / f"fraction{row['fraction']:g}-seed0", "val_loss")[-1]
    assert told[1]["gap to 1"] == told[1]["mean"] - told[0]["mean"]


def test_scopes_and_masses_are_those_of_the_run_directories(out: Path, tables: dict[str, dict[str, Any]]) -> None:
    for row in rows(tables["Local and global selection at fraction .25, seed 0"])[1:]:
        run = out / f"fraction0.25-seed0-ranks2-{row['scope']}"
        assert row["loss"] == scalar(run, "val_loss")[-1]
        assert row["regret"] == pytest.approx(np.mean(selection(run, "regret")), rel=1e-9)
        assert row["k/n"] == pytest.approx(np.mean(selection(run, "fraction")), rel=1e-9)
    for row in rows(tables["Captured mass of momentum and gradient"]):
        run = out / f"fraction{row['fraction']:g}-seed0"
        assert row["C_M(0.25)"] == pytest.approx(np.mean(selection(run, "mass_at_0.25")), rel=1e-9)
        assert row["C_G(0.25)"] == pytest.approx(np.mean(selection(run, "grad_mass_at_0.25")), rel=1e-9)


def test_the_tracker_and_the_record_of_every_step_count_the_same_rows(out: Path) -> None:
    counted: dict[str, list[float]] = {}
    with (out / "fraction0.25-seed0" / "slices.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            counted.setdefault(row["param"], []).append(float(row["selected"]))
    with np.load(out / "fraction0.25-seed0" / "dynamics.npz") as arrays:
        assert {key.partition("/")[2] for key in arrays} == set(counted)
        for name, counts in counted.items():
            bits = np.unpackbits(arrays[f"selected/{name}"], axis=-1, count=len(counts))
            assert bits.sum(0).tolist() == counts
            assert set(bits.sum(1)) == {math.ceil(len(counts) / 4)}


def test_a_shadow_at_the_fraction_of_its_run_selects_the_same_rows(out: Path) -> None:
    run = out / "fraction0.25-seed0"
    with np.load(run / "dynamics.npz") as real, np.load(run / "shadow0.25.npz") as shadow:
        assert set(real) == set(shadow)
        for key in real:
            np.testing.assert_array_equal(real[key], shadow[key], strict=True)
    with np.load(run / "shadow0.5.npz") as half, np.load(run / "dynamics.npz") as real:
        for key in (key for key in real if key.startswith("selected")):
            assert np.unpackbits(half[key]).sum() == 2 * np.unpackbits(real[key]).sum()


def test_predictions_name_every_predictor_and_stay_in_range(tables: dict[str, dict[str, Any]]) -> None:
    found = rows(tables["Same gradients, predicted from the run at .25, second half"])
    assert len(found) == 7  # that of `advise` needs 200 steps
    for row in found:
        assert -1 <= row["corr"] <= 1
        assert 0 <= row["MAE"] <= 1


def test_water_filling_from_true_rates_is_exact(study: ModuleType) -> None:
    predict = importlib.import_module("tune_fraction_predict")
    rng = np.random.default_rng(0)
    g = np.exp(rng.standard_normal(400))
    realised = {"w": np.minimum(1.0, g / 3.0)}
    agreement = predict.agreement(predict.predict({"w": 7.0 * g}, realised), realised)
    assert agreement[0] == pytest.approx(1.0)
    assert agreement[2] == pytest.approx(0.0, abs=1e-9)
    assert agreement[3] == pytest.approx(0.0, abs=1e-9)


def test_bytes_are_those_of_the_closed_form(tables: dict[str, dict[str, Any]]) -> None:
    # Half of every selected matrix goes to its owner and half comes back, in bfloat16; so do the gains, in float32.
    matrices = 3 * (4 * 96 * 96 + 2 * 96 * 288) * 2
    gains = 7 * 96 * 4
    for row in rows(tables["Cost of a step"]):
        assert row["bytes, 2 ranks"] == row["fraction"] * matrices + gains


def test_a_second_call_trains_nothing_and_an_unfinished_run_is_redone(out: Path, study: ModuleType) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "tune_fraction.py"), "train", "--out", str(out), "--quick"]
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*")}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert told.stdout == "0 to do\n"
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*")} == before

    one = out / "fraction0.25-seed0"
    loss = scalar(one, "val_loss")
    (one / "done.json").unlink()
    (one / "scalars.csv").write_text("cut")
    study.train_all(out, quick=True, jobs=1)
    assert scalar(one, "val_loss") == loss  # the same seed: bit for bit
    changed = {path.parent.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed - {"figures"} == {"fraction0.25-seed0"}


def test_the_plan_is_what_the_text_says(study: ModuleType) -> None:
    cases = study.plan(quick=False)
    assert len({case.name for case in cases}) == len(cases)
    sweep = {(case.fraction, case.seed) for case in cases[:15]}
    assert sweep == {(f, s) for f in (1.0, 0.5, 0.25, 0.125, 0.0625) for s in (0, 1, 2)}
    assert {(case.world, case.scope) for case in cases if case.world > 1} == {
        (world, scope) for world in (2, 4) for scope in ("local", "global")
    }
