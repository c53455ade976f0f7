"""From the tables of a run to what they say of every matrix; refuses, with what to log, where they say too little."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from scion_telemetry.store import Run

from .estimators import Array
from .notes import notes_on
from .records import Evidence
from .theory import balanced_growth, calibrated_growth

FEWEST_STEPS = 200
"""Steps at one fraction below which nothing is advised."""

_FEWEST_ROWS = 5
_SETTLED = 3.0
"""Momentum horizons after which a calibration window has forgotten how rows were levelled before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Rows of one parameter in consecutive flushes at one realised fraction.

    Args:
        rows: Their part of the selection table, ascending in step.
        begin: Step after which it begins: that of the flush before, or of the tracker's start.
        end: Step of its last flush.
    """

    rows: pd.DataFrame
    begin: int
    end: int

    @property
    def fraction(self) -> float:
        """Realised k / n."""
        return float(self.rows["fraction"].iloc[0])

    @property
    def steps(self) -> int:
        """Length in steps, exact where the fraction changed at a flush."""
        return self.end - self.begin


def stretches(rows: pd.DataFrame, start: int) -> list[Stretch]:
    """Cut the selection rows of one parameter where its realised fraction changes.

    Args:
        rows: Of one parameter.
        start: Step at which the tracker attached.
    """
    rows = rows[rows["fraction"].notna()].sort_values("step")
    number = (rows["fraction"].diff().abs() > 1e-9).cumsum()
    found: list[Stretch] = []
    for _, part in rows.groupby(number, sort=True):
        found.append(Stretch(rows=part, begin=found[-1].end if found else start, end=int(part["step"].iloc[-1])))
    return found


def gather(run: Run, calibration: Run | None = None) -> tuple[list[Evidence], list[str]]:
    """The evidence of every matrix that selects, in model order, and notes of what is missing.

    Raises:
        ValueError: The run cannot support advice; the message says what to log.
    """
    params = _selecting(run)
    _refuse_mixed_scopes(params)
    start = int(run.info.get("start_step", 0))
    by_param = {str(name): rows for name, rows in run.selection.groupby("param", observed=True)}
    parts = {name: stretches(by_param[name], start) for name in params["name"] if name in by_param}
    slices = {str(name): rows for name, rows in run.slices.groupby("param", observed=True)}
    whole = _selects_everything(parts, slices)
    _refuse(str(run.path), parts, 1.0 if whole else math.nextafter(1.0, 0.0))
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
        reader = _Reader(
            name=name, fact=fact, options=options, part=_longest_last(live), start=start, last=max(run.steps)
        )
        found.append(reader.evidence(slices.get(name), curves.get(name), lrs.get(name)))
    return found, notes_on(found, skipped)


def _refuse_mixed_scopes(params: pd.DataFrame) -> None:
    example = {str(options.get("selection_scope", "local")): name for name, _, options in _facts(params)}
    if len(example) > 1:
        raise ValueError(
            f"selection scopes are mixed ({', '.join(f'{s!r}: {n}' for s, n in sorted(example.items()))}), of "
            "which one answer cannot tell; train with one selection_scope for all that selects, and advise on that run"
        )


def _selecting(run: Run) -> pd.DataFrame:
    if run.selection.empty or "fraction" not in run.selection:
        raise ValueError(
            f"{str(run.path)!r} has no selection rows: no parameter was stepped by Dion2 or Dion3, or selection "
            "metrics were switched off; train with optim.Dion2 under a Tracker with its default metrics"
        )
    names = set(run.selection["param"].unique())
    return run.params[run.params["name"].isin(names)]


def _facts(params: pd.DataFrame) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    for row in params.to_dict("records"):
        yield str(row["name"]), {str(k): v for k, v in row.items()}, row["options"]


def _longest_last(parts: list[Stretch]) -> Stretch:
    """The last stretch that is long enough, or the longest where none is."""
    enough = [part for part in parts if part.steps >= FEWEST_STEPS and len(part.rows) >= _FEWEST_ROWS]
    return enough[-1] if enough else max(parts, key=lambda part: part.steps)


def _selects_everything(parts: Mapping[str, list[Stretch]], slices: Mapping[str, pd.DataFrame]) -> bool:
    """Whether a run is at fraction 1 throughout, and scored every row of every matrix."""
    return all(p.fraction >= 1 for found in parts.values() for p in found) and all(
        name in slices and "score_all" in slices[name] and slices[name]["score_all"].notna().all() for name in parts
    )


def _refuse(where: str, parts: Mapping[str, list[Stretch]], largest: float) -> None:
    live = {name: [p for p in found if p.fraction <= largest] for name, found in parts.items()}
    live = {name: found for name, found in live.items() if found}
    if not live:
        raise ValueError(
            f"{where!r} selects everything (fraction 1) at every step: it is a calibration run, and tells without "
            "slices.csv (written when the tracker closes: call tracker.close()) the mass that rows would have but not "
            "how often they would be selected; give it as calibration= beside a run at a smaller fraction, of "
            f">= {FEWEST_STEPS} steps"
        )
    name, found = min(live.items(), key=lambda item: _longest_last(item[1]).steps)
    best = _longest_last(found)
    if best.steps < FEWEST_STEPS and len(found) > 1:
        values = ", ".join(f"{p.fraction:.3g} up to step {p.end}" for p in found[:4])
        raise ValueError(
            f"{where!r} changes the fraction of {name!r} too often ({values}, …): the longest stretch is {best.steps} "
            f"steps; keep one fraction for >= {FEWEST_STEPS} steps (set_fraction between two steps)"
        )
    if best.steps < FEWEST_STEPS:
        raise ValueError(
            f"{where!r} has too few steps at one fraction: {best.steps} of {name!r} at {best.fraction:.3g}; log at "
            f"least {FEWEST_STEPS}"
        )
    if len(best.rows) < _FEWEST_ROWS:
        raise ValueError(
            f"{where!r} measured the selection of {name!r} only {len(best.rows)} times at {best.fraction:.3g}; log at "
            f"least {_FEWEST_ROWS} flushes (every={max(1, best.steps // 20)})"
        )
    _refuse_broken({name: _longest_last(found).rows for name, found in live.items()})


def _refuse_broken(tables: Mapping[str, pd.DataFrame]) -> None:
    for name, rows in tables.items():
        # A momentum of zeros has no mass either, but only before its first gradient.
        if "captured_mass" in rows and math.isnan(rows["captured_mass"].iloc[-1]):
            raise ValueError(
                f"the momentum of {name!r} holds NaN, infinity or nothing at step {rows['step'].iloc[-1]}: a run that "
                "broke cannot be advised on; advise on one that ended before"
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
        settled = [p.rows[p.rows["step"] > p.begin + _SETTLED / max(1e-9, 1 - ef[name])] for p in whole]
        if settled and (curve := _curve(pd.concat(settled), "mass_at")):
            found[name] = curve
    return found


def _curves_of(calibration: Run) -> dict[str, dict[float, float]]:
    params = _selecting(calibration)
    start = int(calibration.info.get("start_step", 0))
    parts = {str(n): stretches(rows, start) for n, rows in calibration.selection.groupby("param", observed=True)}
    curves = _calibration_curves(parts, params)
    if not curves:
        raise ValueError(
            f"{str(calibration.path)!r} is no calibration run: it needs >= {FEWEST_STEPS} steps at fraction 1 with the "
            "columns mass_at_… in its selection table; `scion-telemetry calibrate` shows how"
        )
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
        source, rates, never = self._growth(slices if slices is not None and len(slices) == total else None, n)
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
            source=source,
            rates=rates,
            never=never,
            age_p99=None if whole else _middle(rows, "age_p99"),
            regret=None if whole else _mean(rows, "regret"),
            regret_at={int(w): v for w, v in _curve(rows, "regret_at").items()},
            mass=curves[mass_source],
            mass_source=mass_source,
        )

    def _growth(self, slices: pd.DataFrame | None, n: int) -> tuple[str, Array, float]:
        """Where it is from, the growth of every row, and the share of rows that were never selected."""
        if slices is None:
            return "curve", *self._from_curve(n)
        if self.part.fraction < 1:
            return "slices", *self._from_slices(slices, n)
        scores = slices.sort_values(["matrix", "index"])["score_all"].to_numpy(float)
        return "calibration", calibrated_growth(scores).reshape(-1, n), 0.0

    def _from_slices(self, slices: pd.DataFrame, n: int) -> tuple[Array, float]:
        """Growth of every row from what the whole run took from it and what it still holds.

        Sums over the whole run hold for any schedule of fractions; a run that starts from zero momentum ends with all
        that a row holds gained in it.
        """
        slices = slices.sort_values(["matrix", "index"])
        selected, steps = slices["selected"].to_numpy(float), np.maximum(1.0, slices["steps"].to_numpy(float))
        threshold = _middle(self.part.rows, "threshold")
        # A row that was selected between flushes only: error feedback levels scores, so it had about the threshold.
        score = slices["score"].fillna(slices["score"].median() if threshold is None else threshold).to_numpy(float)
        held = np.zeros_like(score)
        if self.start == 0 and threshold is not None:
            now = 2 * slices["score_all"].to_numpy(float) if "score_all" in slices else np.full_like(score, threshold)
            held = np.minimum(threshold, np.where(np.isfinite(now), now, threshold))
        rates = balanced_growth(score, selected, steps, _ef(self.options), held)
        return rates.reshape(-1, n), float((selected == 0).mean())

    def _from_curve(self, n: int) -> tuple[Array, float]:
        """Frequencies in units of θ from the mean Lorenz curve; rows at 1 may grow faster than it shows."""
        rows, needed = self.part.rows, math.ceil(8 / self.part.fraction)
        if "window" in rows:
            rows = rows[rows["window"] >= needed]
        curve = _curve(rows, "frequency_at") if len(rows) else {}
        if not curve:
            raise ValueError(
                f"nothing says how often single rows of {self.name!r} were selected: there is no slices.csv for it "
                f"(written when the tracker closes: call tracker.close()), and no curve frequency_at_… counted over "
                f">= {needed} steps (log selection every >= {needed} steps)"
            )
        at = np.array([0.0, *curve, 1.0])
        share = np.maximum.accumulate(np.array([0.0, *curve.values(), 1.0]))
        cumulated = np.interp(np.arange(n + 1) / n, at, share)
        f = np.minimum(1.0, np.diff(cumulated) * self.part.fraction * n)
        coverage = _mean(rows, "coverage")
        return f[None, :], 0.0 if coverage is None else 1 - coverage


def _middle(rows: pd.DataFrame, column: str) -> float | None:
    """Median of the last quarter of the flushes: ages rise until every row has had its first turn."""
    if column not in rows or not rows[column].notna().any():
        return None
    values = rows[column].dropna()
    return float(values.iloc[len(values) * 3 // 4 :].median())


def _mean(rows: pd.DataFrame, column: str) -> float | None:
    return float(rows[column].mean()) if column in rows and rows[column].notna().any() else None
