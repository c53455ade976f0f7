"""Weights that something other than a step has changed: σ₁ starts anew, on all ranks together."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tracked import gauss, named, rows

from scion_telemetry import Tracker, every
from scion_telemetry.optim.layout import local
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(60)

SHAPES = {"wide": (150, 260), "tall": (300, 140)}
REPLACED = 4
Trained = tuple[MemorySink, list[int]]


def weight(name: str, seed: int) -> Tensor:
    return gauss(*SHAPES[name], seed=seed)  # noise: a start that knows nothing is as far off as can be


def trained(place: Callable[[Tensor], Tensor], only_on: int | None = None, rank: int = 0) -> Trained:
    """σ₁ and collectives at every step of SGD that hardly moves; before one step the weights are replaced in place."""
    model = named(**{name: place(weight(name, 0)) for name in SHAPES})
    optimizer, sink, counts = torch.optim.SGD(model.parameters(), lr=1e-6), MemorySink(), []
    with Tracker(model, optimizer, schedule=every(1), metrics=["weight_spectral"], sinks=[sink]) as tracker:
        for step in range(1, 7):
            if step == REPLACED and only_on in (None, rank):
                with torch.no_grad():
                    for name, p in model.items():
                        local(p).copy_(local(place(weight(name, 1))))
            for name, p in model.items():
                p.grad = place(weight(name, step))
            optimizer.step()
            assert tracker.last_flush is not None
            counts.append(tracker.last_flush.collectives)
    return sink, counts


def normalised(rank: int, world: int) -> tuple[MemorySink, list[int]]:
    """Rows of weights are made one long after every step, as some trainings do."""
    mesh = init_device_mesh("cpu", (world,))

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)

    model = named(w=distribute_tensor(unit(weight("wide", 0)), mesh, [Shard(0)], src_data_rank=None))
    optimizer, sink, counts = torch.optim.SGD(model.parameters(), lr=1e-3), MemorySink(), []
    with Tracker(model, optimizer, schedule=every(1), metrics=["weight_spectral"], sinks=[sink]) as tracker:
        for step in range(1, 7):
            model["w"].grad = distribute_tensor(weight("wide", step), mesh, [Shard(0)], src_data_rank=None)
            optimizer.step()
            truth = torch.linalg.svdvals(model["w"].full_tensor().detach().double())[0]
            tracker.log(truth=truth)
            with torch.no_grad():
                local(model["w"]).copy_(unit(local(model["w"])))
            assert tracker.last_flush is not None
            counts.append(tracker.last_flush.collectives)
    return sink, counts


def check(sink: MemorySink) -> None:
    for (step, name), row in rows(sink).items():
        truth = float(torch.linalg.svdvals(weight(name, int(step >= REPLACED)).double())[0])
        assert row["weight_spectral"] == pytest.approx(truth, rel=0.01), (step, name)


def test_whole_weights() -> None:
    check(trained(lambda x: x)[0])


def in_rows(rank: int, world: int, only_on: int | None = None) -> Trained:
    mesh = init_device_mesh("cpu", (world,))
    return trained(lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None), only_on, rank)


def test_weights_in_pieces_and_no_collective_more_at_other_flushes() -> None:
    (sink, counts), (_, others) = run_forked(in_rows, 2, timeout=50)
    check(sink)
    assert counts == others == [10, 4, 4, 10, 4, 4]


def test_a_change_on_one_rank_alone_is_one_on_all() -> None:
    """Half of a matrix is another one: nobody waits for a collective that the others do not make."""
    found = run_forked(lambda r, w: in_rows(r, w, only_on=1)[1], 2, timeout=50)
    assert found[0] == found[1] == [10, 4, 4, 10, 4, 4]


def test_a_change_after_every_step_is_a_habit_and_costs_no_cold_start_each_time() -> None:
    (sink, counts), (_, others) = run_forked(normalised, 2, timeout=50)
    assert counts == others == [10, 10, 6, 6, 6, 6]  # cold; told for the first time; warm, with all steps
    truths = {s.step: s.value for s in sink.scalars if s.name == "truth"}
    assert len(truths) == 6
    for (step, _), row in rows(sink).items():
        assert row["weight_spectral"] == pytest.approx(truths[step], rel=0.01)
