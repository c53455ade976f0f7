"""Ranks that differ: in what they hold, in what they were told, and in what fails; and what is counted once."""

import math
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2
from scion_telemetry.reduce import own_group
from scion_telemetry.rows import RunInfo
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked, run_threads

COUNTING = torch.arange(1.0, 16.0).view(5, 3)


def sgd(*params: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, foreach=False)


def named(**params: Tensor) -> nn.ParameterDict:
    model = nn.ParameterDict()
    for name, p in params.items():  # one by one: a dict would be sorted
        model[name] = nn.Parameter(p)
    return model


def stepped(model: nn.Module, **options: Any) -> dict[str, dict[str, float]]:
    """Rows of one step with gradients equal to the weights, before which nothing happens."""
    optimizer, sink = sgd(*model.parameters()), MemorySink()
    for p in model.parameters():
        p.grad = p.detach().clone()
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink], **options):
        optimizer.step()
    return {r.param: dict(r.values) for r in sink.layers}


# ---------------------------------------------------------------------- counted once


def sharded_beside_plain(rank: int, world: int) -> dict[str, dict[str, float]]:
    mesh = init_device_mesh("cpu", (world,))
    return stepped(named(w=distribute_tensor(COUNTING, mesh, [Shard(0)]), plain=torch.ones(2, 2)))


@pytest.mark.parametrize("run", [run_threads, run_forked], ids=["threads", "gloo"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_shard_is_not_the_layer_and_a_replica_counts_once(world: int, run: Callable[..., Any]) -> None:
    rows = run(sharded_beside_plain, world, timeout=20)[0]
    assert rows["w"]["grad_frobenius"] == pytest.approx(35.213634, rel=1e-7)
    assert rows["w"]["grad_spectral"] == pytest.approx(35.182648, rel=1e-5)
    assert rows["w"]["grad_rms_to_rms"] == pytest.approx(27.2523, rel=1e-5)
    assert rows["w"]["grad_rms"] == pytest.approx(9.0921, rel=1e-5)
    assert rows["w"]["grad_max_abs"] == 15
    assert rows["plain"]["grad_frobenius"] == 2
    total = math.hypot(rows["w"]["grad_frobenius"], rows["plain"]["grad_frobenius"])
    assert total == pytest.approx(35.2704, rel=1e-6)


def two_meshes(rank: int, world: int) -> dict[str, dict[str, float]]:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    return stepped(
        named(
            line=distribute_tensor(COUNTING, line, [Shard(0)]),
            square=distribute_tensor(COUNTING, square, [Shard(0), Shard(1)]),
        )
    )


def test_parameters_on_two_meshes() -> None:
    rows = run_forked(two_meshes, 4, timeout=20)[0]
    for name in ("line", "square"):
        assert rows[name]["grad_frobenius"] == pytest.approx(35.213634, rel=1e-7)
        assert rows[name]["grad_spectral"] == pytest.approx(35.182648, rel=1e-5)


@pytest.mark.parametrize(("dtype", "entry"), [(torch.bfloat16, 257), (torch.float16, 40000)])
def test_sums_travel_wider_than_the_parameters(dtype: torch.dtype, entry: int) -> None:
    def run(rank: int, world: int) -> dict[str, dict[str, float]]:
        mesh = init_device_mesh("cpu", (world,))
        full = torch.full((4, 1), math.sqrt(entry), dtype=torch.float64).to(dtype)
        return stepped(named(w=distribute_tensor(full, mesh, [Shard(0)])))

    rounded = float(torch.tensor(math.sqrt(entry), dtype=torch.float64).to(dtype))
    assert run_forked(run, 4, timeout=20)[0]["w"]["grad_frobenius"] == pytest.approx(2 * rounded, rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "fraction", "scope", "counts"),
    [(17, 0.35, "global", {1: 6, 2: 6, 4: 6}), (17, 0.35, "local", {1: 6, 2: 8, 4: 8}), (5, 0.25, "local", {4: 3})],
)
def test_selected_rows_are_counted_from_real_rows(
    rows: int, fraction: float, scope: str, counts: dict[int, int]
) -> None:
    """Global: ⌈0.35·17⌉ whatever the world. Local: ⌈0.35·9⌉ and ⌈0.35·5⌉ rows of every shard; none of an empty one."""

    def run(rank: int, world: int) -> list[float]:
        mesh = init_device_mesh("cpu", (world,))
        full = torch.randn(rows, 30, generator=torch.Generator().manual_seed(0))
        model = named(w=distribute_tensor(full, mesh, [Shard(0)]))
        optimizer, sink = Dion2(model.parameters(), fraction=fraction, selection_scope=scope), MemorySink()
        with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
            for _ in range(2):
                model["w"].grad = model["w"].detach().clone()
                optimizer.step()
        return [row.values["k"] for row in sink.selection]

    for world, k in counts.items():
        assert run_forked(run, world, timeout=20)[0] == [k, k]


# ---------------------------------------------------------------------- ranks that hold different things


def pipeline(rank: int, world: int) -> tuple[dict[str, dict[str, float]], list[str]]:
    own = {f"stage{rank}": torch.full((3, 2), 1.0 + rank)} if rank < 3 else {}
    model = named(tied=torch.full((3, 3), 1.0), **own)
    optimizer, sink = sgd(*model.parameters()), MemorySink()
    for p in model.parameters():
        p.grad = p.detach().clone()
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]) as tracker:
        optimizer.step()
        tracker.log(**{f"loss{rank}": float(rank)})
    rows = {r.param: dict(r.values) for r in sink.layers}
    return rows, [] if sink.run is None else [p.layout for p in sink.run.params]


def test_stages_of_a_pipeline_and_a_copy_that_they_share() -> None:
    rows, layouts = run_forked(pipeline, 4, timeout=20)[0]
    assert list(rows) == ["tied", "stage0", "stage1", "stage2"]
    assert rows["tied"]["grad_frobenius"] == 3
    for stage in range(3):
        assert rows[f"stage{stage}"]["grad_max_abs"] == 1 + stage
        assert rows[f"stage{stage}"]["grad_spectral"] == pytest.approx((1 + stage) * math.sqrt(6), rel=1e-12)
    assert layouts == ["replicated x4", "whole", "whole", "whole"]


def other_order(rank: int, world: int) -> dict[str, dict[str, float]]:
    params = {"a": torch.full((2, 3), 2.0), "b": torch.full((3, 4), 3.0)}
    return stepped(named(**(params if rank == 0 else dict(reversed(params.items())))))


def test_ranks_that_list_their_parameters_in_another_order() -> None:
    rows = run_forked(other_order, 2, timeout=20)[0]
    assert list(rows) == ["a", "b"]
    assert (rows["a"]["grad_max_abs"], rows["b"]["grad_max_abs"]) == (2, 3)


def half_of_the_ranks(rank: int, world: int) -> dict[str, dict[str, float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    full = COUNTING * (1 + rank // 2)  # two models side by side
    model = named(w=distribute_tensor(full, mesh["shard"], [Shard(0)]))
    return stepped(model, process_group=mesh["shard"].get_group())


def test_two_models_side_by_side_in_groups_of_their_own() -> None:
    found = run_forked(half_of_the_ranks, 4, timeout=20)
    assert found[0]["w"]["grad_max_abs"] == 15
    assert found[2]["w"]["grad_max_abs"] == 30
    assert found[1] == found[3] == {}


# ---------------------------------------------------------------------- ranks that disagree or fail


def outcome(make: Callable[[int], object], rank: int) -> str:
    """Type and text of what constructing raised; a rank that waits for ever fails by the time limit."""
    try:
        make(rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Broken(MemorySink):
    """Cannot start, with an error of a kind that nobody knows."""

    def open(self, run: RunInfo) -> None:
        raise LookupError("no such project")


def tracker_of(**options: Any) -> Tracker:
    model = named(w=torch.ones(2, 2))
    return Tracker(model, sgd(*model.parameters()), **options)


DISAGREEMENTS: dict[str, tuple[Callable[[int], object], str]] = {
    "schedule": (
        lambda r: tracker_of(schedule=every(1 + r)),
        r"ValueError: the schedule differs between ranks: rank 0 has 'every\(1\)', rank 1 has 'every\(2\)'",
    ),
    "metrics": (
        lambda r: tracker_of(metrics=["weight_rms", "grad_rms"][r]),
        "ValueError: the choice of metrics differs between ranks",
    ),
    "start_step": (
        lambda r: tracker_of(start_step=r),
        r"ValueError: the step to start from differs between ranks: rank 0 has .*0.*, rank 1 has .*1",
    ),
    "shape": (
        lambda r: Tracker(m := named(w=torch.ones(2, 2 + r)), sgd(*m.parameters())),
        r"ValueError: shape of parameter 'w' is \(2, 2\) on rank 0 and \(2, 3\) on rank 1",
    ),
    "dtype": (
        lambda r: Tracker(
            m := named(w=torch.ones(2, 2, dtype=[torch.float32, torch.bfloat16][r])), sgd(*m.parameters())
        ),
        "ValueError: dtype of parameter 'w'",
    ),
}


@pytest.mark.parametrize(("make", "expected"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_ranks_that_disagree_are_refused_everywhere(make: Callable[[int], object], expected: str) -> None:
    found = run_threads(lambda r, w: outcome(make, r), 2, timeout=10)
    assert found[0] == found[1]
    assert re.match(expected, found[0]), found[0]


FAILURES: dict[str, tuple[Callable[[int], object], int, str]] = {
    "metric": (lambda r: tracker_of(metrics=["rms", "rmz"][r]), 1, "ValueError: unknown metric 'rmz'"),
    "sink": (lambda r: tracker_of(sinks=[Broken()]), 0, "LookupError: no such project"),
    "no sink": (
        lambda r: tracker_of(sinks=[None] if r else []),
        1,
        "TypeError: a sink needs open(run), write(batch) and close(); None has no open",
    ),
    "model": (
        lambda r: Tracker(named(w=torch.ones(1)), sgd(torch.ones(3))) if r else tracker_of(),
        1,
        "ValueError: an optimizer steps 1 parameters that the model does not have",
    ),
}


@pytest.mark.parametrize(("make", "where", "expected"), FAILURES.values(), ids=FAILURES)
def test_a_failure_on_one_rank_is_an_error_on_all(make: Callable[[int], object], where: int, expected: str) -> None:
    found = run_threads(lambda r, w: outcome(make, r), 2, timeout=10)
    assert found[where].startswith(expected)
    assert found[1 - where].startswith(f"ValueError: rank {where} failed: {expected}")


def wrong_pieces(rank: int) -> object:
    mesh = init_device_mesh("cpu", (2,))
    model = named(w=distribute_tensor(COUNTING, mesh, [Shard(0)]))
    alone = [dist.new_group([r]) for r in range(2)][rank]
    return Tracker(model, sgd(*model.parameters()), process_group=alone)


def test_pieces_that_do_not_make_up_the_whole() -> None:
    found = run_forked(lambda r, w: outcome(wrong_pieces, r), 2, timeout=20)
    for message, elements in zip(found, (9, 6), strict=True):
        assert message.startswith(f"ValueError: the pieces of parameter 'w' on ranks [0] hold {elements} elements, its")
        assert "give the tracker a process group that spans all of its pieces" in message


def wrong_shape(rank: int) -> object:
    mesh = init_device_mesh("cpu", (4,))
    piece = distribute_tensor(COUNTING, mesh, [Shard(0)]).to_local()
    model = named(w=DTensor.from_local(piece, mesh, [Shard(0)]))  # without shape=: each rank guesses another one
    return Tracker(model, sgd(*model.parameters()))


def test_a_declared_shape_that_the_pieces_contradict() -> None:
    for message in run_forked(lambda r, w: outcome(wrong_shape, r), 4, timeout=20):
        assert message.startswith("ValueError: ")
        assert "'w'" in message


# ---------------------------------------------------------------------- plain functions as schedules


def test_a_plain_function_is_a_schedule_on_several_ranks() -> None:
    """Its ``str`` shows an address, which differs between ranks; the ranks must agree all the same."""

    def run(rank: int, world: int) -> tuple[list[int], str]:
        sink = MemorySink()
        model = named(w=torch.ones(2, 2))
        optimizer = sgd(*model.parameters())
        with Tracker(model, optimizer, schedule=lambda step: step == 2 + rank - rank, sinks=[sink]):
            for _ in range(3):
                optimizer.step()
        return sink.steps, "" if sink.run is None else sink.run.schedule

    steps, name = run_threads(run, 2, timeout=10)[0]
    assert steps == [2]
    assert "lambda" in name
    assert "0x" not in name


# ---------------------------------------------------------------------- what looks like a replica


@pytest.mark.parametrize("same", [True, False])
def test_replicas_that_differ_are_said(same: bool, caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        model = named(
            whole=torch.ones(2, 2),
            expert=torch.full((2, 2), math.nan if same else rank + 1.0),
            cut=distribute_tensor(COUNTING, mesh, [Shard(0)]),
        )
        Tracker(model, sgd(*model.parameters())).close()

    run_threads(run, 2, timeout=20)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (0 if same else 1)
    assert same or said[0].startswith("1 of 3 parameters, the first is 'expert', have the same name and shape")


def fsdp1(rank: int, strategy: ShardingStrategy) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated
        model = FullyShardedDataParallel(
            nn.Linear(4, 4, bias=False), use_orig_params=True, sharding_strategy=strategy, device_id=torch.device("cpu")
        )
    return Tracker(model, sgd(*model.parameters()))


def test_flat_shards_of_fsdp1_do_not_pass_for_layers() -> None:
    """Both ranks hold a vector of 8 entries under the name of one 4x4 matrix."""
    flat, whole = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
    for message in run_forked(lambda r, w: outcome(lambda rank: fsdp1(rank, flat), r), 2, timeout=20):
        assert "FSDP1, FULL_SHARD" in message
        assert "fully_shard (FSDP2)" in message
    assert run_forked(lambda r, w: outcome(lambda rank: fsdp1(rank, whole), r), 2, timeout=20) == ["nothing"] * 2


# ---------------------------------------------------------------------- ranks that leave


def test_the_tracker_waits_no_longer_than_the_user_chose() -> None:
    def run(rank: int, world: int) -> float:
        group: Any = own_group(None)
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert run_forked(run, 2, timeout=17) == [17.0, 17.0]


def leaves(rank: int, world: int) -> tuple[bool, list[int]]:
    model, sink = named(w=torch.ones(2, 2)), MemorySink()
    optimizer = sgd(*model.parameters())

    def train() -> None:
        with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
            optimizer.step()
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        train()
    return sink.closed, sink.steps


def many(rank: int, world: int) -> list[int]:
    model, sockets = named(w=torch.ones(2, 2)), []
    optimizer = sgd(*model.parameters())
    for _ in range(6):
        with Tracker(model, optimizer, schedule=every(1)):
            optimizer.step()
        sockets.append(os.open(os.devnull, os.O_RDONLY))  # the lowest number that is free
        os.close(sockets[-1])
    return sockets


def test_trackers_one_after_another_leave_no_group_behind() -> None:
    for sockets in run_forked(many, 2, timeout=20):
        assert sockets[-1] <= sockets[1]


def test_after_an_exception_no_rank_waits_for_another() -> None:
    assert run_forked(leaves, 2, timeout=20) == [(True, [1]), (False, [])]
