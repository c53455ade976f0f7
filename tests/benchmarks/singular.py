"""σ₁ of all weights of one flush, against the singular values of gathered weights."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from measuring import Time, Traffic, Watched, flush_time, ms, slowest, take_turns
from peers import matrices, model_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scion_telemetry import Tracker, every
from scion_telemetry.testing import run_forked

COLUMNS = ["weight_spectral", "weight_spectral_upper"]
OURS, THEIRS = "ours", "full_tensor() and torch.linalg.svdvals"
FLUSHES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One method on one rank; an error for the first flush and one for the last."""

    times: list[Time]
    collectives: int
    errors: tuple[float, float] = (0.0, 0.0)
    enclosed: bool = True


def largest(weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, float]:
    found = {}
    for name, w in weights.items():
        full = w.full_tensor() if isinstance(w, DTensor) else w
        found[name] = torch.linalg.svdvals(full.to(dtype))[0].item()
    return found


def theirs(weights: Mapping[str, Tensor]) -> Time:
    dist.barrier()
    start = time.perf_counter()
    largest(weights)
    whole = time.perf_counter() - start
    return Time(whole=whole, part=whole)


def side_by_side(d: int, blocks: int, repeats: int, rank: int, world: int) -> dict[str, Result]:
    """Both methods on this rank; the second one on every rank, as it is usually called."""
    mesh = init_device_mesh("cpu", (world,))
    tensors = matrices(d, blocks, partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)]))
    model, optimizer = model_of(tensors)
    weights = {name: p.detach() for name, p in model.items()}
    exact = largest(weights, torch.float64)
    sink = Watched()

    def error() -> float:
        found = sink.values() if rank == 0 else {}
        return max((abs(found[f"{COLUMNS[0]}/{n}"] / s - 1) for n, s in exact.items() if found), default=0.0)

    with Tracker(model, optimizer, schedule=every(1), metrics=COLUMNS, sinks=[sink]) as tracker:

        def ours() -> Time:
            dist.barrier()
            return flush_time(optimizer, tracker)

        ours()
        first = error()
        for _ in range(FLUSHES - 2):
            ours()
        with Traffic() as traffic:
            ours()
        third = error()
        times = take_turns({OURS: ours, THEIRS: partial(theirs, weights)}, repeats)
        found = sink.values() if rank == 0 else {}
    with Traffic() as gathering:
        largest(weights)
    low, high = ({n: found[f"{c}/{n}"] for n in exact if found} for c in COLUMNS)
    slack = 1 + 1e-6  # float32 rows against a float64 truth
    enclosed = all(low[n] <= exact[n] * slack and exact[n] <= high[n] * slack for n in low)
    return {
        OURS: Result(times=times[OURS], collectives=traffic.collectives, errors=(first, third), enclosed=enclosed),
        THEIRS: Result(times=times[THEIRS], collectives=gathering.collectives),
    }


def section(d: int, blocks: int, repeats: int) -> list[dict[str, str]]:
    """The table's rows."""
    found = run_forked(partial(side_by_side, d, blocks, repeats), 2, timeout=900.0)
    times = {name: slowest([rank[name].times for rank in found]) for name in (OURS, THEIRS)}
    rows = []
    for name, result in found[0].items():
        pairs = zip(times[name], times[OURS], strict=True)
        rows.append(
            {
                "σ₁ of all weights, 2 ranks": name,
                "ms": ms(median(t.whole for t in times[name])),
                "over ours": f"{median(t.whole / o.whole for t, o in pairs):.1f}",
                "collectives": str(result.collectives),
                "error, first flush": f"{result.errors[0]:.1e}" if name == OURS else "",
                f"error, flush {FLUSHES}": f"{result.errors[1]:.1e}" if name == OURS else "",
                "truth in the interval": ("yes" if result.enclosed else "NO") if name == OURS else "",
            }
        )
    return rows
