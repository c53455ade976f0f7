"""A run of Dion2 that never was: selection tables from the simulator, written as the tracker writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from sample_run import run_info

from scion_telemetry.analysis.estimators import captured_mass
from scion_telemetry.analysis.simulate import Simulated, simulate
from scion_telemetry.rows import Batch, ParamInfo, Row, Slice
from scion_telemetry.sinks import CsvSink
from scion_telemetry.store import Run, load_run

FRACTIONS = (1 / 64, 1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 7 / 16, 1 / 2, 9 / 16, 5 / 8, 3 / 4)
WIDTH = 32
LATE = ("selected_late", "steps_late", "score_all_late")


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """One parameter ``[n, 32]`` of a run.

    Args:
        name: Its name.
        scales: Of its rows.
        plan: Steps and fraction of every stretch.
        options: Of its group.
        columns: Further selection columns.
        snr: Drift over noise of its gradients.
        ends: Scales at the end of every stretch, if they drift there.
    """

    name: str
    scales: np.ndarray
    plan: Sequence[tuple[int, float]] = ((1000, 0.25),)
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, float] = field(default_factory=dict)
    role: str = "hidden"
    snr: float = 1.0
    ends: np.ndarray | None = None


def lognormal(n: int = 256, seed: int = 1, sigma: float = 1.0) -> np.ndarray:
    return np.exp(sigma * np.random.default_rng(seed).standard_normal(n))


def simulated(matrix: Matrix, steps: int, fraction: float) -> Simulated:
    options: dict[str, Any] = {"width": WIDTH, "snr": matrix.snr, "ends": matrix.ends}
    return simulate(matrix.scales, fraction=fraction, steps=steps, burn_in=0, **options)


def write(
    path: Path,
    *matrices: Matrix,
    every: int = 20,
    slices: bool = True,
    mass: bool = True,
    frequencies: bool = False,
    late: bool = True,
) -> Run:
    """Write a run; every stretch of a plan is simulated from zero momentum."""
    selection: dict[int, list[Row]] = {}
    last: list[Slice] = []
    for matrix in matrices:
        rows, told = _tables(matrix, every, mass, frequencies)
        for row in rows:
            selection.setdefault(row.step, []).append(row)
        if not late:
            told = [replace(s, values={k: v for k, v in s.values.items() if k not in LATE}) for s in told]
        last += told if slices else []
    columns = tuple(dict.fromkeys(c for rows in selection.values() for row in rows for c in row.values))
    info = run_info(
        params=tuple(_param(m) for m in matrices),
        selection_columns=columns,
        slice_columns=("selected", "steps", "score", "score_all", *(LATE if late else ())),
        attributes={},
    )
    sink = CsvSink(path)
    sink.open(info)
    for step in sorted(selection):
        sink.write(Batch(step=step, selection=tuple(selection[step])))
    sink.write(Batch(step=max(selection, default=0), slices=tuple(last)))
    sink.close()
    return load_run(path)


def _param(matrix: Matrix) -> ParamInfo:
    options = {"fraction": matrix.plan[-1][1], "ef_decay": 0.95, "lr": 0.02, "weight_decay": 0.01}
    return ParamInfo(
        name=matrix.name,
        role=matrix.role,
        shape=(len(matrix.scales), WIDTH),
        dtype="float32",
        layout="whole",
        algorithm="dion2",
        options={**options, "selection_scope": "local", "selection": "rows", "shards": 1, **matrix.options},
    )


def _tables(matrix: Matrix, every: int, mass: bool, frequencies: bool) -> tuple[list[Row], list[Slice]]:
    n = len(matrix.scales)
    rows: list[Row] = []
    begin, seen = 0, None
    taken, score = np.zeros(n), np.zeros(n)
    for steps, fraction in matrix.plan:
        run = simulated(matrix, steps, fraction)
        values = _row(matrix, run, fraction, every, mass, frequencies)
        for step in range(every, steps + 1, every):
            age = float(np.quantile(run.ages[(step - 1) // 10], 0.99, method="inverted_cdf"))
            rows.append(Row(step=begin + step, param=matrix.name, values={"age_p99": age, **values}))
        begin, seen = begin + steps, run
        taken = taken + run.selected
        score = score + np.nan_to_num(run.score) * run.selected
    assert seen is not None
    told = []
    for i in range(n):
        values = {"selected": float(taken[i]), "steps": float(begin), "score_all": float(seen.score_all[i])}
        late = seen.selected_late[i], seen.steps_late, seen.score_all_late[i]
        values |= dict(zip(LATE, map(float, late), strict=True))
        if taken[i]:
            values["score"] = float(score[i] / taken[i])
        told.append(Slice(param=matrix.name, matrix=0, index=i, values=values))
    return rows, told


def _row(
    matrix: Matrix, run: Simulated, fraction: float, every: int, mass: bool, frequencies: bool
) -> dict[str, float]:
    n = len(matrix.scales)
    values = {
        "k": float(np.ceil(fraction * n)),
        "fraction": float(np.ceil(fraction * n)) / n,
        "captured_mass": run.momentum_mass,
        "threshold": float(np.nanmedian(run.score)),
        "window": float(every),
    }
    if mass:
        values |= {f"mass_at_{f:g}": float(captured_mass(run.score_all, f)) for f in FRACTIONS}
    if frequencies:
        values |= {f"frequency_at_{f:g}": float(captured_mass(run.selected, f)) for f in FRACTIONS}
    return {**values, **matrix.columns}
