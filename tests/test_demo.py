"""The demo end to end: both optimizers, one and two processes, killed on the way, refused before it starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner
from wandb_files import only_run

from scion_telemetry import load_run
from scion_telemetry.cli import app
from scion_telemetry.demo.config import DemoConfig

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "scion_telemetry.cli", "demo"]


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "COLUMNS": "100"}
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.timeout(120)
def test_two_ranks_write_a_run_that_says_what_was_trained(tmp_path: Path) -> None:
    done = demo("--steps", "20", "--every", "5", "--seed", "3", "--fraction", "0.5", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    assert run.steps == [1, 5, 10, 15, 20]
    assert run.info["world_size"] == 2
    assert run.attributes["seed"] == 3
    assert run.attributes["fraction"] == 0.5
    assert set(run.params["layout"]) == {"Shard(0) x2"}
    assert set(run.selection["fraction"]) == {0.5}
    assert run.layers.groupby("step").size().unique().tolist() == [len(run.params)]
    assert run.scalars["train_loss"].notna().sum() == 20
    losses = run.scalars["val_loss"].dropna()
    assert losses.iloc[0] == pytest.approx(5.55, abs=0.1)
    assert losses.iloc[-1] < 3.4
    assert (tmp_path / "run" / "overview.png").stat().st_size > 10_000
    for word in ("blocks.0.attn.wq", "rms_to_rms", "validation loss", "scion-telemetry plot run"):
        assert word in done.stdout


@pytest.mark.timeout(120)
def test_one_process_measures_what_two_do(tmp_path: Path) -> None:
    for name, processes in (("one", "1"), ("two", "2")):
        done = demo("--steps", "1", "--optimizer", "scion", "--nproc", processes, "--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = load_run(tmp_path / "one"), load_run(tmp_path / "two")
    assert one.info["world_size"] == 1
    assert one.selection.empty
    for column in ("weight_rms", "weight_l1_to_rms", "weight_rms_to_inf", "update_rms", "momentum_rms"):
        # Newton-Schulz in bfloat16 amplifies the rounding of a gradient summed in another order.
        tolerance = 2e-3 if column.startswith("update") else 2e-4
        pd.testing.assert_series_equal(one.layers[column], two.layers[column], rtol=tolerance)
    pd.testing.assert_frame_equal(one.scalars[["val_loss"]], two.scalars[["val_loss"]], rtol=1e-3)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_killed_on_the_way_it_leaves_a_run_that_reads(tmp_path: Path, kind: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = ["--steps", "100000", "--every", "1", "--out", "run"]
    # Background jobs of a shell ignore SIGINT, and torch ends ranks without a launcher by that signal.
    deaf = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    started = subprocess.Popen(
        [*deaf, *COMMAND, *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(lambda: _steps(tmp_path / "run") >= 5)
        started.send_signal(kind)
        started.wait(timeout=30)
    finally:
        started.kill()
    # The ranks end with their launcher; a rank that trained on would make the run grow.
    _wait(lambda: _settled(tmp_path / "run"))
    run = load_run(tmp_path / "run")
    assert len(run.steps) >= 5
    assert run.steps == list(range(1, len(run.steps) + 1))
    assert run.layers["weight_rms"].notna().all()


def _steps(path: Path) -> int:
    return len(load_run(path).steps) if (path / "run.json").exists() else 0


def _settled(path: Path) -> bool:
    before = (path / "layers.csv").stat().st_size
    time.sleep(3)
    return (path / "layers.csv").stat().st_size == before


def _wait(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"every": 0}, "every must be a whole number >= 1, got 0"),
        ({"nproc": 0}, "nproc must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"fraction": 0.0}, "fraction must be in (0, 1], got 0.0"),
        ({"fraction": 1.5}, "fraction must be in (0, 1], got 1.5"),
        ({"lr": float("nan")}, "lr must be a finite number > 0, got nan"),
        ({"optimizer": "adam"}, "optimizer must be one of dion2, scion, got 'adam'"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "run"), *arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_an_output_that_holds_a_run_or_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="already holds a run; choose another --out"):
        DemoConfig(out=tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        DemoConfig(out=tmp_path / "run.json")


def test_errors_are_one_line_and_exit_with_2(tmp_path: Path) -> None:
    done = demo("--fraction", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: fraction must be in (0, 1], got 2.0"
    assert not done.stdout


@pytest.mark.timeout(120)
def test_wandb_holds_what_the_run_directory_holds(tmp_path: Path) -> None:
    done = demo("--steps", "6", "--wandb", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    stored = {
        (row["telemetry/step"], key): value
        for row in only_run(tmp_path / "run").history
        for key, value in row.items()
        if key != "_step"
    }
    cells = [
        (row["step"], f"{prefix}{column}/{row['param']}", value)
        for table, prefix in ((run.layers, ""), (run.selection, "selection_"))
        for row in table.to_dict("records")
        for column, value in row.items()
        if column not in ("step", "param") and "_at_" not in column  # of curves it gets no points
    ]
    scalars = run.scalars.melt("step").to_dict("records")
    cells += [(row["step"], f"scalars/{row['variable']}", row["value"]) for row in scalars]
    expected = {(step, key): value for step, key, value in cells if value == value}
    found = {place: value for place, value in stored.items() if not place[1].startswith("telemetry/")}
    histograms = {place: found.pop(place) for place in list(found) if place[1].startswith("selection_frequencies/")}
    bins = run.histograms[np.isfinite(run.histograms["log2"])].groupby(["step", "param"], observed=True)["count"].sum()
    assert {place: sum(drawn) for place, drawn in histograms.items() if place[1].endswith(".values")} == {
        (step, f"selection_frequencies/{param}.values"): count for (step, param), count in bins.items()
    }
    assert found.keys() == expected.keys()
    assert len(found) > 1000
    for place, value in expected.items():
        assert found[place] == pytest.approx(value, rel=1e-8), place
