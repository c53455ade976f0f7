"""The command line's own part: tables and paths that survive the terminal, and errors that are one line."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from sample_run import one_row, run_info, write_run
from typer.testing import CliRunner

from scion_telemetry import load_run
from scion_telemetry.cli import _conclude, app, main
from scion_telemetry.rows import Batch, Scalar
from scion_telemetry.sinks import CsvSink


def output(*arguments: object, columns: int = 80) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_name_in_brackets_is_no_markup(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "run")
    sink.open(run_info(names=("[red]wq", "layers[0]"), selection_columns=()))
    sink.write(one_row(1, {"weight_rms": 0.5}, "[red]wq"))
    sink.close()
    shown = output("show", tmp_path / "run")
    assert "[red]wq" in shown
    assert "layers[0]" in shown


def test_a_narrow_terminal_cuts_no_number(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path / "run"), range(1, 4))
    numbers = [word for line in output("show", tmp_path / "run", columns=200).splitlines() for word in line.split()]
    narrow = output("show", tmp_path / "run", columns=20)
    assert "…" not in narrow
    assert {word for word in numbers if word[:2] == "0."} <= set(narrow.split())


def test_the_end_of_the_demo_names_paths_as_the_shell_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "[bold]a b"
    sink = CsvSink(folder)
    sink.open(run_info())
    sink.write(Batch(step=2, scalars=tuple(Scalar(step=s, name="val_loss", value=5.0 / (s + 1)) for s in (0, 1))))
    sink.close()
    _conclude(load_run(folder), 1.0)
    said = capsys.readouterr().out
    assert f"figure          {folder}/overview.png" in said
    assert "validation loss 5.00 -> 2.50" in said
    plot = next(line for line in said.splitlines() if "telemetry plot" in line)
    assert shlex.split(plot)[2] == str(folder)
    code = shlex.split(next(line for line in said.splitlines() if "python -c" in line))[2]
    assert f"load_run({json.dumps(str(folder))})" in code


def test_a_run_that_diverged_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = CsvSink(tmp_path / "run")
    sink.open(run_info())
    values = {0: 5.0, 4: 3.0, 8: float("nan")}
    sink.write(Batch(step=8, scalars=tuple(Scalar(step=s, name="val_loss", value=v) for s, v in values.items())))
    sink.close()
    _conclude(load_run(tmp_path / "run"), 1.0)
    assert "validation loss 5.00 -> nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plot", "run", "--out", "run/run.json"], "run.json"),
        (["show", "nothing"], "no run directory"),
        (["plot", "run", "--format", "gif"], ".gif"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    write_run(CsvSink(tmp_path / "run"), range(1, 3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scion-telemetry", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert message in said
