"""What ``tune_fraction.py train`` measured, as tables and figures. Imports no torch.

run directories -> Study -> one function a question -> Table -> tables.md, tables.json
                                                    -> tune_fraction_figures -> PNG
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tune_fraction_predict import advice, ages, cold, predictions, repeats
from tune_fraction_study import Study, Table, late, load

from scion_telemetry.analysis.theory import flat_mass, overdue_share
from scion_telemetry.store import Run

Z_SUM = 1.959964 + 0.841621
"""z of a two-sided 5 % level plus z of 80 % power."""


# ---------------------------------------------------------------------- 1. loss


def losses(study: Study) -> Table:
    """Validation loss at every fraction, and its gap to fraction 1 seed by seed."""
    by = study.sweep.pivot(index="fraction", columns="seed", values="val_loss").sort_index(ascending=False)
    gaps = by - by.iloc[0]
    rows = [
        [f, *by.loc[f].tolist(), by.loc[f].mean(), by.loc[f].std(), gaps.loc[f].mean(), gaps.loc[f].std()]
        for f in by.index
    ]
    columns = ["fraction", *(f"seed {s}" for s in by.columns), "mean", "sd", "gap to 1", "sd of the gap"]
    return Table(title="Validation loss, nats a byte", columns=columns, rows=rows)


def power(study: Study) -> Table:
    """Gap of two means that n seeds an arm show with 80 % power, by the pooled spread over seeds."""
    by = study.sweep.pivot(index="fraction", columns="seed", values="val_loss").sort_index(ascending=False)
    gaps = (by - by.iloc[0]).iloc[1:]
    n = by.shape[1]
    unpaired = math.sqrt(float(by.var(axis=1).mean()))
    paired = math.sqrt(float(gaps.var(axis=1).mean()))
    rows = [
        ["unpaired", unpaired, n, Z_SUM * unpaired * math.sqrt(2 / n)],
        ["paired by seed", paired, n, Z_SUM * paired / math.sqrt(n)],
    ]
    return Table(title="What the seeds can show", columns=["comparison", "sd", "seeds", "gap at 80 % power"], rows=rows)


def rates(study: Study) -> Table:
    """Validation loss on the grid of learning rates, seed 0."""
    t = study.table
    t = t[(t["world"] == 1) & t["data_seed"].isna() & (t["seed"] == 0) & ~t["name"].str.contains("-ef")]
    by = t.pivot(index="fraction", columns="lr", values="val_loss").sort_index(ascending=False)
    rows = [[f, *by.loc[f].tolist(), float(by.loc[f].idxmin()), by.loc[f].min()] for f in by.index]
    columns = ["fraction", *(f"lr {lr:g}" for lr in by.columns), "best lr", "its loss"]
    return Table(title="Validation loss by learning rate, seed 0", columns=columns, rows=rows)


# ---------------------------------------------------------------------- 3. to 5. momentum, scopes, cost


def horizons(study: Study) -> Table:
    """Loss with ef_decay .95 and with the one that keeps the horizon at that of fraction 1, at one learning rate."""
    rows = []
    for _, facts in study.table[study.table["name"].str.contains("-ef")].iterrows():
        fraction, ef = facts["fraction"], facts["ef_decay"]
        usual = study.runs.get(str(facts["name"]).replace(f"-ef{ef:g}", ""))
        usual_loss = math.nan if usual is None else _last(usual)
        ages = [
            math.nan if run is None else float(late(run)["age_p99"].mean())
            for run in (usual, study.runs[facts["name"]])
        ]
        mean = [facts["lr"], 1 / (0.05 * fraction), usual_loss, ages[0], ef, 1 / ((1 - ef) * fraction)]
        rows.append([fraction, *mean, facts["val_loss"], ages[1]])
    columns = ["fraction", "lr", "horizon at .95", "loss", "age p99", "ef_decay", "horizon", "its loss", "its age p99"]
    return Table(title="A momentum of one horizon, seed 0", columns=columns, rows=rows[::-1])


def flattening(study: Study) -> Table:
    """C of the momentum and of the gradient, mean over matrices, over the second half and over seeds."""
    rows = []
    for fraction in study.fractions:
        names = study.sweep.loc[study.sweep["fraction"] == fraction, "name"]
        tables = pd.concat([late(study.runs[name]) for name in names])
        flat = _flat(study.runs[names.iloc[0]])
        cells = [tables[f"{side}mass_at_{f:g}"].mean() for f in (0.0625, 0.25, 0.5) for side in ("", "grad_")]
        rows.append(
            [fraction, *cells, flat, tables["ef_growth"].mean(), 1 - tables["churn"].mean(), fraction / (2 - fraction)]
        )
    head = [f"{side}({f:g})" for f in (0.0625, 0.25, 0.5) for side in ("C_M", "C_G")]
    columns = ["fraction", *head, "flat C(.25)", "EF growth", "Jaccard", "of random"]
    return Table(title="Captured mass of momentum and gradient", columns=columns, rows=rows)


def _flat(run: Run) -> float:
    params = run.params[run.params["algorithm"] == "dion2"]
    return float(np.mean([flat_mass(0.25, shape[1]) for shape in params["shape"]]))


def starvation(study: Study) -> Table:
    """What the rule looks at, measured in the second half of every run: mean and worst matrix over seeds."""
    rows = []
    for fraction in [f for f in study.fractions if f < 1]:
        names = study.sweep.loc[study.sweep["fraction"] == fraction, "name"]
        rows.append([fraction, *_waiting(study, names.tolist())])
    return Table(title="Waiting rows in the second half", columns=["fraction", *_WAITING], rows=rows)


def starvation_by_rate(study: Study) -> Table:
    """The same of every learning rate and ``ef_decay`` that was tried, seed 0, with the loss."""
    t = study.table
    t = t[(t["world"] == 1) & t["data_seed"].isna() & (t["seed"] == 0) & (t["fraction"] < 1)]
    rows = []
    for _, facts in t.sort_values(["lr", "fraction"], ascending=[True, False]).iterrows():
        cells = _waiting(study, [facts["name"]])
        rows.append([facts["lr"], facts["fraction"], _options(study, facts["name"])["ef_decay"], *cells])
        rows[-1].append(facts["val_loss"])
    columns = ["lr", "fraction", "ef_decay", *_WAITING, "loss"]
    return Table(title="Waiting rows by learning rate, seed 0", columns=columns, rows=rows)


_HORIZONS = 3.0
_WAITING = (
    "horizon",
    "age p99",
    "worst",
    "age / horizon",
    "parameters above 3",
    "overdue",
    "worst",
    "lr·wd·age, worst",
)


def _waiting(study: Study, names: list[str]) -> list[float]:
    """Over matrices and runs: ages in steps and horizons, rows rarer than once in three of these, and drift."""
    options, fraction = _options(study, names[0]), study.table.set_index("name").loc[names[0], "fraction"]
    horizon = 1 / ((1 - options["ef_decay"]) * fraction)
    tables = pd.concat([late(study.runs[name]).assign(run=name) for name in names])
    p99 = tables.groupby(["run", "param"], observed=True)["age_p99"].mean()
    sizes = {name: math.prod(shape) for name, shape in study.runs[names[0]].params.set_index("name")["shape"].items()}
    weights = np.array([sizes[param] for _, param in p99.index], dtype=float)
    old = float(weights @ (p99.to_numpy() > _HORIZONS * horizon) / weights.sum())
    rare = [overdue_share(f, _HORIZONS * horizon) for name in names for f in study.trace(name).frequency(0.5).values()]
    drift = options["lr"] * options["weight_decay"] * p99.max()
    ages = [float(p99.mean()), float(p99.max()), float(p99.mean()) / horizon]
    return [horizon, *ages, old, float(np.mean(rare)), float(np.max(rare)), drift]


def _options(study: Study, name: str) -> dict[str, Any]:
    return next(o for o in study.runs[name].params["options"] if "ef_decay" in o)


def scopes(study: Study) -> Table:
    """Local and global selection where rows lie in shards."""
    base = study.of(0.25)
    rows: list[list[Any]] = []
    if base is not None:
        alone = late(base)
        whole = [1, "whole", _last(base), alone["fraction"].mean(), *[math.nan] * 4, alone["gini"].mean()]
        rows.append([*whole, alone["age_p99"].mean()])
    for _, facts in study.table[study.table["world"] > 1].iterrows():
        table = late(study.runs[facts["name"]])
        means = [table["fraction"].mean(), table["regret"].mean(), table["regret"].max(), table["overlap"].mean()]
        cells = [table["imbalance"].mean(), table["gini"].mean(), table["age_p99"].mean()]
        rows.append([int(facts["world"]), facts["scope"], facts["val_loss"], *means, *cells])
    columns = ["ranks", "scope", "loss", "k/n", "regret", "its max", "overlap", "imbalance", "Gini", "age p99"]
    return Table(title="Local and global selection at fraction .25, seed 0", columns=columns, rows=rows)


def _last(run: Run) -> float:
    return float(run.scalars["val_loss"].dropna().iloc[-1])


def costs(study: Study) -> Table:
    """Optimizer time over that at fraction 1, and bytes between ranks in one step."""
    path = study.path / "cost.json"
    if not path.exists():
        return Table(title="Cost of a step", columns=["fraction"], rows=[])
    found = json.loads(path.read_text())
    fractions, times, sent = found["fractions"], found["optimizer_ms"], found["bytes_by_rank"]
    rows = []
    for i, fraction in enumerate(fractions):
        relative = [table[i] / table[0] for table in times.values()]
        moved = [sum(table[i]) for table in sent.values()]
        share = [sum(table[i]) / sum(table[0]) for table in sent.values()]
        rows.append([fraction, *relative, share_of_step(study, fraction), *moved, *share])
    columns = [
        "fraction",
        *(f"time, {w} wide" for w in times),
        "optimizer / step",
        *(f"bytes, {w} ranks" for w in sent),
    ]
    return Table(title="Cost of a step", columns=[*columns, *(f"of full, {w} ranks" for w in sent)], rows=rows)


def share_of_step(study: Study, fraction: float) -> float:
    """Optimizer time over that of the whole step, median over steps that were not measured, seed 0."""
    run = study.of(fraction)
    if run is None:
        return math.nan
    t = run.scalars.set_index("step")
    t = t[~t.index.isin(run.steps) & t["optimizer_ms"].notna()]
    return float((t["optimizer_ms"] / (t["optimizer_ms"] + t["gradient_ms"])).median())


def tables(study: Study) -> list[Table]:
    """All of them, in the order of the questions."""
    return [
        losses(study),
        power(study),
        rates(study),
        horizons(study),
        *predictions(study),
        cold(study),
        repeats(study),
        flattening(study),
        starvation(study),
        starvation_by_rate(study),
        ages(study),
        advice(study),
        scopes(study),
        costs(study),
    ]


def report(path: Path, figures: Path) -> str:
    """Write ``tables.md`` and ``tables.json``, draw the figures; returns the tables as text."""
    import tune_fraction_figures  # which imports this module

    study = load(path)
    found = tables(study)
    text = "\n".join(str(table) for table in found)
    (path / "tables.md").write_text(text)
    (path / "tables.json").write_text(json.dumps([asdict(table) for table in found], indent=1) + "\n")
    tune_fraction_figures.draw(study, figures)
    return text
