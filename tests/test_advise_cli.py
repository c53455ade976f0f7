"""``scion-telemetry advise`` and ``calibrate``, and the fraction that a training loop changes."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from advise_run import Matrix, lognormal, write
from typer.testing import CliRunner

from scion_telemetry import Tracker, every, load_run
from scion_telemetry.analysis import calibration_snippet
from scion_telemetry.cli import app, main
from scion_telemetry.optim import Dion2, Dion3, Scion, set_fraction
from scion_telemetry.sinks import CsvSink


def output(*arguments: object, columns: int = 160) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flat = [Matrix(name=f"layers.{i}.wq", scales=np.ones(128)) for i in range(12)]
    return write(tmp_path_factory.mktemp("run") / "run", *flat, Matrix(name="layers.12.[wo]", scales=lognormal())).path


def test_advise_prints_what_it_found(run: Path) -> None:
    shown = output("advise", run, "--total-steps", 100000, "--max-age", 200, "--mass", 0)
    assert "ranked by L1 norm" in shown
    lines = [line.split() for line in shown.splitlines() if line.strip()]
    assert next(line for line in lines if line[0] == "layers.12.[wo]")[1:3] == ["256", "0.1875"]  # and no markup
    assert next(line for line in lines if line[0] == "hidden")[1:4] == ["13", "0.25", "0.1875"]
    first = next(line for line in shown.splitlines() if line.startswith("hidden: "))
    assert first.startswith("hidden: ef_decay=0.733 with fraction=0.1875, instead of 0.95"), "what is worth most"
    assert "time of the optimizer falls less" in " ".join(shown.split())
    assert "starved" not in shown
    assert "note: the mass rule was not applied to 13 of 13 matrices" in shown
    assert "a gap of .002 in the mean loss takes 7 seeds per arm" in shown
    assert "0.002: 7" in shown


def test_a_narrow_terminal_cuts_no_number(run: Path) -> None:
    narrow, wide = (output("advise", run, columns=columns) for columns in (20, 200))
    assert "…" not in narrow.partition("note:")[0]
    numbers = {word for word in wide.split() if word[0].isdigit() or word[0] == "."}
    assert numbers <= set(narrow.split())


def test_limits_are_options(run: Path, tmp_path: Path) -> None:
    low, high = (tmp_path / name for name in ("low.json", "high.json"))
    output("advise", run, "--json", low, "--max-age", 2000, "--overdue", 0.5, "--age-horizons", 9, "--mass", 0)
    output("advise", run, "--json", high, "--max-age", 2)
    fractions = [json.loads(path.read_text())["groups"][0]["fraction"] for path in (low, high)]
    assert fractions[0] < 0.25 < fractions[1]
    assert json.loads(high.read_text())["limits"]["max_age"] == 2
    assert json.loads(high.read_text())["total_steps_from"] == "run"


def test_the_length_of_the_training_is_told_where_it_counts(run: Path) -> None:
    plain, told = output("advise", run), output("advise", run, "--total-steps", 10, "--horizon-share", 0)
    assert plain.startswith("Ages and overdue rows are those of the settled state")
    first, _, rest = told.partition("\n")
    assert "Without effect here: --total-steps and --horizon-share. The length only counts for fractions below" in first
    assert "below 0.05, where no ef_decay keeps the horizon; none was tried" in first
    assert rest == plain.partition("\n")[2]
    short, long = (output("advise", run, "--mu", 0.9, "--mass", 0, *more) for more in ((), ("--total-steps", 10**6)))
    assert short.startswith("For a training of 1000 steps (this run's; --total-steps tells another), which may bar")
    assert long.startswith("For a training of 1000000 steps (as told), which may bar fractions below 0.1, where no ef_")
    assert short.partition("\n")[2] != long.partition("\n")[2]


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--json", ".", "--json must be a file, got the folder"),
        ("--json", "none/told.json", "--json must be a file in a folder that exists"),
        ("--figure", "none/drawn.png", "--figure must be a file in a folder that exists"),
        ("--figure", "drawn.jpg", "the suffix must be one of .png, .svg, .pdf, got '.jpg'"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is(
    run: Path, tmp_path: Path, option: str, name: str, message: str
) -> None:
    result = CliRunner().invoke(app, ["advise", str(run), option, str(tmp_path / name)])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert result.output == ""
    assert list(tmp_path.iterdir()) == []


def test_one_number_of_flops_in_table_and_figure(tmp_path: Path) -> None:
    """The median: one of 18 that is large would decide the mean by parameters."""
    rows = [Matrix(name=f"w{i}", scales=np.ones(n)) for i, n in enumerate((64, 64, 512))]
    run = write(tmp_path / "run", *rows).path
    shown, told = (
        output("advise", run, "--json", tmp_path / "told.json"),
        json.loads((tmp_path / "told.json").read_text()),
    )
    at = [next(c for c in m["candidates"] if c["fraction"] == 0.25)["flops"] for m in told["matrices"]]
    line = next(words for line in shown.splitlines() if (words := line.split()) and words[0] == "0.25")
    assert float(line[-2]) == pytest.approx(at[0], rel=0.01)
    assert at[2] != pytest.approx(at[0], rel=0.1)
    assert "mass, NS FLOPs: median" in " ".join(shown.split())


def test_no_fraction_below_the_published_ones_where_the_mass_is_not_known(run: Path) -> None:
    shown = output("advise", run, "--total-steps", 100000, "--max-age", 2000, "--overdue", 0.5)
    lines = [line.split() for line in shown.splitlines() if line.strip()]
    assert next(line for line in lines if line[0] == "hidden")[3:7] == ["0.25", "local", "mass", "unknown"]
    assert "measure the mass of 13 of 13 matrices before you go below 0.25" in shown


def test_the_momentum_whose_horizon_is_kept_is_an_option(run: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    output("advise", run, "--json", told, "--mu", 0.975)
    decays = {c["fraction"]: c["ef_decay"] for c in json.loads(told.read_text())["matrices"][0]["candidates"]}
    assert (decays[0.5], decays[0.25]) == (pytest.approx(0.95), pytest.approx(0.9))


def test_calibration_is_an_option(run: Path, tmp_path: Path) -> None:
    whole = write(tmp_path / "cal", Matrix(name="layers.12.[wo]", scales=lognormal(), plan=((300, 1.0),)))
    shown = output("advise", run, "--calibration", whole.path)
    assert "not applied to 12 of 13" in shown


def test_what_cannot_be_advised_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = write(tmp_path / "run", Matrix(name="w", scales=lognormal(64), plan=((100, 0.25),)))
    monkeypatch.setattr(sys, "argv", ["scion-telemetry", "advise", str(short.path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "too few steps" in said


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 32, bias=False))


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    first, second = model.parameters()
    return [
        {"params": [("first", first)], "role": "hidden"},
        {"params": [("second", second)], "algorithm": "scion", "norm": "RowNorm"},
    ]


def test_the_snippet_makes_a_window_that_advise_finds(tmp_path: Path) -> None:
    said = output("calibrate", "--warm-up", 20, "--fraction", 0.5)
    assert said.endswith(calibration_snippet(0.5, warm_up=20))
    assert "the window is steps 21 to 220 as the Tracker counts them" in said
    model = small_model()
    optimizer = Dion2(groups(model), lr=0.01)
    tracker = Tracker(model, optimizer, sinks=[CsvSink(tmp_path / "run")], schedule=every(10))
    data = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))

    def train_step() -> None:
        optimizer.zero_grad()
        (model(data) - data.roll(1, 1)).square().mean().backward()
        optimizer.step()

    exec(said, {"optimizer": optimizer, "total_steps": 450, "train_step": train_step})
    tracker.close()
    selection = load_run(tmp_path / "run").selection
    fractions = selection.set_index("step")["fraction"]
    assert set(fractions[(fractions.index > 20) & (fractions.index <= 220)]) == {1.0}
    assert set(fractions[(fractions.index <= 20) | (fractions.index > 220)]) == {0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fraction": 1.0}, r"fraction must be in \(0, 1\), got 1.0"),
        ({"steps": 100}, "steps must be >= 200, got 100"),
        ({"warm_up": -1}, "warm_up must be >= 0, got -1"),
    ],
)
def test_a_window_that_would_not_do(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibration_snippet(**arguments)


@pytest.mark.parametrize("kind", [Dion2, Dion3])
def test_set_fraction_changes_the_next_step(kind: type[Dion2] | type[Dion3]) -> None:
    from scion_telemetry.optim import StepEvent, register_step_observer

    model = small_model()
    optimizer = kind(groups(model), lr=0.01)
    seen: list[int] = []

    def watch(event: StepEvent) -> None:
        seen.extend(s.indices.size(-1) for s in event.selections)

    handle = register_step_observer(optimizer, watch)
    for fraction in (0.25, 1.0, 1, 0.1):
        set_fraction(optimizer, fraction)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    handle.remove()
    assert seen == [8, 32, 32, 4]
    assert [group["fraction"] for group in optimizer.param_groups] == [0.1, 0.25]


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, float("nan"), True, "0.5", None])
def test_a_fraction_that_is_none(fraction: Any) -> None:
    optimizer = Dion2(groups(small_model()), lr=0.01)
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got"):
        set_fraction(optimizer, fraction)
    assert optimizer.param_groups[0]["fraction"] == 0.25


def test_an_optimizer_that_does_not_select() -> None:
    optimizer = Scion(list(small_model().parameters()), lr=0.01)
    with pytest.raises(ValueError, match="no parameter group of Scion selects: expected a Dion2 or Dion3"):
        set_fraction(optimizer, 0.5)
