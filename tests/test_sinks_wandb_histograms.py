"""WandbSink: histograms and parameters that come in mid-run, read back from disk."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_run import HISTOGRAMS, NAMES, SLICE_COLUMNS, batch, histogram, one_row, param, run_info, slices
from wandb_files import Stored, only_run, settings
from wandb_trainers import ModelRun

from scion_telemetry.rows import Batch, Histogram, RunInfo
from scion_telemetry.sinks import WandbSink
from scion_telemetry.sinks.wandb_guest import GuestRows

STEP, NONFINITE = "telemetry/step", "telemetry/nonfinite"
KEY = "weight_row_norms/embed"


def info(**changes: Any) -> RunInfo:
    return run_info(**{"histograms": HISTOGRAMS, "slice_columns": SLICE_COLUMNS, **changes})


def own(folder: Path, **options: Any) -> WandbSink:
    return WandbSink(**{"project": "p", "mode": "offline", "dir": folder, "settings": settings(), **options})


def logged(sink: WandbSink, *batches: Batch, **changes: Any) -> None:
    sink.open(info(**changes))
    for item in batches:
        sink.write(item)
    sink.close()


def of(log2: tuple[float, ...], count: tuple[float, ...]) -> Batch:
    item = Histogram(step=1, param="embed", name=HISTOGRAMS[0], log2=log2, count=count, mass=(0.0,) * len(log2))
    return Batch(step=1, histograms=(item,))


def read(stored: Stored, key: str = KEY) -> list[dict[str, Any]]:
    """The histograms of ``key`` with the steps of their rows."""
    return [
        {"step": row[STEP], "values": row[f"{key}.values"], "bins": row[f"{key}.bins"]}
        for row in stored.history
        if row.get(f"{key}._type") == "histogram"
    ]


def test_consecutive_bins_without_zeros_and_what_is_not_finite(tmp_path: Path) -> None:
    other = histogram(4, "layers.2.attn.wq", HISTOGRAMS[1])
    logged(own(tmp_path), Batch(step=4, layers=batch(4).layers, histograms=(histogram(4), other), slices=slices(4)))
    stored = only_run(tmp_path)
    expected = {
        "step": 4,
        "values": [1, 0, 0, 0, 4],
        "bins": pytest.approx([2.0 ** (quarter / 4) for quarter in range(-4, 2)], rel=1e-15),
    }
    assert read(stored) == read(stored, "selection_frequencies/layers.2.attn.wq") == [expected]
    (row,) = stored.history
    assert row[NONFINITE] == 2  # one in each
    assert len(row) == 3 + 4 * 3 + 2 * 3  # and nothing of the slices
    assert {f"{name}/*" for name in HISTOGRAMS} <= set(stored.metrics)
    assert stored.metrics["weight_row_norms/*"]["step_metric"] == STEP


def test_histograms_of_several_steps_are_rows_of_their_own(tmp_path: Path) -> None:
    logged(own(tmp_path), Batch(step=3, histograms=(histogram(1), histogram(3))), Batch(step=3, slices=slices(3)))
    stored = only_run(tmp_path)
    assert [(row["step"], row["values"]) for row in read(stored)] == [(1, [1, 0, 0, 0, 1]), (3, [1, 0, 0, 0, 3])]
    assert len(stored.history) == 2


def test_nothing_but_zeros_and_nan(tmp_path: Path) -> None:
    logged(own(tmp_path), of((-math.inf, math.nan), (5.0, 3.0)), of((), ()))
    assert only_run(tmp_path).history == [
        {"_step": 0, STEP: 1, NONFINITE: 3},
        {"_step": 1, STEP: 1, NONFINITE: 0},
    ]


@pytest.mark.parametrize(
    ("span", "bins", "factor"),
    [(512, 512, 2**0.25), (513, 257, 2**0.5), (1024, 512, 2**0.5), (1108, 277, 2.0)],
)
def test_more_octaves_than_wandb_has_bins(tmp_path: Path, span: int, bins: int, factor: float) -> None:
    """1108 quarter octaves are all that float32 has."""
    lowest = -596
    quarters = np.arange(lowest, lowest + span)
    counts = np.random.default_rng(0).integers(1, 100, span)
    logged(own(tmp_path), of(tuple((quarters / 4).tolist()), tuple(counts.astype(float).tolist())))
    (found,) = read(only_run(tmp_path))
    edges = np.array(found["bins"])
    assert len(found["values"]) == bins
    assert edges[1:] / edges[:-1] == pytest.approx(factor, rel=1e-12)
    middles = 2.0 ** (quarters / 4 + 0.125)  # each is in the bin that says so
    assert found["values"] == np.histogram(middles, bins=edges, weights=counts)[0].tolist()
    assert sum(found["values"]) == counts.sum()


def test_key_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    histograms = tuple(histogram(1, name) for name in NAMES)
    logged(own(tmp_path, max_keys=3), Batch(step=1, histograms=histograms))
    stored = only_run(tmp_path)
    assert [len(read(stored, f"weight_row_norms/{name}")) for name in NAMES] == [1, 1, 1, 0]
    assert stored.history[0][NONFINITE] == 4  # also of what is left out
    assert "max_keys=3: 1 of 4 parameters are left out of wandb, from 'norm' on" in caplog.text


# --- the run of a trainer --------------------------------------------------------------------------------------------


def test_in_a_given_run(tmp_path: Path) -> None:
    import wandb

    run = wandb.init(project="trainer", mode="offline", dir=tmp_path, settings=settings(), reinit="create_new")
    sink = WandbSink(run=run)
    sink.open(info())
    for step in range(1, 4):
        sink.write(Batch(step=step, layers=batch(step).layers[:1], histograms=(histogram(step),)))
        if step != 2:  # the third waits for room
            run.log({"loss": float(step)})
    sink.write(Batch(step=3, slices=slices(3)))
    sink.extend(info(names=("embed", "new")))
    sink.write(one_row(3, {"weight_rms": 0.25}, "new"))
    sink.close()
    assert dict(run.config) == {}
    run.finish()
    stored = only_run(tmp_path)
    assert [(row["step"], row["values"][-1]) for row in read(stored)] == [(1, 1), (2, 2), (3, 3)]
    assert [value for _, value in stored.series("loss")] == [1.0, 3.0]
    assert [row[NONFINITE] for row in stored.history if NONFINITE in row] == [1, 1, 1]
    assert [value for _, value in stored.series("weight_rms/new")] == [0.25]


def test_a_histogram_that_waits_weighs_what_it_holds() -> None:
    import wandb

    run = ModelRun()
    rows = GuestRows(run)
    rows.put(1, {STEP: 1})
    bins: Any = ([1.0] * 100, [float(i) for i in range(101)])
    rows.put(2, {STEP: 2, KEY: wandb.Histogram(np_histogram=bins)})
    assert rows._held_values == 1 + 200
    run.log({"loss": 1.0})
    rows.put(3, {STEP: 3})
    assert rows._held_values == 1


# --- parameters that come in mid-run ---------------------------------------------------------------------------------


def test_extend_takes_new_parameters_and_tells_the_config(tmp_path: Path) -> None:
    sink = own(tmp_path)
    sink.open(info(names=NAMES[:2], start_step=5))
    sink.write(one_row(6, {"weight_rms": 0.5}))
    sink.extend(info(params=(param("new", shape=(7, 3)), *(param(name) for name in NAMES[:2])), start_step=5))
    sink.write(one_row(7, {"weight_rms": 0.25}, "new"))
    sink.close()
    stored = only_run(tmp_path)
    assert [row.get("weight_rms/new") for row in stored.history] == [None, 0.25]
    updates = [record["config"]["update"] for record in stored.records if record.get("type") == "config"]
    telemetry = updates[-1]["telemetry"]
    assert stored.config["telemetry"]["params"]["count"] == 2
    assert telemetry["params"]["count"] == 3
    assert telemetry["params"]["shapes"] == {"7x3": 1, "320x1280": 2}
    assert {k: v for k, v in telemetry.items() if k != "params"} == {
        k: v for k, v in stored.config["telemetry"].items() if k != "params"
    }


def test_a_parameter_that_was_left_out_stays_out_when_others_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = own(tmp_path, max_keys=1)
    sink.open(info(names=("a", "b")))
    both = Batch(step=1, histograms=(histogram(1, "a"), histogram(1, "b")))
    sink.write(both)
    sink.extend(info(names=("new", "a", "b")))
    sink.write(Batch(step=2, histograms=(*both.histograms, histogram(2, "new"))))
    sink.close()
    stored = only_run(tmp_path)
    counts = [len(read(stored, f"weight_row_norms/{name}")) for name in ("a", "b", "new")]
    assert counts == [2, 0, 0]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
