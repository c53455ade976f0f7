"""From the tables of a run to what they say of every matrix; refuses, with what to log, where they say too little."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from scion_telemetry.store import Run

from .estimators import Array
from .growth import curve_growth, has_late, late_growth, rarest_window, whole_growth
from .notes import notes_on
from .records import Evidence
from .refusals import (
    refuse_as_calibration,
    refuse_few,
    refuse_mixed_scopes,
    refuse_unknown_rows,
    refuse_without_selection,
)
from .stretches import FEWEST_STEPS, Stretch, longest_last, stretches
from .theory import calibrated_growth, horizon

_FORGOTTEN = 3.0
"""Momentum horizons after which a calibration window has forgotten how rows were levelled before it."""

_LEVELLED = 10.0
"""Momentum horizons after a change of the fraction until a row a tenth as frequent as the mean has had its turn."""


def gather(run: Run, calibration: Run | None = None) -> tuple[list[Evidence], list[str]]:
    """The evidence of every matrix that selects, in model order, and notes of what is missing.

    Raises:
        ValueError: The run cannot support advice; the message says what to log.
    """
    params = _selecting(run)
    refuse_mixed_scopes({name: options for name, _, options in _facts(params)})
    start = int(run.info.get("start_step", 0))
    by_param = {str(name): rows for name, rows in run.selection.groupby("param", observed=True)}
    parts = {name: stretches(by_param[name], start) for name in params["name"] if name in by_param}
    slices = {str(name): rows for name, rows in run.slices.groupby("param", observed=True)}
    whole = _selects_everything(parts, slices)
    refuse_few(run, parts, 1.0 if whole else math.nextafter(1.0, 0.0))
    curves = _calibration_curves(parts, params)
    if calibration is not None:
        curves |= _curves_of(calibration)
    lrs = _largest_lr(run)
    found, skipped = [], []
    for name, fact, options in _facts(params):
        live = [part for part in parts.get(name, []) if part.fraction < 1 or whole]
        if not live:
            skipped.append(name)
            continue
        part = longest_last(live)
        alone = len(parts[name]) == 1
        reader = _Reader(
            name=name, fact=fact, options=options, part=part, start=start, last=max(run.steps), alone=alone
        )
        found.append(reader.evidence(slices.get(name), curves.get(name), lrs.get(name)))
    windows = [p for found_parts in parts.values() for p in found_parts if p.fraction >= 1 and not whole]
    return found, notes_on(found, skipped, max(windows, key=lambda p: p.steps, default=None))


def _selecting(run: Run) -> pd.DataFrame:
    refuse_without_selection(run)
    names = set(run.selection["param"].unique())
    return run.params[run.params["name"].isin(names)]


def _facts(params: pd.DataFrame) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    for row in params.to_dict("records"):
        yield str(row["name"]), {str(k): v for k, v in row.items()}, row["options"]


def _selects_everything(parts: Mapping[str, list[Stretch]], slices: Mapping[str, pd.DataFrame]) -> bool:
    """Whether a run is at fraction 1 throughout, and scored every row of every matrix."""
    return all(p.fraction >= 1 for found in parts.values() for p in found) and all(
        name in slices and "score_all" in slices[name] and slices[name]["score_all"].notna().all() for name in parts
    )


def _curve(rows: pd.DataFrame, prefix: str) -> dict[float, float]:
    """Mean curve over flushes by fraction, of columns ``{prefix}_{F}``; empty where none was measured."""
    columns = {float(c.removeprefix(f"{prefix}_")): c for c in rows.columns if c.startswith(f"{prefix}_")}
    means = {at: float(rows[columns[at]].mean()) for at in sorted(columns)}
    return {at: mean for at, mean in means.items() if mean == mean}


def _calibration_curves(parts: Mapping[str, list[Stretch]], params: pd.DataFrame) -> dict[str, dict[float, float]]:
    """Curves of momentum mass at fraction 1, once it has forgotten what was before; of windows that are long enough."""
    ef = {name: _ef(options) for name, _, options in _facts(params)}
    found: dict[str, dict[float, float]] = {}
    for name, all_parts in parts.items():
        whole = [p for p in all_parts if p.fraction >= 1 and p.steps >= FEWEST_STEPS]
        settled = [p.rows[p.rows["step"] > p.begin + _FORGOTTEN / max(1e-9, 1 - ef[name])] for p in whole]
        if settled and (curve := _curve(pd.concat(settled), "mass_at")):
            found[name] = curve
    return found


def _curves_of(calibration: Run) -> dict[str, dict[float, float]]:
    params = _selecting(calibration)
    start = int(calibration.info.get("start_step", 0))
    parts = {str(n): stretches(rows, start) for n, rows in calibration.selection.groupby("param", observed=True)}
    curves = _calibration_curves(parts, params)
    if not curves:
        refuse_as_calibration(calibration, [p for found in parts.values() for p in found if p.fraction >= 1])
    return curves


def _largest_lr(run: Run) -> dict[str, float]:
    if "update_lr" not in run.layers:
        return {}
    largest = run.layers.groupby("param", observed=True)["update_lr"].max()
    return {str(name): float(value) for name, value in largest.items() if value == value}


def _ef(options: Mapping[str, Any]) -> float:
    return float(options.get("ef_decay", options.get("mu", 0.95)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """One parameter, and where to look."""

    name: str
    fact: Mapping[str, Any]
    options: Mapping[str, Any]
    part: Stretch
    start: int
    last: int
    alone: bool

    def evidence(
        self, slices: pd.DataFrame | None, calibration: Mapping[float, float] | None, lr: float | None
    ) -> Evidence:
        rows, options = self.part.rows, self.options
        curves = {"calibration": calibration or {}, "gradient": _curve(rows, "grad_mass_at"), "none": {}}
        mass_source = next(name for name, curve in curves.items() if curve or name == "none")
        shape = tuple(self.fact["shape"])
        total = max(1, round(float((rows["k"] / rows["fraction"]).median())))
        matrices = math.prod(shape[:-2]) * int(options.get("num_heads") or 1)
        n, width = total // matrices, math.prod(shape) // total
        whole = self.part.fraction >= 1
        grown = self._growth(slices if slices is not None and len(slices) == total else None, n)
        return Evidence(
            param=self.name,
            role=str(self.fact["role"]),
            shape=shape,
            matrices=matrices,
            n=n,
            width=width,
            shards=int(options.get("shards") or 1),
            scope=str(options.get("selection_scope", "local")),
            fraction=self.part.fraction,
            steps=self.part.steps,
            total_steps=self.last,
            ef_decay=_ef(options),
            lr=max(float(options.get("lr", 0.0)), lr or 0.0),
            weight_decay=float(options.get("weight_decay", 0.0)),
            decays_selected=options.get("decay_on") == "selected",
            source=grown.source,
            rates=grown.rates,
            late=grown.late,
            never=grown.never,
            age_p99=None if whole else _middle(rows, "age_p99"),
            regret=None if whole else _mean(rows, "regret"),
            regret_at={int(w): v for w, v in _curve(rows, "regret_at").items()},
            mass=curves[mass_source],
            mass_source=mass_source,
        )

    def _growth(self, slices: pd.DataFrame | None, n: int) -> "_Grown":
        if slices is None:
            return self._from_curve(n)
        slices = slices.sort_values(["matrix", "index"])
        if self.part.fraction < 1:
            return self._from_slices(slices, n)
        rates = calibrated_growth(slices["score_all"].to_numpy(float)).reshape(-1, n)
        return _Grown(source="calibration", rates=rates, never=0.0)

    def _from_slices(self, slices: pd.DataFrame, n: int) -> "_Grown":
        """From the later part of the run where it was at one fraction and is told of, else from all of it."""
        threshold, cold = _middle(self.part.rows, "threshold"), self.start == 0
        never = float((slices["selected"] == 0).mean())
        late = int(slices["steps_late"].iloc[0]) if threshold is not None and has_late(slices) else 0
        if threshold is not None and late and self._was_level(late):
            rates = late_growth(slices, threshold, _ef(self.options), cold=cold and self.alone)
        else:
            rates, late = whole_growth(slices, threshold, _ef(self.options), cold=cold), 0
        return _Grown(source="slices", rates=rates.reshape(-1, n), never=never, late=late)

    def _was_level(self, steps: int) -> bool:
        """Whether the last so many steps are all of this stretch, long after the fraction changed."""
        before = self.last - steps - self.part.begin
        levelled = _LEVELLED * horizon(self.part.fraction, _ef(self.options))
        return self.alone or (self.part.end == self.last and before >= levelled)

    def _from_curve(self, n: int) -> "_Grown":
        rows = self.part.rows
        if "window" in rows:
            rows = rows[rows["window"] >= rarest_window(self.part.fraction)]
        curve = _curve(rows, "frequency_at") if len(rows) else {}
        if not curve:
            refuse_unknown_rows(self.name, self.part.fraction)
        rates = curve_growth(curve, self.part.fraction, n)
        return _Grown(source="curve", rates=rates[None, :], never=self._at_most_never())

    def _at_most_never(self) -> float:
        """Bound on the share of rows never selected: what the window that touched most left out, NaN if not known.

        A row that never was selected is as old as the tracker; where none is so old, there is none.
        """
        rows = self.part.rows
        if "age_max" in rows and (rows["age_max"] < rows["step"] - self.start).any():
            return 0.0
        return float(1 - rows["coverage"].max()) if "coverage" in rows else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grown:
    """Growth of every row, where it is from, steps of the later part that tell it, and the share never selected."""

    source: str
    rates: Array
    never: float
    late: int = 0


def _middle(rows: pd.DataFrame, column: str) -> float | None:
    """Median of the last quarter of the flushes: ages rise until every row has had its first turn."""
    if column not in rows or not rows[column].notna().any():
        return None
    values = rows[column].dropna()
    return float(values.iloc[len(values) * 3 // 4 :].median())


def _mean(rows: pd.DataFrame, column: str) -> float | None:
    return float(rows[column].mean()) if column in rows and rows[column].notna().any() else None
