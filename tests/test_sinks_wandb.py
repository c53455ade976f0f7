"""WandbSink: its own run, read back from disk and held against the CSV of the same batches."""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_run import LAYER_COLUMNS, NAMES, SELECTION_COLUMNS, batch, one_row, param, run_info
from wandb_files import offline_runs, only_run, settings

from scion_telemetry.rows import Batch, Row, Scalar, key
from scion_telemetry.sinks import CsvSink, WandbSink
from scion_telemetry.store import load_run

STEP = "telemetry/step"


def own(folder: Path, **options: Any) -> WandbSink:
    """A sink with an offline run in ``folder``; wandb reads ``WANDB_DIR`` only once in a process."""
    return WandbSink(**{"project": "p", "mode": "offline", "dir": folder, "settings": settings(), **options})


def logged(sink: WandbSink, *batches: Batch, **info: Any) -> None:
    sink.open(run_info(**info))
    for item in batches:
        sink.write(item)
    sink.close()


def test_every_value_of_the_csv_is_in_the_run(tmp_path: Path) -> None:
    batches = [
        batch(3, *(Scalar(step=step, name="train_loss", value=1 / step) for step in (1, 2, 3))),
        batch(6, Scalar(step=4, name="train_loss", value=0.2), Scalar(step=6, name="val/loss", value=2.5)),
    ]
    csv, sink = CsvSink(tmp_path / "csv"), own(tmp_path)
    logged(sink, *batches)
    csv.open(run_info())
    for item in batches:
        csv.write(item)
    csv.close()

    run, stored = load_run(tmp_path / "csv"), only_run(tmp_path)
    rows = {row[STEP]: row for row in stored.history}
    assert [row["_step"] for row in stored.history] == [0, 1, 2, 3, 4]
    assert list(rows) == [1, 2, 3, 4, 6]  # one row a distinct step, each at its own
    expected: dict[int, dict[str, float]] = {step: {} for step in rows}
    for table, columns, prefix in ((run.layers, LAYER_COLUMNS, ""), (run.selection, SELECTION_COLUMNS, "selection_")):
        for cells in table.to_dict("records"):
            for column in columns:
                expected[cells["step"]][f"{prefix}{column}/{cells['param']}"] = cells[column]
    for cells in run.scalars.to_dict("records"):
        for name in ("train_loss", "val/loss"):
            if not math.isnan(cells[name]):
                expected[cells["step"]][f"scalars/{name}"] = cells[name]
    assert sum(map(len, expected.values())) == 2 * (4 * 3 + 3 * 2) + 5
    for step, values in expected.items():
        found = {k: v for k, v in rows[step].items() if k not in ("_step", STEP, "telemetry/nonfinite")}
        assert found == pytest.approx(values, rel=1e-8)


def test_every_key_has_the_optimizer_step_as_its_axis(tmp_path: Path) -> None:
    logged(own(tmp_path), batch(1))
    metrics = only_run(tmp_path).metrics
    globs = [f"{column}/*" for column in LAYER_COLUMNS] + [f"selection_{column}/*" for column in SELECTION_COLUMNS]
    assert set(metrics) == {STEP, "telemetry/nonfinite", "scalars/*", *globs}
    assert metrics[STEP]["options"]["hidden"] is True
    assert {metric.get("step_metric") for name, metric in metrics.items() if name != STEP} == {STEP}


def test_config_has_the_attributes_and_a_summary_of_the_parameters(tmp_path: Path) -> None:
    params = (param("a", role="embedding", shape=(7, 3)), param("b", shape=(4,)), param("c", shape=(4,)))
    logged(own(tmp_path, group="g", name="n"), params=params, attributes={"lr": math.inf, "seed": 3}, start_step=5)
    stored = only_run(tmp_path)
    config = stored.config
    assert (config["seed"], config["lr"]) == (3, "inf")
    assert config["telemetry"]["start_step"] == 5
    assert config["telemetry"]["versions"] == {"torch": "2.13.0"}
    assert config["telemetry"]["params"] == {
        "count": 3,
        "elements": 29,
        "roles": {"embedding": 1, "hidden": 2},
        "algorithms": {"dion2": 3},
        "shapes": {"7x3": 1, "4": 2},
    }
    assert (stored.run["project"], stored.run["run_group"], stored.run["display_name"]) == ("p", "g", "n")


def test_nonfinite_values_are_counted_and_kept(tmp_path: Path) -> None:  # C109
    values = {"weight_rms_to_rms": math.nan, "update_weight_ratio": math.inf, "weight_rms": 0.5}
    loss = Scalar(step=2, name="train_loss", value=-math.inf)
    logged(own(tmp_path), one_row(1, values), Batch(step=2, scalars=(loss,)), Batch(step=3, layers=batch(3).layers))
    bad, scalar, healthy = only_run(tmp_path).history
    assert bad == {
        "_step": 0, STEP: 1, "telemetry/nonfinite": 2,
        "weight_rms_to_rms/embed": "NaN", "update_weight_ratio/embed": "Infinity", "weight_rms/embed": 0.5,
    }  # fmt: skip
    assert scalar == {"_step": 1, STEP: 2, "telemetry/nonfinite": 1, "scalars/train_loss": "-Infinity"}
    assert healthy["telemetry/nonfinite"] == 0


def test_values_of_other_types_and_awkward_names(tmp_path: Path) -> None:  # C111, C115
    import torch

    values: dict[str, Any] = {"weight_rms": torch.tensor(0.5, dtype=torch.bfloat16), "update_weight_ratio": True}
    step: Any = torch.tensor(3)
    names = ("_orig_mod.0", "0", "a b/c")
    rows = tuple(Row(step=step, param=name, values=values) for name in names)
    logged(own(tmp_path), Batch(step=step, layers=rows), names=names)
    (row,) = only_run(tmp_path).history
    assert row[STEP] == 3
    assert [row[key("weight_rms", name)] for name in names] == [0.5] * 3
    assert row["update_weight_ratio/0"] == 1.0
    assert not [k for k in row if k.startswith("_") and k != "_step"]


def test_key_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Five keys for each of the first three parameters, in model order; the last has three.
    logged(own(tmp_path, max_keys=14), batch(1, Scalar(step=1, name="train_loss", value=1.0)), batch(2))
    history = only_run(tmp_path).history
    for row in history:
        names = {k.split("/", 1)[1] for k in row if k.split("/")[0] in LAYER_COLUMNS or k.startswith("selection_")}
        assert names == set(NAMES[:2])
        assert sum("layers.2" in k for k in row) == 5
    assert history[0]["scalars/train_loss"] == 1.0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "max_keys=14: 2 of 4 parameters are left out of wandb, from 'layers.10.attn.wq' on; CsvSink keeps all"
    ]


def test_a_parameter_that_was_left_out_once_stays_out(tmp_path: Path) -> None:
    small = Batch(step=2, layers=tuple(Row(step=2, param=name, values={"weight_rms": 1.0}) for name in NAMES))
    logged(own(tmp_path, max_keys=17), batch(1), small)
    assert [sorted(k for k in row if k.startswith("weight_rms/")) for row in only_run(tmp_path).history] == [
        ["weight_rms/embed", "weight_rms/layers.10.attn.wq", "weight_rms/layers.2.attn.wq"]
    ] * 2


def test_all_fit_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logged(own(tmp_path, max_keys=18), batch(1))
    assert len(only_run(tmp_path).history[0]) == 18 + 3  # with the two telemetry keys and _step
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nonfinite_values_beyond_the_budget_count_too(tmp_path: Path) -> None:
    rows = tuple(Row(step=1, param=name, values={"weight_rms": math.nan}) for name in NAMES)
    logged(own(tmp_path, max_keys=1), Batch(step=1, layers=rows))
    (row,) = only_run(tmp_path).history
    assert row == {"_step": 0, STEP: 1, "telemetry/nonfinite": 4, "weight_rms/embed": "NaN"}


def test_dir_is_made(tmp_path: Path) -> None:
    logged(own(tmp_path / "new" / "place"), batch(1))
    assert len(only_run(tmp_path / "new" / "place").history) == 1


def test_a_forked_child_logs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C128
    sink = own(tmp_path)
    sink.open(run_info())
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        sink.write(batch(2))
        sink.close()
    sink.write(batch(1))
    sink.close()
    assert [row[STEP] for row in only_run(tmp_path).history] == [1]


def test_a_rank_that_never_opens_the_sink_never_imports_wandb(tmp_path: Path) -> None:  # C106
    code = """
import sys
from scion_telemetry.sinks import WandbSink
WandbSink(project="p")
print("wandb" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert child.stdout == "False\n"
    assert offline_runs(tmp_path) == []


# --- what is refused, and where a run goes without a login ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_keys": 0}, ValueError, "max_keys must be at least 1, got 0"),
        ({"max_keys": 1.5}, TypeError, "max_keys must be an int, got 1.5"),
        ({"mode": "of"}, ValueError, "mode must be online, offline, disabled, shared or None, got 'of'"),
        ({"run": object()}, ValueError, r"run must be a wandb run.*has no \['log', 'define_metric', 'step'\]"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WandbSink(**options)


def test_a_given_run_takes_no_options() -> None:
    import wandb

    run = wandb.init(mode="disabled")
    with pytest.raises(ValueError, match=r"run= logs into a run that exists already, so \['project', 'tags'\] cannot"):
        WandbSink(run=run, project="p", tags=["x"])
    run.finish()


def test_without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RuntimeError, match=r"pip install 'scion-telemetry\[wandb\]'"):
        WandbSink(project="p").open(run_info())


LOGIN = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
sys.path.insert(0, {tests!r})
from sample_run import *
from wandb_files import settings
import wandb
from scion_telemetry.sinks import WandbSink
try:
    sink = WandbSink(project="p", settings=settings(), mode={mode!r})
    sink.open(run_info())
    sink.close()
    print("opened")
except RuntimeError as error:
    print(error)
"""


def without_login(tmp_path: Path, mode: str | None, **env: str) -> str:
    code = LOGIN.format(tests=str(Path(__file__).parent), mode=mode)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    clean |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_DIR": str(tmp_path), **env}
    clean["WANDB_CONFIG_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", code]
    child = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=clean,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_no_login_goes_offline_and_says_so(tmp_path: Path) -> None:
    output = without_login(tmp_path, None)
    assert output.splitlines() == [
        "no wandb login found: the run is written offline, `wandb sync` uploads it",
        "opened",
    ]
    assert len(offline_runs(tmp_path)) == 1


def test_online_without_a_login_says_what_to_do(tmp_path: Path) -> None:
    for output in (without_login(tmp_path, "online"), without_login(tmp_path, None, WANDB_MODE="online")):
        assert "could not be started" in output
        assert 'mode="offline" or WANDB_MODE=offline' in output
    assert offline_runs(tmp_path) == []


def test_a_relative_folder_is_this_process_s_even_where_the_service_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    import wandb

    wandb.setup()  # the service starts in the folder of now
    monkeypatch.chdir(tmp_path / "here")
    sink = WandbSink(project="p", dir="logs", mode="offline", settings=settings())
    sink.open(run_info())
    sink.write(Batch(step=1, scalars=(Scalar(step=1, name="loss", value=0.5),)))
    sink.close()
    assert only_run(tmp_path / "here" / "logs").history
