"""What a step of every optimizer costs, as ratios that were measured side by side in one run; asserts no time.

python tests/benchmarks/optim.py [--layers 12] [--width 768] [--repeats 5] [--quick]

The parameters are the hidden matrices of a GPT: q, k, v, o [d, d], up [4d, d] and down [d, 4d] of every layer, float32.
Every process has one thread. Variants take turns within a repeat, and a ratio is the median of the ratios of single
repeats, so that the drift of a shared machine cancels.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.tensor  # before any fork
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import _muon

from scion_telemetry.optim import Dion2, Orthogonalizer, Scion
from scion_telemetry.optim.layout import local
from scion_telemetry.testing import run_forked, run_threads

FRACTIONS = (1.0, 0.5, 0.25, 0.125)
Params = list[nn.Parameter]
Func = str | Callable[..., Tensor]
Make = Callable[[Params, Func], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of the table.

    Args:
        name: What it is called.
        make: The optimizer of some parameters.
        func: Name of the orthogonaliser; empty for torch.optim.Muon, which has its own.
        fraction: Of Dion2.
    """

    name: str
    make: Make
    func: str = "newton_schulz"
    fraction: float | None = None


def muon(params: Params, func: Func) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=1e-3, momentum=0.9, nesterov=False, weight_decay=0.0)


def scion(params: Params, func: Func) -> torch.optim.Optimizer:
    return Scion(params, lr=1e-3, momentum=0.1, norm="Spectral", norm_kwargs={"orthogonalizer": func})


def dion2(params: Params, func: Func, *, fraction: float, scope: str = "local") -> torch.optim.Optimizer:
    return Dion2(params, lr=1e-3, fraction=fraction, newton_schulz_func=func, selection_scope=scope)


MUON = Variant(name="torch.optim.Muon", make=muon, func="")
SCION = Variant(name="Scion", make=scion)
FUSED = Variant(name="Scion, muon_ns5", make=scion, func="muon_ns5")
DION2 = tuple(Variant(name=f"Dion2, {f:g}", make=partial(dion2, fraction=f), fraction=f) for f in FRACTIONS)
VARIANTS = (MUON, SCION, FUSED, *DION2)
OURS = VARIANTS[1:]


def shapes(layers: int, d: int) -> list[tuple[int, int]]:
    return [(d, d)] * (4 * layers) + [(4 * d, d)] * layers + [(d, 4 * d)] * layers


def parameters(layers: int, d: int, place: Callable[[Tensor], Tensor] = lambda full: full) -> Params:
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in shapes(layers, d):
        found.append(nn.Parameter(place(torch.randn(shape, generator=generator))))
        found[-1].grad = place(torch.randn(shape, generator=generator))
    return found


# ---------------------------------------------------------------------- one process


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """Seconds of one step, and of a part of it."""

    step: float
    part: float


@contextmanager
def timed_functions(seconds: list[float]) -> Iterator[None]:
    """Notes the seconds of every call of an orthogonaliser: of ours, and of the one of torch.optim.Muon."""

    def timed(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            start = time.perf_counter()
            result = real(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return result

        return call

    ours, theirs = Orthogonalizer.__call__, _muon._zeropower_via_newtonschulz
    with (
        patch.object(Orthogonalizer, "__call__", timed(ours)),
        patch.object(_muon, "_zeropower_via_newtonschulz", timed(theirs)),
    ):
        yield


def one_process(layers: int, d: int, repeats: int) -> tuple[dict[str, list[Time]], dict[str, float]]:
    """Times of steps and of their Newton-Schulz, and peak memory in buckets; a first step of each is not counted."""
    params, seconds = parameters(layers, d), list[float]()
    optimizers = {v.name: v.make(params, v.func) for v in VARIANTS}
    times: dict[str, list[Time]] = {v.name: [] for v in VARIANTS}
    with timed_functions(seconds):
        for turn in range(repeats + 1):
            for name in list(times)[:: -1 if turn % 2 else 1]:
                seconds.clear()
                start = time.perf_counter()
                optimizers[name].step()
                if turn:
                    times[name].append(Time(step=time.perf_counter() - start, part=sum(seconds)))
    return times, {name: peak(optimizer.step) / bucket(params) for name, optimizer in optimizers.items()}


def bucket(params: Params) -> int:
    """Bytes of this rank's pieces of all parameters of one shape: of the largest such set."""
    sizes: dict[torch.Size, int] = {}
    for p in params:
        sizes[p.shape] = sizes.get(p.shape, 0) + local(p).nbytes
    return max(sizes.values())


def peak(step: Callable[[], object]) -> int:
    """Largest number of bytes that a step holds beyond those it found, as the allocator reports them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: float(e["ts"])):
        now += int(event["args"]["Bytes"])
        most = max(most, now)
    return most


# ---------------------------------------------------------------------- several ranks


class TimedWork:
    """A transfer in flight whose wait is timed."""

    def __init__(self, work: Any, seconds: list[float]) -> None:
        self.work, self.seconds = work, seconds

    def wait(self) -> None:
        start = time.perf_counter()
        self.work.wait()
        self.seconds.append(time.perf_counter() - start)


def two_ranks(layers: int, d: int, repeats: int, rank: int, world: int) -> dict[str, tuple[list[Time], float]]:
    """Times of steps and of sending and waiting, and peak memory in buckets, on this rank; pieces are rows, as FSDP2's.

    A wait for a rank that still computes counts as communication.
    """
    mesh, seconds = init_device_mesh("cpu", (world,)), list[float]()
    params = parameters(layers, d, lambda full: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
    optimizers = {v.name: v.make(params, v.func) for v in OURS}
    times: dict[str, list[Time]] = {v.name: [] for v in OURS}

    def wrap(real: Callable[..., Any], *args: Any, **kwargs: Any) -> TimedWork:
        start = time.perf_counter()
        work = real(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return TimedWork(work, seconds)

    with patch.object(dist, "all_to_all_single", partial(wrap, dist.all_to_all_single)):
        for turn in range(repeats + 1):
            for name in list(times)[:: -1 if turn % 2 else 1]:
                dist.barrier()
                seconds.clear()
                start = time.perf_counter()
                optimizers[name].step()
                if turn:
                    times[name].append(Time(step=time.perf_counter() - start, part=sum(seconds)))
    return {name: (times[name], peak(optimizers[name].step) / bucket(params)) for name in times}


@dataclass(slots=True)
class Sent:
    """Bytes of one step that leave a rank for others, and that it adds up with them; of all ranks."""

    all_to_all: int = 0
    all_reduce: int = 0


def count(make: Make, d: int, world: int) -> Sent:
    """Exact bytes of one step on threads.

    Of one layer, as every layer sends as many, and with an orthogonaliser that does nothing, as none changes them.
    """
    sent = Sent()

    def all_to_all(real: Callable[..., Any], output: Tensor, input: Tensor, *splits: Any, **kwargs: Any) -> Any:
        leaving = splits[1]
        own = leaving[dist.get_rank(kwargs["group"])]
        sent.all_to_all += (sum(leaving) - own) * input.itemsize
        return real(output, input, *splits, **kwargs)

    def all_reduce(real: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.all_reduce += tensor.nbytes
        return real(tensor, *args, **kwargs)

    def step(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        place = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)], src_data_rank=None)
        optimizer = make(parameters(1, d, place), lambda input, epsilon: input)
        optimizer.step()

    with (
        patch.object(dist, "all_to_all_single", partial(all_to_all, dist.all_to_all_single)),
        patch.object(dist, "all_reduce", partial(all_reduce, dist.all_reduce)),
    ):
        run_threads(step, world, timeout=300.0)
    return sent


# ---------------------------------------------------------------------- the table


def predicted(fraction: float, layers: int, d: int) -> float:
    """Multiplications of Newton-Schulz at a fraction over those at 1: 4k²n + 2k³ of a k x n matrix, k <= n."""

    def cost(rows: float, columns: float) -> float:
        k, n = sorted((rows, columns))
        return 4 * k * k * n + 2 * k**3

    whole = sum(cost(*shape) for shape in shapes(layers, d))
    # Where nothing is cut, the shorter dimension is selected from.
    return sum(cost(fraction * min(shape), max(shape)) for shape in shapes(layers, d)) / whole


def ratio(times: Sequence[float], base: Sequence[float]) -> str:
    return f"{median(a / b for a, b in zip(times, base, strict=True)):.2f}"


def rows(layers: int, d: int, repeats: int) -> list[dict[str, str]]:
    run = partial(two_ranks, layers, d, repeats)
    ranks = run_forked(run, 2, timeout=1800.0)
    times, memory = one_process(layers, d, repeats)
    steps = {name: [t.step for t in found] for name, found in times.items()}
    parts = {name: [t.part for t in found] for name, found in times.items()}
    sent = {w: {v.name: count(v.make, d, w) for v in OURS} for w in (1, 2, 4)}
    added = {v.name: count(partial(dion2, fraction=v.fraction or 1.0, scope="global"), d, 2) for v in DION2}
    whole, found = DION2[0].name, []
    for v in VARIANTS:
        row = {
            "optimizer": v.name,
            "step / Muon": ratio(steps[v.name], steps[MUON.name]),
            "step / Scion": ratio(steps[v.name], steps[SCION.name]),
            "step / Dion2 at 1": ratio(steps[v.name], steps[whole]),
            "NS share of step": ratio(parts[v.name], steps[v.name]),
            "NS / NS at 1": ratio(parts[v.name], parts[whole]) if v.fraction else "",
            "predicted": f"{predicted(v.fraction, layers, d):.2f}" if v.fraction else "",
            "peak memory, buckets": f"{memory[v.name]:.2f}",
        }
        found.append(row | (_on_ranks(v, ranks, sent, added) if v in OURS else {}))
    return found


def _on_ranks(
    v: Variant,
    ranks: Sequence[Mapping[str, tuple[list[Time], float]]],
    sent: Mapping[int, Mapping[str, Sent]],
    added: Mapping[str, Sent],
) -> dict[str, str]:
    """The columns of several ranks; bytes relative to those that Dion2 at 1 sends in all_to_all on as many ranks."""
    whole = DION2[0].name
    return {
        "peak memory, 2 ranks": f"{max(r[v.name][1] for r in ranks):.2f}",
        "comm. share, 2 ranks": f"{median(t.part / t.step for r in ranks for t in r[v.name][0]):.2f}",
        "bytes, 1 rank": str(sent[1][v.name].all_to_all + sent[1][v.name].all_reduce),
        **{f"all_to_all, {w} ranks": _share(sent[w][v.name].all_to_all, sent[w][whole].all_to_all) for w in (2, 4)},
        "all_reduce, 2 ranks, local": _share(sent[2][v.name].all_reduce, sent[2][whole].all_to_all),
        "same, global": _share(added[v.name].all_reduce, sent[2][whole].all_to_all) if v in DION2 else "",
    }


def _share(part: int, whole: int) -> str:
    return "0" if part == 0 else f"{part / whole:.4g}"


def table(found: Sequence[Mapping[str, str]]) -> str:
    """Markdown, one column an optimizer: the numbers of the table outnumber its optimizers."""
    heads = list(dict.fromkeys(key for row in found for key in row))
    lines = [[head, *(row.get(head, "") for row in found)] for head in heads]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def main(layers: int = 12, width: int = 768, repeats: int = 5, quick: bool = False) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    typer.echo(table(rows(min(layers, 2) if quick else layers, width, repeats)))


if __name__ == "__main__":
    typer.run(main)
