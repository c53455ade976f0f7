"""The tracker: attaches to an optimizer, decides when, and drives measure -> reduce -> rows -> sinks."""

import dataclasses
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scion_telemetry import describe
from scion_telemetry.collect import Collector
from scion_telemetry.metrics.catalogue import (
    SELECTION_METRICS,
    Choice,
    Measured,
    choose,
    finish,
    finish_selection,
    selection_shape,
)
from scion_telemetry.optim.events import ObservableOptimizer, StepEvent
from scion_telemetry.plan import Planned, agree, make_plan, require_equal, warn_of_different_replicas
from scion_telemetry.reduce import Buffers, HostBuffers, Schema, drop_group, own_group
from scion_telemetry.rows import Batch, ParamInfo, Row, RunInfo, Sink, Value
from scion_telemetry.scalars import Number, ScalarLog, Window
from scion_telemetry.schedule import Schedule, every, name_of
from scion_telemetry.writer import Writer, open_sinks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushStats:
    """What one flush cost.

    Args:
        step: Its step.
        collectives: Collectives of this flush.
        numbers: Numbers in the reduced buffers, 8 bytes each.
    """

    step: int
    collectives: int
    numbers: int


class Tracker:
    """Measures an optimizer while it steps, exactly under any sharding, and writes rows to sinks.

        with Tracker(model, optimizer, schedule=every(10), sinks=[CsvSink("runs/a")]) as tracker:
            for batch in loader:
                ...
                optimizer.step()           # measured here, on schedule
                tracker.log(loss=loss)     # any scalar, mean over ranks

    It attaches with hooks and works with any ``torch.optim.Optimizer``; weights and optimizer state are bit-identical
    with and without it. Off schedule it does no collective and no copy. On several ranks every rank constructs it, at
    the same point of the program; only rank 0 writes.

    Args:
        model: The model, sharded or wrapped as it will train.
        optimizer: Its optimizer. Of one that does not show its updates, scheduled steps keep a copy of the weights.
        schedule: From the number of the step (1 for the first) to yes or no.
        metrics: A preset (``norms``, ``basic``, ``full``), or a list of columns, metrics and presets.
        sinks: Where rows go.
        run: Attributes of the run: seed, lr, data, …
        process_group: Ranks that together hold the model; None: all.
        start_step: Steps taken before, when a run is resumed.

    Raises:
        TypeError: For an optimizer that is no ``torch.optim.Optimizer``, a schedule that cannot be called, a sink
            without ``open``, ``write`` and ``close``.
        ValueError: For an unknown metric, a parameter that cannot be measured, settings that differ between ranks, or a
            failure on another rank.
        Exception: Of a sink that cannot start; those already started are closed again.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None = None,
        metrics: str | Sequence[str] = "basic",
        sinks: Sequence[Sink] = (),
        run: Mapping[str, Value] | None = None,
        process_group: dist.ProcessGroup | None = None,
        start_step: int = 0,
    ) -> None:
        self._schedule = every(10) if schedule is None else schedule
        self._optimizer = optimizer
        self._group = own_group(process_group)
        self._rank = 0 if self._group is None else self._group.rank()
        self._step = start_step
        self._closed = self._armed = False
        self._buffers: Buffers | None = None
        self._window: Window | None = None
        self.last_flush: FlushStats | None = None
        params = self._agree_on_parameters(model, metrics, sinks, run)
        self._collector = Collector(
            self._plan, self._choice, params, rank=self._rank, group=self._group, step=start_step
        )
        self._scalars = ScalarLog(self._group, start_step)
        self._count = len(params)
        self._open(sinks, dict(run or {}))
        self._handles = self._attach()

    def _agree_on_parameters(
        self, model: nn.Module, metrics: str | Sequence[str], sinks: Sequence[Sink], run: Mapping[str, Value] | None
    ) -> dict[str, Tensor]:
        params: dict[str, Tensor] = {}

        def mine() -> tuple[Any, ...]:
            _check_arguments(self._optimizer, self._schedule, sinks, run, self._step)
            self._choice = choose(metrics)
            params.update(describe.parameters(model, self._optimizer))
            columns = [name for name, _, _ in self._choice.columns]
            return describe.describe(model, self._optimizer, params), name_of(self._schedule), columns, self._step

        everybody = agree(mine, self._group)
        for what, i in (("the schedule", 1), ("the choice of metrics", 2), ("start_step", 3)):
            require_equal(what, [rank[i] for rank in everybody])
        self._plan = make_plan([rank[0] for rank in everybody])
        if not self._plan:
            raise ValueError("the optimizer steps none of the model's parameters: nothing would be measured")
        if self._rank == 0:
            warn_of_different_replicas(self._plan)
        return params

    def _open(self, sinks: Sequence[Sink], attributes: Mapping[str, Value]) -> None:
        def start() -> None:
            if self._rank == 0:
                info = self._run_info(attributes)
                open_sinks(sinks, lambda sink: sink.open(info))

        agree(start, self._group)
        self._writer = Writer(sinks) if self._rank == 0 else None

    def _run_info(self, attributes: Mapping[str, Value]) -> RunInfo:
        selects = any(p.spec.select_dim is not None for p in self._plan)
        units = {**self._choice.units(), **({m.name: m.unit for m in SELECTION_METRICS} if selects else {})}
        return RunInfo(
            attributes=attributes,
            params=tuple(_with_replicas(p) for p in self._plan),
            layer_columns=tuple(name for name, _, _ in self._choice.columns),
            selection_columns=tuple(m.name for m in SELECTION_METRICS) if selects else (),
            units=units,
            schedule=name_of(self._schedule),
            world_size=1 if self._group is None else self._group.size(),
            start_step=self._step,
            versions=_versions(),
        )

    def _attach(self) -> list[RemovableHandle]:
        eager: Any = torch.compiler.disable  # a compiled step must not trace, and recompile, what measures it
        handles = [
            self._optimizer.register_step_pre_hook(eager(self._before_step)),
            self._optimizer.register_step_post_hook(eager(self._after_step)),
        ]
        if isinstance(self._optimizer, ObservableOptimizer):
            handles.append(self._optimizer.register_step_observer(eager(self._on_event)))
        return handles

    # ------------------------------------------------------------------ hooks

    def _before_step(self, *_: object) -> None:
        self._armed = True
        if not self._schedule(self._step + 1):
            self._buffers = None
            return
        if sum(len(g["params"]) for g in self._optimizer.param_groups) != self._count:
            logger.warning(
                "the optimizer has other parameters than when the tracker attached; new ones are not tracked"
            )
            self._count = sum(len(g["params"]) for g in self._optimizer.param_groups)
        self._window = self._scalars.open(self._step + 1)
        self._buffers = Buffers(self._collector.schema, self._collector.device, extra=self._window.size)
        with torch.no_grad():
            self._collector.snapshot()

    def _on_event(self, event: StepEvent) -> None:
        self._collector.observe(event, self._step + 1, self._buffers)

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        if not self._armed:  # the end of a step around a step (a subclass that calls super().step())
            return
        self._armed = False
        self._step += 1
        buffers, window = self._buffers, self._window
        if buffers is None or window is None:
            return
        self._buffers = self._window = None
        self._collector.measure(self._optimizer.state, describe.decoupled_decay(self._optimizer), buffers)
        self._send(buffers, window)

    def _send(self, buffers: Buffers, window: Window) -> None:
        self._scalars.fill(buffers.tail, window)
        collectives = self._collector.reduce(buffers)
        host = buffers.to_host()
        self._scalars.close(host)
        numbers = buffers.schema.sum_size + buffers.schema.max_size + buffers.extra
        self.last_flush = FlushStats(step=self._step, collectives=collectives, numbers=numbers)
        if self._writer is not None:
            step, plan, choice = self._step, self._plan, self._choice
            self._writer.put(lambda: make_batch(step, plan, choice, host, window))

    # ------------------------------------------------------------------ the user's side

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self._step

    def log(self, /, **scalars: Number) -> None:
        """Log scalars of the step just taken, as numbers or tensors of one number; the mean over ranks is written.

        They travel with the next flush, so they appear one flush later than the norms. Nothing is sent off schedule.

        Raises:
            TypeError: For a value that is not a single real number.
            RuntimeError: After ``close``.
        """
        if self._closed:
            raise RuntimeError("the tracker is closed; log inside its with block")
        self._scalars.add(self._step, scalars)

    def flush(self) -> None:
        """Return once every row so far is with the sinks. Needs no other rank."""
        if self._writer is not None:
            self._writer.flush()

    def detach(self) -> None:
        """Remove the hooks; the optimizer is then as it was before. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Send the last scalars, write what is queued, close sinks, detach. Every rank calls it; twice is harmless."""
        if self._closed:
            return
        try:
            self._send_last_scalars()
            drop_group(self._group)
        finally:  # also when another rank is gone
            self._finish()

    def _send_last_scalars(self) -> None:
        window = self._scalars.open(self._step + 1, agreed=True)
        if window.names:
            buffers = Buffers(Schema.of(()), self._collector.device, extra=window.size)
            self._scalars.fill(buffers.tail, window)
            buffers.reduce(self._group)
            host = buffers.to_host()
            if self._writer is not None:
                step = self._step
                self._writer.put(lambda: Batch(step=step, scalars=_read(host, window)))

    def _finish(self) -> None:
        self._closed = True
        self.detach()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception the other ranks may be anywhere: write what is here, and wait for nobody.
        if kind is None:
            self.close()
        elif not self._closed:
            self._finish()


def make_batch(step: int, plan: Sequence[Planned], choice: Choice, host: HostBuffers, window: Window) -> Batch:
    """Finishing formulas: merged partial results to rows. Runs on the worker of rank 0."""
    host.wait()
    layers, selection = [], []
    for number, planned in enumerate(plan):

        def get(quantity: str, partial: str, number: int = number) -> Tensor:
            return host.get((number, quantity, partial))

        name = planned.spec.info.name
        values = finish(choice, Measured(shape=planned.shape, get=get))
        if values:
            layers.append(Row(step=step, param=name, values=values))
        if planned.spec.select_dim is not None:
            shape = selection_shape(planned.shape, planned.spec.select_dim, planned.spec.heads)
            if values := finish_selection(Measured(shape=shape, get=get)):
                selection.append(Row(step=step, param=name, values=values))
    return Batch(step=step, layers=tuple(layers), selection=tuple(selection), scalars=window.read(host.tail))


def _read(host: HostBuffers, window: Window) -> tuple[Any, ...]:
    host.wait()
    return window.read(host.tail)


def _check_arguments(optimizer: object, schedule: object, sinks: object, run: object, start_step: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"the tracker attaches to a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the optimizer "
            "inside a wrapper (accelerate: optimizer.optimizer)"
        )
    if not callable(schedule):
        raise TypeError(
            f"schedule must be a function from a step to True or False, such as every(10); got {schedule!r}"
        )
    if not isinstance(sinks, Sequence):
        raise TypeError(f"sinks must be a list, got {sinks!r}; write sinks=[...]")
    if not isinstance(run, Mapping | None):
        raise TypeError(f"run must be a dict of attributes such as {{'seed': 0}}, got {run!r}")
    for sink in sinks:
        missing = [m for m in ("open", "write", "close") if not callable(getattr(sink, m, None))]
        if missing:
            raise TypeError(f"a sink needs open(run), write(batch) and close(); {sink!r} has no {missing[0]}")
    if isinstance(start_step, bool) or not isinstance(start_step, int) or start_step < 0:
        raise ValueError(f"start_step must be a whole number >= 0, got {start_step!r}")


def _with_replicas(planned: Planned) -> ParamInfo:
    return dataclasses.replace(planned.spec.info, layout=planned.layout)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("scion-telemetry", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found
