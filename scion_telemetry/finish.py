"""From merged partial results to rows: finishing formulas, totals, histograms. Runs on the worker thread of rank 0."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress

import numpy as np

from scion_telemetry.chosen import Selections, Tally
from scion_telemetry.metrics import relations
from scion_telemetry.metrics.choice import FREQUENCIES, ROWS, Choice
from scion_telemetry.metrics.declare import Array, Measured, Metric, Shapes
from scion_telemetry.metrics.selection import Selected, frequency
from scion_telemetry.metrics.selection_columns import finish_selection
from scion_telemetry.plan import Planned
from scion_telemetry.reduce import HostBuffers
from scion_telemetry.rows import Batch, Chosen, Histogram, Row, Scalar

logger = logging.getLogger(__name__)

TOTAL = "total"
"""Totals are scalars called ``weight_rms/total``, and ``weight_rms/total.hidden`` for those of one role."""


class Finisher:
    """Makes batches of one plan.

    Args:
        plan: What was measured.
    """

    def __init__(self, plan: Sequence[Planned]) -> None:
        self._plan = plan
        self._names = [p.spec.info.name for p in plan]
        self._shapes = Shapes.of([p.shape for p in plan], [len(p.measurers) for p in plan])
        self._norms = [p.spec.norm for p in plan]
        self._warned: set[str] = set()
        self._selections = Selections(plan)
        self.tally = Tally(plan)
        roles = np.array([p.spec.info.role for p in plan])
        self._groups: dict[str, Array] = {TOTAL: np.ones(len(plan), dtype=bool)}
        if len(each := dict.fromkeys(roles.tolist())) > 1:
            self._groups |= {f"{TOTAL}.{role}": roles == role for role in each}

    def batch(self, step: int, choice: Choice, host: HostBuffers, scalars: Sequence[Scalar] = ()) -> Batch:
        """One flush: what it measured, from merged partial results; logged scalars come first."""
        measured = Measured(self._shapes, lambda q, p: host.block((q, p)), self._norms)
        rows: list[dict[str, float]] = [{} for _ in self._plan]
        totals: list[Scalar] = []
        with np.errstate(divide="ignore", invalid="ignore"):
            for name, quantity, metric in choice.columns:
                values = metric.finish(measured, quantity)
                where = metric.where(measured, quantity)
                for row, value in zip(compress(rows, where), values[where].tolist(), strict=True):
                    row[name] = value
                totals += self._totals(step, name, metric, measured, quantity, where)
            histograms = self._histograms(step, choice, measured)
        self._warn(measured)
        layers = tuple(Row(step=step, param=n, values=v) for n, v in zip(self._names, rows, strict=True) if v)
        selection, frequencies, selected = self._selection(step, choice, host)
        count = Scalar(step=step, name="telemetry_rows", value=float(len(layers) + len(selection)))
        return Batch(
            step=step,
            layers=layers,
            selection=selection,
            scalars=(*scalars, count, *totals),
            histograms=histograms + frequencies,
            selected=selected,
        )

    def _warn(self, measured: Measured) -> None:
        for (name, quantity, number), error in measured.errors.items():
            if name not in self._warned:
                self._warned.add(name)
                what = (name, quantity, self._names[number], type(error).__name__, error)
                logger.warning("metric %r failed for the %s of %r and is left out there: %s: %s", *what)

    def _totals(
        self, step: int, name: str, metric: Metric, measured: Measured, quantity: str, where: Array
    ) -> list[Scalar]:
        if metric.total is None:
            return []
        found = []
        for group, mask in self._groups.items():
            if (both := mask & where).any():
                value = metric.total(measured, quantity, both)
                found.append(Scalar(step=step, name=f"{name}/{group}", value=value))
        return found

    def _histograms(self, step: int, choice: Choice, measured: Measured) -> tuple[Histogram, ...]:
        found = []
        for name, quantity, metric in choice.histograms:
            there = measured.pieces(quantity) > 0
            for n, values in enumerate(metric.values(measured, quantity)):
                if there[n] and values.size:
                    found.append(self._histogram(step, n, name, values))
        return tuple(found)

    def _selection(
        self, step: int, choice: Choice, host: HostBuffers
    ) -> tuple[tuple[Row, ...], tuple[Histogram, ...], tuple[Chosen, ...]]:
        found: dict[int, Mapping[str, float]] = {}
        histograms: list[Histogram] = []
        chosen: dict[int, list[Chosen]] = {}
        for numbers, selected in self._selections.read(host):
            found.update(zip(numbers, finish_selection(selected), strict=True))
            self.tally.add(numbers, selected)
            if FREQUENCIES in choice.extras:
                each = zip(numbers, frequency(selected), strict=True)
                histograms += [self._histogram(step, n, FREQUENCIES, values.ravel()) for n, values in each if found[n]]
            if ROWS in choice.extras:
                chosen.update(zip(numbers, self._chosen(step, numbers, selected), strict=True))
        there = [n for n in sorted(found) if found[n]]
        rows = tuple(Row(step=step, param=self._names[n], values=found[n]) for n in there)
        return rows, tuple(histograms), tuple(chain.from_iterable(chosen[n] for n in there if n in chosen))

    def _chosen(self, step: int, numbers: Sequence[int], selected: Selected) -> Iterator[list[Chosen]]:
        packed = np.packbits(selected.selected, axis=-1)
        for n, matrices in zip(numbers, packed, strict=True):
            yield [
                Chosen(step=step, param=self._names[n], matrix=b, count=selected.n, rows=rows.tobytes())
                for b, rows in enumerate(matrices)
            ]

    def _histogram(self, step: int, number: int, name: str, values: Array) -> Histogram:
        log2, count, mass = relations.histogram(values)
        return Histogram(step=step, param=self._names[number], name=name, log2=log2, count=count, mass=mass)
