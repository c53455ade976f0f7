"""The tracker: attaches to optimizers, decides when, and drives measure -> reduce -> rows -> sinks."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scion_telemetry import describe, state
from scion_telemetry.collect import FLAGS, GROWN, Collector
from scion_telemetry.cost import OWN, Clock, FlushStats, cost_scalars
from scion_telemetry.finish import Finisher
from scion_telemetry.metrics.choice import SELECTION, Metrics, choose
from scion_telemetry.optim.events import StepEvent
from scion_telemetry.plan import agree, make_plan, require_equal, warn_of_different_replicas
from scion_telemetry.reduce import Buffers, HostBuffers, Schema, drop_group, own_group
from scion_telemetry.rounds import Rounds
from scion_telemetry.rows import Batch, RunInfo, Scalar, Sink, Value
from scion_telemetry.scalars import Number, ScalarLog, Window
from scion_telemetry.schedule import Schedule, every, name_of
from scion_telemetry.setup import check_arguments, run_info, unwrap
from scion_telemetry.sheet import Flush, selected_shapes
from scion_telemetry.verify import Verification, verify
from scion_telemetry.watch import Watch
from scion_telemetry.writer import Writer, open_sinks

logger = logging.getLogger(__name__)


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
        optimizer: Its optimizer, or a list of those that step its parameters; one training step is then a step of each.
            Of one that does not show its updates, scheduled steps keep a copy of the weights.
        schedule: From the number of the step (1 for the first) to yes or no.
        metrics: A preset (``norms``, ``basic``, ``spectral``, ``full``); a list of columns, metrics, presets and
            metrics of your own (``custom``); or a dict from these to every how many flushes they are measured.
        sinks: Where rows go.
        run: Attributes of the run: seed, lr, data, …
        process_group: Ranks that together hold the model; None: all, in a process group of the tracker's own.
        start_step: Steps taken before, when a run is resumed without ``resume``.
        resume: ``state_dict()`` of the tracker that this one continues.

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
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        schedule: Schedule | None = None,
        metrics: Metrics = "basic",
        sinks: Sequence[Sink] = (),
        run: Mapping[str, Value] | None = None,
        process_group: dist.ProcessGroup | None = None,
        start_step: int = 0,
        resume: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._schedule = every(10) if schedule is None else schedule
        self._given, self._group = process_group, own_group(process_group)
        self._rank = 0 if self._group is None else self._group.rank()
        self._step, self._flushes, self._flushed = start_step, 0, start_step
        self._closed = False
        self._flush: Flush | None = None
        self._window: Window | None = None
        self._merged: HostBuffers | None = None
        self._snapshots: dict[Tensor, Tensor] = {}
        self._settings: dict[Tensor, describe.Setting] = {}
        self._clock = Clock()
        self._watch = Watch(())
        self.last_flush: FlushStats | None = None
        params = self._agree(optimizer, metrics, sinks, run, resume)
        self._start_step, self._attributes = self._step, dict(run or {})
        self._attach(params)
        if resume is not None:
            state.restore(resume, self._collector, self._finisher, self._plan)
            self._watch.moved = bool(resume.get("moved", False))
        self._scalars = ScalarLog(self._group, self._step)
        self._open(sinks)
        self._rounds = Rounds(
            self._optimizers,
            begin=self._begin,
            before=self._look,
            after=self._after,
            end=self._end,
            event=self._on_event,
            grams=lambda: self._flush is not None and "gram_rank" in self._flush.choice.names("momentum"),
        )

    def _agree(
        self, optimizer: object, metrics: Metrics, sinks: Sequence[Sink], run: object, resume: Mapping[str, Any] | None
    ) -> dict[str, Tensor]:
        """Check this rank's arguments, tell the others, and make the plan; returns this rank's parameters."""
        params: dict[str, Tensor] = {}

        def mine() -> tuple[Any, ...]:
            self._optimizers = unwrap(optimizer)
            check_arguments(self._model, self._schedule, sinks, run, self._step)
            if resume is not None:
                self._step, self._flushes, self._flushed = state.position(resume, self._step)
            self._choice = choose(metrics)
            params.update(describe.parameters(self._model, self._optimizers))
            specs = describe.describe(self._model, self._optimizers, params)
            names = [*self._choice.units(), *sorted(self._choice.extras)]
            return specs, name_of(self._schedule), (names, dict(self._choice.every)), (self._step, self._flushes)

        everybody = agree(mine, self._group)
        for what, i in (("the schedule", 1), ("the choice of metrics", 2), ("the step to start from", 3)):
            require_equal(what, [rank[i] for rank in everybody])
        self._plan = make_plan([rank[0] for rank in everybody])
        if not self._plan:
            raise ValueError("the optimizer steps none of the model's parameters: nothing would be measured")
        if not (self._choice.columns or self._choice.histograms or any(selected_shapes(self._plan))):
            raise ValueError(
                f"metrics={metrics!r} measures selections alone, and no optimizer here selects rows: nothing would be "
                'measured; add "norms", or train with optim.Dion2'
            )
        if self._rank == 0:
            warn_of_different_replicas(self._plan)
        return params

    def _attach(self, params: Mapping[str, Tensor]) -> None:
        with torch.inference_mode(False):  # what is kept is changed later, also outside of where the tracker was made
            self._collector = Collector(
                self._plan,
                params,
                rank=self._rank,
                group=self._group,
                step=self._step,
                selects=SELECTION in self._choice.extras,
            )
        self._finisher = Finisher(self._plan)
        self._watch = Watch(params.values() if self._choice.follows else (), moved=self._watch.moved)
        self._known = self._parameters()
        self._roles = {p: self._plan[n].spec.info.role for p, n in self._collector.numbers.items()}
        self._own = {id(o): frozenset(p for group in o.param_groups for p in group["params"]) for o in self._optimizers}

    def _open(self, sinks: Sequence[Sink]) -> None:
        def start() -> None:
            if self._rank == 0:
                info = self._run_info()
                open_sinks(sinks, lambda sink: sink.open(info))

        agree(start, self._group)
        self._writer = Writer(sinks) if self._rank == 0 else None

    def _run_info(self) -> RunInfo:
        return run_info(
            self._plan,
            self._choice,
            attributes=self._attributes,
            schedule=name_of(self._schedule),
            world_size=1 if self._group is None else self._group.size(),
            start_step=self._start_step,
        )

    # ------------------------------------------------------------------ while the optimizers step

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Without gradients, and in the precision that is asked for, whatever surrounds the step."""
        with torch.no_grad(), torch.autocast(self._collector.device.type, enabled=False):
            yield

    def _begin(self) -> None:
        with self._clock, self._undisturbed():
            due = bool(self._schedule(self._step + 1))
            self._collector.log.drop()
            self._flush = self._open_flush() if due else None
            keeps = self._keeps_for_the_next(due)
            if self._flush is not None or keeps:
                # One that left its optimizer is not told of: until that is noticed it has no settings.
                self._settings = dict.fromkeys(self._collector.numbers, describe.Setting(lr=math.nan))
                for optimizer in self._optimizers:
                    self._settings.update(describe.settings(optimizer, self._roles))
            if self._flush is not None:
                self._flush.settings = self._settings
            hidden = keeps or (self._flush is not None and self._flush.choice.names("update"))
            self._snapshots = self._collector.snapshot() if hidden else {}
            self._collector.previous.keeps = keeps

    def _open_flush(self) -> Flush:
        self._grow()
        choice = self._choice.at(self._flushes)
        self._window = self._scalars.open(self._step + 1)
        header = {"the number of the step": float(self._step + 1), "logged scalars": float(self._window.size)}
        buffers = Buffers(
            self._collector.schema(choice), self._collector.device, extra=self._window.size, header=header, flags=FLAGS
        )
        buffers.raised[GROWN] = float(self._parameters() != self._known)
        window = self._step + 1 - self._flushed
        self._watch.look_up()
        moved = self._watch.moved
        return Flush(step=self._step + 1, window=window, choice=choice, buffers=buffers, settings={}, moved=moved)

    def _look(self) -> None:
        with self._clock, self._undisturbed():
            self._watch.look()
            if self._flush is not None:
                self._flush.moved |= self._watch.moved

    def _keeps_for_the_next(self, due: bool) -> bool:
        following = self._choice.at(self._flushes + due)
        return "with_previous" in following.names("update") and bool(self._schedule(self._step + 2))

    def _on_event(self, event: StepEvent) -> None:
        with self._clock, self._undisturbed():
            self._collector.observe(event, self._step + 1, self._flush)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        with self._clock, self._undisturbed():
            self._watch.rest()
            own = self._own[id(optimizer)]
            snapshots = {p: before for p, before in self._snapshots.items() if p in own}
            if self._flush is not None:
                self._flush.snapshots = snapshots
                momenta = optimizer.state
                self._collector.measure(lambda p: describe.find_momentum(momenta.get(p, {}), p), self._flush, own)
            self._collector.keep_hidden(snapshots, self._settings)

    def _end(self) -> None:
        with self._clock, self._undisturbed():
            self._step += 1
            self._snapshots = {}
            self._collector.previous.end_step()
            flush, window = self._flush, self._window
            self._flush = self._window = None
            if flush is not None and window is not None:
                self._send(flush, window)

    def _send(self, flush: Flush, window: Window) -> None:
        self._scalars.fill(flush.buffers.tail, window)
        collectives, size = self._collector.reduce(flush)
        if flush.choice.follows:
            self._watch.moved = False
        self._merged = host = flush.buffers.to_host()
        self._scalars.close(host)
        self._flushes, self._flushed = self._flushes + 1, self._step
        spent, between = self._clock.lap()
        self.last_flush = FlushStats(
            step=self._step,
            collectives=collectives,
            bytes=size,
            numbers=flush.buffers.numbers,
            milliseconds=1e3 * spent,
        )
        if self._writer is not None:
            cost = cost_scalars(self.last_flush, flush.window, between)
            step, finisher, choice = self._step, self._finisher, flush.choice

            def make() -> Batch:
                host.wait()
                return finisher.batch(step, choice, host, (*window.read(host.tail), *cost))

            self._writer.put(make)

    # ------------------------------------------------------------------ parameters that come later

    def _parameters(self) -> frozenset[int]:
        return frozenset(id(p) for o in self._optimizers for group in o.param_groups for p in group["params"])

    def _grow(self) -> None:
        """Take new parameters of the optimizers, once some rank has said that it has some."""
        changed = self._parameters() != self._known
        if self._merged is not None and self._group is not None:
            self._merged.wait()
            self._merged.check()
            changed = bool(self._merged.raised[GROWN])
        if not changed or (self._merged is None and self._group is not None):
            return
        self.flush()
        params: dict[str, Tensor] = {}

        def mine() -> Any:
            params.update(describe.parameters(self._model, self._optimizers))
            return describe.describe(self._model, self._optimizers, params)

        try:
            plan = make_plan(agree(mine, self._group))
        except ValueError:  # on all ranks; training must not end for it
            logger.exception("the optimizers' parameters changed to what cannot be measured; the others still are")
            self._known = self._parameters()
            return
        known = state.gather(self._collector, self._finisher, self._plan, self._group, moved=self._watch.moved)
        self._plan = plan
        self._attach(params)
        state.restore(known, self._collector, self._finisher, self._plan)
        self._merged = None
        if self._writer is not None:
            info = self._run_info()
            self._writer.put(lambda: info)

    # ------------------------------------------------------------------ the user's side

    @property
    def step(self) -> int:
        """Number of training steps taken."""
        return self._step

    def log(self, /, **scalars: Number) -> None:
        """Log scalars of the step just taken, as numbers or tensors of one number; the mean over ranks is written.

        They travel with the next flush, so they appear one flush later than the norms. Nothing is sent off schedule.

        Raises:
            TypeError: For a value that is not a single real number.
            ValueError: For a name that the tracker writes itself.
            RuntimeError: After ``close``.
        """
        self._require_open("log")
        for name in scalars:
            if name in OWN or "/total" in name:
                raise ValueError(f"{name!r} is of the tracker's own ({', '.join(OWN)}, .../total); rename yours")
        self._scalars.add(self._step, scalars)

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"the tracker is closed; {what} inside its with block")

    def flush(self) -> None:
        """Return once every row so far is with the sinks. Needs no other rank."""
        if self._writer is not None:
            self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """What ``Tracker(resume=...)`` needs to go on without a gap; the same on all ranks, for any later sharding.

        Every rank calls it (it is one small collective or three). Scalars logged so far are sent first, and all rows
        are with the sinks when it returns: a checkpoint never knows more than the files.
        """
        self._require_open("call state_dict")
        self._send_scalars()
        self.flush()
        self._watch.look()
        found = state.gather(self._collector, self._finisher, self._plan, self._group, moved=self._watch.moved)
        return {**found, "step": self._step, "flushes": self._flushes, "flushed": self._flushed}

    def verify(self, *, params: int = 8) -> Verification:
        """Compare reduced numbers of the weights, gradients and momenta as they are now with a gathered reference.

        Every rank calls it. A sample of ``params`` parameters, spread over the model, is gathered in float64, one at a
        time; that each element was counted once is checked of all parameters.

        Returns:
            The largest relative error, where it is, and what was counted.
        """
        self._require_open("call verify")
        if self._flush is None:  # between two optimizers of a step it is measured with what there was
            self._grow()
        self._watch.look()
        self._watch.look_up()
        momenta = {p: o.state.get(p, {}) for o in self._optimizers for p in self._own[id(o)]}
        with self._undisturbed():
            return verify(
                self._collector,
                self._plan,
                lambda p: describe.find_momentum(momenta.get(p, {}), p),
                self._group,
                params=params,
                step=self._step,
                moved=self._watch.moved,
            )

    def detach(self) -> None:
        """Remove the hooks; the optimizers are then as they were before. May be called twice."""
        self._rounds.detach()

    def close(self) -> None:
        """Send the last scalars, write what is queued, close sinks, detach. Every rank calls it; twice is harmless."""
        if self._closed:
            return
        try:
            self._rounds.finish()
            self._send_scalars()
            drop_group(self._group, self._given)
        finally:  # also when another rank is gone
            self._finish()

    def _send_scalars(self) -> None:
        window = self._scalars.open(self._step + 1, agreed=True)
        if window.names:
            buffers = Buffers(Schema.of(()), self._collector.device, extra=window.size)
            self._scalars.fill(buffers.tail, window)
            buffers.reduce(self._group)
            self._scalars.close(None)
            host = buffers.to_host()
            if self._writer is not None:
                step = self._step
                self._writer.put(lambda: Batch(step=step, scalars=_read(host, window)))

    def _finish(self) -> None:
        self._closed = True
        self.detach()
        if self._writer is not None:
            step, tally = self._step, self._finisher.tally
            self._writer.put(lambda: Batch(step=step, slices=tally.slices()))
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
            if self._group is None:
                self._send_scalars()
            self._finish()


def _read(host: HostBuffers, window: Window) -> tuple[Scalar, ...]:
    host.wait()
    return window.read(host.tail)
