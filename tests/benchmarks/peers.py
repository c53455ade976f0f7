"""The same metrics by other means: one all-reduce a key, three stacked ones, whole tensors, and wandb.watch.

Every method is written from its description, on this rank's rows of 24 matrices: 6 blocks of qkv [3d, d], o [d, d],
w1 [4d, d] and w2 [d, 4d]. Each returns plain numbers by key, as ours leave the worker.
"""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import Still, Time, Traffic, Watched, flush_time, ms, slowest, take_turns
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scion_telemetry import Tracker, every
from scion_telemetry.optim.layout import local
from scion_telemetry.testing import run_forked

QUANTITIES = ("weight", "grad", "momentum", "update")
SETS = {"norms": ("frobenius",), "norms and largest entries": ("frobenius", "max_abs")}
OURS = "ours"
Numbers = dict[str, float]
Tensors = Mapping[str, Tensor]
"""By quantity and parameter: ``weight/0.qkv``."""


def shapes(d: int, blocks: int) -> dict[str, tuple[int, int]]:
    block = {"qkv": (3 * d, d), "o": (d, d), "w1": (4 * d, d), "w2": (d, 4 * d)}
    return {f"{i}_{name}": shape for i in range(blocks) for name, shape in block.items()}


def matrices(d: int, blocks: int, place: Callable[[Tensor], Tensor] = lambda t: t) -> dict[str, Tensor]:
    """Normal entries; every tensor has a scale of its own, from 1e-6 to 1e3, and in every other block columns fall."""
    generator, found = torch.Generator().manual_seed(0), {}
    for q in QUANTITIES:
        for name, shape in shapes(d, blocks).items():
            scale = 10 ** float(torch.empty(()).uniform_(-6, 3, generator=generator))
            # Without a fall the largest singular values are nearly equal, the worst case for finding them.
            fall = torch.arange(1, shape[1] + 1) ** (-0.25 if int(name.split("_")[0]) % 2 == 0 else 0.0)
            found[f"{q}/{name}"] = place(torch.randn(shape, generator=generator) * fall * scale)
    return found


def model_of(tensors: Tensors) -> tuple[nn.ParameterDict, Still]:
    """The weights as a model with gradients, and an optimizer at rest that has the momenta and shows the updates."""
    names = [key.split("/")[1] for key in tensors if key.startswith("weight/")]
    model = nn.ParameterDict({n: nn.Parameter(tensors[f"weight/{n}"]) for n in names})
    for n, param in model.items():
        param.grad = tensors[f"grad/{n}"]
    updates, momenta = ([tensors[f"{q}/{n}"] for n in names] for q in ("update", "momentum"))
    return model, Still([model[n] for n in names], updates, momenta)


# ---------------------------------------------------------------------- how others do it


def one_all_reduce_per_key(tensors: Tensors, largest: bool) -> Numbers:
    """The local norm of every tensor, squared; each key reduced by itself; root and host value by value."""
    local_norms = {key: torch.linalg.vector_norm(local(t)) for key, t in tensors.items()}
    found = {}
    for key, norm in local_norms.items():
        square = norm**2
        dist.all_reduce(square)
        found[f"frobenius/{key}"] = square.sqrt().item()
    for key, t in tensors.items() if largest else ():
        biggest = local(t).abs().max()
        dist.all_reduce(biggest, op=dist.ReduceOp.MAX)
        found[f"max_abs/{key}"] = biggest.item()
    return found


def three_all_reduces(tensors: Tensors, largest: bool) -> Numbers:
    """Norm, minimum and maximum tensor by tensor, each kind stacked into one all-reduce; host value by value."""
    norms, lows, highs = [], [], []
    for t in tensors.values():
        piece = local(t)
        norms.append(torch.linalg.vector_norm(piece, dtype=torch.float32))
        if largest:
            lows.append(piece.min())
            highs.append(piece.max())
    squares = torch.stack(norms) ** 2
    dist.all_reduce(squares)
    found = {f"frobenius/{key}": v.item() for key, v in zip(tensors, squares.sqrt(), strict=True)}
    if largest:
        low, high = torch.stack(lows), torch.stack(highs)
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        for key, a, b in zip(tensors, low, high, strict=True):
            found[f"max_abs/{key}"] = max(-a.item(), b.item())
    return found


def whole_tensors(tensors: Tensors, largest: bool) -> Numbers:
    """Every tensor gathered by itself."""
    found = {}
    for key, t in tensors.items():
        full = t.full_tensor() if isinstance(t, DTensor) else t
        found[f"frobenius/{key}"] = torch.linalg.vector_norm(full).item()
        if largest:
            found[f"max_abs/{key}"] = full.abs().max().item()
    return found


def reading_once(tensors: Tensors, largest: bool) -> Numbers:
    """Every entry of this rank once, with nothing sent and nothing told: nobody who looks at all of them is faster."""
    for t in tensors.values():
        local(t).sum()
    return {}


PEERS: Mapping[str, Callable[[Tensors, bool], Numbers]] = {
    "one all-reduce per key (as Composer's OptimizerMonitor)": one_all_reduce_per_key,
    "three stacked all-reduces, one item() a value (as OLMo-core's collector)": three_all_reduces,
    "full_tensor() of every tensor": whole_tensors,
    "no metrics: every entry read once": reading_once,
}


# ---------------------------------------------------------------------- side by side


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One method on one rank: times, what it sends, what it finds, how far that is from the truth."""

    times: list[Time]
    collectives: int
    sent: int
    metrics: int
    error: float


def truth(tensors: Tensors) -> Numbers:
    """In float64, on gathered tensors."""
    found: Numbers = {}
    for key, t in tensors.items():
        full = (t.full_tensor() if isinstance(t, DTensor) else t).double()
        found |= {f"frobenius/{key}": full.norm().item(), f"max_abs/{key}": full.abs().max().item()}
    return found


def worst(found: Numbers, expected: Numbers) -> float:
    return max((abs(value / expected[key] - 1) for key, value in found.items()), default=0.0)


def side_by_side(d: int, blocks: int, names: Sequence[str], repeats: int, rank: int, world: int) -> dict[str, Result]:
    """All methods on this rank."""
    mesh = init_device_mesh("cpu", (world,))
    tensors = matrices(d, blocks, partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)]))
    expected, largest = truth(tensors), "max_abs" in names
    model, optimizer = model_of(tensors)
    sink = Watched()
    columns = [f"{q}_{name}" for q in QUANTITIES for name in names]

    def peer(method: Callable[[Tensors, bool], Numbers]) -> Time:
        dist.barrier()
        start = time.perf_counter()
        method(tensors, largest)
        whole = time.perf_counter() - start
        return Time(whole=whole, part=whole)

    with Tracker(model, optimizer, schedule=every(1), metrics=columns, sinks=[sink]) as tracker:

        def ours() -> Time:
            dist.barrier()
            return flush_time(optimizer, tracker)

        times = take_turns({OURS: ours, **{name: partial(peer, method) for name, method in PEERS.items()}}, repeats)
        with Traffic() as traffic:
            ours()
        found = {_as_peers_have_it(key): v for key, v in sink.values().items()} if rank == 0 else {}
    results = {OURS: _result(times[OURS], traffic, found, expected)}
    for name, method in PEERS.items():
        with Traffic() as traffic:
            found = method(tensors, largest)
        results[name] = _result(times[name], traffic, found, expected)
    return results


def _as_peers_have_it(key: str) -> str:
    column, param = key.split("/")
    quantity, metric = column.split("_", 1)
    return f"{metric}/{quantity}/{param}"


def _result(times: list[Time], traffic: Traffic, found: Numbers, expected: Numbers) -> Result:
    return Result(
        times=times,
        collectives=traffic.collectives,
        sent=traffic.bytes,
        metrics=len(found),
        error=worst(found, expected),
    )


def section(d: int, blocks: int, repeats: int) -> list[tuple[str, list[dict[str, str]]]]:
    """One table a set of metrics."""
    tables = []
    for what, names in SETS.items():
        found = run_forked(partial(side_by_side, d, blocks, names, repeats), 2, timeout=900.0)
        times = {name: slowest([rank[name].times for rank in found]) for name in found[0]}
        rows = [_line(name, found[0][name], times[name], times[OURS]) for name in times]
        text = f"{what} of {', '.join(QUANTITIES)} of {4 * blocks} matrices in rows on 2 ranks, d={d}"
        tables.append((text, rows))
    return tables


def _line(name: str, result: Result, times: Sequence[Time], ours: Sequence[Time]) -> dict[str, str]:
    pairs = list(zip(times, ours, strict=True))
    return {
        "method": name,
        "ms until training goes on": ms(median(t.part for t in times)),
        "over ours": f"{median(t.part / o.part for t, o in pairs):.2f}",
        "ms until all numbers are there": ms(median(t.whole for t in times)),
        "over ours, all": f"{median(t.whole / o.whole for t, o in pairs):.2f}",
        "collectives": str(result.collectives),
        "bytes": str(result.sent),
        "metrics": str(result.metrics),
        "largest relative error": f"{result.error:.1e}",
    }


# ---------------------------------------------------------------------- wandb.watch, on one process


class Wide(nn.Module):
    """The matrices as layers, each fed by itself, so that forward and backward are theirs alone."""

    def __init__(self, d: int, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({n: nn.Linear(w, h, bias=False) for n, (h, w) in shapes(d, blocks).items()})

    def forward(self, batch: int) -> Tensor:
        outputs = (layer(torch.ones(batch, layer.in_features)) for layer in self.layers.values())
        return torch.stack([out.square().mean() for out in outputs]).sum()


def watch(d: int, blocks: int, repeats: int, folder: str, rank: int, world: int) -> dict[str, list[Time]]:
    """Seconds of a step bare, with a tracker, and watched by wandb; the same model, on one process."""
    import wandb

    models = {name: Wide(d, blocks) for name in ("bare", OURS, "wandb")}
    optimizer = Still(list(models[OURS].parameters()))
    run: Any = wandb.init(project="benchmark", mode="offline", dir=folder, settings=wandb.Settings(console="off"))
    run.watch(models["wandb"], log="all", log_freq=1)
    columns = [f"{q}_{metric}" for q in ("weight", "grad") for metric in ("frobenius", "max_abs")]

    def step(name: str, after: Callable[[], None]) -> Time:
        start = time.perf_counter()
        models[name].zero_grad()
        models[name](8).backward()
        after()
        return Time(whole=time.perf_counter() - start)

    with Tracker(models[OURS], optimizer, schedule=every(1), metrics=columns, sinks=[Watched()]) as tracker:

        def ours() -> None:
            optimizer.step()
            tracker.flush()

        after = {"bare": lambda: None, OURS: ours, "wandb": lambda: run.log({"loss": 1.0})}
        times = take_turns({name: partial(step, name, after[name]) for name in models}, min(repeats, 5))
    run.finish()
    return times


def watched_by_wandb(d: int, blocks: int, repeats: int) -> str:
    """One line; says so where wandb is not installed."""
    if importlib.util.find_spec("wandb") is None:
        return "- wandb.watch: not measured, wandb is not installed"
    os.environ["WANDB_SILENT"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        (times,) = run_forked(partial(watch, d, blocks, repeats, folder), 1, timeout=900.0)
    bare = times["bare"]

    def added(name: str) -> list[float]:
        return [t.whole - b.whole for t, b in zip(times[name], bare, strict=True)]

    over = median(w / o for w, o in zip(added("wandb"), added(OURS), strict=True))
    return (
        f"- wandb.watch(log='all', log_freq=1), offline, one process, {4 * blocks} matrices: adds "
        f"{ms(median(added('wandb')))} ms a step for histograms of weights and gradients; ours adds "
        f"{ms(median(added(OURS)))} ms for their norms and largest entries, until the rows are there; "
        f"{over:.1f} times as much"
    )
