"""Selections that are not of one optimizer, one dtype, or all ranks."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from selection_brute import Moment, compare, count, follow, truth
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from tracked import gauss, named

from scion_telemetry import Tracker, at, every
from scion_telemetry.optim import Dion2, Dion3, group_params
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked, run_threads

pytestmark = pytest.mark.timeout(60)

METRICS = ["basic", "selection_gradient"]


def rows_of(sink: MemorySink) -> dict[tuple[int, str], dict[str, float]]:
    return {(r.step, r.param): dict(r.values) for r in sink.selection}


def near(row: dict[str, float], expected: dict[str, float], rel: float = 1e-5) -> None:
    assert set(row) == set(expected), set(row) ^ set(expected)
    assert row == pytest.approx(expected, rel=rel, abs=rel)


def grads(shape: Sequence[int], steps: int, seed: int) -> list[Tensor]:
    heavy = gauss(shape[-2], 1, seed=seed).exp()
    return [gauss(*shape, seed=100 * seed + step) * heavy for step in range(steps)]


def known(moments: list[Moment], flushed: int, length: int, **options: Any) -> dict[str, float]:
    return truth(moments, flushed, length=length, ef_decay=0.95, **options)


def test_two_optimizers_with_groups_of_different_fractions() -> None:
    shapes = {"a": (6, 8), "b": (5, 9), "c": (7, 7)}
    fractions = {"a": 0.5, "b": 0.2, "c": 0.9}
    model = named(**{name: torch.ones(shape) for name, shape in shapes.items()})
    groups = [{"params": [(n, model[n])], "fraction": fractions[n]} for n in "ab"]
    both = [Dion2(groups), Dion2([("c", model["c"])], fraction=0.9)]
    gradients = {name: grads(shape, 6, i) for i, (name, shape) in enumerate(shapes.items())}
    sink = MemorySink()
    with Tracker(model, both, schedule=every(3, first=False), metrics=METRICS, sinks=[sink]):
        for step in range(6):
            for name, p in model.items():
                p.grad = gradients[name][step].clone()
            for optimizer in both:
                optimizer.step()
    for name, shape in shapes.items():
        moments = follow([g[None] for g in gradients[name]], [fractions[name]] * 6, 0.95)
        for step in (3, 6):
            near(rows_of(sink)[step, name], known(moments[:step], step - 3, shape[-1]))


@pytest.mark.parametrize(("options", "rel"), [({}, 2e-2), ({"momentum_dtype": torch.float64}, 1e-6)])
def test_momenta_of_other_dtypes(options: dict[str, Any], rel: float) -> None:
    """Bfloat16 weights; their momentum is rounded at every step unless it is kept in another dtype."""
    shape = (6, 32)
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))})
    gradients = [g.bfloat16() for g in grads(shape, 4, 3)]
    optimizer, sink = Dion2(model.parameters(), fraction=0.34, **options), MemorySink()
    with Tracker(model, optimizer, schedule=at(4), metrics=METRICS, sinks=[sink]):
        for g in gradients:
            model["w"].grad = g.clone()
            optimizer.step()
    near(rows_of(sink)[4, "w"], known(follow([g.float()[None] for g in gradients], [0.34] * 4, 0.95), 0, 32), rel)


@pytest.mark.parametrize("select", ["rows", "cols"])
def test_an_embedding_that_is_selected_from(select: str) -> None:
    """Its norms are those of the transpose; its rows are its rows."""
    model = nn.Sequential(nn.Embedding(11, 5))
    optimizer, sink = Dion2(model.parameters(), fraction=0.3, select_dim=select), MemorySink()
    gradients = grads((11, 5), 3, 4)
    with Tracker(model, optimizer, schedule=at(3), metrics=METRICS, sinks=[sink]):
        for g in gradients:
            model[0].weight.grad = g.clone()
            optimizer.step()
    slices = [g[None] if select == "rows" else g.mT[None].contiguous() for g in gradients]
    assert sink.run is not None
    assert sink.run.params[0].role == "embedding"
    near(rows_of(sink)[3, "0"], known(follow(slices, [0.3] * 3, 0.95), 0, 5 if select == "rows" else 11))


def test_a_parameter_that_comes_later_has_its_own_window() -> None:
    model = named(a=torch.ones(6, 8))
    optimizer, sink = Dion2(list(model.items()), fraction=0.25), MemorySink()
    gradients = {"a": grads((6, 8), 8, 1), "b": grads((4, 8), 8, 2)}
    with Tracker(model, optimizer, schedule=every(4, first=False), metrics=METRICS, sinks=[sink]):
        for step in range(8):
            if step == 5:
                model["b"] = nn.Parameter(torch.ones(4, 8))
                optimizer.add_param_group({"params": [("b", model["b"])]})
            for name, p in model.items():
                p.grad = gradients[name][step].clone()
            optimizer.step()
    rows = rows_of(sink)
    assert set(rows) == {(4, "a"), (8, "a"), (8, "b")}
    moments = follow([g[None] for g in gradients["a"]], [0.25] * 8, 0.95)
    near(rows[8, "a"], known(moments, 4, 8))
    late = follow([g[None] for g in gradients["b"][5:]], [0.25] * 3, 0.95)[-1]
    b = rows[8, "b"]
    assert b["captured_mass"] == pytest.approx(known([late], 0, 8)["captured_mass"], rel=1e-6)
    assert 1 <= b["window"] <= 4
    assert b["age_max"] <= b["window"]


def test_parameters_of_one_rank_alone() -> None:
    """Two stages of a pipeline: what a rank lacks it says nothing of."""

    def run(rank: int, world: int) -> dict[tuple[int, str], dict[str, float]]:
        name, shape = (("first", (6, 8)), ("second", (9, 4)))[rank]
        model = named(**{name: torch.ones(shape)})
        optimizer, sink = Dion2(list(model.items()), fraction=0.3, select_dim="rows"), MemorySink()
        with Tracker(model, optimizer, schedule=at(2, 4), metrics=METRICS, sinks=[sink]):
            for g in grads(shape, 4, 8 + rank):
                model[name].grad = g.clone()
                optimizer.step()
        return rows_of(sink)

    rows = run_forked(run, 2, timeout=50)[0]
    assert set(rows) == {(s, n) for s in (2, 4) for n in ("first", "second")}
    for i, (name, shape) in enumerate((("first", (6, 8)), ("second", (9, 4)))):
        moments = follow([g[None] for g in grads(shape, 4, 8 + i)], [0.3] * 4, 0.95)
        near(rows[4, name], known(moments, 2, shape[-1]))


@pytest.mark.parametrize("scope", ["local", "global"])
def test_tensor_parallelism_under_fsdp(scope: str) -> None:
    """Right-to-left sharding: a rank has every other quarter, so positions are not in the order of ranks."""
    gradients = [g * torch.linspace(0, 2, 16).exp().unsqueeze(1) for g in grads((16, 5), 4, 5)]

    def run(rank: int, world: int) -> dict[tuple[int, str], dict[str, float]]:
        mesh = init_device_mesh("cpu", (2, 2))
        cut = (_StridedShard(0, split_factor=2), Shard(0))

        def place(x: Tensor) -> Tensor:
            return distribute_tensor(x, mesh, cut, src_data_rank=None)

        model = named(w=place(torch.ones(16, 5)))
        options: dict[str, Any] = {"selection_scope": scope, "select_dim": "rows"}
        optimizer, sink = Dion2(model.parameters(), fraction=0.3, **options), MemorySink()
        with Tracker(model, optimizer, schedule=at(2, 4), metrics=METRICS, sinks=[sink]):
            for g in gradients:
                model["w"].grad = place(g)
                optimizer.step()
        return rows_of(sink)

    rows = run_threads(run, 4, timeout=50)[0]
    shards = [range(i, i + 4) for i in range(0, 16, 4)]
    moments = follow([g[None] for g in gradients], [0.3] * 4, 0.95, shards if scope == "local" else None)
    near(rows[4, "w"], known(moments, 2, 5, shards=shards, travels=True))
    assert rows[4, "w"]["regret"] > 0.01


@pytest.mark.parametrize("world", [2, 4])
def test_experts_that_do_not_divide_among_the_ranks(world: int) -> None:
    gradients = grads((5, 6, 4), 4, 6)

    def run(rank: int, world: int) -> dict[tuple[int, str], dict[str, float]]:
        mesh = init_device_mesh("cpu", (world,))

        def place(x: Tensor) -> Tensor:
            return distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

        model = named(w=place(torch.ones(5, 6, 4)))
        optimizer, sink = Dion2(model.parameters(), fraction=0.3, select_dim="rows"), MemorySink()
        with Tracker(model, optimizer, schedule=at(2, 4), metrics=METRICS, sinks=[sink]):
            for g in gradients:
                model["w"].grad = place(g)
                optimizer.step()
        return rows_of(sink)

    row = run_forked(run, world, timeout=50)[0][4, "w"]
    near(row, known(follow(gradients, [0.3] * 4, 0.95), 2, 4))
    assert row["k"] == 5 * count(0.3, 6)


def test_heads_over_ranks_select_each_for_itself() -> None:
    gradients = grads((12, 5), 4, 7)

    def run(rank: int, world: int) -> dict[tuple[int, str], dict[str, float]]:
        mesh = init_device_mesh("cpu", (world,))

        def place(x: Tensor) -> Tensor:
            return distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

        model = named(w=place(torch.ones(12, 5)))
        optimizer, sink = Dion2(model.parameters(), fraction=0.3, num_heads=3, select_dim="rows"), MemorySink()
        with Tracker(model, optimizer, schedule=at(4), metrics=METRICS, sinks=[sink]):
            for g in gradients:
                model["w"].grad = place(g)
                optimizer.step()
        assert rank or {(s.matrix, s.index) for s in sink.slices} == {(h, i) for h in range(3) for i in range(4)}
        return rows_of(sink)

    row = run_forked(run, 3, timeout=50)[0][4, "w"]
    near(row, known(follow([g.view(3, 4, 5) for g in gradients], [0.3] * 4, 0.95), 0, 5))


def test_dion3_tells_of_its_selection_as_dion2_does() -> None:
    model = named(w=torch.ones(8, 6))
    optimizer, sink = Dion3(model.parameters(), fraction=0.3), MemorySink()
    chosen: list[tuple[Tensor, set[int]]] = []
    optimizer.register_step_observer(
        lambda e: chosen.append((e.selections[0].scores.clone(), set(e.selections[0].indices.tolist())))
    )
    with Tracker(model, optimizer, schedule=at(4), metrics=METRICS, sinks=[sink]):
        for g in grads((8, 6), 4, 9):
            model["w"].grad = g.clone()
            optimizer.step()
    row = rows_of(sink)[4, "w"]
    scores, indices = chosen[-1]
    r = scores.double().tolist()
    assert row["captured_mass"] == pytest.approx(sum(r[i] for i in indices) / sum(r), rel=1e-12)
    assert row["threshold"] == min(r[i] for i in indices)
    assert row["coverage"] == len(set().union(*(c for _, c in chosen))) / 8
    assert row["churn"] == 1 - len(indices & chosen[-2][1]) / len(indices | chosen[-2][1])


def test_without_momentum_columns_the_energy_is_not_told() -> None:
    model = named(w=torch.ones(6, 8))
    optimizer, sink = Dion2(model.parameters(), fraction=0.25), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics=["weight_rms", "selection"], sinks=[sink]):
        model["w"].grad = grads((6, 8), 1, 1)[0]
        optimizer.step()
    (row,) = sink.selection
    expected = known(follow([grads((6, 8), 1, 1)[0][None]], [0.25], 0.95), 0, 8, gradient=False)
    del expected["unselected_energy"]
    near(dict(row.values), expected)


def test_a_run_without_selection_has_no_columns_of_it() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer, sink = torch.optim.AdamW(model.parameters()), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics=[*METRICS, "selection_frequencies"], sinks=[sink]):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert sink.run is not None
    assert (sink.run.selection_columns, sink.run.slice_columns, sink.run.histograms) == ((), (), ())
    assert not sink.selection
    assert not sink.slices
    assert not sink.histograms


def test_groups_of_adamw_beside_a_selection() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5))
    optimizer, sink = Dion2(group_params(model), fraction=0.5), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics=METRICS, sinks=[sink]):
        for step in range(2):
            for i, p in enumerate(model.parameters()):
                p.grad = gauss(*p.shape, seed=10 * step + i)
            optimizer.step()
    assert sink.run is not None
    selected = {p.name for p in sink.run.params if "selection" in p.options}
    assert selected == {r.param for r in sink.selection} == {s.param for s in sink.slices}
    options = next(p.options for p in sink.run.params if p.name == "1")
    for name in ("fraction", "ef_decay", "lr", "weight_decay", "selection_scope"):
        assert name in options
    assert (options["selection"], options["shards"]) == ("rows", 1)


def test_gradients_that_are_zero_at_first() -> None:
    """Nothing has mass: shares are NaN, what is counted is not."""
    model = named(w=torch.ones(4, 6))
    optimizer, sink = Dion2(model.parameters(), fraction=0.5), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics=METRICS, sinks=[sink]):
        for scale in (0.0, 1.0):
            model["w"].grad = scale * gauss(4, 6, seed=1)
            optimizer.step()
    first, second = (dict(r.values) for r in sink.selection)
    for name in ("captured_mass", "gini", "participation_ratio", "regret_at_2", "mass_at_0.25", "grad_gini"):
        assert math.isnan(first[name]), name
        assert math.isfinite(second[name]), name
    assert (first["k"], first["threshold"], first["ties"], first["coverage"], first["age_max"]) == (2, 0, 2, 0.5, 1)
    compare({"k": second["k"]}, {"k": 2.0})


def test_no_rank_waits_when_one_has_no_gradient_of_a_replicated_matrix() -> None:
    """Replicas that step alone: rank 1 measures the parameter and has no gradient at the flush."""

    def run(rank: int, world: int) -> dict[tuple[int, str], dict[str, float]]:
        model = named(a=torch.ones(6, 8), b=torch.ones(6, 8))
        optimizer, sink = Dion2(list(model.items()), fraction=0.25), MemorySink()
        with Tracker(model, optimizer, schedule=at(1, 2, 3), metrics=METRICS, sinks=[sink]):
            for step in range(3):
                for i, p in enumerate(model.values()):
                    p.grad = None if rank == 1 and step == 1 else gauss(6, 8, seed=10 * step + i)
                optimizer.step()
        dist.barrier()
        return rows_of(sink)

    rows = run_forked(run, 2, timeout=50)[0]
    assert {(1, "a"), (1, "b"), (3, "a"), (3, "b")} <= set(rows)
    assert {n for s, n in rows if s == 2} < {"a", "b"}, "what nobody could tell is absent"
    assert {rows[3, n]["window"] for n in "ab"} == {1, 2}


def test_a_step_that_raised_after_its_selection_and_is_taken_again() -> None:
    """At the step of a flush, and between two: what was counted so far is not lost, and no window is empty."""
    model = named(w=torch.ones(6, 8))
    optimizer, sink = Dion2(model.parameters(), fraction=0.25), MemorySink()
    chosen: list[list[int]] = []
    failing = {6, 9}

    def see(event: Any) -> None:
        chosen.append(event.selections[0].indices.tolist())
        if tracker.step + 1 in failing:
            failing.remove(tracker.step + 1)
            raise ZeroDivisionError

    with Tracker(model, optimizer, schedule=at(3, 6, 12), metrics=METRICS, sinks=[sink]) as tracker:
        optimizer.register_step_observer(see)
        for step in range(1, 13):
            model["w"].grad = gauss(6, 8, seed=step)
            if step in failing:
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
            optimizer.step()
    rows = rows_of(sink)
    assert [s for s, _ in rows] == [3, 6, 12]
    assert [r["window"] for r in rows.values()] == [3, 3, 6]
    selected = [s.values["selected"] for s in sink.slices]
    assert all(s.values["steps"] == 12 for s in sink.slices)
    assert sum(selected) >= 12 * 2
    for row in rows.values():
        assert row["frequency_at_0.5"] <= 1
        assert 0 < row["coverage"] <= 1
        assert math.isfinite(row["frequency_gini"])
