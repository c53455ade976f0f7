"""Input that is wrong is refused at construction: what, got what, allowed what, what to do."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from scion_telemetry import Tracker, at, every, log_spaced
from scion_telemetry.optim import Dion2, Scion, group_params
from scion_telemetry.sinks import CsvSink, MemorySink
from scion_telemetry.testing import run_threads


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=False))


def tracker(model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> Tracker:
    model = linear() if model is None else model
    return Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer, **options)


def two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False, device="meta"))


def complex_model() -> nn.Module:
    return nn.ParameterDict({"w": nn.Parameter(torch.ones(2, dtype=torch.complex64))})


CASES: dict[str, tuple[Callable[[], object], type[Exception], list[str]]] = {
    # what makes it, the error, and what the message must hold
    "unknown metric": (
        lambda: tracker(metrics="weight_rmss"),
        ValueError,
        ["unknown metric 'weight_rmss'", "basic", "weight_rms", "rms_to_inf"],
    ),
    "selections alone, of an optimizer that selects nothing": (
        lambda: tracker(metrics=["selection", "selection_rows"]),
        ValueError,
        ["no optimizer here selects rows", 'add "norms"'],
    ),
    "unknown metric in a list": (lambda: tracker(metrics=["rms", "skew"]), ValueError, ["unknown metric 'skew'"]),
    "column of selection": (lambda: tracker(metrics=["rms", "gini"]), ValueError, ["'gini'", 'choose "selection"']),
    "fraction 0": (lambda: Dion2(linear().parameters(), fraction=0), ValueError, ["fraction", "(0, 1]", "got 0"]),
    "fraction 1.5": (lambda: Dion2(linear().parameters(), fraction=1.5), ValueError, ["fraction", "(0, 1]", "1.5"]),
    "fraction a": (
        lambda: Dion2(linear().parameters(), fraction="a"),  # type: ignore[arg-type]
        ValueError,
        ["fraction", "(0, 1]", "'a'"],
    ),
    "every 0": (lambda: every(0), ValueError, ["every(n)", ">= 1", "got 0"]),
    "every half": (lambda: every(0.5), ValueError, ["whole numbers", "0.5"]),  # type: ignore[arg-type]
    "at nothing": (at, ValueError, ["at()", "at least one step", "at(1, 10, 100)"]),
    "at 0": (lambda: at(1, 0), ValueError, ["at(...)", "got 0"]),
    "log_spaced 0": (lambda: log_spaced(0), ValueError, ["log_spaced", "got 0"]),
    "schedule that is a number": (
        lambda: tracker(schedule=10),
        TypeError,
        ["schedule must be a function", "every(10)", "got 10"],
    ),
    "two devices": (
        lambda: tracker(two_devices()),
        ValueError,
        ["on one device", "cpu, meta", "move the model to one device"],
    ),
    "two devices, our optimizer": (
        lambda: Dion2(group_params(two_devices())),
        ValueError,
        ["['cpu', 'meta']", "move the model to one first"],
    ),
    "no storage": (
        lambda: tracker(nn.Linear(2, 2, device="meta")),
        ValueError,
        ["got meta", "to_empty"],
    ),
    "complex parameter": (lambda: tracker(complex_model()), ValueError, ["'w'", "complex64", "only dense tensors"]),
    "no optimizer": (
        lambda: tracker(optimizer="adam"),
        TypeError,
        ["torch.optim.Optimizer", "got str", "inside a wrapper"],
    ),
    "a model as the optimizer": (lambda: tracker(optimizer=linear()), TypeError, ["got Sequential"]),
    "another model": (
        lambda: tracker(linear(), torch.optim.SGD(linear().parameters(), lr=0.1)),
        ValueError,
        ["1 parameters that the model does not have", "(3, 4)", "pass the model that the optimizer was made for"],
    ),
    "a sink that is none": (
        lambda: tracker(sinks=["runs/a"]),
        TypeError,
        ["open(run), write(batch) and close()", "'runs/a'"],
    ),
    "a sink beside a list": (lambda: tracker(sinks=MemorySink()), TypeError, ["sinks must be a list", "MemorySink"]),
    "run as text": (lambda: tracker(run="seed=0"), TypeError, ["run must be a dict", "'seed=0'"]),
    "two names that become one": (
        lambda: tracker(nn.ModuleDict({"a": linear(), "module": nn.ModuleDict({"a": linear()})})),
        ValueError,
        ["'module.a.0.weight'", "both called 'a.0'", "rename"],
    ),
    "start_step below 0": (lambda: tracker(start_step=-1), ValueError, ["start_step", ">= 0", "got -1"]),
    "start_step True": (lambda: tracker(start_step=True), ValueError, ["start_step", "got True"]),
    "a vector for Dion2": (
        lambda: Dion2(nn.ParameterDict({"b": nn.Parameter(torch.ones(3))}).named_parameters()),
        ValueError,
        ["'b'", "(3,)", "adamw"],
    ),
    "a float for betas": (
        lambda: Dion2(linear().parameters(), betas=0.9),  # type: ignore[arg-type]
        ValueError,
        ["betas must be two numbers in [0, 1)", "got 0.9"],
    ),
    "text for norm_kwargs": (
        lambda: Scion(linear().parameters(), norm_kwargs="abc"),  # type: ignore[arg-type]
        ValueError,
        ["norm_kwargs must be a dict", "'abc'"],
    ),
    "a list for norm": (
        lambda: Scion(linear().parameters(), norm=["Sign"]),  # type: ignore[arg-type]
        ValueError,
        ["unknown norm ['Sign']", "RowNorm"],
    ),
    "heads True": (lambda: Dion2(linear().parameters(), num_heads=True), ValueError, ["num_heads", "got True"]),
    "fraction True": (lambda: Dion2(linear().parameters(), fraction=True), ValueError, ["fraction", "got True"]),
    "lr without end": (lambda: Scion(linear().parameters(), lr=float("inf")), ValueError, ["lr", "got inf"]),
    "lr in the place of the mesh": (
        lambda: Dion2(linear().parameters(), 0.02),  # type: ignore[arg-type]
        TypeError,
        ["distributed_mesh", "a process group that this rank is in, or None", "got 0.02"],
    ),
    "text for a flag": (
        lambda: Scion(linear().parameters(), agree_on_gradients="no"),  # type: ignore[arg-type]
        ValueError,
        ["agree_on_gradients must be True or False", "'no'"],
    ),
    "an observer that is none": (
        lambda: Scion(linear().parameters()).register_step_observer(None),  # type: ignore[arg-type]
        TypeError,
        ["an observer is a function of one StepEvent", "got None"],
    ),
    "unknown norm": (lambda: Scion(linear().parameters(), norm="Spektral"), ValueError, ["'Spektral'", "RowNorm"]),
}


@pytest.mark.parametrize(("make", "error", "parts"), CASES.values(), ids=CASES)
def test_refused_at_construction(make: Callable[[], object], error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as found:
        make()
    for part in parts:
        assert part in str(found.value), part


def test_a_directory_that_holds_another_run(tmp_path: Path) -> None:
    with tracker(sinks=[CsvSink(tmp_path / "run")]):
        pass
    kept = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    other = MemorySink()
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "run"))) as found:
        tracker(sinks=[other, CsvSink(tmp_path / "run")])
    assert "resume" in str(found.value)
    assert other.closed
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == kept


def test_a_placement_that_the_optimizers_do_not_step() -> None:
    def run(rank: int, world: int) -> str:
        mesh = init_device_mesh("cpu", (world,))
        kernel = distribute_tensor(torch.ones(4, 6, 3, 2), mesh, [Shard(3)])
        with pytest.raises(ValueError, match="'w'") as found:
            Dion2([{"params": [("w", nn.Parameter(kernel))], "algorithm": "scion"}])
        return str(found.value)

    for message in run_threads(run, 2, timeout=20):
        assert "Shard(3) x2" in message
        assert "cuts dimension 3" in message
        assert "supported are cuts along rows, columns and stacked matrices, dimensions 0 to 1" in message


def test_what_was_refused_leaves_nothing_behind() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="unknown metric"):
        tracker(model, optimizer, metrics="no such")
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    with tracker(model, optimizer) as good:
        optimizer.step()
    assert good.step == 1
