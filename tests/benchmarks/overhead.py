"""What a tracker adds to the training of a small GPT, as a share of the same loop without it."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from measuring import Time, Traffic, Watched, ms, slowest, take_turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scion_telemetry import Tracker
from scion_telemetry.demo.model import GPT, GPTConfig
from scion_telemetry.demo.train import ROLES
from scion_telemetry.metrics.catalogue import PRESETS
from scion_telemetry.metrics.choice import Metrics
from scion_telemetry.optim import Dion2, group_params
from scion_telemetry.sinks import CsvSink
from scion_telemetry.testing import run_forked

CADENCES = (1, 10, 100)
DIRECT = "basic"
BLOCK = 2


def presets() -> dict[str, Metrics]:
    """Those that exist, the cheap ones first, and what a selection adds to the cheapest."""
    known: dict[str, Metrics] = {"norms": "norms", "norms, selection": ["norms", "selection"]}
    return known | {name: name for name in ("basic", "spectral", *PRESETS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One preset on one rank.

    Args:
        on: Steps of the loop with a flush, waiting for its rows.
        off: Steps of the optimizer without a flush, by themselves.
        worker: CPU seconds of the worker for one flush.
        collectives: Of one flush, as the tracker has it.
        counted: The same, counted from outside.
        sent: Bytes that this rank puts into them.
        numbers: In the merged buffers.
        rows: Of one flush.
    """

    on: list[Time]
    off: list[Time]
    worker: float
    collectives: int
    counted: int
    sent: int
    numbers: int
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One rank's measurements.

    Args:
        parameters: Of the model.
        bare: Steps of the loop without a tracker.
        bare_off: Steps of the optimizer without a tracker, by themselves.
        costs: By preset.
        block_bare: ``BLOCK`` steps of the loop in a row, without a tracker.
        block_direct: The same with one.
    """

    parameters: int
    bare: list[Time]
    bare_off: list[Time]
    costs: dict[str, Cost]
    block_bare: list[Time]
    block_direct: list[Time]


class Training:
    """The loop of the demo on random tokens.

    Args:
        config: The model.
        batch: Sequences a rank.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, config: GPTConfig, batch: int, rank: int, world: int) -> None:
        self.model, self.world = GPT(config), world
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        generator = torch.Generator().manual_seed(rank)
        shape = (batch, config.context + 1)
        self._draw = partial(torch.randint, config.vocab, shape, generator=generator)
        self.scheduled = False

    def optimizer(self) -> Dion2:
        return Dion2(group_params(self.model, roles=ROLES), lr=1e-4, fraction=0.25, momentum=0.1)

    def schedule(self, step: int) -> bool:
        return self.scheduled

    def _together(self) -> None:
        if self.world > 1:
            dist.barrier()

    def step(self, optimizer: Dion2, tracker: Tracker | None = None, on: bool = False, wait: bool = True) -> Time:
        """One step; ``wait`` for the rows, as on a machine with a core a rank the worker delays its rank in the end."""
        tokens, self.scheduled = self._draw(), on
        self._together()
        start = time.perf_counter()
        loss = self.model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self._together()  # or a rank that is late would count as a slow step of the other one
        before = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter()
        optimizer.zero_grad()
        if tracker is not None:
            tracker.log(train_loss=loss)
            if wait:
                tracker.flush()
        end = time.perf_counter()
        return Time(whole=end - start, part=stepped - before, rows=end - stepped)

    def optimizer_alone(self, optimizer: Dion2) -> Time:
        """A step of the optimizer on the gradients that are there, off schedule."""
        self.scheduled = False
        self._together()
        start = time.perf_counter()
        optimizer.step()
        whole = time.perf_counter() - start
        return Time(whole=whole, part=whole)

    def backward(self) -> None:
        """Gradients."""
        tokens = self._draw()
        self.model.loss(tokens[:, :-1], tokens[:, 1:]).backward()

    def block(self, optimizer: Dion2, tracker: Tracker | None) -> Time:
        """Steps in a row, every one of them on schedule where there is a tracker, the worker beside them."""
        start = time.perf_counter()
        for _ in range(BLOCK):
            self.step(optimizer, tracker, on=True, wait=False)
        if tracker is not None:
            tracker.flush()
        return Time(whole=time.perf_counter() - start)

    def counted(self, optimizer: Dion2, tracker: Tracker | None) -> Traffic:
        """One step that is not timed, after one that agrees on names of scalars and takes along those that wait."""
        self.step(optimizer, tracker, on=True)
        with Traffic() as traffic:
            self.step(optimizer, tracker, on=True)
        return traffic


def on_ranks(config: GPTConfig, batch: int, repeats: int, folder: str, rank: int, world: int) -> Found:
    """What one rank measures."""
    # A model for each: a tracker sees what others do to its weights, and is right to look again.
    trainings = {p: Training(config, batch, rank, world) for p in ("bare", *presets())}
    optimizers = {p: training.optimizer() for p, training in trainings.items()}
    sinks = {p: Watched(CsvSink(Path(folder) / f"{world}-{p}")) for p in presets()}
    trackers = {
        p: Tracker(trainings[p].model, optimizers[p], schedule=trainings[p].schedule, metrics=metrics, sinks=[sinks[p]])
        for p, metrics in presets().items()
    }
    step: dict[str, Callable[[], Time]] = {
        p: partial(t.step, optimizers[p], trackers.get(p), True) for p, t in trainings.items()
    }
    times = take_turns(step, repeats)
    for training in trainings.values():
        training.backward()
    off = take_turns({p: partial(t.optimizer_alone, optimizers[p]) for p, t in trainings.items()}, 3 * repeats)
    for training in trainings.values():
        training.model.zero_grad()
    blocks = take_turns(
        {p: partial(trainings[p].block, optimizers[p], trackers.get(p)) for p in ("bare", DIRECT)}, repeats
    )
    own = trainings["bare"].counted(optimizers["bare"], None)
    found = Found(
        parameters=sum(p.numel() for p in trainings["bare"].model.parameters()),
        bare=times["bare"],
        bare_off=off["bare"],
        costs={
            p: _cost(times[p], off[p], sinks[p], tracker, own, trainings[p].counted(optimizers[p], tracker))
            for p, tracker in trackers.items()
        },
        block_bare=blocks["bare"],
        block_direct=blocks[DIRECT],
    )
    for tracker in trackers.values():
        tracker.close()
    return found


def _cost(on: list[Time], off: list[Time], sink: Watched, tracker: Tracker, own: Traffic, traffic: Traffic) -> Cost:
    assert tracker.last_flush is not None
    return Cost(
        on=on,
        off=off,
        worker=sink.cpu,
        collectives=tracker.last_flush.collectives,
        counted=traffic.collectives - own.collectives,
        sent=traffic.bytes - own.bytes,
        numbers=tracker.last_flush.numbers,
        rows=sink.rows,
    )


# ---------------------------------------------------------------------- the table


def share(steps: Sequence[Time], bare: Sequence[Time]) -> float:
    """Median of what a step has inside ``optimizer.step()`` and after it beyond a bare one, over a whole bare step.

    Forward and backward are the same and vary by more than a tracker costs, so their times count in the base only.
    """
    return median((s.part + s.rows - b.part - b.rows) / b.whole for s, b in zip(steps, bare, strict=True))


def line(preset: str, found: Sequence[Found], tokens: int) -> dict[str, str]:
    """One preset, by tokens a rank: cost of a flush and of a step off schedule, and what follows for each cadence."""
    costs = [f.costs[preset] for f in found]
    bare = slowest([f.bare for f in found])
    steps, step = slowest([c.on for c in costs]), median(b.whole for b in bare)
    quiet = zip(slowest([c.off for c in costs]), slowest([f.bare_off for f in found]), strict=True)
    on, off = share(steps, bare), median(q.part - b.part for q, b in quiet) / step
    whole = median(s.whole / b.whole for s, b in zip(steps, bare, strict=True)) - 1
    return {
        "ranks": str(len(found)),
        "tokens": str(tokens),
        "preset": preset,
        "bare step, ms": ms(step),
        "flush, ms": f"{1e3 * step * on:.1f}",
        "of it worker": ms(costs[0].worker),
        "off schedule, ms": f"{1e3 * step * off:.2f}",
        **{f"every={n}, %": f"{100 * (on + (n - 1) * off) / n:.2f}" for n in CADENCES},
        "whole steps, every=1, %": f"{100 * whole:.1f}",
        "collectives": str(costs[0].collectives),
        "counted": str(costs[0].counted),
        "numbers": str(costs[0].numbers),
        "bytes": str(costs[0].sent),
        "rows": str(costs[0].rows),
    }


def verification(found: Sequence[Found], tokens: int) -> str:
    """The derived share of one cell beside the one of steps in a row."""
    bare, direct = slowest([f.block_bare for f in found]), slowest([f.block_direct for f in found])
    derived = share(slowest([f.costs[DIRECT].on for f in found]), slowest([f.bare for f in found]))
    seen = median(d.whole / b.whole for d, b in zip(direct, bare, strict=True)) - 1
    return (
        f"{DIRECT} at every=1 on {len(found)} rank(s), {tokens} tokens: {100 * derived:.1f} % as derived above, "
        f"{100 * seen:.1f} % measured over blocks of {BLOCK} steps with the worker beside them"
    )


def section(
    config: GPTConfig, batches: Sequence[tuple[int, int]], repeats: int
) -> tuple[list[Mapping[str, str]], list[str]]:
    """Lines of the table, and remarks, for each of some (ranks, sequences a rank)."""
    rows: list[Mapping[str, str]] = []
    remarks: list[str] = []
    for world, batch in batches:
        with tempfile.TemporaryDirectory() as folder:
            found = run_forked(partial(on_ranks, config, batch, repeats, folder), world, timeout=1800.0)
        rows += [line(preset, found, batch * config.context) for preset in found[0].costs]
        remarks += [verification(found, batch * config.context)]
    return rows, [f"{found[0].parameters} parameters", *remarks]
