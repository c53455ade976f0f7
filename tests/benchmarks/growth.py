"""How a flush grows with layers, with rows and columns, and with ranks."""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from measuring import Still, Time, Traffic, Watched, flush_time, ms, take_turns
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scion_telemetry import Tracker, every
from scion_telemetry.optim.layout import Axis, Layout
from scion_telemetry.plan import ParamSpec
from scion_telemetry.testing import run_forked

SIDE, HEIGHT = 64, 2048
PRESETS = ("norms", "basic")
Place = Callable[[Tensor], Tensor]


def model_of(shapes: Sequence[tuple[int, int]], place: Place = lambda t: t) -> tuple[nn.ParameterList, Still]:
    """Matrices with gradients and momenta, and an optimizer at rest that shows its updates."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [place(torch.randn(shape, generator=generator)) for shape in shapes]

    model = nn.ParameterList(nn.Parameter(t) for t in draw())
    for param, grad in zip(model, draw(), strict=True):
        param.grad = grad
    return model, Still(list(model), draw(), draw())


# ---------------------------------------------------------------------- layers


def layers(counts: Sequence[int], metrics: str, repeats: int, rank: int, world: int) -> list[tuple[list[Time], Any]]:
    """Times of a flush of so many layers, taking turns, and what the last one of each took along."""
    place: Place = lambda t: t  # noqa: E731
    if world > 1:
        place = partial(distribute_tensor, device_mesh=init_device_mesh("cpu", (world,)), placements=[Shard(0)])
    trackers, variants = [], {}
    for count in counts:
        model, optimizer = model_of([(SIDE, SIDE)] * count, place)
        trackers.append(Tracker(model, optimizer, schedule=every(1), metrics=metrics, sinks=[Watched()]))
        variants[str(count)] = partial(flush_time, optimizer, trackers[-1])
    times = take_turns(variants, repeats)
    found = [(times[str(count)], tracker.last_flush) for count, tracker in zip(counts, trackers, strict=True)]
    for tracker in trackers:
        tracker.close()
    return found


def with_layers(counts: Sequence[int], repeats: int) -> list[dict[str, str]]:
    """Square matrices of side 64, of one process and of two."""
    rows: list[dict[str, str]] = []
    for metrics in PRESETS:
        found = {w: run_forked(partial(layers, counts, metrics, repeats), w, timeout=900.0) for w in (1, 2)}
        for i, count in enumerate(counts):
            row = {"preset": metrics, "layers": str(count)}
            for world, ranks in found.items():
                times, last = ranks[0][i]
                part, whole = median(t.part for t in times), median(t.whole for t in times)
                row |= {
                    f"ms in the step, {world} rank(s)": ms(part),
                    f"until rows, {world}": ms(whole),
                    f"µs a layer in the step, {world}": f"{1e6 * part / count:.0f}",
                    f"collectives, {world}": str(last.collectives),
                }
            rows.append(row | {"numbers": str(last.numbers), "numbers a layer": f"{last.numbers / count:.1f}"})
    return rows


# ---------------------------------------------------------------------- rows and columns


def size(side: int, metrics: str, rank: int, world: int) -> tuple[int, int]:
    """Numbers of a flush of one square matrix, and bytes that a rank puts into collectives."""
    place = partial(distribute_tensor, device_mesh=init_device_mesh("cpu", (world,)), placements=[Shard(0)])
    model, optimizer = model_of([(side, side)], place)
    with Tracker(model, optimizer, schedule=every(1), metrics=metrics) as tracker:
        optimizer.step()
        with Traffic() as traffic:
            optimizer.step()
        assert tracker.last_flush is not None
        return tracker.last_flush.numbers, traffic.bytes


def with_size(sides: Sequence[int]) -> list[dict[str, str]]:
    """One matrix n x n in rows on two ranks."""
    rows = []
    for metrics in PRESETS:
        for side in sides:
            ((numbers, sent), _) = run_forked(partial(size, side, metrics), 2)
            rows.append(
                {
                    "preset": metrics,
                    "n": str(side),
                    "numbers": str(numbers),
                    "bytes": str(sent),
                    "bytes / n": f"{sent / side:.1f}",
                    "bytes / n²": f"{sent / side**2:.3f}",
                }
            )
    return rows


# ---------------------------------------------------------------------- ranks


def seen_by(rank: int, world: int, told: Any) -> Any:
    """What another rank would say where this one says ``told``: the same, of its own rows."""
    if isinstance(told, ParamSpec):
        layout = Layout(shape=told.info.shape, axes=(Axis(size=world, coordinate=rank, dim=0),))
        return replace(told, runs=tuple(layout.runs(d) for d in range(len(layout.shape))))
    if isinstance(told, list | tuple):
        return type(told)(seen_by(rank, world, part) for part in told)
    return told


class Invented:
    """Stands for ``all_gather_object`` where there is one rank: what others say follows from what this one says.

    Args:
        world: Number of ranks.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.told = 0
        self.seconds = 0.0

    def __call__(self, everybody: list[Any], mine: Any, group: Any = None) -> None:
        start = time.perf_counter()
        self.told = max(self.told, len(pickle.dumps(mine)))
        everybody[:] = [seen_by(rank, self.world, mine) for rank in range(self.world)]
        self.seconds += time.perf_counter() - start


def attach(world: int, metrics: str, count: int) -> dict[str, str]:
    """What one of many ranks has to do; transfers do nothing, and what others say is invented in no time."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    invented = Invented(world)
    try:
        mesh = init_device_mesh("cpu", (world,))

        def place(whole: Tensor) -> Tensor:
            rows = whole[: HEIGHT // world].clone()
            return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(SIDE, 1))

        model, optimizer = model_of([(HEIGHT, SIDE)] * count, place)
        with patch.object(dist, "all_gather_object", invented):
            start = time.perf_counter()
            tracker = Tracker(model, optimizer, schedule=every(1), metrics=metrics, sinks=[Watched()])
            attached = time.perf_counter() - start - invented.seconds
            optimizer.step()
            with Traffic() as traffic:
                optimizer.step()
            step = min(flush_time(optimizer, tracker).part for _ in range(3))
            tracker.close()
    finally:
        dist.destroy_process_group()
    assert tracker.last_flush is not None
    return {
        "preset": metrics,
        "ranks": str(world),
        "ms to attach": ms(attached),
        "bytes told to others": str(invented.told),
        "numbers": str(tracker.last_flush.numbers),
        "collectives": str(traffic.collectives),
        "bytes a flush": str(traffic.bytes),
        "ms a flush, without the network": ms(step),
    }


def with_ranks(worlds: Sequence[int], count: int = 24) -> list[dict[str, str]]:
    """24 matrices [2048, 64] in rows, as rank 0 sees it; collectives do nothing."""
    return [attach(world, metrics, count) for metrics in PRESETS for world in worlds]
