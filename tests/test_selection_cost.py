"""What selections cost: eight bytes a row and a few a matrix at a flush, two int32 a row between them, no waiting."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_tracker_cost import Counting
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tracked import gauss, named

from scion_telemetry import Tracker, every
from scion_telemetry.cost import FlushStats
from scion_telemetry.metrics import norms
from scion_telemetry.optim import Dion2, Scion
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked, run_threads

pytestmark = pytest.mark.timeout(60)

SHAPES = {"wide": (40, 60), "tall": (70, 30), "experts": (4, 12, 16), "few": (3, 9)}
ROWS = 40 + 70 + 4 * 12 + 3
PER_MATRIX = 4  # energy that was kept, window, fraction, decay
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "dion2": lambda m: Dion2(m.parameters(), fraction=0.25, select_dim="rows"),
    "scion": lambda m: Scion(m.parameters(), lr=0.01),
}


def flushed(maker: str, metrics: list[str], place: Callable[[Tensor], Tensor]) -> tuple[FlushStats, int, int]:
    """One flush; and the rows that this rank's log has, with their bytes."""
    model = named(**{name: place(torch.ones(shape)) for name, shape in SHAPES.items()})
    optimizer = MAKERS[maker](model)
    with Tracker(model, optimizer, schedule=every(1), metrics=metrics) as tracker:
        for i, p in enumerate(model.parameters()):
            p.grad = place(gauss(*p.shape, seed=i))
        optimizer.step()
        assert tracker.last_flush is not None
        log = tracker._collector.log
        size = log.last.numel() * log.last.element_size() + log.count.numel() * log.count.element_size()
        return tracker.last_flush, log.last.numel(), size


def on_two_ranks(maker: str, metrics: list[str]) -> list[tuple[FlushStats, int, int]]:
    def run(rank: int, world: int) -> tuple[FlushStats, int, int]:
        mesh = init_device_mesh("cpu", (world,))
        return flushed(maker, metrics, lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None))

    return run_forked(run, 2, timeout=50)


def test_a_flush_is_eight_bytes_a_row_and_four_numbers_a_matrix_larger() -> None:
    with_selection, without = (on_two_ranks(maker, ["basic"]) for maker in ("dion2", "scion"))
    gradient = on_two_ranks("dion2", ["basic", "selection_gradient"])
    for (more, _, _), (less, _, _), (most, _, _) in zip(with_selection, without, gradient, strict=True):
        assert more.numbers - less.numbers == ROWS + PER_MATRIX * len(SHAPES)
        assert more.bytes - less.bytes == 8 * (ROWS + PER_MATRIX * len(SHAPES))
        assert more.collectives == less.collectives == most.collectives
        assert most.bytes - more.bytes == 8 * ROWS, "the gradient's scores"


def test_the_state_is_two_int32_of_a_row_on_the_rank_that_tells_of_it() -> None:
    ranks = on_two_ranks("dion2", ["basic"])
    assert [rows for _, rows, _ in ranks] == [20 + 35 + 2 * 12 + 2, 20 + 35 + 2 * 12 + 1]
    assert all(size == 8 * rows for _, rows, size in ranks)


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [((4,), (Shard(0),)), ((4,), (Shard(1),)), ((2, 2), (Replicate(), Shard(0))), ((2, 2), (Shard(0), Shard(1)))],
)
def test_every_row_has_one_owner_in_every_layout(sizes: tuple[int, ...], placements: Any) -> None:
    def run(rank: int, world: int) -> int:
        mesh = init_device_mesh("cpu", sizes)
        place = partial(distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None)
        return flushed("dion2", ["norms", "selection"], place)[1]

    assert sum(run_threads(run, 4, timeout=50)) == ROWS


def steps(layers: int, tracked: bool, rank: int, world: int) -> list[tuple[int, int]]:
    """Collectives and reads of steps 1 to 7, of which 3 and 6 are scheduled."""
    mesh = init_device_mesh("cpu", (world,))

    def place(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

    model = nn.ParameterList(nn.Parameter(place(gauss(8 + i % 3, 6, seed=i))) for i in range(layers))
    optimizer = Dion2(model.parameters(), fraction=0.25)
    found = []
    metrics = ["norms", "selection_gradient", "selection_frequencies"]
    tracker = None
    if tracked:
        tracker = Tracker(model, optimizer, schedule=every(3, first=False), metrics=metrics, sinks=[MemorySink()])
    for step in range(7):
        for i, p in enumerate(model):
            p.grad = place(gauss(*p.shape, seed=100 * step + i))
        with Counting() as counting:
            optimizer.step()
        found.append((counting.collectives, counting.reads))
    if tracker is not None:
        tracker.close()
    return found


def test_nothing_is_sent_or_read_off_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "free_to_read", lambda number: False)  # as on an accelerator
    for layers in (4, 20):
        with_tracker, without = (run_forked(partial(steps, layers, on), 2, timeout=50) for on in (True, False))
        for one, other in zip(with_tracker, without, strict=True):
            extra = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(one, other, strict=True)]
            assert [extra[i] for i in (0, 1, 3, 4, 6)] == [(0, 0)] * 5
            assert extra[5][0] == 2
            assert extra[5][1] <= 8, "a header of a few numbers, whatever the number of layers"
