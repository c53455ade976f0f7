"""From the tables of a run to arrays that can be drawn: which values exist, and which of them are findings.

A cell that is empty was never measured and is left out. A cell that is NaN or infinite was measured and is a finding,
which a figure must show. In pandas both are NaN, so :func:`column_table` tells them apart by what stands beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scion_telemetry import words
from scion_telemetry.store import Run

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One column of a run as a matrix, with parameters in model order.

    Args:
        column: Name of the column.
        steps: Ascending steps, [n_steps].
        names: Parameters that have this column, [n_params].
        roles: Their roles, [n_params].
        values: [n_steps, n_params]; NaN where nothing finite was measured.
        findings: [n_steps, n_params]; True where something was measured and it was NaN or infinite.
    """

    column: str
    steps: NDArray[np.int64]
    names: tuple[str, ...]
    roles: tuple[str, ...]
    values: Floats
    findings: Bools

    def last_step(self) -> int | None:
        """The last step at which anything was measured, finite or not."""
        rows = np.flatnonzero((np.isfinite(self.values) | self.findings).any(axis=1))
        return int(self.steps[rows[-1]]) if rows.size else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One scalar over the steps at which it was logged, or seems to have been.

    Args:
        name: Name of the scalar.
        steps: Ascending steps, [n].
        values: [n]; NaN where nothing finite was logged.
    """

    name: str
    steps: NDArray[np.int64]
    values: Floats


def column_table(run: Run, frame: pd.DataFrame, column: str, params: Sequence[str] | None = None) -> Table:
    """Arrange one column of ``run.layers`` or ``run.selection`` by step and parameter.

    Where a count of non-finite entries stands beside the column (``weight_nonfinite`` for ``weight_rms``), a NaN is a
    finding if the count is positive or other parameters have a value at that step; without such a count, every NaN of a
    parameter that has a value at any step is one. Infinities always are. Of several rows for one step and parameter the
    last counts.

    Raises:
        ValueError: The column or a parameter is unknown.
    """
    if column not in _metrics(frame):
        raise ValueError(f"no column {column!r} in this run; {_offer(column, _metrics(frame))}")
    names, roles = _model_order(run, frame)
    steps, row, slot = _positions(frame, names)
    raw = _matrix(frame[column], row, slot, (steps.size, len(names)))
    present = np.zeros(raw.shape, dtype=bool)
    present[row, slot] = True
    counted = f"{words.quantity(column)}_nonfinite"
    bad = _matrix(frame[counted], row, slot, raw.shape) > 0 if counted in frame.columns else None
    measured, findings = _tell_apart(raw, present, bad)
    keep = _wanted(names, measured, params)
    return Table(
        column=column,
        steps=steps,
        names=tuple(names[i] for i in keep),
        roles=tuple(roles[i] for i in keep),
        values=np.where(np.isfinite(raw), raw, np.nan)[:, keep],
        findings=findings[:, keep],
    )


def curves(run: Run, names: Sequence[str]) -> tuple[Curve, ...]:
    """The named scalars, each with NaN at the steps where it was infinite, or where its own cadence lacks a value.

    The wide table does not tell an unlogged value from a NaN. Where at least four of five values of a scalar are
    equally far apart, a missing one between or after them is taken for a NaN; so is every step of a scalar that has no
    value at all.
    """
    if run.scalars.empty:
        return ()
    frame = run.scalars.sort_values("step", kind="stable")
    every = frame["step"].to_numpy(dtype=np.int64)
    found = []
    for name in names:
        values = frame[name].to_numpy(dtype=np.float64)
        known = ~np.isnan(values)
        use = known | _overdue(every, known)
        found.append(Curve(name=name, steps=every[use], values=np.where(np.isfinite(values), values, np.nan)[use]))
    return tuple(found)


def _overdue(steps: NDArray[np.int64], known: Bools) -> Bools:
    """Steps without a value at which the cadence of the known ones makes one expect it."""
    own = steps[known]
    if own.size == 0:
        return np.ones(steps.size, dtype=bool)
    if own.size == 1:
        return np.zeros(steps.size, dtype=bool)
    sizes, counts = np.unique(np.diff(own), return_counts=True)
    usual = int(sizes[counts.argmax()])
    if counts.max() < 0.8 * counts.sum():
        return np.zeros(steps.size, dtype=bool)
    expected: Bools = ~known & (steps > own[0]) & ((steps - own[0]) % usual == 0)
    return expected


def _metrics(frame: pd.DataFrame) -> list[str]:
    return [str(name) for name in frame.columns if name not in ("run", "step", "param")]


def _offer(wanted: str, known: Sequence[str]) -> str:
    close = get_close_matches(wanted, known, n=3)
    if close:
        return f"did you mean {', '.join(close)}?"
    shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return f"it has: {shown}" if known else "it has none"


def _model_order(run: Run, frame: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Names and roles in model order; a parameter that params.csv lacks comes last, in order of appearance."""
    names = [str(name) for name in run.params["name"]]
    roles = [str(role) for role in run.params["role"]]
    listed = set(names)
    extra = [str(name) for name in frame["param"].unique() if str(name) not in listed]
    return names + extra, roles + ["unknown"] * len(extra)


def _positions(
    frame: pd.DataFrame, names: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.intp]]:
    steps, row = np.unique(frame["step"].to_numpy(dtype=np.int64), return_inverse=True)
    slot = pd.Index(names).get_indexer(pd.Index(frame["param"].astype(str)))
    return steps, row, slot.astype(np.intp)


def _matrix(
    series: "pd.Series[float]", row: NDArray[np.intp], slot: NDArray[np.intp], shape: tuple[int, ...]
) -> Floats:
    out = np.full(shape, np.nan)
    out[row, slot] = series.to_numpy(dtype=np.float64)
    return out


def _tell_apart(raw: Floats, present: Bools, bad: Bools | None) -> tuple[Bools, Bools]:
    """Which parameters have this column at all [n_params], and which cells are findings [n_steps, n_params]."""
    nan = np.isnan(raw) & present
    known = ~np.isnan(raw)
    measured: Bools = np.any(known, axis=0)
    if bad is not None:
        # NaN from the first row to the last: a finding only if the count explains every one of them.
        unexplained = present & ~bad
        measured = measured | (np.any(present, axis=0) & ~np.any(unexplained, axis=0))
        nan = nan & (bad | np.any(known, axis=1, keepdims=True))
    return measured, (np.isinf(raw) | nan) & measured


def _wanted(names: Sequence[str], measured: Bools, params: Sequence[str] | None) -> NDArray[np.intp]:
    if params is not None:
        for name in params:
            if name not in names:
                raise ValueError(f"no parameter {name!r} in this run; {_offer(name, names)}")
        chosen = set(params)
        measured = measured & np.array([name in chosen for name in names])
    return np.flatnonzero(measured)
