"""CsvSink when processes are forked or killed and disks fill up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sample_run import NAMES, batch, number, run_info

from scion_telemetry.rows import Scalar
from scion_telemetry.sinks import CsvSink
from scion_telemetry.sinks.tablefile import TableFile
from scion_telemetry.store import load_run

HERE = Path(__file__).parent


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:  # C128
    sink = CsvSink(tmp_path)
    sink.open(run_info())
    sink.write(batch(1))
    before = (tmp_path / "layers.csv").read_bytes()
    child = os.fork()
    if child == 0:
        sink.write(batch(2))
        sink.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "layers.csv").read_bytes() == before
    sink.write(batch(2))
    assert load_run(tmp_path).steps == [1, 2]


PROLOGUE = """
import os, sys
sys.path.insert(0, {tests!r})
from sample_run import *
from scion_telemetry.sinks import CsvSink
"""


def python(code: str, stdout: int | None = None, **env: str) -> "subprocess.Popen[str]":
    source = PROLOGUE.format(tests=str(HERE)) + code
    return subprocess.Popen(
        [sys.executable, "-c", source], cwd=HERE.parent, env={**os.environ, **env}, stdout=stdout, text=True
    )


def test_a_child_that_exits_the_normal_way_flushes_nothing(tmp_path: Path) -> None:  # C128
    code = f"""
sink = CsvSink({str(tmp_path)!r}); sink.open(run_info()); sink.write(batch(1))
child = os.fork()
sys.exit(0) if child == 0 else os.waitpid(child, 0)
sink.write(batch(2)); sink.close()
"""
    assert python(code).wait() == 0
    assert [line.split(",")[0] for line in lines(tmp_path / "layers.csv")[1:]] == ["1"] * 4 + ["2"] * 4


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed(tmp_path: Path, how: signal.Signals) -> None:  # C126
    code = f"""
import time
sink = CsvSink({str(tmp_path)!r}); sink.open(run_info())
for step in range(1, 100000):
    sink.write(batch(step))
    if step == 20: print("20", flush=True)
    time.sleep(0.0002)
"""
    child = python(code, subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == "20\n"
    time.sleep(0.01)
    child.send_signal(how)
    assert child.wait() == -how
    child.stdout.close()
    run = load_run(tmp_path)
    last = run.steps[-1]
    assert last >= 20
    assert run.steps == list(range(1, last + 1))
    expected = [number(step, name, "weight_rms") for step in run.steps for name in NAMES]
    assert run.layers["weight_rms"].tolist() == pytest.approx(expected, rel=1e-8)


def test_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:  # C134
    for seed in ("1", "2"):
        code = f"write_run(CsvSink({str(tmp_path / seed)!r}), range(1, 3))"
        assert python(code, PYTHONHASHSEED=seed).wait() == 0
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()} for seed in ("1", "2"))
    assert first == second
    assert len(first) == 5


def test_disk_full(tmp_path: Path, small_files: Any) -> None:  # C124
    sink = CsvSink(tmp_path)
    sink.open(run_info())
    errors = {}
    for step in range(1, 201):
        try:
            sink.write(batch(step, Scalar(step=step, name="train_loss", value=1.0)))
        except OSError as error:
            errors[step] = error
    full = min(errors)
    assert list(errors) == list(range(full, 201))  # the tracker reports the first and counts the others
    assert {(error.errno, error.filename) for error in errors.values()} == {(27, str(tmp_path / "layers.csv"))}
    run = load_run(tmp_path)
    assert run.layers["step"].tolist() == [step for step in range(1, full) for _ in NAMES]
    assert (tmp_path / "layers.csv").read_bytes().endswith(b"\n")
    assert run.scalars["step"].tolist() == list(range(1, 201))  # a table that still has room goes on

    small_files()
    sink.write(batch(201))
    assert load_run(tmp_path).layers["step"].tolist() == [*run.layers["step"], *[201] * 4]


def test_a_half_line_that_could_not_be_taken_back_at_once_is_taken_back_later(
    tmp_path: Path, small_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableFile(tmp_path / "t.csv", ("step", "value"))
    with monkeypatch.context() as patch:
        patch.setattr(TableFile, "_try_take_back", lambda self: None)
        with pytest.raises(OSError, match=r"t\.csv"):
            table.append(b"1," + b"1" * 5000 + b"\n")
    assert (tmp_path / "t.csv").stat().st_size == 4096  # half a line stands there now
    table.append(b"2,2\n")
    assert (tmp_path / "t.csv").read_bytes() == b"step,value\n2,2\n"
