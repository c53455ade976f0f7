"""load_run and load_runs: what was written comes back, whatever moment the run was cut at."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sample_run import LAYER_COLUMNS, NAMES, SELECTION_COLUMNS, batch, number, one_row, param, run_info, write_run

from scion_telemetry.rows import Batch, Row, Scalar
from scion_telemetry.sinks import CsvSink
from scion_telemetry.store import load_run, load_runs


def written(path: Path, batches: list[Batch], **info: object) -> Path:
    sink = CsvSink(path)
    sink.open(run_info(**info))  # type: ignore[arg-type]
    for item in batches:
        sink.write(item)
    sink.close()
    return path


def test_everything_comes_back(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path / "a"), range(1, 6))
    run = load_run(tmp_path / "a")
    assert run.path == tmp_path / "a"
    assert run.attributes == {"seed": 0}
    assert (run.info["schedule"], run.info["units"]["weight_rms"]) == ("every(1)", "1")
    assert run.steps == [1, 2, 3, 4, 5]
    for table, columns, names in (
        (run.layers, LAYER_COLUMNS, NAMES),
        (run.selection, SELECTION_COLUMNS, NAMES[:3]),
    ):
        assert table.columns.tolist() == ["step", "param", *columns]
        assert table["step"].tolist() == [step for step in range(1, 6) for _ in names]
        assert table["param"].tolist() == list(names) * 5
        expected = [[number(step, name, column) for column in columns] for step in range(1, 6) for name in names]
        assert (table[list(columns)].to_numpy().astype(np.float32) == np.array(expected, dtype=np.float32)).all()
    assert run.scalars.to_dict("list") == {
        "step": [1, 2, 3, 4, 5],
        "train_loss": pytest.approx([1 / step for step in range(1, 6)], rel=1e-8),
    }


def test_types(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(1, 3))
    run = load_run(tmp_path)
    for table in (run.layers, run.selection, run.scalars):
        assert table["step"].dtype == "int64"
        numbers = table.drop(columns=["step", "param"], errors="ignore")
        assert set(numbers.dtypes.astype(str)) == {"float64"}
    assert run.layers["param"].dtype.name == "category"
    assert run.layers["param"].cat.categories.tolist() == list(NAMES)  # model order: 2 before 10
    assert run.layers.groupby("param")["weight_rms"].mean().index.tolist() == list(NAMES)


def test_names_that_look_like_numbers(tmp_path: Path) -> None:
    names = ("0", "01", "1", "1.0", "True")
    rows = tuple(Row(step=1, param=name, values={"weight_rms": float(i)}) for i, name in enumerate(names))
    layers = load_run(written(tmp_path, [Batch(step=1, layers=rows)], names=names)).layers
    assert layers["param"].tolist() == list(names) == layers["param"].cat.categories.tolist()
    assert layers.loc[layers["param"] == "1", "weight_rms"].tolist() == [2.0]


def test_a_row_of_a_parameter_that_is_not_listed(tmp_path: Path) -> None:
    layers = load_run(written(tmp_path, [one_row(1, {"weight_rms": 1.0}, "other")])).layers
    assert layers["param"].tolist() == ["other"]
    assert layers["param"].cat.categories.tolist() == [*NAMES, "other"]


def test_params(tmp_path: Path) -> None:
    tied = param("embed", role="embedding", shape=(7, 3, 1, 2), lr=0.1, nesterov=True, rule="x", clip=None)
    CsvSink(tmp_path).open(run_info(params=(tied, param("scale", role="vector", shape=()))))
    text = (tmp_path / "params.csv").read_text().replace("embed,,", "embed,head;lm_head,", 1)
    (tmp_path / "params.csv").write_text(text)
    params = load_run(tmp_path).params
    assert params["shape"].tolist() == [(7, 3, 1, 2), ()]
    assert params["aliases"].tolist() == [("head", "lm_head"), ()]
    assert params["options"].tolist() == [{"lr": 0.1, "nesterov": True, "rule": "x", "clip": None}, {}]
    assert params["role"].tolist() == ["embedding", "vector"]
    assert params.columns.tolist() == [
        "name", "aliases", "role", "shape", "dtype", "layout", "algorithm", "options",
    ]  # fmt: skip


def test_scalars_are_wide_in_order_of_first_use_and_the_last_of_two_values_holds(tmp_path: Path) -> None:
    logged = [(1, "train_loss", 3.0), (2, "val", 9.0), (2, "train_loss", 2.0), (2, "train_loss", 1.5), (2, "step", 7.0)]
    items = tuple(Scalar(step=step, name=name, value=value) for step, name, value in logged)
    scalars = load_run(written(tmp_path, [Batch(step=2, scalars=items)])).scalars
    expected = pd.DataFrame(
        {"step": [1, 2], "train_loss": [3.0, 1.5], "val": [math.nan, 9.0], "scalar_step": [math.nan, 7.0]}
    )
    pd.testing.assert_frame_equal(scalars, expected)


@pytest.mark.parametrize("cut", [1, 2, 9, 30])
def test_a_torn_line_is_never_data(tmp_path: Path, cut: int) -> None:
    write_run(CsvSink(tmp_path), range(1, 3))
    for name in ("layers", "selection", "scalars"):
        path = tmp_path / f"{name}.csv"
        path.write_bytes(path.read_bytes() + b"3,train_loss,15.77000000000000,0.25\n"[:cut])
    run = load_run(tmp_path)
    assert run.steps == [1, 2]
    assert run.scalars["step"].tolist() == [1, 2]


def test_cut_anywhere(tmp_path: Path) -> None:
    """A run killed after any byte of layers.csv gives exactly its whole rows, with no error."""
    write_run(CsvSink(tmp_path), range(1, 3))
    path = tmp_path / "layers.csv"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        table = load_run(tmp_path).layers
        assert len(table) == max(0, data[:size].count(b"\n") - 1), size
        assert table.columns.tolist() == ["step", "param", *LAYER_COLUMNS]


@pytest.mark.parametrize("headers", [True, False])
def test_a_run_that_only_just_began(tmp_path: Path, headers: bool) -> None:
    written(tmp_path, [])
    if not headers:
        for path in tmp_path.glob("*.csv"):
            path.unlink()
    run = load_run(tmp_path)
    assert (run.steps, len(run.layers), len(run.selection), len(run.scalars)) == ([], 0, 0, 0)
    assert run.layers.columns.tolist() == ["step", "param", *LAYER_COLUMNS]
    assert run.scalars.columns.tolist() == ["step"]
    assert run.layers["step"].dtype == run.scalars["step"].dtype == "int64"
    assert run.layers["weight_rms"].dtype == "float64"
    assert "no steps yet" in repr(run)
    assert run.summary().index.tolist() == (list(NAMES) if headers else [])
    assert load_runs([tmp_path]).layers.columns.tolist() == ["run", "step", "param", *LAYER_COLUMNS, "seed"]


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run directory.*holds run.json, params.csv, layers.csv"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="no run directory"):
        load_run(tmp_path / "absent")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.json cannot be read"):
        load_run(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match=r"run.json cannot be read"):
        load_run(tmp_path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [])
    info = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**info, "schema_version": 2}))
    with pytest.raises(ValueError, match="schema version 2, this package reads up to 1"):
        load_run(tmp_path)


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    written(tmp_path, [batch(1)])
    with (tmp_path / "layers.csv").open("a") as file:
        file.write("x,embed,1,2,3\n")
    with pytest.raises(ValueError, match=r"layers\.csv cannot be read"):
        load_run(tmp_path).layers  # noqa: B018


def test_summary_is_the_last_measured_value(tmp_path: Path) -> None:
    batches = [
        one_row(1, {"weight_rms": 1.0, "weight_rms_to_rms": 5.0}),
        one_row(2, {"weight_rms": 2.0}),  # the operator norm is not measured at every step
        one_row(3, {"weight_rms": math.nan, "update_weight_ratio": math.inf}),
        Batch(step=3, selection=(Row(step=3, param="norm", values={"captured_mass": 0.75, "k": 4.0}),)),
    ]
    params = (param("embed", role="embedding", shape=(5, 3)), param("norm", role="vector", shape=(3,)))
    summary = load_run(written(tmp_path, batches, params=params)).summary()
    assert summary.columns.tolist() == [
        "shape", "role", "weight_rms", "weight_rms_to_rms", "update_weight_ratio", "captured_mass",
    ]  # fmt: skip
    assert summary.index.tolist() == ["embed", "norm"]
    assert summary["shape"].tolist() == [(5, 3), (3,)]
    embed, norm = summary.loc["embed"], summary.loc["norm"]
    assert summary["weight_rms"].isna().all()  # a finding: 2.0 would look healthy
    assert (embed["weight_rms_to_rms"], embed["update_weight_ratio"]) == (5.0, math.inf)
    assert norm["captured_mass"] == 0.75
    assert norm[["weight_rms", "update_weight_ratio"]].isna().all()


def test_repr(tmp_path: Path) -> None:
    run = load_run(written(tmp_path, [batch(1), batch(7)], attributes={"lr": 0.5, "seed": 3}))
    assert repr(run) == f"Run({str(tmp_path)!r}: 4 params, 2 steps up to 7; lr=0.5, seed=3)"


# --- many runs -------------------------------------------------------------------------------------------------------


def test_many_runs(tmp_path: Path) -> None:
    written(tmp_path / "b", [batch(1)], attributes={"lr": 0.2, "optimizer": "scion"})
    written(tmp_path / "a", [batch(1), batch(2)], attributes={"lr": 0.1, "seed": 5})
    (tmp_path / "c").mkdir()
    (tmp_path / "plot.png").write_bytes(b"")
    runs = load_runs(str(tmp_path / "*"))
    assert (runs.names, len(runs), [run.path.name for run in runs]) == (("a", "b"), 2, ["a", "b"])
    assert repr(runs) == "Runs(2: a, b)"
    layers = runs.layers
    assert layers.columns.tolist() == ["run", "step", "param", *LAYER_COLUMNS, "lr", "seed", "optimizer"]
    assert layers["run"].tolist() == ["a"] * 8 + ["b"] * 4
    assert layers["lr"].tolist() == [0.1] * 8 + [0.2] * 4
    assert layers["seed"].tolist()[:8] == [5] * 8
    assert layers["seed"][8:].isna().all()
    assert layers.index.tolist() == list(range(12))
    assert layers["param"].dtype.name == "category"
    values = runs.runs[1].layers[list(LAYER_COLUMNS)].to_numpy()
    assert (layers.loc[layers["run"] == "b", list(LAYER_COLUMNS)].to_numpy() == values).all()
    assert runs.params["name"].tolist() == [*NAMES, *NAMES]
    assert runs.params["run"].tolist() == ["a"] * 4 + ["b"] * 4
    assert len(runs.selection) == 9
    assert runs.scalars.columns.tolist() == ["run", "step", "lr", "seed", "optimizer"]


def test_runs_of_different_models_and_metrics(tmp_path: Path) -> None:
    written(tmp_path / "a", [one_row(1, {"weight_rms": 1.0}, "x")], names=("x",), layer_columns=("weight_rms",))
    written(tmp_path / "b", [one_row(1, {"grad_rms": 2.0}, "y")], names=("y",), layer_columns=("grad_rms",))
    written(tmp_path / "c", [], names=("z",), layer_columns=("grad_rms",), selection_columns=())
    layers = load_runs(tmp_path / "*").layers
    assert layers["param"].tolist() == ["x", "y"]
    assert layers["param"].cat.categories.tolist() == ["x", "y", "z"]
    assert layers[["weight_rms", "grad_rms"]].fillna(-1).to_numpy().tolist() == [[1.0, -1.0], [-1.0, 2.0]]


def test_an_attribute_never_hides_a_column(tmp_path: Path) -> None:
    attributes = {"captured_mass": "asked", "run": "mine", "lr": 0.1, "train_loss": 99.0}
    written(tmp_path / "a", [batch(1, Scalar(step=1, name="train_loss", value=1.0))], attributes=attributes)
    runs = load_runs([tmp_path / "a"])
    added = ["run_captured_mass", "run_run", "lr"]
    assert runs.layers.columns.tolist() == ["run", "step", "param", *LAYER_COLUMNS, *added, "train_loss"]
    assert runs.selection["captured_mass"].tolist() == pytest.approx([number(1, n, "captured_mass") for n in NAMES[:3]])
    assert runs.selection["run_captured_mass"].tolist() == ["asked"] * 3
    assert (runs.scalars["train_loss"][0], runs.scalars["run_train_loss"][0]) == (1.0, 99.0)


def test_runs_that_share_a_name(tmp_path: Path) -> None:
    for folder in ("x/seed0", "y/seed0"):
        written(tmp_path / folder, [batch(1)])
    assert load_runs(str(tmp_path / "**")).names == ("x/seed0", "y/seed0")


def test_paths_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "[1]", [batch(1)])
    assert load_runs(str(tmp_path / "[1]")).names == ("[1]",)  # an existing run is meant as it is written
    monkeypatch.chdir(tmp_path)
    assert load_runs("*").names == ("[1]",)
    with pytest.raises(ValueError, match=r"no run found in 'nothing/\*'"):
        load_runs("nothing/*")
    with pytest.raises(ValueError, match="no run found"):
        load_runs([])
    with pytest.raises(ValueError, match="no run directory"):
        load_runs([tmp_path / "[1]", tmp_path / "absent"])


def test_reading_needs_neither_torch_nor_wandb(tmp_path: Path) -> None:
    written(tmp_path, [batch(1)])
    code = f"""
import sys
from scion_telemetry.store import load_run, load_runs
run = load_run({str(tmp_path)!r})
run.summary(), run.scalars, load_runs({str(tmp_path)!r}).layers
print(sorted({{"torch", "wandb", "matplotlib"}} & set(sys.modules)))
"""
    command = [sys.executable, "-W", "error", "-c", code]
    child = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"
