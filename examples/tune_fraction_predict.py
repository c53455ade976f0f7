"""How often each row will be selected: predictors from one run, held against other runs."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from tune_fraction_study import Array, Rows, Study, Table, ef_decay, late, slices_of

from scion_telemetry.analysis.advise import advise
from scion_telemetry.analysis.growth import late_growth
from scion_telemetry.analysis.stretches import FEWEST_STEPS
from scion_telemetry.analysis.theory import (
    SHARPNESS,
    balanced_growth,
    cold_fill,
    geometric_age,
    growth,
    overdue_share,
    periodic_age,
    water_fill,
)
from scion_telemetry.store import Run

Predictor = Callable[[Study, str], Rows]


def _score(table: pd.DataFrame) -> Array:
    """Score when selected; where no flush found the row selected, the matrix's median stands for its threshold."""
    return np.asarray(table["score"].fillna(table["score"].median()))


def by_counts(study: Study, name: str) -> Rows:
    """(1 - ef) · score · f of the whole run."""
    run = study.runs[name]
    return {param: growth(_score(t), t["selected"] / t["steps"], ef_decay(run)) for param, t in slices_of(run)}


def by_balance(study: Study, name: str) -> Rows:
    """What was taken and what is held, all from slices.csv.

    A row that was selected holds about its score when selected; one that never was has grown from 0 all the time, so
    that it holds twice its mean score.
    """
    run = study.runs[name]
    found = {}
    for param, t in slices_of(run):
        held = np.where(t["selected"] > 0, _score(t), 2 * t["score_all"])
        found[param] = balanced_growth(_score(t), t["selected"], t["steps"], ef_decay(run), held)
    return found


def by_later_part(study: Study, name: str) -> Rows:
    """What ``advise`` takes where ``slices.csv`` counts the later part of a run; here counted in the record."""
    run = study.runs[name]
    start = _start_of_later_part([step for step in run.steps if step <= run.slices["steps"].max()])
    trace, found = study.trace(name), {}
    for param, t in slices_of(run):
        rows = run.selection[run.selection["param"] == param]
        every = len(trace.selected[param]) // len(trace.scores[param])
        told = {
            "selected_late": trace.selected[param][start:].sum(0),
            "steps_late": len(trace.selected[param]) - start,
            "score_all_late": trace.scores[param][start // every :].mean(0),
        }
        threshold = float(rows["threshold"].iloc[len(rows) * 3 // 4 :].median())
        found[param] = late_growth(t.assign(**told), threshold, ef_decay(run), cold=True)
    return found


def _start_of_later_part(flushes: list[int]) -> int:
    """After which step the tracker begins it: of flushes that are √2 apart, the latest in the first half."""
    apart: list[int] = []
    for step in flushes:
        if not apart or step >= math.sqrt(2) * apart[-1]:
            apart.append(step)
    return max((step for step in apart if 2 * step <= flushes[-1]), default=0)


def by_mean_score(study: Study, name: str) -> Rows:
    """The mean score over all steps."""
    return {param: t["score_all"].to_numpy() for param, t in slices_of(study.runs[name])}


def by_last_half(study: Study, name: str) -> Rows:
    """What was taken in the second half and what is held more at its end than at its beginning."""
    trace, keep, found = study.trace(name), ef_decay(study.runs[name]), {}
    for param, selected in trace.selected.items():
        half, scores = len(selected) // 2, trace.scores[param]
        every = len(selected) // len(scores)
        late, flushed = scores[half // every :], selected[every - 1 :: every][half // every :]
        with np.errstate(invalid="ignore"):
            score = np.where(flushed.any(0), (late * flushed).sum(0) / flushed.sum(0), late.mean(0))
        held = late[-1] - scores[half // every - 1]
        found[param] = np.maximum(0.0, balanced_growth(score, selected[half:].sum(0), len(selected) - half, keep, held))
    return found


def by_square(study: Study, name: str) -> Rows:
    """The square of the mean score: how it would be if gradients were all noise."""
    return {param: score**2 for param, score in by_mean_score(study, name).items()}


def by_advice(study: Study, name: str) -> Rows:
    """What ``advise`` takes."""
    return {m.evidence.param: m.evidence.rates.ravel() for m in advise(study.runs[name]).matrices}


PREDICTORS: dict[str, tuple[Predictor, float]] = {
    "counts (1-ef)·score·f": (by_counts, math.inf),
    "counts + held": (by_balance, math.inf),
    "counts + held, soft": (by_balance, SHARPNESS),
    "of the last half": (by_last_half, math.inf),
    "of the last half, soft": (by_last_half, SHARPNESS),
    "later part (slices.csv), soft": (by_later_part, SHARPNESS),
    "mean score": (by_mean_score, math.inf),
    "advise": (by_advice, SHARPNESS),
}
CALIBRATIONS: dict[str, tuple[Predictor, float]] = {
    "mean score": (by_mean_score, math.inf),
    "mean score squared": (by_square, math.inf),
    "mean score squared, soft": (by_square, SHARPNESS),
}
"""Growth of every row, and how sharply it becomes full."""


def predict(g: Rows, like: Rows, *, sharpness: float = math.inf, steps: int | None = None, keep: float = 0.95) -> Rows:
    """Frequencies at the fraction that ``like`` realised, matrix by matrix.

    Args:
        g: Growth of every row.
        like: Frequencies whose mean is the fraction.
        sharpness: Infinite: a row becomes full at once.
        steps: Of a run from zero momentum; None: in balance.
        keep: What a selected row keeps; only with ``steps``.
    """
    found = {}
    for param, f in like.items():
        alpha = min(1.0, float(f.mean()))
        if steps is None:
            found[param] = water_fill(g[param], alpha, sharpness=sharpness)
        else:
            found[param] = cold_fill(g[param], alpha, steps, keep, sharpness=sharpness)
    return found


def agreement(predicted: Rows, realised: Rows) -> list[float]:
    """How well every row's frequency was said, and how well their distribution.

    Returns:
        Correlation over all rows; its median over matrices; mean error; that of the sorted frequencies of each matrix,
        which does not ask which row is which; and the mean error of saying α of every row.
    """
    x, y = (np.concatenate([rows[param] for param in realised]) for rows in (predicted, realised))
    level = np.concatenate([np.full_like(f, f.mean()) for f in realised.values()])
    each = [correlation(predicted[param], f) for param, f in realised.items()]
    ordered = [np.abs(np.sort(predicted[param]) - np.sort(f)).mean() for param, f in realised.items()]
    sizes = [len(f) for f in realised.values()]
    return [
        correlation(x, y),
        float(np.median(each)),
        float(np.abs(x - y).mean()),
        float(np.average(ordered, weights=sizes)),
        float(np.abs(level - y).mean()),
    ]


def correlation(x: Array, y: Array) -> float:
    """Pearson's r; NaN where one of them is constant."""
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else math.nan


_AGREEMENT = ["corr", "of the median matrix", "MAE", "sorted MAE", "MAE of f = α"]


def predictions(study: Study) -> list[Table]:
    """From one run at .25, and from one at 1, to every other fraction; the mean over seeds."""
    return [
        _predictions(study, "Same gradients, predicted from the run at .25", 0.25, PREDICTORS, shadow=True),
        _predictions(study, "Other runs, predicted from the run at .25", 0.25, PREDICTORS),
        _predictions(study, "Other runs, predicted from the run at 1", 1.0, CALIBRATIONS),
    ]


def _predictions(
    study: Study, title: str, source: float, predictors: dict[str, tuple[Predictor, float]], *, shadow: bool = False
) -> Table:
    rows = []
    long_enough = study.table["steps"].max() >= FEWEST_STEPS
    for label, (predictor, sharpness) in predictors.items():
        for target in study.fractions if long_enough or predictor is not by_advice else ():
            found = []
            for seed in sorted(study.sweep["seed"].unique()):
                one, other = study.of(source, seed), study.of(source if shadow else target, seed)
                if one is not None and other is not None and target < 1:
                    realised = study.trace(other.path.name, target if shadow else None).frequency(0.5)
                    said = predict(predictor(study, one.path.name), realised, sharpness=sharpness)
                    found.append(agreement(said, realised))
            rows += [[label, target, *np.nanmean(found, axis=0).tolist()]] if found else []
    return Table(title=f"{title}, second half", columns=["growth from", "to", *_AGREEMENT], rows=rows)


def cold(study: Study) -> Table:
    """Counts of whole runs, which start from zero momentum, by both forms of the law."""
    rows = []
    for target in [f for f in study.fractions if f < 1]:
        source, other = study.of(0.25), study.of(target)
        if source is None or other is None:
            continue
        realised = {p: (t["selected"] / t["steps"]).to_numpy() for p, t in slices_of(other)}
        steps = int(other.slices["steps"].iloc[0])
        for label, predictor in (("counts", by_counts), ("balance", by_balance)):
            g = predictor(study, source.path.name)
            for law, given in (("in balance", None), ("from zero momentum", steps)):
                said = predict(g, realised, sharpness=SHARPNESS, steps=given, keep=ef_decay(other))
                row = agreement(said, realised)
                rows.append([label, law, target, *row])
    columns = ["growth from", "law", "to", *_AGREEMENT]
    return Table(title="Counts of the whole run, predicted from one at .25, seed 0", columns=columns, rows=rows)


def repeats(study: Study) -> Table:
    """How well a run predicts its own second half, its repetition, and what its gradients do at another fraction."""
    rows = []
    for fraction in study.fractions:
        run, quarter = study.of(fraction), study.of(0.25)
        if fraction == 1 or run is None or quarter is None:
            continue
        trace = study.trace(run.path.name)
        early = {p: s[: len(s) // 2].mean(0) for p, s in trace.selected.items()}
        pairs = {"first half of the same run": early}
        for name in study.runs:
            if name.startswith(f"fraction{fraction:g}-seed0-data"):
                pairs["same weights, other order of the data"] = study.trace(name).frequency(0.5)
        pairs["this fraction on the gradients of the run at .25"] = study.trace(quarter.path.name, fraction).frequency(
            0.5
        )
        rows += [[fraction, label, *agreement(rows_, trace.frequency(0.5))] for label, rows_ in pairs.items()]
    return Table(
        title="What other runs say of the second half of a run, seed 0",
        columns=["fraction", "by", *_AGREEMENT],
        rows=rows,
    )


def ages(study: Study) -> Table:
    """Laws of the 99th percentile of the age, from the run at .25 to others, over matrices and seeds.

    ``periodic`` and ``geometric`` take the predicted frequencies; ``scaled`` moves the age that was measured at .25 by
    the ratio of the periodic ones; the last one by the ratio of the fractions alone.
    """
    rows = []
    for target in [f for f in study.fractions if f < 1 and study.table["steps"].max() >= FEWEST_STEPS]:
        measured, said = [], []
        for seed in sorted(study.sweep["seed"].unique()):
            source, other = study.of(0.25, seed), study.of(target, seed)
            if source is not None and other is not None:
                now = _ages(source)
                g = by_last_half(study, source.path.name)
                measured += [_ages(other)[param] for param in g]
                said += [_laws(rates, 0.25, target, now[param]) for param, rates in g.items()]
        if said:
            real = np.array(measured)
            for law, values in zip(("periodic", "geometric", "scaled", "1/fraction"), np.array(said).T, strict=True):
                ratio = (values + 1) / (real + 1)
                cells = [float(x) for x in (np.median(real), np.median(values), np.median(ratio))]
                spread = float(np.exp(np.abs(np.log(ratio)).mean()))
                rows.append([target, law, *cells, spread, correlation(np.log1p(values), np.log1p(real))])
    columns = ["to", "law", "measured", "said", "said / measured", "off by a factor of", "corr of logs"]
    return Table(title="Age p99, median matrix, predicted from the run at .25", columns=columns, rows=rows)


def _ages(run: Run) -> "pd.Series[float]":
    return late(run).groupby("param", observed=True)["age_p99"].mean()


def _laws(rates: Array, source: float, target: float, measured: float) -> list[float]:
    old, new = (periodic_age(water_fill(rates, f), 0.99) for f in (source, target))
    plain = (measured + 1) * source / target - 1
    scaled = (measured + 1) * (new + 1) / (old + 1) - 1 if math.isfinite(new) and math.isfinite(old) else plain
    return [new, geometric_age(water_fill(rates, target), 0.99), scaled, plain]


def advice(study: Study) -> Table:
    """What ``advise`` says of each fraction from the run at .25, and what came in the runs at that fraction, seed 0."""
    rows: list[list[Any]] = []
    source, whole = study.of(0.25), study.of(1.0)
    columns = ["fraction", "age p99", "measured", "worst", "measured", "overdue", "measured", "accepted", "broken by"]
    if source is not None and study.table["steps"].max() >= FEWEST_STEPS:
        said = advise(source, calibration=whole)
        frame = said.to_frame()
        for fraction in study.fractions:
            run = study.of(fraction)
            if run is None:
                continue
            told = frame[frame["fraction"] == fraction]
            ages = late(run).groupby("param", observed=True)["age_p99"].mean()
            limit = float(told["age_limit"].median())
            rare = [overdue_share(f, limit) for f in study.trace(run.path.name).frequency(0.5).values()]
            pairs = [told["age_p99"].mean(), ages.mean(), told["age_p99"].max(), ages.max()]
            broken = told["failed"][told["failed"] != ""].str.split(";").explode().value_counts()
            why = ", ".join(f"{name} {count}" for name, count in broken.items())
            cells = [*pairs, told["overdue"].mean(), float(np.mean(rare)), told["accepted"].mean(), why or "-"]
            rows.append([fraction, *cells])
        rows += [[g.fraction, *["-"] * 7, f"advised for {g.role}, bound by {g.binding}"] for g in said.groups]
    return Table(title="Advice from the run at .25, and what came", columns=columns, rows=rows)
