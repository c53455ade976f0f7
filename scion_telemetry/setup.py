"""What is checked and written down when a tracker attaches."""

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from scion_telemetry.chosen import COLUMNS as SLICE_COLUMNS
from scion_telemetry.metrics.choice import FREQUENCIES, ROWS, SELECTION, Choice
from scion_telemetry.metrics.selection_columns import SELECTION_METRICS
from scion_telemetry.plan import Planned
from scion_telemetry.rows import ParamInfo, RunInfo, Value


def unwrap(optimizers: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers to hook: one or several, out of wrappers such as that of accelerate.

    Raises:
        TypeError: For what is no ``torch.optim.Optimizer``, also inside.
        ValueError: For none, or the same one twice.
    """
    several = isinstance(optimizers, Sequence) and not isinstance(optimizers, str)
    found = tuple(_unwrap(o) for o in (optimizers if several else [optimizers]))
    if not found:
        raise ValueError("the tracker needs at least one optimizer, got an empty list")
    if len({id(o) for o in found}) != len(found):
        raise ValueError("the same optimizer is listed twice; list each one once")
    return found


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    inner = optimizer
    # accelerate's wrapper is an Optimizer itself, whose hooks nobody calls: the one inside steps.
    while isinstance(nested := getattr(inner, "optimizer", None), torch.optim.Optimizer) and nested is not inner:
        inner = nested
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"the tracker attaches to a torch.optim.Optimizer or a list of them, got {type(optimizer).__name__}; pass "
            "the optimizer inside a wrapper"
        )
    return inner


def check_arguments(model: object, schedule: object, sinks: object, run: object, start_step: object) -> None:
    """Refuse what would fail later.

    Raises:
        TypeError: For a model that is none, a schedule that cannot be called, sinks that are none, attributes that are
            no dict of plain values.
        ValueError: For a ``start_step`` that is no whole number >= 0.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the first argument is the model, an nn.Module; got {type(model).__name__}")
    if not callable(schedule):
        raise TypeError(
            f"schedule must be a function from a step to True or False, such as every(10); got {schedule!r}"
        )
    if not isinstance(sinks, Sequence):
        raise TypeError(f"sinks must be a list, got {sinks!r}; write sinks=[...]")
    if not isinstance(run, Mapping | None):
        raise TypeError(f"run must be a dict of attributes such as {{'seed': 0}}, got {run!r}")
    for name, value in (run or {}).items():
        if not isinstance(value, str | int | float | bool | None):
            raise TypeError(f"run[{name!r}] must be a text, a number, True, False or None, got {type(value).__name__}")
    for sink in sinks:
        missing = [m for m in ("open", "write", "close") if not callable(getattr(sink, m, None))]
        if missing:
            raise TypeError(f"a sink needs open(run), write(batch) and close(); {sink!r} has no {missing[0]}")
    if isinstance(start_step, bool) or not isinstance(start_step, int) or start_step < 0:
        raise ValueError(f"start_step must be a whole number >= 0, got {start_step!r}")


def run_info(
    plan: Sequence[Planned],
    choice: Choice,
    *,
    attributes: Mapping[str, Value],
    schedule: str,
    world_size: int,
    start_step: int,
) -> RunInfo:
    """What sinks learn of the run."""
    selects = SELECTION in choice.extras and any(p.spec.select_dim is not None for p in plan)
    frequencies = (FREQUENCIES,) if selects and FREQUENCIES in choice.extras else ()
    units = {**choice.units(), **({m.name: m.unit for m in SELECTION_METRICS} if selects else {})}
    return RunInfo(
        attributes=attributes,
        params=tuple(_with_what_ranks_know(p) for p in plan),
        layer_columns=tuple(name for name, _, _ in choice.columns),
        selection_columns=tuple(m.name for m in SELECTION_METRICS) if selects else (),
        histograms=(*(name for name, _, _ in choice.histograms), *frequencies),
        slice_columns=SLICE_COLUMNS if selects else (),
        selection_rows=selects and ROWS in choice.extras,
        units=units,
        schedule=schedule,
        world_size=world_size,
        start_step=start_step,
        versions=_versions(),
    )


def _with_what_ranks_know(planned: Planned) -> ParamInfo:
    info = planned.spec.info
    options = dict(info.options)
    if planned.spec.select_dim is not None:
        options["selection"] = "rows" if planned.spec.select_dim == -2 else "columns"
        options["shards"] = max(1, len(planned.shards))
    return dataclasses.replace(info, layout=planned.layout, options=options)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("scion-telemetry", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found
