"""Run directories as pandas tables, while the run lives or long after. Imports no torch.

    run = load_run("runs/a")
    run.layers          step, param, one column a metric
    run.selection       the same for what the optimizer selected
    run.scalars         step, one column a scalar
    run.params          name, role, shape, options, ...
    run.histograms      step, param, name, log2, count, mass: one row a bin that is not empty
    run.slices          param, matrix, index, one column a fact, over the whole run
    run.selected        step, param, matrix, count, rows: which rows were selected; run.raster(param) has them as flags
    load_runs("runs/*").layers      all runs, with the run's name and attributes as columns

A line without its line end is one that is being written, or that a kill has cut: it is never read as data.
"""

import glob
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ._store_selected import unpacked
from .rows import SCHEMA_VERSION, Value

_HOLDS = (
    "a run directory holds run.json, params.csv, layers.csv, scalars.csv and, where they are measured, selection.csv, "
    "histograms.csv, selected.csv and slices.csv"
)
_PARAM_COLUMNS = ["name", "aliases", "role", "shape", "dtype", "layout", "algorithm", "options"]
_SUMMARY = {
    "layers": ("weight_rms", "weight_rms_to_rms", "weight_nonfinite", "update_weight_ratio"),
    "selection": ("captured_mass",),
}


# No slots: cached_property keeps a table in the instance, so that of two thousand runs only what is asked for is read.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run:
    """One run. A table is read when it is first asked for, as it stands then; ``load_run`` again to see more.

    Args:
        path: The run directory.
        info: Content of ``run.json``.
    """

    path: Path
    info: Mapping[str, Any]

    @property
    def attributes(self) -> dict[str, Value]:
        """The user's facts about the run: ``Tracker(run=...)``."""
        nonfinite = self.info.get("nonfinite_attributes", ())
        return {name: float(v) if name in nonfinite else v for name, v in self.info.get("attributes", {}).items()}

    @cached_property
    def params(self) -> pd.DataFrame:
        """One row a parameter, in model order; ``shape`` is a tuple of ints, ``options`` a dict, ``aliases`` names."""
        table = _read(self.path / "params.csv", _PARAM_COLUMNS, _text_columns(_PARAM_COLUMNS))
        shapes = [tuple(int(size) for size in text.split("x") if size) for text in table["shape"]]
        aliases = [tuple(name for name in text.split(";") if name) for text in table["aliases"]]
        options = [json.loads(text) for text in table["options"]]
        columns = {"shape": shapes, "aliases": aliases, "options": options}
        return table.assign(**{name: pd.Series(cells, dtype=object) for name, cells in columns.items()})

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row a step and parameter: ``step``, ``param`` (a category in model order), one column a metric."""
        return self._rows("layers", ["step", "param", *self.info.get("layer_columns", ())])

    @cached_property
    def selection(self) -> pd.DataFrame:
        """One row a step and parameter whose optimizer selects; empty when nothing selects."""
        return self._rows("selection", ["step", "param", *self.info.get("selection_columns", ())])

    @cached_property
    def histograms(self) -> pd.DataFrame:
        """One row a bin: ``step``, ``param``, ``name``, ``log2`` of its lower edge, ``count``, ``mass``.

        Bins are a quarter octave wide, and empty ones have no row. ``log2`` is ``-inf`` for exact zeros and NaN for
        values that are not finite.
        """
        return self._rows("histograms", ["step", "param", "name", "log2", "count", "mass"], texts=("name",))

    @cached_property
    def slices(self) -> pd.DataFrame:
        """One row a row or column that an optimizer selects from: ``param``, ``matrix``, ``index`` and its facts.

        ``selected`` in ``steps``, mean L1 ``score`` when selected and ``score_all``; ``…_late``: of the run's later
        part. Written when the run ends: empty while it lives and when it was killed.
        """
        columns = ["param", "matrix", "index", *self.info.get("slice_columns", ())]
        return self._rows("slices", columns, whole=("matrix", "index"))

    @cached_property
    def selected(self) -> pd.DataFrame:
        """One row a step and matrix: ``step``, ``param``, ``matrix``, ``count`` of its rows (or columns), and ``rows``.

        ``rows`` are bytes, a bit each; :meth:`raster` unpacks them. Empty where ``selection_rows`` was not measured.

        Raises:
            ValueError: A line is damaged; the message names it.
        """
        columns = ["step", "param", "matrix", "count", "rows"]
        table = self._rows("selected", columns, texts=("rows",), whole=("matrix", "count"))
        return unpacked(table, self.path / "selected.csv")

    def raster(self, param: str, matrix: int = 0) -> pd.DataFrame:
        """Flags of the rows (or columns) of one matrix that were selected, [flushes, rows], with ``step`` as index.

        Where a resumed run selected from another number of them, what came before is left out.

        Raises:
            ValueError: It is not known of this matrix.
        """
        table = self.selected
        own = table[(table["param"] == param) & (table["matrix"] == matrix)]
        if own.empty:
            names = [f"{name}[{m}]" for name, m in table[["param", "matrix"]].drop_duplicates().to_numpy()]
            known = f"known are {', '.join(names[:9])}{', …' * (len(names) > 9)}" if names else "measure selection_rows"
            raise ValueError(f"it is not known which rows of {param}[{matrix}] were selected; {known}")
        own = own[own["count"] == own["count"].iloc[-1]]
        packed = np.frombuffer(b"".join(own["rows"]), dtype=np.uint8).reshape(len(own), -1)
        flags = np.unpackbits(packed, axis=1, count=int(own["count"].iloc[-1])).astype(bool)
        return pd.DataFrame(flags, index=pd.Index(own["step"], name="step")).rename_axis(columns="row")

    @cached_property
    def scalars(self) -> pd.DataFrame:
        """``step`` and one column a logged scalar, NaN where it was not logged. Of two values at a step the last holds.

        A scalar that is itself called ``step`` stands in the column ``scalar_step``.
        """
        columns = ["step", "name", "value"]
        long = _read(self.path / "scalars.csv", columns, {**_number_columns(columns), "name": "str"})
        long["name"] = long["name"].replace("step", "scalar_step")
        names = list(dict.fromkeys(long["name"]))
        wide = long.drop_duplicates(["step", "name"], keep="last").pivot(index="step", columns="name", values="value")
        return wide.reindex(columns=names).rename_axis(columns=None).reset_index()

    @property
    def steps(self) -> list[int]:
        """Steps that were measured, ascending."""
        return sorted({*self.layers["step"].tolist(), *self.selection["step"].tolist()})

    def summary(self) -> pd.DataFrame:
        """One row a parameter: shape, role and the last measured value of the main columns that the run has.

        A NaN that was measured last is shown as NaN and does not give way to an earlier, healthy number. A parameter
        for which a column was never measured has NaN there too.
        """
        table = self.params.set_index("name")[["shape", "role"]].rename_axis("param")
        for name, main in _SUMMARY.items():
            have = [column for column in main if column in getattr(self, name).columns]
            if have:
                cells = _read(self.path / f"{name}.csv", ["param", *have], _text_columns(["param", *have]))
                for column in have:
                    measured = cells[cells[column] != ""].drop_duplicates("param", keep="last").set_index("param")
                    table[column] = measured[column].astype("float64").reindex(table.index)
        return table

    def _rows(
        self, name: str, columns: list[str], *, texts: tuple[str, ...] = (), whole: tuple[str, ...] = ()
    ) -> pd.DataFrame:
        # Not read as a category: pandas would take the layers "01" and "1" of a Sequential for one number.
        dtypes = {**_number_columns(columns), **_text_columns(["param", *texts]), **dict.fromkeys(whole, "int64")}
        table = _read(self.path / f"{name}.csv", columns, dtypes)
        order = dict.fromkeys(chain(self.params["name"], table["param"].unique()))  # model order: 2 before 10
        return table.assign(param=pd.Categorical(table["param"], categories=list(order)))

    def __repr__(self) -> str:
        steps = self.steps
        seen = f"{len(steps)} steps up to {steps[-1]}" if steps else "no steps yet"
        facts = ", ".join(f"{name}={value!r}" for name, value in self.attributes.items())
        facts = facts if len(facts) <= 60 else f"{facts[:57]}..."
        return f"Run({str(self.path)!r}: {len(self.params)} params, {seen}" + (f"; {facts})" if facts else ")")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Runs:
    """Several runs as one table each: first the column ``run``, last one column an attribute.

    An attribute that shares its name with a column of ``params``, ``layers`` or ``selection`` stands as
    ``run_<name>`` in every table; one that shares it with a scalar, or with a column of ``histograms``, ``slices`` or
    ``selected``, does so there.

    Args:
        runs: The runs, in the order of their paths.
    """

    runs: tuple[Run, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The directory's name of each run, or the path below the common folder where two share a name."""
        names = tuple(run.path.name for run in self.runs)
        if len(set(names)) == len(names):
            return names
        paths = [run.path.resolve() for run in self.runs]
        common = os.path.commonpath(paths)
        return tuple(path.relative_to(common).as_posix() for path in paths)

    @cached_property
    def attributes(self) -> pd.DataFrame:
        """One row a run: ``run`` and its attributes, under the names that they have in the other tables."""
        taken = {"run", "step", "param", "name", "value", *_PARAM_COLUMNS}
        for run in self.runs:
            taken.update(run.info.get("layer_columns", ()), run.info.get("selection_columns", ()))
        facts = [{f"run_{k}" if k in taken else k: v for k, v in run.attributes.items()} for run in self.runs]
        table = pd.DataFrame(facts, index=range(len(facts)))
        table.insert(0, "run", pd.Series(pd.Categorical(self.names, categories=list(self.names))))
        return table

    @cached_property
    def params(self) -> pd.DataFrame:
        """The parameters of all runs."""
        return self._joined([run.params for run in self.runs])

    @cached_property
    def layers(self) -> pd.DataFrame:
        """The layer rows of all runs."""
        return self._joined(_same_categories([run.layers for run in self.runs]))

    @cached_property
    def selection(self) -> pd.DataFrame:
        """The selection rows of all runs."""
        return self._joined(_same_categories([run.selection for run in self.runs]))

    @cached_property
    def scalars(self) -> pd.DataFrame:
        """The scalars of all runs."""
        return self._joined([run.scalars for run in self.runs])

    @cached_property
    def histograms(self) -> pd.DataFrame:
        """The bins of the histograms of all runs."""
        return self._joined(_same_categories([run.histograms for run in self.runs]))

    @cached_property
    def slices(self) -> pd.DataFrame:
        """The slices of all runs."""
        return self._joined(_same_categories([run.slices for run in self.runs]))

    @cached_property
    def selected(self) -> pd.DataFrame:
        """Which rows were selected, of all runs."""
        return self._joined(_same_categories([run.selected for run in self.runs]))

    def _joined(self, tables: list[pd.DataFrame]) -> pd.DataFrame:
        which = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        facts = self.attributes.iloc[which].reset_index(drop=True)
        rows = pd.concat(tables, ignore_index=True)
        facts = facts.rename(columns={name: f"run_{name}" for name in rows.columns if name in facts.columns})
        return pd.concat([facts[["run"]], rows, facts.drop(columns="run")], axis=1)

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __repr__(self) -> str:
        names = ", ".join(self.names[:4]) + (", ..." if len(self) > 4 else "")
        return f"Runs({len(self)}: {names})"


def load_run(path: str | os.PathLike[str]) -> Run:
    """Open one run directory, also of a run that is still being written or was killed.

    Raises:
        ValueError: ``path`` holds no run, or one that a newer version of this package wrote.
    """
    path = Path(path)
    try:
        info = json.loads((path / "run.json").read_text(encoding="utf-8"))
        version = int(info["schema_version"])
    except FileNotFoundError as error:
        raise ValueError(f"{str(path)!r} is no run directory: it has no run.json; {_HOLDS}") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is no run directory: run.json cannot be read ({error!r}); {_HOLDS}") from error
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{str(path)!r} has schema version {version}, this package reads up to {SCHEMA_VERSION}; "
            "upgrade scion-telemetry"
        )
    return Run(path=path, info=info)


def load_runs(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Runs:
    """Open many runs.

    Args:
        paths: A glob pattern (``runs/*``, ``**`` for any depth; what it finds without a ``run.json`` is passed
            over), or the run directories themselves.

    Raises:
        ValueError: No run was found, or one of the given directories holds none.
    """
    if isinstance(paths, str | os.PathLike):
        pattern = os.path.expanduser(os.fspath(paths))
        found = [pattern] if _is_run(pattern) else sorted(filter(_is_run, glob.glob(pattern, recursive=True)))
    else:
        found = [os.fspath(path) for path in paths]
    if not found:
        raise ValueError(f"no run found in {paths!r} from {os.getcwd()!r}; {_HOLDS}")
    return Runs(runs=tuple(load_run(path) for path in found))


def _is_run(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "run.json"))


def _number_columns(columns: Iterable[str]) -> dict[str, str]:
    return {name: "int64" if name == "step" else "float64" for name in columns}


def _text_columns(columns: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(columns, "str")


def _read(path: Path, columns: list[str], dtypes: Mapping[str, str]) -> pd.DataFrame:
    """The whole lines of a table, with ``columns`` in this order. A missing file is an empty table.

    Raises:
        ValueError: The file is no such table; the message names it.
    """
    data = path.read_bytes() if path.exists() else b""
    data = data[: data.rfind(b"\n") + 1]
    if not data:
        return pd.DataFrame({name: pd.Series(dtype=dtypes[name]) for name in columns})
    # Told what is a number, pandas leaves a layer alone that is called "null" or "None".
    empty = {name: ["", "NaN"] for name, dtype in dtypes.items() if dtype == "float64"}
    try:
        return pd.read_csv(
            io.BytesIO(data), usecols=columns, dtype=dict(dtypes), keep_default_na=False, na_values=empty
        )[columns]
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as a table of {columns!r}: {error}") from error


def _same_categories(tables: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Tables whose ``param`` has one common list of categories; pandas joins others as plain text."""
    union = list(dict.fromkeys(chain.from_iterable(table["param"].cat.categories for table in tables)))
    return [table.assign(param=table["param"].cat.set_categories(union)) for table in tables]
