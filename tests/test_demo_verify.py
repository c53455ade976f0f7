"""The demo holds its tracker to account: ``--verify`` says what it compared and ends with 1 when something is off."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scion_telemetry import load_run
from scion_telemetry.cli import app
from scion_telemetry.metrics.declare import Measured

ROOT = Path(__file__).parent.parent
WRONG = "error: verification failed: measured numbers differ from the gathered reference, as the lines above say"

FAULT = """
from scion_telemetry.cli import main
from scion_telemetry.metrics.declare import Measured

right = Measured.frobenius
Measured.frobenius = lambda m, quantity: 1.001 * right(m, quantity)

if __name__ == "__main__":
    main()
"""
"""A command whose tracker is wrong, in every process that it starts: each imports this file again."""


def verified(*entry: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, *entry, "demo", "--steps", "2", "--out", "run", "--verify"]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.timeout(120)
def test_two_ranks_agree_with_what_was_gathered(tmp_path: Path) -> None:
    done = verified("-m", "scion_telemetry.cli", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    numbers = re.search(
        r"(\d+) norms and counts of weights, gradients and momenta of 8 parameters: largest relative error (\S+) ",
        done.stdout,
    )
    assert numbers, done.stdout
    # Three quantities of eight parameters, the gradients among them; four numbers of a matrix, three of a vector.
    assert 8 * 3 * 3 <= int(numbers[1]) <= 8 * 3 * 4
    assert float(numbers[2]) <= 1e-7
    assert re.search(r"24 spectral norms: largest relative error \S+, 0 further off .+, 0 outside", done.stdout)
    assert "every element counted once" in done.stdout
    assert done.stdout.index("every element") < done.stdout.index("validation loss")
    assert load_run(tmp_path / "run").steps == [1]


@pytest.mark.timeout(120)
def test_two_ranks_that_are_wrong_end_with_one_line_and_1(tmp_path: Path) -> None:
    (tmp_path / "fault.py").write_text(FAULT)
    done = verified("fault.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert re.search(r"largest relative error 1.0e-03 \(\w+_frobenius of \S+\)", done.stdout), done.stdout
    assert done.stderr.strip() == WRONG
    assert load_run(tmp_path / "run").steps == [1], "the run is kept"


@pytest.mark.parametrize(("options", "status"), [(["--verify"], 1), ([], 0)])
def test_one_process_that_is_wrong_is_told_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], status: int
) -> None:
    right = Measured.frobenius
    monkeypatch.setattr(Measured, "frobenius", lambda m, quantity: 1.001 * right(m, quantity))
    arguments = ["demo", "--steps", "1", "--nproc", "1", "--out", str(tmp_path / "run"), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    assert ("norms and counts of" in result.output) == bool(options)
    assert (WRONG in result.stderr) == bool(options)
