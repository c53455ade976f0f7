"""The sink that writes a run directory: ``run.json`` and append-only CSV tables.

    runs/a/run.json        facts of the run
    runs/a/params.csv      one row a parameter
    runs/a/layers.csv      step, param, one column a metric
    runs/a/selection.csv   the same for what the optimizer selected; absent when nothing selects
    runs/a/scalars.csv     step, name, value
    runs/a/histograms.csv  step, param, name, log2, count, mass: one line a bin; absent when none are asked for
    runs/a/selected.csv    step, param, matrix, count, rows: which of ``count`` were selected; absent when not asked for
    runs/a/slices.csv      param, matrix, index, one column a fact: the whole run, written at its end

``rows`` is base64 of ``numpy.packbits`` of the flags: of n rows n/6 characters a matrix and flush, about 700 for 4,096.
An empty cell was not measured; ``NaN``, ``inf`` and ``-inf`` were. ``scion_telemetry.store`` reads it back.
"""

import base64
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scion_telemetry.rows import SCHEMA_VERSION, Batch, Chosen, Histogram, ParamInfo, Row, RunInfo, Slice, text

from .plain import nonfinite_names, plain_mapping, strict_json
from .tablefile import TableFile, csv_lines, header_differs, quoted, trim

logger = logging.getLogger(__name__)

_PARAM_COLUMNS = ("name", "aliases", "role", "shape", "dtype", "layout", "algorithm", "options")
_HISTOGRAM_COLUMNS = ("step", "param", "name", "log2", "count", "mass")
_SELECTED_COLUMNS = ("step", "param", "matrix", "count", "rows")
_SLICE_COLUMNS = ("param", "matrix", "index")
_TABLES = ("params", "layers", "selection", "scalars", "histograms", "selected", "slices")
_FILES = ("run.json", *(f"{name}.csv" for name in _TABLES))


class CsvSink:
    """Writes a run directory. Every batch is on disk, in whole lines, when ``write`` returns.

    When the disk is full, ``write`` raises; what a file could not take is lost, what follows starts on a fresh line.

    Args:
        path: The run directory. Made by ``open``, with its parents; the constructor touches nothing.
        resume: Continue the run that the directory holds. Rows of steps after ``RunInfo.start_step`` are cut first:
            they were written after the checkpoint that is being resumed. ``slices.csv`` tells of the run up to where
            it ended: it goes with the first batch, and the end writes it anew. An empty or absent directory starts a
            run.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be a str or a path, got {path!r}")
        if not isinstance(resume, bool):
            raise TypeError(f"resume must be True or False, got {resume!r}")
        self.path = Path(path)
        self._resume = resume
        self._columns: dict[str, tuple[str, ...]] = {}
        self._heads: dict[str, tuple[str, ...]] = {}
        self._tables: dict[str, TableFile] = {}
        self._facts: dict[str, Any] = {}
        self._pid, self._fresh, self._outdated = -1, False, False

    def open(self, run: RunInfo) -> None:
        """Make the directory and its files, or take up the run it holds.

        Raises:
            ValueError: The directory holds a run and ``resume`` is False, or a run that cannot be continued.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"a run is a directory, but {str(self.path)!r} is a file; choose another path")
        found = [name for name in _FILES if (self.path / name).exists()]
        if found and not self._resume:
            raise ValueError(
                f"{str(self.path)!r} already holds a run ({', '.join(found)}); choose another path, "
                "or continue that run with CsvSink(path, resume=True)"
            )
        self._columns, self._heads = _columns(run), _headers(run)
        facts = _facts(run)
        if found:
            facts = _continued(self.path, facts, run)
            self._trim(run)
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_facts(facts)
        self._write_params(run)
        self._tables = {}
        for name in self._heads:
            self._table(name)
        self._pid, self._fresh, self._outdated = os.getpid(), not found, bool(found)

    def extend(self, run: RunInfo) -> None:
        """List the parameters that ``run`` has now; their rows follow in the same tables, or in new ones of selections.

        Raises:
            OSError: ``params.csv`` or ``run.json`` could not be written; it stands as it was.
        """
        if os.getpid() != self._pid:
            return
        self._write_params(run)
        self._columns, self._heads = _columns(run), _headers(run)
        facts = _facts(run)
        grown = {name: facts[name] for name in ("selection_columns", "slice_columns", "units")}
        if (now := {**self._facts, **grown, **_joined(self._facts, facts)}) != self._facts:
            self._write_facts(now)
        for name in self._heads:
            self._table(name)

    def write(self, batch: Batch) -> None:
        """Append the rows of ``batch``.

        Raises:
            OSError: A file cannot take them; the message names file and cause. The other files have theirs.
        """
        if os.getpid() != self._pid:  # a forked child: the rows are its parent's
            return
        lines = {
            "layers": self._rows("layers", batch.layers),
            "selection": self._rows("selection", batch.selection),
            "scalars": csv_lines([str(int(s.step)), s.name, _cell(s.value)] for s in batch.scalars),
            "histograms": self._histograms(batch.histograms),
            "selected": self._selected(batch.selected),
        }
        slices = self._slices(batch.slices)
        errors = [error for name, data in lines.items() if data and (error := self._append(name, data))]
        if error := self._replace_slices(slices):
            errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Close the files. In a forked child nothing happens."""
        if os.getpid() == self._pid:
            for table in self._tables.values():
                table.close()

    def discard(self) -> None:
        """Close, and take a new run back: the tracker did not start, and the next try may use this path."""
        self.close()
        if self._fresh and os.getpid() == self._pid:
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)

    def _append(self, name: str, data: bytes) -> OSError | None:
        try:
            self._table(name).append(data)
        except OSError as error:
            return error
        return None

    def _table(self, name: str) -> TableFile:
        if name not in self._tables:  # also one that found no room for its header before
            self._tables[name] = TableFile(self.path / f"{name}.csv", self._heads[name])
        return self._tables[name]

    def _rows(self, table: str, rows: Iterable[Row]) -> bytes:
        columns = self._columns[table]
        declared = set(columns)
        lines = []
        for row in rows:
            assert row.values.keys() <= declared, f"undeclared {table} columns {set(row.values) - declared}"
            numbers = [_cell(row.values.get(name)) for name in columns]
            lines.append(",".join([str(int(row.step)), quoted(row.param), *numbers]) + "\n")
        return "".join(lines).encode()

    def _histograms(self, histograms: Iterable[Histogram]) -> bytes:
        lines = []
        for item in histograms:
            assert item.name in self._columns["histograms"], f"undeclared histogram {item.name!r}"
            start = f"{int(item.step)},{quoted(item.param)},{quoted(item.name)}"
            for bin_ in zip(item.log2, item.count, item.mass, strict=True):
                lines.append(",".join([start, *map(_cell, bin_)]) + "\n")
        return "".join(lines).encode()

    def _selected(self, selected: Iterable[Chosen]) -> bytes:
        lines = []
        for item in selected:
            assert "selected" in self._heads, f"undeclared selection of {item.param!r}"
            start = f"{int(item.step)},{quoted(item.param)},{int(item.matrix)},{int(item.count)}"
            lines.append(f"{start},{base64.b64encode(item.rows).decode()}\n")
        return "".join(lines).encode()

    def _slices(self, slices: Iterable[Slice]) -> bytes:
        columns = self._columns["slices"]
        declared = set(columns)
        lines = []
        for item in slices:
            assert item.values.keys() <= declared, f"undeclared slice columns {set(item.values) - declared}"
            numbers = [_cell(item.values.get(name)) for name in columns]
            lines.append(",".join([quoted(item.param), str(int(item.matrix)), str(int(item.index)), *numbers]) + "\n")
        return "".join(lines).encode()

    def _replace_slices(self, data: bytes) -> OSError | None:
        """Write the table of slices whole; without ``data`` see that none stands there that rows have outlived."""
        path = self.path / "slices.csv"
        try:
            if data:
                _replace(path, csv_lines([(*_SLICE_COLUMNS, *self._columns["slices"])]) + data)
            elif self._outdated:
                path.unlink(missing_ok=True)
        except OSError as error:
            return error
        self._outdated = False
        return None

    def _write_facts(self, facts: dict[str, Any]) -> None:
        _replace(self.path / "run.json", (strict_json(facts, indent=2) + "\n").encode())
        self._facts = facts

    def _write_params(self, run: RunInfo) -> None:
        _replace(self.path / "params.csv", csv_lines([_PARAM_COLUMNS, *map(_param_cells, run.params)]))

    def _trim(self, run: RunInfo) -> None:
        # Also what this run makes none of: histograms and rows of the run before are cut like everything else.
        heads = {**_headers(run), "histograms": _HISTOGRAM_COLUMNS, "selected": _SELECTED_COLUMNS}
        paths = {self.path / f"{name}.csv": head for name, head in heads.items()}
        existing = {path: head for path, head in paths.items() if path.exists()}
        for path, head in existing.items():  # all are checked before the first is changed
            if header_differs(path, head):
                raise ValueError(f"{path} cannot be resumed: its columns are not {head!r}; choose another path")
        for path in existing:
            if cut := trim(path, run.start_step):
                logger.warning("%s: cut %d rows after step %d, where this run resumes", path, cut, run.start_step)
        slices = self.path / "slices.csv"
        if slices.exists() and header_differs(slices, (*_SLICE_COLUMNS, *run.slice_columns)):
            slices.unlink()  # run.json is about to name other columns


def _columns(run: RunInfo) -> dict[str, tuple[str, ...]]:
    """Names that rows of a table may bring."""
    columns = {"layers": run.layer_columns, "selection": run.selection_columns}
    return {**columns, "histograms": run.histograms, "slices": run.slice_columns}


def _headers(run: RunInfo) -> dict[str, tuple[str, ...]]:
    """Header of every table that grows."""
    headers = {"layers": ("step", "param", *run.layer_columns), "scalars": ("step", "name", "value")}
    if run.selection_columns:
        headers["selection"] = ("step", "param", *run.selection_columns)
    if run.histograms:
        headers["histograms"] = _HISTOGRAM_COLUMNS
    if run.selection_rows:
        headers["selected"] = _SELECTED_COLUMNS
    return headers


def _facts(run: RunInfo) -> dict[str, Any]:
    """Content of ``run.json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "attributes": plain_mapping(run.attributes),
        "nonfinite_attributes": nonfinite_names(run),
        "versions": dict(run.versions),
        "world_size": run.world_size,
        "schedule": run.schedule,
        "start_step": run.start_step,
        "resumed_at": [],
        "units": dict(run.units),
        "layer_columns": list(run.layer_columns),
        "selection_columns": list(run.selection_columns),
        "histograms": list(run.histograms),
        "slice_columns": list(run.slice_columns),
        "selection_rows": run.selection_rows,
    }


def _continued(path: Path, facts: dict[str, Any], run: RunInfo) -> dict[str, Any]:
    """``facts`` as the continuation of the run in ``path``: it keeps its start and gains a ``resumed_at``.

    Raises:
        ValueError: The run there has another schema or other columns, or its ``run.json`` cannot be read.
    """
    try:
        old = json.loads((path / "run.json").read_text(encoding="utf-8"))
        version = int(old["schema_version"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{str(path)!r} cannot be resumed: no readable run.json ({error!r})") from error
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{str(path)!r} has schema version {version}, this package writes {SCHEMA_VERSION}; "
            "upgrade scion-telemetry or choose another path"
        )
    for name in ("layer_columns", "selection_columns"):
        if old.get(name) != facts[name]:
            differing = sorted(set(old.get(name) or ()) ^ set(facts[name])) or "order"
            raise ValueError(
                f"{str(path)!r} cannot be resumed: {name} differ ({differing}); columns are fixed for a run, "
                "so measure the same metrics or choose another path"
            )
    return {
        **facts,
        "start_step": old.get("start_step", 0),
        "resumed_at": [*old.get("resumed_at", []), run.start_step],
        **_joined(old, facts),
    }


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Facts of tables that hold what both told."""
    return {
        "histograms": list(dict.fromkeys([*old.get("histograms", []), *new["histograms"]])),
        "selection_rows": bool(old.get("selection_rows") or new["selection_rows"]),
    }


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: There is no room; the message names the file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _param_cells(param: ParamInfo) -> list[str]:
    shape = "x".join(map(str, param.shape))
    options = strict_json(plain_mapping(param.options))
    names = [param.name, ";".join(param.aliases)]
    return [*names, param.role, shape, param.dtype, param.layout, param.algorithm, options]


def _cell(value: float | None) -> str:
    """``rows.text`` of a number of any type; counts stay whole however large they are."""
    if isinstance(value, float) and value == value:  # nearly all; thousands a batch
        return f"{value:.9g}"
    if value is None or isinstance(value, int):
        return text(None if value is None else int(value))
    return text(float(value))
