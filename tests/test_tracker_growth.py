"""Parameters that come while a run goes on, and ranks whose steps do not go together."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tracked import gauss, named, rms, rows, set_grads

from scion_telemetry import Tracker, every, load_run
from scion_telemetry.optim import Dion2
from scion_telemetry.sinks import CsvSink, MemorySink
from scion_telemetry.testing import run_forked, run_threads

pytestmark = pytest.mark.timeout(90)

SHAPES = {"first": (6, 4), "late": (5, 3), "last": (7,)}  # what comes later stands in the middle
ADDED, STEPS = 3, 8


class Growing:
    """``late`` is frozen until step 3; ``first`` is a matrix that is selected from."""

    def __init__(self, world: int) -> None:
        self.mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
        self.model = named(**{n: self.place(gauss(*s, seed=i)) for i, (n, s) in enumerate(SHAPES.items())})
        self.model["late"].requires_grad_(False)
        matrix, vector = {"params": [self.model["first"]]}, {"params": [self.model["last"]], "algorithm": "adamw"}
        scope: Any = {"selection_scope": "global", "select_dim": "rows"}
        self.optimizer = Dion2([matrix, vector], lr=0.05, fraction=0.3, **scope)

    def place(self, x: Tensor) -> Tensor:
        return x if self.mesh is None else distribute_tensor(x, self.mesh, [Shard(0)], src_data_rank=None)

    def step(self, step: int, grow: bool = True) -> None:
        if step == ADDED and grow:
            self.model["late"].requires_grad_(True)
            self.optimizer.add_param_group({"params": [self.model["late"]], "lr": 0.01})
        for name, p in self.model.items():
            p.grad = self.place(grad(name, step)) if p.requires_grad else None
        self.optimizer.step()


def grad(name: str, step: int) -> Tensor:
    return gauss(*SHAPES[name], seed=100 * step + len(name))


def run(path: Path, rank: int, world: int, interval: int = 1, grow: bool = True) -> dict[str, float]:
    growing = Growing(world)
    schedule = every(interval)
    with Tracker(growing.model, growing.optimizer, schedule=schedule, metrics="full", sinks=[CsvSink(path)]) as tracker:
        for step in range(1, STEPS + 1):
            growing.step(step, grow)
            tracker.log(loss=float(step))
    return {}


@pytest.mark.parametrize(("world", "interval", "begins"), [(1, 1, 3), (1, 2, 4), (2, 1, 4), (2, 2, 6), (4, 1, 4)])
def test_a_group_that_is_added_at_step_3(world: int, interval: int, begins: int, tmp_path: Path) -> None:
    """One process has it in the flush at hand; ranks tell each other at one flush, and have it at the next."""
    path = tmp_path / "run"
    if world == 1:
        run(path, 0, 1, interval)
    else:
        run_forked(lambda r, w: run(path, r, w, interval), world, timeout=40)
    found = load_run(path)
    steps = [1, 2, 3, 4, 5, 6, 7, 8] if interval == 1 else [1, 2, 4, 6, 8]
    for name in ("first", "last"):
        assert found.layers[found.layers["param"] == name]["step"].tolist() == steps
    late = found.layers[found.layers["param"] == "late"].set_index("step")
    assert late.index.tolist() == [s for s in steps if s >= begins]
    assert late["update_lr"].unique().tolist() == [0.01]
    for step, param, value in zip(*(found.layers[c] for c in ("step", "param", "grad_rms")), strict=True):
        assert value == pytest.approx(rms(grad(param, step)), rel=1e-6), (step, param)
    assert found.params["name"].tolist() == ["first", "late", "last"]
    assert found.params.set_index("name").loc["late", "shape"] == (5, 3)
    chosen = found.selection[found.selection["param"] == "late"].set_index("step")
    assert chosen.index.tolist() == late.index.tolist()
    assert (chosen["k"] == 2).all()
    assert pd.isna(chosen["churn"].iloc[0])
    assert chosen["churn"].iloc[1:].notna().all()
    assert found.scalars["loss"].dropna().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("world", [1, 2])
def test_what_was_there_before_goes_on_as_if_nothing_came(world: int, tmp_path: Path) -> None:
    """Ages, churn, warm starts and values of the other parameters."""

    def both(rank: int, world: int) -> None:
        for name, grow in (("grown", True), ("not", False)):
            run(tmp_path / name, rank, world, grow=grow)

    if world == 1:
        both(0, 1)
    else:
        run_forked(both, world, timeout=40)
    grown, plain = load_run(tmp_path / "grown"), load_run(tmp_path / "not")
    gap = ["update_previous_cosine"]  # the update before the one at which the tables grew is not kept
    for table in ("layers", "selection"):
        one, other = getattr(grown, table), getattr(plain, table)
        one, other = (t.astype({"param": str}).drop(columns=gap, errors="ignore") for t in (one, other))
        one = one[one["param"] != "late"].reset_index(drop=True)
        assert len(one) > 7
        # 1e-7: what is iterated in float32 is summed in another order beside another matrix.
        pd.testing.assert_frame_equal(one, other, rtol=1e-7, atol=0)


def test_the_first_parameter_that_is_selected_from_comes_late(tmp_path: Path) -> None:
    """The files have no columns of selections then: the other tables must not lose a row."""
    model = named(bias=gauss(4), matrix=gauss(6, 4))
    optimizer = Dion2([{"params": [model["bias"]], "algorithm": "adamw"}], lr=0.05, fraction=0.5)
    with Tracker(model, optimizer, schedule=every(1), sinks=[CsvSink(tmp_path / "run")]):
        for step in (1, 2, 3, 4):
            if step == 3:
                optimizer.add_param_group({"params": [model["matrix"]]})
            for p in model.values():
                p.grad = gauss(*p.shape, seed=step)
            optimizer.step()
    layers = load_run(tmp_path / "run").layers
    assert layers["step"].tolist() == [1, 2, 3, 3, 4, 4]
    assert layers.query("param == 'matrix'")["update_rms"].notna().all()


def test_one_rank_alone_has_something_new() -> None:
    """As with the stages of a pipeline."""

    def one(rank: int, world: int) -> dict[tuple[int, str], Any]:
        model = named(**{f"own{rank}": gauss(3, 2, seed=rank), **({"late": gauss(4, 2, seed=5)} if rank else {})})
        optimizer, sink = torch.optim.SGD([model[f"own{rank}"]], lr=0.1), MemorySink()
        with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]):
            for step in range(1, 6):
                if step == 3 and rank == 1:
                    optimizer.add_param_group({"params": [model["late"]]})
                for p in model.values():
                    p.grad = p.detach().clone()
                optimizer.step()
        return rows(sink)

    found = run_forked(one, 2, timeout=30)[0]
    assert [step for step, name in found if name == "late"] == [4, 5]
    assert [step for step, name in found if name == "own0"] == [1, 2, 3, 4, 5]
    assert found[5, "late"]["grad_rms"] == pytest.approx(rms(gauss(4, 2, seed=5)) * 0.9**2, rel=1e-6)


def test_a_parameter_that_the_model_lacks_is_named_when_it_comes_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = named(w=gauss(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics="weight_rms", sinks=[sink]):
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(gauss(2))]})
        for _ in range(2):
            optimizer.step()
    assert sink.steps == [1, 2, 3]
    assert caplog.text.count("the model does not have, of shapes") == 1


# ---------------------------------------------------------------------- ranks that do not go together


@pytest.mark.parametrize("start", [run_threads, run_forked], ids=["threads", "gloo"])
def test_ranks_that_flush_at_different_steps_are_told_so_and_nobody_waits(start: Any) -> None:
    """A schedule that has one name and another answer on rank 1."""

    def leaves(rank: int, world: int) -> str:
        model = named(w=torch.ones(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = ""
        try:
            with Tracker(model, optimizer, schedule=lambda step: step == 3 + rank):
                for _ in range(5):
                    optimizer.step()
        except ValueError as error:
            found = str(error)
        return found

    for rank, message in enumerate(start(leaves, 2, timeout=20)):
        assert message == (
            f"ranks measure at the same time but differ in the number of the step: from 3 to 4, {3 + rank} on this "
            "rank; all ranks must step their optimizers together"
        )


def test_ranks_that_are_at_different_steps_of_one_flush_write_no_row() -> None:
    def one(rank: int, world: int) -> tuple[bool, list[int]]:
        model = named(w=torch.ones(2, 2))
        optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()

        def train() -> None:
            with Tracker(model, optimizer, schedule=lambda step: step in (1, 3 + rank), sinks=[sink]):
                for _ in range(5):
                    optimizer.step()

        with pytest.raises(ValueError, match="differ in the number of the step"):
            train()
        return sink.closed, sink.steps

    assert run_forked(one, 2, timeout=20) == [(True, [1]), (False, [])]


# ---------------------------------------------------------------------- parameters that go


def test_a_group_that_is_taken_away_ends_its_rows() -> None:
    model = named(a=gauss(6, 4), b=gauss(5, 3), c=gauss(4))
    optimizer, sink = torch.optim.SGD([{"params": [p]} for p in model.values()], lr=0.1), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]):
        for step in range(1, 5):
            if step == 3:
                optimizer.param_groups.pop(1)
            set_grads(model, step)
            optimizer.step()
    assert [r.step for r in sink.layers if r.param == "b"] == [1, 2]
    for name in ("a", "c"):
        assert [r.step for r in sink.layers if r.param == name] == [1, 2, 3, 4]
        assert sink.value(4, name, "update_rms") == pytest.approx(0.1 * rms(model[name].grad), rel=1e-5)


def test_a_parameter_that_is_exchanged_for_another() -> None:
    """Their number stays the same."""
    model = named(a=gauss(6, 4), b=gauss(5, 3))
    optimizer, sink = torch.optim.SGD([model["a"]], lr=0.1), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]):
        for step in range(1, 5):
            if step == 3:
                optimizer.param_groups[0]["params"] = [model["b"]]
            set_grads(model, step)
            optimizer.step()
    assert [(r.step, r.param) for r in sink.layers] == [(1, "a"), (2, "a"), (3, "b"), (4, "b")]
    assert sink.value(4, "b", "update_rms") == pytest.approx(0.1 * rms(model["b"].grad), rel=1e-5)
