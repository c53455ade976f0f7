"""The tracker's page says nothing that its code does not do: every block runs, and what it wrote is looked at."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from import_rules import PARTS, ROOT
from test_readme import Regression
from torch import Tensor, nn
from tracked import gauss, named

from scion_telemetry import Tracker, every, load_run
from scion_telemetry.metrics.declare import custom
from scion_telemetry.optim import Dion2, group_params
from scion_telemetry.sinks import MemorySink

TEXT = (ROOT / "scion_telemetry" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
BATCHES = 12
SIGMA = "weight_stable_rank"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Runs all blocks in one namespace and an empty folder."""
    torch.manual_seed(0)
    model = Regression()
    names: dict[str, Any] = {
        "model": model,
        "loader": torch.randn(BATCHES, 16, 8),
        "optimizer": Dion2(group_params(model), lr=0.02, fraction=0.5),
    }
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"README.md, block {number}", "exec"), names)
        yield folder, names


def test_there_are_blocks_and_all_of_them_run(ran: tuple[Path, dict[str, Any]]) -> None:
    assert len(BLOCKS) == 6 == TEXT.count("```python")
    assert ran[1]["found"]


def test_norms_at_every_flush_and_spectra_at_every_third(ran: tuple[Path, dict[str, Any]]) -> None:
    run = load_run(ran[0] / "runs" / "often")
    assert run.steps == [1, 2, 4, 6, 8, 10, 12]
    hidden = run.layers[run.layers["param"] == "hidden"].set_index("step")
    assert hidden["weight_rms"].notna().all()
    assert hidden.index[hidden[SIGMA].notna()].tolist() == [1, 6, 12]
    assert sorted(run.histograms["step"].unique()) == [1, 6, 12]


def test_metrics_of_ones_own_on_a_schedule_of_ones_own(ran: tuple[Path, dict[str, Any]]) -> None:
    run = load_run(ran[0] / "runs" / "own")
    assert run.steps == [1, 2, 3, 5, 10]
    for quantity in ("weight", "grad", "momentum", "update"):
        assert run.layers[f"{quantity}_l3"].gt(0).all()
        assert run.layers[f"{quantity}_spread"].between(0, 1).all()


def test_metrics_of_ones_own_are_right(ran: tuple[Path, dict[str, Any]]) -> None:
    metrics = [ran[1]["cubes"], ran[1]["spread"]]
    model, sink = Regression(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), metrics=metrics, sinks=[sink]):
        model(torch.randn(16, 8)).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        x, param = p.detach().double(), name.removesuffix(".weight")
        assert sink.value(1, param, "weight_l3") == pytest.approx(float(x.abs().pow(3).sum()) ** (1 / 3), rel=1e-6)
        spread = float(x.abs().mean() / x.square().mean().sqrt())
        assert sink.value(1, param, "weight_spread") == pytest.approx(spread, rel=1e-7)


def test_the_sink_wrote_a_line_a_row_of_both_optimizers(ran: tuple[Path, dict[str, Any]]) -> None:
    lines = [json.loads(line) for line in (ran[0] / "muon.jsonl").read_text().splitlines()]
    assert [(line["step"], line["param"]) for line in lines] == [
        (step, param) for step in (1, 10) for param in ("hidden", "out", "out.bias")
    ]
    assert all(line["update_rms"] > 0 for line in lines)


def test_the_resumed_run_goes_on(ran: tuple[Path, dict[str, Any]]) -> None:
    run = load_run(ran[0] / "runs" / "long")
    assert run.steps == [1, 10, 20]
    assert run.scalars.loc[run.scalars["loss"].notna(), "step"].tolist() == list(range(1, 2 * BATCHES + 1))


def test_norms_on_demand(ran: tuple[Path, dict[str, Any]]) -> None:
    assert {"track_param_rms_to_inf/out", "track_update_supremum/hidden"} <= set(ran[1]["found"])


@pytest.mark.parametrize("merge", ["sum", "max"])
def test_a_metric_of_ones_own_that_fails_leaves_its_cell_empty(merge: str, caplog: pytest.LogCaptureFixture) -> None:
    def picky(x: Tensor) -> Tensor:
        if x.size(1) == 6:
            raise ArithmeticError("not of six rows")
        return x.sum() if merge == "sum" else x.max()

    model, sink = named(six=gauss(6, 4), five=gauss(5, 4)), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    own = custom("picky", picky, merge=merge, quantities=["weight"])
    with Tracker(model, optimizer, schedule=every(1), metrics=["weight_rms", own], sinks=[sink]):
        for _ in range(3):
            model["six"].grad, model["five"].grad = gauss(6, 4), gauss(5, 4)
            optimizer.step()
    expected = gauss(5, 4).sum() if merge == "sum" else gauss(5, 4).max()
    for step in (1, 2, 3):
        assert sink.value(step, "five", "weight_picky") == pytest.approx(float(expected), rel=1e-5)
        assert sink.value(step, "six", "weight_rms") > 0
        with pytest.raises(KeyError, match="weight_picky"):
            sink.value(step, "six", "weight_picky")
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert "metric 'picky' failed for the weight of 'six'" in said[0]
    assert "not of six rows" in said[0]


def test_every_test_that_shows_a_guarantee_is_there() -> None:
    table = TEXT.split("## What holds")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    shown = re.findall(r"`(test_\w+\.py)::(test_\w+)`", table)
    assert len(shown) == len(rows) >= 8
    for file, name in shown:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in text, (file, name)


def test_every_module_on_the_data_s_way_is_named_and_every_file_is_there() -> None:
    table = TEXT.split("| module | does |")[1].split("\n\n")[0]
    named_modules = set(re.findall(r"`(\w+)\.py`", table))
    assert {*PARTS, "tracker", "schedule", "reduce", "writer", "rows"} <= named_modules
    folders = ("scion_telemetry", "scion_telemetry/metrics", "scion_telemetry/integrations", ".")
    for name in re.findall(r"`([\w/]+\.py|\w+/)`", TEXT):
        assert name.startswith("test_") or any((ROOT / folder / name).exists() for folder in folders), name


def test_no_copy_is_made_where_no_column_of_updates_is_chosen_or_all_are_shown() -> None:
    copies = {}
    for kind, metrics, shows in (("plain", "norms", False), ("none", "weight_rms", False), ("shown", "norms", True)):
        model: nn.Module = Regression()
        optimizer = Dion2(group_params(model)) if shows else torch.optim.SGD(model.parameters(), lr=0.1)
        with Tracker(model, optimizer, schedule=every(1), metrics=metrics) as tracker:
            seen: list[int] = []
            optimizer.register_step_pre_hook(lambda *_, t=tracker, seen=seen: seen.append(len(t._snapshots)))
            model(torch.randn(16, 8)).backward()
            optimizer.step()
        copies[kind] = seen
    assert copies == {"plain": [3], "none": [0], "shown": [0]}
