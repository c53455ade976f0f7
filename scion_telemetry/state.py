"""What a tracker needs to go on where another one stopped: global tensors by name, whatever the sharding."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.collect import Collector
from scion_telemetry.finish import Finisher
from scion_telemetry.plan import Planned, agree
from scion_telemetry.sheet import selected_shapes
from scion_telemetry.sigma import Key

VERSION = 1

_Memory: TypeAlias = tuple[Mapping[Key, Tensor], Mapping[Key, int]]
"""First blocks of later runs, and the steps of the runs that found them."""


def gather(
    collector: Collector,
    finisher: Finisher,
    plan: Sequence[Planned],
    group: dist.ProcessGroup | None,
    *,
    moved: bool,
) -> dict[str, Any]:
    """When rows were last selected and how often, and the vectors that singular values start from; on all ranks.

    ``moved``: something other than steps has changed this rank's weights.
    """
    selections = _selections(collector, plan, group)
    tally = finisher.tally.state()
    memories = (collector.cut.memory, collector.memory)
    mine = [(dict(m.starts), dict(m.solved)) for m in memories]
    everybody = agree(lambda: (mine, tally, max(m.restless for m in memories), moved), group)
    starts, solved = _latest([memory for there, *_ in everybody for memory in there])
    names = [p.spec.info.name for p in plan]
    return {
        "version": VERSION,
        "selections": selections,
        "tally": everybody[0][1],
        "starts": {_text(key, names): start for key, start in starts.items()},
        "solved": {_text(key, names): step for key, step in solved.items()},
        "restless": max(restless for _, _, restless, _ in everybody),
        "moved": any(moved_there for *_, moved_there in everybody),
    }


def _selections(collector: Collector, plan: Sequence[Planned], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The history of all rows by parameter: every rank adds the rows that it tells of."""
    shapes = selected_shapes(plan) if collector.selects else [None] * len(plan)
    sizes = [0 if s is None else s.batch * s.rows for s in shapes]
    begin = [sum(sizes[:n]) for n in range(len(plan))]
    rows = torch.zeros(2, sum(sizes), dtype=torch.float64, device=collector.device)
    steps = torch.zeros(2, len(plan), dtype=torch.float64, device=collector.device)
    for param, number in collector.numbers.items():
        if param in collector.log:
            positions = collector.log.positions([param])[0]
            for total, here in zip(rows, collector.log.piece(param), strict=True):
                region, own = total[begin[number] : begin[number] + sizes[number]], here.double()
                region.add_(own) if positions is None else region.index_add_(0, positions, own)
            steps[0, number], steps[1, number] = collector.log.latest(param) or 0, collector.log.shown(param)
    if group is not None:
        dist.all_reduce(rows, group=group)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=group)
    last, count = rows.to("cpu", torch.int32)
    return {
        p.spec.info.name: {
            "seen": _seen(p),
            "last": last[begin[n] : begin[n] + sizes[n]].clone(),
            "count": count[begin[n] : begin[n] + sizes[n]].clone(),
            "latest": int(steps[0, n]),
            "shown": int(steps[1, n]),
        }
        for n, p in enumerate(plan)
        if sizes[n]
    }


def _latest(memories: Iterable[_Memory]) -> _Memory:
    """Of every matrix the vectors that were found last, on the host.

    Those of matrices in pieces are the same on all ranks, those of a whole matrix are where it is measured; what a
    resumed tracker was given and has not used is older than what has.
    """
    starts: dict[Key, Tensor] = {}
    solved: dict[Key, int] = {}
    for known, when in memories:
        for key, step in when.items():
            if step > solved.get(key, -1):
                solved[key], starts[key] = step, known[key].cpu().clone()
    return starts, solved


def restore(known: Mapping[str, Any], collector: Collector, finisher: Finisher, plan: Sequence[Planned]) -> None:
    """Go on from what ``gather`` gave; parameters that it does not know, or of another shape, start anew."""
    names = [p.spec.info.name for p in plan]
    for param, number in collector.numbers.items():
        told = known["selections"].get(names[number])
        if told is not None and told["seen"] == _seen(plan[number]) and param in collector.log:
            rows = [told[key].to(collector.device) for key in ("last", "count")]
            collector.log.restore(param, *rows, latest=told["latest"] or None, shown=told["shown"])
    same = {
        p.spec.info.name
        for p in plan
        if collector.selects
        and (told := known["selections"].get(p.spec.info.name)) is not None
        and told["seen"] == _seen(p)
    }
    finisher.tally.restore({key: {n: v for n, v in part.items() if n in same} for key, part in known["tally"].items()})
    numbers = {name: n for n, name in enumerate(names)}
    keys = {text: key for text in known["starts"] if (key := _key(text, numbers)) is not None}
    for memory in (collector.cut.memory, collector.memory):
        memory.restore(
            {key: known["starts"][text] for text, key in keys.items()},
            {key: known["solved"][text] for text, key in keys.items()},
            restless=known.get("restless", 0),
        )


def position(known: Any, start_step: int) -> tuple[int, int, int]:
    """The step, the number of flushes, and the step of the latest one, to go on from.

    Raises:
        TypeError: For what is no ``Tracker.state_dict()``.
        ValueError: For one of another version, or a ``start_step`` that contradicts it.
    """
    fields = ("version", "step", "flushes", "flushed", "selections", "tally", "starts", "solved")
    if not isinstance(known, Mapping) or not set(fields) <= set(known):
        raise TypeError(f"resume must be what Tracker.state_dict() returned, got {type(known).__name__}")
    if known["version"] != VERSION:
        raise ValueError(f"resume is of version {known['version']!r}, this tracker reads version {VERSION}")
    if start_step not in (0, known["step"]):
        raise ValueError(f"start_step is {start_step}, but resume is of step {known['step']}; leave start_step out")
    return known["step"], known["flushes"], known["flushed"]


def _seen(planned: Planned) -> list[int]:
    """What a parameter is selected from, as far as rows of one could pass for rows of another."""
    shape, spec = planned.shape, planned.spec
    return [shape.batch, shape.rows, shape.columns, spec.select_dim or 0, spec.heads]


def _text(key: Key, names: Sequence[str]) -> str:
    quantity, number, matrix = key
    return f"{quantity}/{matrix}/{names[number]}"


def _key(text: str, numbers: Mapping[str, int]) -> Key | None:
    quantity, matrix, name = text.split("/", 2)
    return (quantity, numbers[name], int(matrix)) if name in numbers else None
