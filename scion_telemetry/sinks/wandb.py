"""The sink for Weights & Biases: a run of its own, or rows in the run of a trainer that logs there already.

Keys are ``{column}/{param}``, ``selection_{column}/{param}``, ``scalars/{name}`` and, for histograms,
``{name}/{param}``; every row carries ``telemetry/step``, the x-axis of them all, and ``telemetry/nonfinite``. wandb is
imported by ``open`` and for histograms alone.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scion_telemetry.rows import SCHEMA_VERSION, Batch, Histogram, Row, RunInfo, key

from .plain import plain_mapping
from .wandb_guest import NONFINITE_KEY, STEP_KEY, GuestRows

logger = logging.getLogger(__name__)

_OFFLINE = 'mode="offline" or WANDB_MODE=offline writes the run to disk, and `wandb sync` uploads it later'
_MAX_BINS = 512  # wandb.Histogram.MAX_LENGTH


class WandbSink:
    """Logs to Weights & Biases, in one of two ways.

    Its own run (the default): one row a step, beside whatever runs the trainer has. The config holds the run's
    attributes and a summary of the parameters.

    A given run (``run=``): one row a batch goes into the user's run, whose rows and step counter keep the place they
    would have had (see ``wandb_guest``); it is not finished here. A scalar stands there with its latest value at the
    step of its batch; all values at their own steps are in a run of its own and in CSV.

    A histogram is a ``wandb.Histogram`` of the counts in quarter octaves (wider ones where it spans more than 128
    octaves). Zeros have no place on its axis and are left out; values that are not finite are too, and count in
    ``telemetry/nonfinite``. The mass in the bins and all slices are left out: CsvSink keeps them.

    Args:
        project: Project of the own run; by default ``WANDB_PROJECT`` decides.
        name: Display name of the own run.
        group: Group of the own run.
        dir: Folder in which ``wandb/`` is made.
        mode: ``online``, ``offline``, ``disabled``, ``shared``; ``None`` follows ``WANDB_MODE``, and where that is
            unset goes online when the user is logged in and offline otherwise.
        run: The run to log into. Excludes all of the above.
        max_keys: Most layer, selection and histogram keys in a batch. Parameters beyond are left out in model
            order, with one warning.
            Points of a selection's curves (``mass_at_0.25``) are never sent: they are in the run directory.
        **init: Further arguments of ``wandb.init`` for the own run: ``entity``, ``tags``, ``settings``, ...
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        dir: str | os.PathLike[str] | None = None,
        mode: str | None = None,
        run: Any = None,
        max_keys: int = 2000,
        **init: Any,
    ) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int):
            raise TypeError(f"max_keys must be an int, got {max_keys!r}")
        if max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, got {max_keys!r}")
        if mode not in (None, "online", "offline", "disabled", "shared"):
            raise ValueError(f"mode must be online, offline, disabled, shared or None, got {mode!r}")
        own = {"project": project, "name": name, "group": group, "dir": dir, "mode": mode, **init}
        self._init = {option: value for option, value in own.items() if value is not None}
        if run is not None and self._init:
            raise ValueError(f"run= logs into a run that exists already, so {sorted(self._init)!r} cannot be set too")
        missing = [name for name in ("log", "define_metric", "step") if run is not None and not hasattr(run, name)]
        if missing:
            raise ValueError(f"run must be a wandb run, as wandb.init returns it; {run!r} has no {missing!r}")
        self._given = run
        self._run: Any = None
        self._guest: GuestRows | None = None
        self._budget = _KeyBudget(max_keys)
        self._pid = -1

    def open(self, run: RunInfo) -> None:
        """Start the run and declare the x-axis of every key.

        Raises:
            RuntimeError: wandb is not installed, or the run could not be started; says what to do.
        """
        if self._given is not None:
            self._run, self._guest = self._given, GuestRows(self._given)
        else:
            self._run = _start({**self._init, "config": _config(run)})
        self._budget.extend(param.name for param in run.params)
        self._run.define_metric(STEP_KEY, hidden=True)
        self._define(run)
        self._pid = os.getpid()

    def extend(self, run: RunInfo) -> None:
        """Take the rows of the parameters that ``run`` has now; the config of the own run sums them up."""
        if os.getpid() != self._pid:
            return
        self._budget.extend(param.name for param in run.params)
        self._define(run)  # a first parameter that is selected from brings columns
        if self._guest is None:
            self._run.config.update({"telemetry": _telemetry(run)}, allow_val_change=True)

    def _define(self, run: RunInfo) -> None:
        sections = [
            *run.layer_columns,
            *(f"selection_{n}" for n in run.selection_columns if "_at_" not in n),
            "scalars",
        ]
        for name in [NONFINITE_KEY, *(f"{section}/*" for section in (*sections, *run.histograms))]:
            self._run.define_metric(name, step_metric=STEP_KEY)

    def write(self, batch: Batch) -> None:
        """Log the rows of ``batch``."""
        if os.getpid() != self._pid:  # a forked child: the rows are its parent's
            return
        batch = _without_curves(batch)
        if self._guest is not None:
            if row := self._row(batch.step, batch):
                self._guest.put(int(batch.step), row)
            return
        for step, part in _by_step(batch):
            if row := self._row(step, part):
                self._run.log(row)

    def close(self) -> None:
        """Finish the own run; in a given run place the rows that still wait."""
        if os.getpid() != self._pid:
            return
        if self._guest is not None:
            self._guest.flush()
        else:
            self._run.finish()
        self._pid = -1

    def _row(self, step: int, batch: Batch) -> dict[str, Any]:
        """``batch`` as one wandb row of optimizer step ``step``; empty when there is nothing to say."""
        values = [float(value) for row in (*batch.layers, *batch.selection) for value in row.values.values()]
        values += [float(scalar.value) for scalar in batch.scalars]
        if not (values or batch.histograms):
            return {}
        kept = self._budget.keep(batch)
        row: dict[str, Any] = {STEP_KEY: int(step)}
        row |= _flat(kept.layers, "") | _flat(kept.selection, "selection_")
        row |= {key("scalars", scalar.name): float(scalar.value) for scalar in batch.scalars}
        row |= _wandb_histograms(kept.histograms)
        nonfinite = sum(not math.isfinite(value) for value in values) + _count_nonfinite(batch.histograms)
        if batch.layers or batch.histograms or nonfinite:
            row[NONFINITE_KEY] = nonfinite
        return row


class _KeyBudget:
    """Keeps the parameters, in model order, whose keys fit; a parameter that was left out once stays out."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._end: int | None = None  # parameters from this index on are left out
        self.order: dict[str, int] = {}

    def extend(self, names: Iterable[str]) -> None:
        """Put the parameters that are new behind those that are known, wherever the model has them."""
        for name in names:
            self.order.setdefault(name, len(self.order))

    def keep(self, batch: Batch) -> Batch:
        """``batch`` without the rows of the parameters that do not fit."""
        sizes: Counter[int] = Counter()
        for row in (*batch.layers, *batch.selection):
            sizes[self.order[row.param]] += len(row.values)
        sizes.update(self.order[histogram.param] for histogram in batch.histograms)
        used = 0
        for index in sorted(sizes):
            used += sizes[index]
            if used > self._max_keys and (self._end is None or index < self._end):
                self._cut(index)
                break
        if self._end is None:
            return batch
        end = self._end
        layers, selection = (
            tuple(row for row in rows if self.order[row.param] < end) for rows in (batch.layers, batch.selection)
        )
        histograms = tuple(histogram for histogram in batch.histograms if self.order[histogram.param] < end)
        return Batch(step=batch.step, layers=layers, selection=selection, histograms=histograms)

    def _cut(self, index: int) -> None:
        if self._end is None:
            logger.warning(
                "max_keys=%d: %d of %d parameters are left out of wandb, from %r on; CsvSink keeps all",
                self._max_keys,
                len(self.order) - index,
                len(self.order),
                list(self.order)[index],
            )
        self._end = index


def _without_curves(batch: Batch) -> Batch:
    """``batch`` without the points of curves: as keys they would crowd out the rest, and nobody looks at them so."""
    rows = [{name: value for name, value in row.values.items() if "_at_" not in name} for row in batch.selection]
    kept = tuple(replace(row, values=values) for row, values in zip(batch.selection, rows, strict=True))
    return replace(batch, selection=kept)


def _flat(rows: Iterable[Row], prefix: str) -> dict[str, float]:
    return {key(prefix + name, row.param): float(value) for row in rows for name, value in row.values.items()}


def _wandb_histograms(histograms: Iterable[Histogram]) -> dict[str, Any]:
    """Those that hold anything but zeros and values that are not finite."""
    binned: dict[str, Any] = {key(item.name, item.param): _bins(item) for item in histograms}
    if not any(counts for counts, _ in binned.values()):
        return {}
    import wandb

    return {name: wandb.Histogram(np_histogram=bins) for name, bins in binned.items() if bins[0]}


def _bins(histogram: Histogram) -> tuple[list[float], list[float]]:
    """Counts and edges of consecutive bins; two, four, ... quarter octaves are one where wandb would refuse so many."""
    quarters = {round(4 * x): n for x, n in zip(histogram.log2, histogram.count, strict=True) if math.isfinite(x)}
    if not quarters:
        return [], []
    width = 1
    while max(quarters) // width - min(quarters) // width >= _MAX_BINS:
        width *= 2
    first = min(quarters) // width
    counts = [0.0] * (max(quarters) // width - first + 1)
    for quarter, count in quarters.items():
        counts[quarter // width - first] += float(count)
    return counts, [2.0 ** ((first + index) * width / 4) for index in range(len(counts) + 1)]


def _count_nonfinite(histograms: Iterable[Histogram]) -> int:
    return sum(int(n) for item in histograms for x, n in zip(item.log2, item.count, strict=True) if math.isnan(x))


def _by_step(batch: Batch) -> list[tuple[int, Batch]]:
    """``batch`` as one batch for every distinct step in it, ascending."""
    steps = {int(row.step) for row in (*batch.layers, *batch.selection)}
    steps |= {int(scalar.step) for scalar in batch.scalars} | {int(item.step) for item in batch.histograms}
    return [
        (
            step,
            Batch(
                step=step,
                layers=tuple(row for row in batch.layers if row.step == step),
                selection=tuple(row for row in batch.selection if row.step == step),
                scalars=tuple(scalar for scalar in batch.scalars if scalar.step == step),
                histograms=tuple(histogram for histogram in batch.histograms if histogram.step == step),
            ),
        )
        for step in sorted(steps)
    ]


def _config(run: RunInfo) -> dict[str, Any]:
    """Config of the own run: the attributes as they are, everything of ours under ``telemetry``."""
    return {**plain_mapping(run.attributes), "telemetry": _telemetry(run)}


def _telemetry(run: RunInfo) -> dict[str, Any]:
    params = {
        "count": len(run.params),
        "elements": sum(math.prod(param.shape) for param in run.params),
        "roles": dict(Counter(param.role for param in run.params)),
        "algorithms": dict(Counter(param.algorithm for param in run.params)),
        "shapes": dict(Counter("x".join(map(str, param.shape)) for param in run.params)),
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "schedule": run.schedule,
        "world_size": run.world_size,
        "start_step": run.start_step,
        "versions": dict(run.versions),
        "params": params,
    }


def _start(init: dict[str, Any]) -> Any:
    """Start a run of our own beside any other of this process.

    Raises:
        RuntimeError: wandb is missing, or refused.
    """
    try:
        import wandb  # only rank 0 ever gets here
    except ImportError as error:
        raise RuntimeError("WandbSink needs wandb: pip install 'scion-telemetry[wandb]'") from error
    if "dir" in init:
        # wandb's service may have been started by another process, in another folder.
        init = {**init, "dir": os.path.abspath(init["dir"])}
        Path(init["dir"]).mkdir(parents=True, exist_ok=True)  # wandb falls back to a temporary folder otherwise
    try:
        if "mode" not in init and not os.environ.get("WANDB_MODE") and not _can_go_online(wandb):
            logger.info("no wandb login found: the run is written offline, `wandb sync` uploads it")
            init["mode"] = "offline"
        return wandb.init(reinit="create_new", **init)
    except (wandb.errors.Error, OSError) as error:
        raise RuntimeError(
            f"the wandb run could not be started ({error}); log in with `wandb login`, or {_OFFLINE}"
        ) from error


def _can_go_online(wandb: Any) -> bool:
    """Whether the trainer's run is online, or else whether a login is on file; asks neither the user nor the server."""
    if wandb.run is not None:  # wandb.login answers False from now on
        return not (wandb.run.offline or wandb.run.disabled)
    return bool(wandb.login(prompt=False, verify=False))
