"""The 24 points in which training telemetry goes wrong, and the tests that prove each of them here."""

import math
from pathlib import Path

import pytest
import torch
from listed import TESTS, missing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from tracked import gauss, named, rms, rows
from truth import layer_values, worst

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

POINTS: dict[int, tuple[str, ...]] = {
    1: ("test_telemetry_list::test_empty_and_uneven_shards_in_every_statistic", "test_tracker_parity::test_fsdp2"),
    2: ("test_telemetry_list::test_empty_and_uneven_shards_in_every_statistic", "test_tracker_parity::test_fsdp2"),
    3: ("test_telemetry_list::test_a_replica_beside_shards_counts_once", "test_tracker_parity::test_tensor_parallel"),
    4: ("test_tracker_parity::test_hsdp", "test_tracker_verify::test_every_layout_is_right"),
    5: ("test_cases_k4::test_c58_a_tied_weight_is_one_row_and_counts_once",),
    6: ("test_tracker_ranks::test_parameters_on_two_meshes", "test_cases_k1::test_c06_the_total_of_two_meshes"),
    7: ("test_cases_k1::test_a_gradient_that_one_rank_lacks", "test_telemetry_list::test_a_replica_without_a_gradient"),
    8: ("test_cases_k1::test_a_rank_without_any_parameter_joins",),
    9: ("test_tracker_ranks::test_ranks_that_list_their_parameters_in_another_order",),
    10: (
        "test_tracker_growth::test_a_group_that_is_added_at_step_3",
        "test_tracker_growth::test_one_rank_alone_has_something_new",
    ),
    11: (
        "test_tracker_steps::test_a_poisoned_layer_leaves_the_others_right",
        "test_cases_k3::test_c28_c29_one_entry_that_is_not_finite",
    ),
    12: (
        "test_metrics_norms::test_shapes_and_dtypes_against_brute_force",
        "test_cases_k3::test_large_entries_of_bf16_do_not_overflow",
    ),
    13: ("test_metrics_norms::test_shapes_and_dtypes_against_brute_force",),
    14: ("test_tracker_steps::test_gradients_that_are_not_summed_up_yet",),
    15: (
        "test_tracker_ranks::test_a_shard_is_not_the_layer_and_a_replica_counts_once",
        "test_cases_k1::test_c07_the_total_of_a_sharded_and_a_plain_parameter",
    ),
    16: (
        "test_tracker_ways::test_accumulated_gradients_are_measured_once_and_whole",
        "test_cases_k1::test_c12_gradients_are_those_that_ddp_has_averaged",
    ),
    17: (
        "test_tracker_resume::test_resumed_on_another_number_of_ranks",
        "test_sinks_csv::test_resume_has_one_header_and_all_rows",
        "test_sinks_wandb_guest::test_the_given_run_goes_on_and_keeps_its_config",
    ),
    18: (
        "test_sinks_wandb_guest::test_no_row_is_lost_with_any_trainer",
        "test_sinks_wandb_guest::test_rows_that_come_late_are_kept",
    ),
    19: (
        "test_writer::test_an_exception_inside_keeps_the_rows_and_is_the_one_that_is_seen",
        "test_writer::test_what_is_queued_when_python_ends_is_written",
    ),
    20: (
        "test_tracker_wrappers::test_a_compiled_step_method_is_measured",
        "test_tracker_ways::test_a_compiled_step_is_measured_and_compiled_no_more_than_without",
    ),
    21: ("test_cases_k2::test_what_rank_0_does_alone_raises_in_the_time_of_its_group",),
    22: (
        "test_tracker_parity::test_fsdp2",
        "test_metrics_selection::test_a_scripted_run",
        "test_telemetry_list::test_ties_are_selected_and_told_alike",
    ),
    23: (
        "test_transport_bytes::test_dion2_moves_only_the_selected_rows",
        "test_tracker_ranks::test_selected_rows_are_counted_from_real_rows",
    ),
    24: (
        "test_tracker_verify::test_every_layout_is_right",
        "test_tracker_verify::test_a_planted_fault_is_found_on_all_ranks",
    ),
}


def test_every_point_has_a_test_that_is_there() -> None:
    assert list(POINTS) == list(range(1, 25))
    assert [entry for tests in POINTS.values() for entry in tests if missing(entry)] == []
    assert all(POINTS.values())


def test_an_entry_that_is_not_there_is_noticed() -> None:
    assert missing("test_telemetry_list::test_no_such_thing")
    assert missing("test_no_such_file::test_every_point_has_a_test_that_is_there")
    assert missing("test_telemetry_list")
    assert not missing("test_telemetry_list::test_an_entry_that_is_not_there_is_noticed")
    assert Path(__file__).parent == TESTS


# ---------------------------------------------------------------------- 1, 2: every statistic of shards


@pytest.mark.parametrize(("shape", "world"), [((3, 4), 2), ((5, 3), 4), ((1, 6), 4), ((7,), 4), ((2,), 4)], ids=str)
def test_empty_and_uneven_shards_in_every_statistic(shape: tuple[int, ...], world: int) -> None:
    """All columns of weight, gradient, momentum and update, against float64 on whole tensors."""

    def run(rank: int, world: int) -> MemorySink:
        mesh = init_device_mesh("cpu", (world,))
        model = named(w=distribute_tensor(gauss(*shape), mesh, [Shard(0)], src_data_rank=None))
        optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False), MemorySink()
        with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
            model["w"].grad = distribute_tensor(gauss(*shape, seed=1), mesh, [Shard(0)], src_data_rank=None)
            optimizer.step()
        return sink

    (row,) = run_forked(run, world, timeout=30)[0].layers
    before, grad = gauss(*shape), gauss(*shape, seed=1)
    after = before.add(grad, alpha=-0.5)
    whole: dict[str, Tensor] = {"weight": after, "grad": grad, "momentum": grad}
    role = "vector" if sum(n > 1 for n in shape) <= 1 else "hidden"  # of no layer: by its shape
    truth = layer_values({**whole, "update": after.double() - before.double()}, role)
    settings = {"grad_missing": 0.0, "update_lr": 0.5, "weight_decay": 0.0}
    assert {name: row.values[name] for name in settings} == settings
    assert worst({n: v for n, v in row.values.items() if n not in settings}, truth) <= 1e-7


def test_a_replica_beside_shards_counts_once() -> None:
    """As under tensor parallelism: a whole norm on every rank beside matrices in pieces; √(‖a‖² + ‖b‖²), once."""

    def run(rank: int, world: int) -> MemorySink:
        mesh = init_device_mesh("cpu", (world,))
        cut = distribute_tensor(gauss(6, 4), mesh, [Shard(1)], src_data_rank=None)
        model = named(cut=cut, norm=gauss(5, seed=1))
        optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False), MemorySink()
        for p in model.values():
            p.grad = p.detach().clone()
        with Tracker(model, optimizer, schedule=every(1), metrics=["frobenius"], sinks=[sink]):
            optimizer.step()
        return sink

    sink = run_forked(run, 4, timeout=30)[0]
    squares = [float(x.double().square().sum()) for x in (gauss(6, 4), gauss(5, seed=1))]
    assert sink.value(1, "cut", "grad_frobenius") == pytest.approx(math.sqrt(squares[0]), rel=1e-12)
    assert sink.value(1, "norm", "grad_frobenius") == pytest.approx(math.sqrt(squares[1]), rel=1e-12)
    (total,) = [s.value for s in sink.scalars if s.name == "grad_frobenius/total"]
    assert total == pytest.approx(math.sqrt(sum(squares)), rel=1e-12)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_replica_without_a_gradient(absent: int) -> None:
    """One of two replicas has no gradient: it is that of the other one, or said to be missing; never half of it."""

    def run(rank: int, world: int) -> MemorySink:
        model = named(a=gauss(3, 2), b=gauss(4, 2, seed=1))  # measured by different ranks
        optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.0), MemorySink()
        for p in model.values():
            p.grad = p.detach().clone() if rank != absent else None
        with Tracker(model, optimizer, schedule=every(1), metrics=["rms", "missing"], sinks=[sink]):
            optimizer.step()
        return sink

    found = rows(run_forked(run, 2, timeout=20)[0])
    whole = {"a": gauss(3, 2), "b": gauss(4, 2, seed=1)}
    missing_pieces = 0
    for name, x in whole.items():
        row = found[1, name]
        assert row["weight_rms"] == pytest.approx(rms(x), rel=1e-12)
        missing_pieces += int(row["grad_missing"])
        if row["grad_missing"]:
            assert "grad_rms" not in row
        else:
            assert row["grad_rms"] == pytest.approx(rms(x), rel=1e-12)
    assert missing_pieces == 1


# ---------------------------------------------------------------------- 22: ties


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("scope", ["global", "local"])
def test_ties_are_selected_and_told_alike(world: int, scope: str) -> None:
    """All rows have one score: exactly ⌈f·n⌉ of them (of every shard, in local scope) and half of the mass."""

    def run(rank: int, size: int) -> tuple[MemorySink, list[int]]:
        full = torch.ones(8, 4)
        if size > 1:
            full = distribute_tensor(full, init_device_mesh("cpu", (size,)), [Shard(0)], src_data_rank=None)
        model, sink, chosen = named(w=full), MemorySink(), list[int]()
        optimizer = Dion2(model.parameters(), lr=0.1, fraction=0.5, selection_scope=scope, select_dim="rows")
        start = rank * 8 // size
        optimizer.register_step_observer(lambda e: chosen.extend((e.selections[0].indices + start).tolist()))
        with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
            model["w"].grad = model["w"].detach().clone()
            optimizer.step()
        assert isinstance(model["w"], DTensor) == (size > 1)
        return sink, chosen

    ranks = run_forked(run, world, timeout=20) if world > 1 else [run(0, 1)]
    (row,) = ranks[0][0].selection
    selected = sorted(i for _, chosen in ranks for i in chosen)
    assert len(set(selected)) == len(selected) == 4
    assert row.values["k"] == 4
    assert row.values["fraction"] == row.values["captured_mass"] == 0.5
    assert row.values["gini"] == pytest.approx(0, abs=1e-12)
    assert row.values["participation_ratio"] == pytest.approx(1, rel=1e-12)
    assert row.values["threshold"] == 4
    if scope == "global":
        assert selected == [0, 1, 2, 3]
