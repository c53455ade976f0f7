"""CsvSink: what stands on disk after resumes, kills, forks and full disks."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sample_run import LAYER_COLUMNS, NAMES, one_row, param, rows, run_info, write_run

from scion_telemetry.rows import Batch, Row, Scalar
from scion_telemetry.sinks import CsvSink
from scion_telemetry.store import load_run

HERE = Path(__file__).parent


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_text_on_disk(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path / "deep" / "run"), range(1, 3))
    run = tmp_path / "deep" / "run"
    layers = lines(run / "layers.csv")
    assert layers[0] == "step,param,weight_rms,weight_rms_to_rms,update_weight_ratio"
    assert [line.split(",")[:2] for line in layers[1:]] == [[str(step), name] for step in (1, 2) for name in NAMES]
    assert lines(run / "selection.csv")[0] == "step,param,k,captured_mass"
    assert lines(run / "scalars.csv") == ["step,name,value", "1,train_loss,1", "2,train_loss,0.5"]
    assert lines(run / "params.csv")[:2] == [
        "name,aliases,role,shape,dtype,layout,algorithm,options",
        "embed,,hidden,320x1280,float32,whole,dion2,{}",
    ]
    assert all(path.read_bytes().endswith(b"\n") for path in run.iterdir())


def test_constructor_touches_nothing_and_a_child_rank_may_make_one(tmp_path: Path) -> None:
    CsvSink(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="path must be"):
        CsvSink(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="resume must be"):
        CsvSink("x", resume=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("held", ["run.json", "layers.csv", "scalars.csv"])
def test_a_run_is_never_overwritten(tmp_path: Path, held: str) -> None:
    (tmp_path / held).write_text("precious\n")
    with pytest.raises(ValueError, match=r"already holds a run .*resume=True"):
        CsvSink(tmp_path).open(run_info())
    assert (tmp_path / held).read_text() == "precious\n"
    assert [path.name for path in tmp_path.iterdir()] == [held]


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        CsvSink(tmp_path / "file").open(run_info())


def test_an_unrelated_file_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    write_run(CsvSink(tmp_path), range(1, 2))
    assert load_run(tmp_path).steps == [1]


# --- resume (C118) ---------------------------------------------------------------------------------------------------


def test_resume_has_one_header_and_all_rows(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path, resume=True), range(1, 4))  # absent: starts
    write_run(CsvSink(tmp_path, resume=True), range(4, 7), run_info(start_step=3, attributes={"seed": 1}))
    table = pd.read_csv(tmp_path / "layers.csv")
    assert table["step"].tolist() == [step for step in range(1, 7) for _ in NAMES]
    assert set(table.dtypes[list(LAYER_COLUMNS)].astype(str)) == {"float64"}
    info = json.loads((tmp_path / "run.json").read_text())
    assert (info["start_step"], info["resumed_at"], info["attributes"]) == (0, [3], {"seed": 1})
    write_run(CsvSink(tmp_path, resume=True), range(7, 8), run_info(start_step=6))
    assert load_run(tmp_path).info["resumed_at"] == [3, 6]


def test_resume_cuts_what_came_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(1, 21))
    kept = {name: lines(tmp_path / name)[: 1 + 12 * n] for name, n in (("layers.csv", 4), ("selection.csv", 3))}
    kept["scalars.csv"] = lines(tmp_path / "scalars.csv")[:13]
    with (tmp_path / "layers.csv").open("a") as file:
        file.write("2")  # the torn beginning of step 21: a valid "step 2" for a careless reader
    write_run(CsvSink(tmp_path, resume=True), range(13, 15), run_info(start_step=12))
    for name, before in kept.items():
        assert lines(tmp_path / name)[: len(before)] == before, name
    assert load_run(tmp_path).steps == list(range(1, 15))
    assert load_run(tmp_path).scalars["step"].tolist() == list(range(1, 15))


def test_resume_only_cuts_a_torn_line(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(1, 4))
    whole = (tmp_path / "layers.csv").read_bytes()
    (tmp_path / "layers.csv").write_bytes(whole + b"4,embed,0.1")
    CsvSink(tmp_path, resume=True).open(run_info(start_step=3))
    assert (tmp_path / "layers.csv").read_bytes() == whole


def test_resume_of_a_run_killed_inside_its_header(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(0))
    header = (tmp_path / "layers.csv").read_bytes()
    (tmp_path / "layers.csv").write_bytes(header[:7])
    (tmp_path / "scalars.csv").unlink()
    write_run(CsvSink(tmp_path, resume=True), range(1, 2))
    assert (tmp_path / "layers.csv").read_bytes().startswith(header)
    assert lines(tmp_path / "scalars.csv") == ["step,name,value", "1,train_loss,1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_columns": [*LAYER_COLUMNS, "grad_rms"]}, r"layer_columns differ \(\['grad_rms'\]\)"),
        ({"layer_columns": list(reversed(LAYER_COLUMNS))}, "layer_columns differ"),
        ({"selection_columns": []}, "selection_columns differ"),
        ({"schema_version": 99}, "schema version 99"),
    ],
)
def test_resume_refuses_another_kind_of_run(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_run(CsvSink(tmp_path), range(1, 4))
    info = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**info, **change}))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=message):
        CsvSink(tmp_path, resume=True).open(run_info(start_step=1))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_resume_refuses_files_it_cannot_judge(tmp_path: Path) -> None:
    write_run(CsvSink(tmp_path), range(1, 4))
    (tmp_path / "scalars.csv").write_text("time,name,value\n1,loss,2\n")
    before = (tmp_path / "layers.csv").read_bytes()
    with pytest.raises(ValueError, match=r"scalars.csv cannot be resumed: its columns"):
        CsvSink(tmp_path, resume=True).open(run_info(start_step=1))
    assert (tmp_path / "layers.csv").read_bytes() == before
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"no readable run.json"):
        CsvSink(tmp_path, resume=True).open(run_info(start_step=1))


# --- cells -----------------------------------------------------------------------------------------------------------


def test_absent_is_empty_and_nonfinite_is_text(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(run_info())
    sink.write(one_row(1, {"weight_rms": math.nan, "update_weight_ratio": -math.inf}))
    sink.write(Batch(step=2, scalars=(Scalar(step=2, name="loss", value=math.inf),)))
    assert lines(tmp_path / "layers.csv")[1] == "1,embed,NaN,,-inf"
    assert lines(tmp_path / "scalars.csv")[1] == "2,loss,inf"
    table = pd.read_csv(tmp_path / "layers.csv")  # pandas as it comes agrees
    assert math.isnan(table["weight_rms"][0])
    assert table["update_weight_ratio"][0] == -math.inf


def test_float32_survives_exactly(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    sink = CsvSink(tmp_path)
    sink.open(run_info())
    sink.write(Batch(step=1, layers=tuple(Row(step=1, param="embed", values={"weight_rms": float(v)}) for v in values)))
    assert (load_run(tmp_path).layers["weight_rms"].to_numpy().astype(np.float32) == values).all()


def test_cells_of_other_number_types(tmp_path: Path) -> None:  # C131
    import torch

    sink = CsvSink(tmp_path)
    sink.open(run_info())
    values: dict[str, Any] = {
        "weight_rms": np.float32("nan"),
        "weight_rms_to_rms": torch.tensor(0.5),
        "update_weight_ratio": True,
    }
    sink.write(one_row(1, values))
    sink.write(one_row(2, {"weight_rms": 12345678901}))
    assert lines(tmp_path / "layers.csv")[1:] == ["1,embed,NaN,0.5,1", "2,embed,12345678901,,"]
    with pytest.raises(TypeError):
        sink.write(one_row(3, {"weight_rms": [1, 2, 3]}))  # type: ignore[dict-item]
    assert len(lines(tmp_path / "layers.csv")) == 3


def test_an_undeclared_column_is_our_own_bug(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(run_info())
    with pytest.raises(AssertionError, match="grad_rms"):
        sink.write(one_row(1, {"grad_rms": 1.0}))


def test_names_that_need_care(tmp_path: Path) -> None:
    names = ('a,b"c', "two\nlines", "null", "NaN", "größe")
    sink = CsvSink(tmp_path)
    sink.open(run_info(names=names))
    sink.write(
        Batch(
            step=1,
            layers=tuple(Row(step=1, param=name, values={"weight_rms": 1.0}) for name in names),
            scalars=(Scalar(step=1, name="loss, smooth\r\n", value=2.0),),
        )
    )
    run = load_run(tmp_path)
    expected = ['a,b"c', "two lines", "null", "NaN", "größe"]
    assert run.layers["param"].tolist() == expected == run.params["name"].tolist()
    assert run.scalars.columns.tolist() == ["step", "loss, smooth"]


def test_json_is_strict_and_nonfinite_attributes_come_back(tmp_path: Path) -> None:  # C129
    attributes = {"lr": math.nan, "clip": math.inf, "norm": "inf", "wd": np.float32(0.5), "none": None, "on": True}
    info = run_info(params=(param("a", lr=-math.inf, betas="(0.9, 0.95)"),), attributes=attributes)
    CsvSink(tmp_path).open(info)

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    parsed = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert parsed["attributes"] == {
        "lr": "NaN", "clip": "inf", "norm": "inf", "wd": 0.5, "none": None, "on": True,
    }  # fmt: skip
    run = load_run(tmp_path)
    assert math.isnan(float(str(run.attributes.pop("lr"))))
    assert run.attributes["clip"] == math.inf
    assert run.attributes["norm"] == "inf"  # text stays text
    assert run.params["options"][0] == {"lr": "-inf", "betas": "(0.9, 0.95)"}


def test_no_selection_no_file(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.open(run_info(selection_columns=()))
    sink.write(Batch(step=1, layers=rows(1, LAYER_COLUMNS)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.csv", "params.csv", "run.json", "scalars.csv"]
    assert load_run(tmp_path).selection.columns.tolist() == ["step", "param"]


def test_a_run_that_did_not_start_leaves_the_path_free(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "run")
    sink.open(run_info())
    sink.discard()
    assert not list((tmp_path / "run").iterdir())
    write_run(CsvSink(tmp_path / "run"), range(1, 3))
    resumed = CsvSink(tmp_path / "run", resume=True)
    resumed.open(run_info(start_step=2))
    resumed.discard()
    assert load_run(tmp_path / "run").steps == [1, 2]
