"""What travels from the tracker to the sinks: rows of plain numbers, and the facts of the run they belong to.

This module imports neither torch nor pandas, so that reading a run needs neither.

    Tracker -> RunInfo (once) -> Sink.open
    Tracker -> Batch (one a flush) -> Sink.write
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

SCHEMA_VERSION = 1
"""Version of the run directory; a reader refuses one that is newer than itself."""

Value = str | int | float | bool | None
"""What may stand in the attributes of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamInfo:
    """One parameter of the model, as ``params.csv`` lists it.

    Args:
        name: Name in the model without wrapper prefixes and without a trailing ``.weight``: ``layers.3.attn.wq``.
        aliases: Other names of the same (tied) tensor.
        role: embedding, hidden, head, vector, conv or expert.
        shape: Global shape, ``[d_out, d_in]`` for a matrix.
        dtype: ``float32``, ``bfloat16``, ...
        layout: Where its pieces live, for people: ``whole``, ``replicated x2``, ``Shard(0) x2``.
        algorithm: The rule that steps it: ``dion2``, ``scion``, ``adamw``, or the class name of another optimizer.
        options: Options of its parameter group (lr, fraction, norm, ...) when the tracker attached.
    """

    name: str
    aliases: tuple[str, ...] = ()
    role: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    algorithm: str
    options: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a sink learns once, before the first batch.

    Args:
        attributes: The user's own facts about the run (``Tracker(run=...)``): seed, lr, data, ...
        params: Every tracked parameter, in model order.
        layer_columns: Metric columns of ``layers``, in order. They do not change during a run.
        selection_columns: Metric columns of ``selection``, in order. Empty when nothing selects.
        units: Unit of every column.
        schedule: The tracker's schedule, for people: ``every(10)``.
        world_size: Number of ranks whose pieces were reduced.
        start_step: Step after which this tracker attached: 0, or more for a resumed run.
        versions: Package versions: ``{"torch": "2.13.0", ...}``.
        histograms: Names of the histograms that may come. Empty when none do.
        slice_columns: Columns of ``slices``, in order. Empty when nothing is told of single rows.
        selection_rows: Whether batches may tell which rows were selected.
    """

    attributes: Mapping[str, Value]
    params: tuple[ParamInfo, ...]
    layer_columns: tuple[str, ...]
    selection_columns: tuple[str, ...]
    units: Mapping[str, str]
    schedule: str
    world_size: int
    start_step: int
    versions: Mapping[str, str]
    histograms: tuple[str, ...] = ()
    slice_columns: tuple[str, ...] = ()
    selection_rows: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The metrics of one parameter after one step.

    A column that is absent from ``values`` was not measured; a NaN or an infinity was measured and is a finding.

    Args:
        step: Number of optimizer steps taken, 1 for the first.
        param: ``ParamInfo.name``.
        values: Column to value.
    """

    step: int
    param: str
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """A number that the user logged: mean over the ranks that logged it at this step."""

    step: int
    name: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """A distribution over the rows (or slices) of one parameter, in bins of a quarter octave with counts and mass.

    A bin holds the values from ``2**log2`` up to, but not including, ``2**(log2 + 1/4)``.

    Args:
        step: Number of optimizer steps taken, 1 for the first.
        param: ``ParamInfo.name``.
        name: Spelled like a column: ``weight_row_norms``, ``selection_frequencies``.
        log2: Base-2 logarithm of the lower edge of every bin that is not empty: multiples of 1/4, ascending. ``-inf``
            (first) stands for exact zeros, NaN (last) for values that are not finite.
        count: How many values each bin holds.
        mass: Sum of the values in each bin.
    """

    step: int
    param: str
    name: str
    log2: tuple[float, ...]
    count: tuple[float, ...]
    mass: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """What happened to one row or column that an optimizer selects from, over a whole run. Written once, at its end.

    Args:
        param: ``ParamInfo.name``.
        matrix: Number of the stacked matrix or head, 0 for a single one.
        index: Index of the row or column in that matrix.
        values: Column to value: how often it was selected, of how many steps, with which mean score.
    """

    param: str
    matrix: int
    index: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Which rows or columns of one matrix an optimizer selected at a step: one bit each.

    Args:
        step: Number of optimizer steps taken, 1 for the first.
        param: ``ParamInfo.name``.
        matrix: Number of the stacked matrix or head, 0 for a single one.
        count: How many rows or columns it selects from.
        rows: A set bit for each selected one, eight a byte, the first in the highest bit; the last byte is filled with
            zeros: ``numpy.packbits`` makes it, and ``numpy.unpackbits(..., count=count)`` reads it.
    """

    step: int
    param: str
    matrix: int
    count: int
    rows: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """All that one flush brings. Scalars may belong to earlier steps than the rows; steps never go backwards.

    Args:
        step: The step of this flush.
        layers: One row a parameter.
        selection: One row a parameter whose optimizer selects.
        scalars: In ascending order of step, then of first use.
        histograms: Distributions, of the steps of the rows.
        slices: Every slice of the run, in the batch that ends it; otherwise empty.
        selected: What was selected, of the steps of the rows: one a matrix.
    """

    step: int
    layers: tuple[Row, ...] = ()
    selection: tuple[Row, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    slices: tuple[Slice, ...] = ()
    selected: tuple[Chosen, ...] = ()


class Sink(Protocol):
    """A destination. Only rank 0 calls it, from one thread at a time, with plain Python values.

    ``open`` runs while the tracker is constructed and raises ``ValueError`` or ``RuntimeError`` when the sink cannot
    start. An exception from ``write`` or ``close`` is reported by the tracker and stops neither training nor other
    sinks: the batch is lost to this sink, and the next one is tried again.

    A sink may also have ``extend(run: RunInfo) -> None``: the set of parameters grew in mid-run, and ``run.params``
    holds all of them now; everything else in ``run`` is as it was.
    """

    def open(self, run: RunInfo) -> None:
        """Start; refuse here what would fail later."""

    def write(self, batch: Batch) -> None:
        """Take one batch; what it holds must be safe from a kill when this returns."""

    def close(self) -> None:
        """Finish. Called once, also after an error."""


def column(quantity: str, metric: str) -> str:
    """Column name of a metric of a quantity: ``column("weight", "rms") == "weight_rms"``."""
    return f"{quantity}_{metric}"


def key(column_name: str, param: str) -> str:
    """Key of one value for destinations that know no rows: ``weight_rms/layers.3.attn.wq``."""
    return f"{column_name}/{param}"


def text(value: float | int | str | None) -> str:
    """Text of a cell: nine significant digits (float32 survives exactly), ``NaN``, ``inf``, ``-inf``, empty for None.

    These spellings are the ones that pandas, DuckDB and polars all read as numbers.
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return "NaN" if value != value else f"{value:.9g}"
    return str(value)
