"""From the tables of a run to what its figures of selections draw."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scion_telemetry import _plot_nulls as nulls
from scion_telemetry._plot_data import Floats
from scion_telemetry.store import Run

KINDS = 12
"""Up to this many kinds of matrices have a panel each; more are put together by role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Columns ``{prefix}_at_{x}`` of ``run.selection``, one curve a parameter, parameters in model order.

    Args:
        prefix: ``mass``, ``grad_mass``, ``frequency`` or ``regret``.
        at: Where the curves are known, ascending: fractions, or numbers of shards, [F].
        names: Parameters, [n].
        roles: Their roles, [n].
        steps: Step at which each was measured, or the last of those that were averaged, [n].
        values: [n, F].
        fraction: Realised fraction of each at that time, NaN where it is not known, [n].
        captured: Its captured mass, [n].
        width: Entries of a row, None where the run does not say, [n].
        window: Steps over which frequencies are counted, NaN where it is not known, [n].
        rows: Rows of all its matrices together: k over the realised fraction, NaN where it is not known, [n].
    """

    prefix: str
    at: Floats
    names: tuple[str, ...]
    roles: tuple[str, ...]
    steps: NDArray[np.int64]
    values: Floats
    fraction: Floats
    captured: Floats
    width: tuple[int | None, ...]
    window: Floats
    rows: Floats


def last_curves(run: Run, prefix: str, step: int | None = None) -> Curves | None:
    """The curves at a step, or of every parameter at the last step that has one; None where there are none.

    Raises:
        ValueError: Curves were measured, but not at this step.
    """
    columns = _columns(run, prefix)
    frame = _measured(run, columns)
    if frame.empty:
        return None
    if step is not None:
        known = np.unique(frame["step"])
        if step not in known:
            shown = ", ".join(map(str, known[:10])) + (", …" if known.size > 10 else "")
            raise ValueError(f"step {step!r} was not measured; measured steps: {shown}")
        frame = frame[frame["step"] == step]
    return _arrange(run, prefix, columns, frame.drop_duplicates("param", keep="last"))


def median_curves(run: Run, prefix: str) -> Curves | None:
    """The same, the median over the second half of the steps, so that the start of training does not weigh."""
    columns = _columns(run, prefix)
    frame = second_half(_measured(run, columns))
    if frame.empty:
        return None
    numbers = frame.groupby("param", observed=True, sort=False).median(numeric_only=True)
    last = frame.groupby("param", observed=True, sort=False)["step"].last()
    return _arrange(run, prefix, columns, numbers.assign(step=last.astype("int64")).reset_index())


def second_half(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the later half of the steps; of a single step, that one."""
    if frame.empty:
        return frame
    step = frame["step"].to_numpy(dtype=np.int64)
    late: pd.DataFrame = frame[step >= (step.min() + step.max()) / 2]
    return late


def groups(names: Sequence[str], roles: Sequence[str]) -> dict[str, list[int]]:
    """Which parameters share a panel: those whose names differ by numbers only, or where these are many, by role."""
    kinds = [re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names]
    labels = kinds if len(set(kinds)) <= KINDS else list(roles)
    return {label: [i for i, own in enumerate(labels) if own == label] for label in dict.fromkeys(labels)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """How often each row of one parameter was selected, rows of all its matrices together.

    Args:
        name: The parameter.
        role: Its role.
        steps: Steps counted.
        frequency: Selections a step, descending, [n].
    """

    name: str
    role: str
    steps: int
    frequency: Floats

    @property
    def share(self) -> float:
        """Mean frequency: the realised fraction of the whole run."""
        return float(self.frequency.mean())

    @property
    def places(self) -> Floats:
        """Rank of every row as a share of all rows, the middle of its place, (0, 1)."""
        return (np.arange(self.frequency.size) + 0.5) / self.frequency.size


def ranked(run: Run) -> list[Ranked]:
    """Every parameter of ``run.slices``, in model order."""
    table = run.slices
    if table.empty or not {"selected", "steps"} <= set(table.columns):
        return []
    roles = dict(zip(run.params["name"], run.params["role"], strict=True))
    found = []
    for name, own in table.groupby("param", observed=True):
        frequency = (own["selected"] / own["steps"]).to_numpy(dtype=np.float64)
        if frequency.size and np.isfinite(frequency).all():
            steps, role = int(own["steps"].max()), str(roles.get(name, "unknown"))
            found.append(Ranked(name=str(name), role=role, steps=steps, frequency=-np.sort(-frequency)))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Raster:
    """How many rows were selected how often, between flush and flush.

    Args:
        steps: Steps of the flushes, [S].
        edges: Lower edges of the bins of frequencies, ascending; the first bin is "never", whose edge is 0, [B].
        share: Share of all rows, [B, S]; NaN at a step without a measurement.
        fraction: Realised fraction, [S].
        window: Steps counted, [S].
    """

    steps: NDArray[np.int64]
    edges: Floats
    share: Floats
    fraction: Floats
    window: Floats


def raster(run: Run, names: Sequence[str], histogram: str) -> Raster:
    """The histograms of these parameters added up."""
    table = run.histograms
    own = table[(table["name"] == histogram) & table["param"].isin(list(names)) & table["log2"].notna()]
    steps = np.unique(own["step"].to_numpy(dtype=np.int64))
    logs = own.loc[np.isfinite(own["log2"]), "log2"]
    least, most = (float(logs.min()), max(0.0, float(logs.max()))) if logs.size else (0.0, 0.0)
    marks = np.arange(round(4 * least), round(4 * most) + 1) / 4  # bins are a quarter octave wide
    counts = np.zeros((marks.size + 1, steps.size))
    place = np.where(np.isneginf(own["log2"]), 0, 1 + np.round(4 * (own["log2"].clip(lower=least) - least)))
    np.add.at(counts, (place.astype(int), np.searchsorted(steps, own["step"])), own["count"].to_numpy())
    facts = run.selection[run.selection["param"].isin(list(names))]
    at = facts.groupby("step")[[c for c in ("fraction", "window") if c in facts.columns]].median().reindex(steps)
    return Raster(
        steps=steps,
        edges=np.concatenate([[0.0], 2.0**marks]),
        share=counts / counts.sum(axis=0),
        fraction=_column(at, "fraction"),
        window=_column(at, "window"),
    )


def step_edges(steps: NDArray[np.int64]) -> Floats:
    """Edges of cells around ascending steps, half-way between them, [S + 1]."""
    gaps = np.diff(steps) if steps.size > 1 else np.ones(1)
    return np.concatenate([[steps[0] - gaps[0] / 2], (steps[:-1] + steps[1:]) / 2, [steps[-1] + gaps[-1] / 2]])


def _columns(run: Run, prefix: str) -> dict[str, float]:
    """Columns of a curve to where they stand, ascending."""
    found = {}
    for column in map(str, run.selection.columns):
        head, _, at = column.rpartition("_at_")
        if head == prefix:
            found[column] = float(at)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _measured(run: Run, columns: dict[str, float]) -> pd.DataFrame:
    if not columns:
        return run.selection.iloc[:0]
    frame = run.selection.dropna(how="all", subset=list(columns)).sort_values("step", kind="stable")
    return frame.drop_duplicates(["step", "param"], keep="last")


def _arrange(run: Run, prefix: str, columns: dict[str, float], frame: pd.DataFrame) -> Curves:
    order = {str(name): i for i, name in enumerate(frame["param"].cat.categories)}
    frame = frame.iloc[np.argsort([order[str(name)] for name in frame["param"]], kind="stable")]
    roles = dict(zip(run.params["name"], run.params["role"], strict=True))
    gini = _column(frame, "flat_gini")
    fraction = _column(frame, "fraction")
    names = tuple(str(name) for name in frame["param"])
    return Curves(
        prefix=prefix,
        at=np.array(list(columns.values())),
        names=names,
        roles=tuple(str(roles.get(name, "unknown")) for name in names),
        steps=frame["step"].to_numpy(dtype=np.int64),
        values=frame[list(columns)].to_numpy(dtype=np.float64),
        fraction=fraction,
        captured=_column(frame, "captured_mass"),
        width=tuple(nulls.width_of(g) if g > 0 else None for g in gini),
        window=_column(frame, "window"),
        rows=np.round(_column(frame, "k") / fraction),
    )


def _column(frame: pd.DataFrame, name: str) -> Floats:
    values: Any = frame[name] if name in frame.columns else np.full(len(frame), np.nan)
    return np.asarray(values, dtype=np.float64)


def late_median(run: Run, column: str) -> dict[str, float]:
    """Median over the second half of the steps of a column of ``run.selection``, of every parameter that has it."""
    if column not in run.selection.columns:
        return {}
    frame = second_half(run.selection.dropna(subset=[column]))
    medians = frame.groupby("param", observed=True)[column].median()
    return {str(name): float(value) for name, value in medians.items()}


def matrices(run: Run) -> dict[str, int]:
    """Stacked matrices or heads of every parameter, each of which selects for itself."""
    table = zip(run.params["name"], run.params["shape"], run.params["options"], strict=True)
    return {name: math.prod(shape[:-2]) * int(options.get("num_heads") or 1) for name, shape, options in table}
