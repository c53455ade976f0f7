"""The run directories that ``tune_fraction.py train`` wrote, opened. Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scion_telemetry.store import Run, load_run

Array = NDArray[np.float64]
Rows = dict[str, Array]
"""One number a row of each matrix, by the name of the matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Measured numbers.

    Args:
        title: What is told.
        columns: Names of the columns.
        rows: One entry a column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *([_text(cell) for cell in row] for row in self.rows)]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _text(cell: Any) -> str:
    if not isinstance(cell, float):
        return str(cell)
    if math.isnan(cell):
        return "-"
    if abs(cell) >= 1000:
        return f"{cell:,.0f}"
    if abs(cell) >= 10:
        return f"{cell:.1f}"
    return f"{cell:.4f}".rstrip("0").rstrip(".") if abs(cell) >= 0.01 or cell == 0 else f"{cell:.2g}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Which rows of each matrix were selected at every step, and their scores at every so many."""

    selected: dict[str, NDArray[np.bool_]]
    scores: dict[str, Array]

    def frequency(self, first: float = 0.0) -> Rows:
        """Selections a step from a share of the run to its end."""
        return {name: s[int(first * len(s)) :].mean(0) for name, s in self.selected.items()}


@dataclass(frozen=True, kw_only=True)
class Study:
    """The finished trainings below a folder.

    Args:
        path: The folder.
        runs: By the name of the run directory.
    """

    path: Path
    runs: dict[str, Run]

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a run: its attributes and its last validation loss."""
        facts = [{"world": 1, "data_seed": math.nan, **run.attributes, "name": name} for name, run in self.runs.items()]
        table = pd.DataFrame(facts)
        table["val_loss"] = [run.scalars["val_loss"].dropna().iloc[-1] for run in self.runs.values()]
        return table

    @cached_property
    def sweep(self) -> pd.DataFrame:
        """The runs that differ in fraction and seed only."""
        t = self.table
        main = (
            t["lr"].mode()[0] if "fraction1-seed0" not in self.runs else self.runs["fraction1-seed0"].attributes["lr"]
        )
        return t[(t["world"] == 1) & t["data_seed"].isna() & (t["lr"] == main)]

    @property
    def fractions(self) -> list[float]:
        """Fractions of the sweep, from 1 down."""
        return sorted(self.sweep["fraction"].unique(), reverse=True)

    def of(self, fraction: float, seed: int = 0) -> Run | None:
        """One run of the sweep."""
        return self.runs.get(f"fraction{fraction:g}-seed{seed}")

    def trace(self, name: str, shadow: float | None = None) -> Trace:
        """The record of a run on one rank, or of what another fraction would have selected from its gradients."""
        shapes = dict(zip(self.runs[name].params["name"], self.runs[name].params["shape"], strict=True))
        selected, scores = {}, {}
        with np.load(self.path / name / ("dynamics.npz" if shadow is None else f"shadow{shadow:g}.npz")) as arrays:
            for key in arrays:
                kind, _, param = key.partition("/")
                if kind == "selected":
                    selected[param] = np.unpackbits(arrays[key], axis=-1, count=shapes[param][0]).astype(bool)
                else:
                    scores[param] = arrays[key].astype(float)
        return Trace(selected=selected, scores=scores)


def load(path: Path) -> Study:
    """Open what is finished below a folder."""
    found = sorted(done.parent for done in path.glob("*/done.json"))
    if not found:
        raise ValueError(f"no finished training below {str(path)!r}; run `tune_fraction.py train --out {path}` first")
    return Study(path=path, runs={p.name: load_run(p) for p in found})


def slices_of(run: Run) -> Iterator[tuple[str, pd.DataFrame]]:
    """What is told of every row, matrix by matrix, in the order of the rows."""
    for name, table in run.slices.groupby("param", observed=True, sort=False):
        yield str(name), table.sort_values("index")


def ef_decay(run: Run) -> float:
    """What a selected row of the momentum keeps."""
    options: dict[str, Any] = next(o for o in run.params["options"] if "ef_decay" in o)
    return float(options["ef_decay"])


def late(run: Run) -> pd.DataFrame:
    """Selection rows of the second half of a run."""
    steps = run.selection["step"]
    found: pd.DataFrame = run.selection[steps > steps.max() / 2]
    return found
