"""A made-up run with everything that figures of selections show, for as many matrices as wanted."""

import base64
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd

from scion_telemetry.analysis import estimators, theory
from scion_telemetry.store import Run, load_run

FRACTIONS = (*(i / 64 for i in (1, 2, 4, 6)), *(i / 16 for i in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15)))
WORLDS = (2, 4, 8, 16, 32, 64)
KINDS = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w1", "mlp.w2", "mlp.w3", "mlp.w4")
N, WIDTH, ALPHA, EVERY = 128, 768, 0.25, 10


def selection_run(path: Path, count: int, *, steps: int = 8, gradient: bool = True, alpha: float = ALPHA) -> Run:
    """``count`` matrices of 128 rows of 768 entries, flushed every 10 steps; the deeper, the more unequal."""
    rng, draws = np.random.default_rng(count), np.random.default_rng(count + 1)
    names = [f"layers.{i // len(KINDS)}.{KINDS[i % len(KINDS)]}" for i in range(count)]
    rows, bins, slices, selected = [], [], [], []
    for i, name in enumerate(names):
        scores = np.exp(1.2 * i / max(1, count - 1) * rng.standard_normal(N)) * (1 + 0.03 * rng.standard_normal(N))
        chance = theory.water_fill(scores, alpha)
        total = np.zeros(N)
        for flush in range(steps):
            step = EVERY * (flush + 1)
            counts = rng.binomial(EVERY, chance)
            total += counts
            noisy = scores * (1 + 0.05 * rng.random(N))
            rows.append({"step": step, "param": name, **_facts(noisy, counts, chance, alpha, gradient, step)})
            bins += [{"step": step, "param": name, **b} for b in _bins(counts / EVERY)]
            selected.append({"step": step, "param": name, "matrix": 0, "count": N, "rows": _flags(draws, chance)})
        for row in range(N):
            slices.append({"param": name, "matrix": 0, "index": row, "selected": total[row], "steps": EVERY * steps})
    return _write(path, names, *map(pd.DataFrame, (rows, bins, slices, selected)))


def _facts(
    scores: np.ndarray, counts: np.ndarray, chance: np.ndarray, alpha: float, gradient: bool, step: int
) -> dict[str, float]:
    level = scores**0.3
    facts = {
        "k": alpha * N,
        "fraction": alpha,
        "captured_mass": float(estimators.captured_mass(level, alpha)),
        "flat_gini": theory.flat_gini(WIDTH),
        "window": float(EVERY),
        "churn": 0.6 + 0.3 * math.sin(step),
        "age_p50": 2.0,
        "age_p99": theory.periodic_age(chance, 0.99),
        "age_max": 1.5 * theory.periodic_age(chance, 0.99) + 1,
        "regret": 0.01,
    }
    facts |= {f"mass_at_{f:g}": float(estimators.captured_mass(level, f)) for f in FRACTIONS}
    if gradient:
        facts |= {f"grad_mass_at_{f:g}": float(estimators.captured_mass(scores, f)) for f in FRACTIONS}
    if counts.any():
        facts |= {f"frequency_at_{f:g}": float(estimators.captured_mass(counts, f)) for f in FRACTIONS}
    return facts | {f"regret_at_{w}": 0.001 * w * float(np.std(scores)) for w in WORLDS}


def _bins(frequency: np.ndarray) -> list[dict[str, float | str]]:
    with np.errstate(divide="ignore"):
        log = np.floor(4 * np.log2(frequency)) / 4
    found, counts = np.unique(log, return_counts=True)
    return [
        {
            "name": "selection_frequencies",
            "log2": float(at),
            "count": float(c),
            "mass": float(frequency[log == at].sum()),
        }
        for at, c in zip(found, counts, strict=True)
    ]


def _flags(draws: np.random.Generator, chance: np.ndarray) -> str:
    """Rows selected at a flush: each with its chance, a fourth of all on average."""
    return base64.b64encode(np.packbits(draws.random(N) < chance).tobytes()).decode()


def _write(
    path: Path, names: list[str], rows: pd.DataFrame, bins: pd.DataFrame, slices: pd.DataFrame, selected: pd.DataFrame
) -> Run:
    path.mkdir(parents=True)
    info = {
        "schema_version": 1,
        "attributes": {},
        "layer_columns": [],
        "selection_columns": [c for c in rows.columns if c not in ("step", "param")],
        "slice_columns": ["selected", "steps"],
        "selection_rows": True,
        "units": {},
    }
    (path / "run.json").write_text(json.dumps(info), encoding="utf-8")
    options = json.dumps({"selection": "rows", "shards": 2, "num_heads": None})
    params = pd.DataFrame({"name": names, "aliases": "", "role": "hidden", "shape": f"{N}x{WIDTH}"})
    params = params.assign(dtype="float32", layout="Shard(0) x2", algorithm="dion2", options=options)
    tables = {"params": params, "selection": rows, "histograms": bins, "slices": slices, "selected": selected}
    for name, table in tables.items():
        table.to_csv(path / f"{name}.csv", index=False)
    return load_run(path)
