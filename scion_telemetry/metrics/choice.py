"""What the user chose: columns, the partial results that they need, and how often each is measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import TypeAlias

from scion_telemetry.metrics.catalogue import HISTOGRAMS, METRICS, PARTIALS, PRESETS
from scion_telemetry.metrics.declare import QUANTITIES, HistogramMetric, Metric, Partial
from scion_telemetry.metrics.selection_columns import SELECTION_METRICS
from scion_telemetry.rows import column

Names: TypeAlias = str | Metric | Sequence[object]
SELECTION = "selection"
GRADIENT = "selection_gradient"
FREQUENCIES = "selection_frequencies"
ROWS = "selection_rows"
EXTRAS: Mapping[str, str] = {
    SELECTION: "columns of what Dion2 selects: one number a row",
    GRADIENT: "and those that need the gradient's scores: one more number a row, and a pass over it",
    FREQUENCIES: "and histograms of how often rows were selected since they were measured last",
    ROWS: "and which rows were selected at each flush",
}
"""Names beside those of metrics, and what they choose; each of the later ones brings the first."""
_EXTRAS_OF = {"basic": (SELECTION,), "full": (SELECTION, GRADIENT)}

_SELECTED = frozenset(metric.name for metric in SELECTION_METRICS)
_OF_GRADIENT = frozenset(("ef_growth",))
"""Those that need the gradient's scores, beside grad_…"""

Metrics: TypeAlias = Names | Mapping[str, int]
"""A preset, a list of names and metrics of one's own, or names with how many flushes lie between measurements."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen columns and histograms, in the order of the catalogue, and the partial results that they need.

    Args:
        columns: (column, quantity, metric).
        histograms: (name, quantity, histogram).
        every: Column or histogram to a multiple: it is measured at every so many flushes, 1 where it is not named.
        extras: Of ``EXTRAS``, those that are measured.
    """

    columns: tuple[tuple[str, str, Metric], ...]
    histograms: tuple[tuple[str, str, HistogramMetric], ...] = ()
    every: Mapping[str, int] = field(default_factory=dict)
    extras: frozenset[str] = frozenset()

    @cached_property
    def partials(self) -> Mapping[str, tuple[Partial, ...]]:
        """Partial results by quantity, in the order of ``PARTIALS``, the user's own last."""
        needed: dict[str, dict[str, Partial]] = {}

        def need(quantity: str, names: Iterable[str], own: Sequence[Partial] = ()) -> None:
            known = needed.setdefault(quantity, {"pieces": PARTIALS["pieces"]})
            mine = {p.name: p for p in own}
            known.update({name: mine.get(name) or PARTIALS[name] for name in names})

        for _, quantity, metric in self.columns:
            need(quantity, metric.needs, metric.own)
            for other, partial in metric.also:
                need(other, (partial,))
        for _, quantity, histogram in self.histograms:
            need(quantity, histogram.needs)
        order = {name: i for i, name in enumerate(PARTIALS)}
        return {
            q: tuple(sorted(needed[q].values(), key=lambda p: (order.get(p.name, len(order)), p.name)))
            for q in QUANTITIES
            if q in needed
        }

    def names(self, quantity: str) -> frozenset[str]:
        """Names of the partial results of a quantity."""
        return frozenset(p.name for p in self.partials.get(quantity, ()))

    @cached_property
    def follows(self) -> bool:
        """Whether singular values of weights are measured, which start from those before."""
        return not self.names("weight").isdisjoint(("sigma", "coherence"))

    def at(self, flush: int) -> "Choice":
        """What is measured at flush number ``flush``, 0 for the first, which measures everything."""
        if all(flush % n == 0 for n in self.every.values()):
            return self
        key = frozenset(name for name, n in self.every.items() if flush % n)
        if key not in self._parts:
            self._parts[key] = Choice(
                columns=tuple(c for c in self.columns if c[0] not in key),
                histograms=tuple(h for h in self.histograms if h[0] not in key),
                extras=_with_selection(self.extras - key),
            )
        return self._parts[key]

    @cached_property
    def _parts(self) -> dict[frozenset[str], "Choice"]:
        return {}

    def units(self) -> dict[str, str]:
        """Unit of every column and histogram."""
        columns = {name: metric.unit for name, _, metric in self.columns}
        histograms = {name: histogram.unit for name, _, histogram in self.histograms}
        return columns | histograms | ({FREQUENCIES: "1"} if FREQUENCIES in self.extras else {})


def _with_selection(extras: frozenset[str]) -> frozenset[str]:
    return extras | {SELECTION} if extras else extras


def choose(metrics: Metrics = "basic") -> Choice:
    """The columns of a preset, or of a list of columns (``weight_rms``), metrics (``rms``), presets and own metrics.

    A dict says how often: ``{"norms": 1, "selection": 10}`` measures norms at every flush, and selections at every
    tenth one.

    Raises:
        ValueError: For a name that is none of these, with the known ones; for a multiple that is no whole number >= 1,
            or a metric of one's own with the name of another one.
        TypeError: For anything else.
    """
    asked = _asked(metrics)
    own = [m for m in asked if isinstance(m, Metric)]
    known = _known(own)
    wanted: dict[str, int] = {}
    for item, multiple in asked.items():
        found = _found(item, known)
        wanted.update({name: min(multiple, wanted.get(name, multiple)) for name in found})
    columns = [(name, q, m) for name, (q, m) in known.items() if name in wanted and isinstance(m, Metric)]
    histograms = [(name, q, m) for name, (q, m) in known.items() if name in wanted and isinstance(m, HistogramMetric)]
    return Choice(
        columns=tuple(columns),
        histograms=tuple(histograms),
        every={name: n for name, n in wanted.items() if n > 1},
        extras=frozenset(EXTRAS) & wanted.keys(),
    )


def _asked(metrics: Metrics) -> dict[str | Metric, int]:
    if isinstance(metrics, str | Metric):
        return {metrics: 1}
    if isinstance(metrics, Mapping):
        for name, n in metrics.items():
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ValueError(f"metrics[{name!r}] is every how many flushes: a whole number >= 1, got {n!r}")
        return dict(metrics.items())
    if not isinstance(metrics, Sequence):
        raise TypeError(
            f"metrics must be a preset ({', '.join(PRESETS)}), a list of names, or a dict from names to every how many "
            f"flushes; got {metrics!r}"
        )
    asked: dict[str | Metric, int] = {}
    for item in metrics:
        if not isinstance(item, str | Metric):
            raise TypeError(f"a metric is a name or made by custom(...), got {item!r}")
        asked[item] = 1
    return asked


def _known(own: Sequence[Metric]) -> dict[str, tuple[str, Metric | HistogramMetric]]:
    everything: tuple[Metric | HistogramMetric, ...] = (*METRICS, *own, *HISTOGRAMS)
    known: dict[str, tuple[str, Metric | HistogramMetric]] = {}
    for quantity in QUANTITIES:
        for metric in everything:
            if (
                quantity in metric.quantities
                and known.setdefault(column(quantity, metric.name), (quantity, metric))[1] is not metric
            ):
                raise ValueError(f"there is a metric {metric.name!r} already; give yours another name")
    return known


def _found(item: str | Metric, known: Mapping[str, tuple[str, Metric | HistogramMetric]]) -> list[str]:
    if isinstance(item, Metric):
        return [name for name, (_, m) in known.items() if m is item]
    if item in EXTRAS:
        return sorted(_with_selection(frozenset((item,))))
    if item in PRESETS:
        return [*PRESETS[item], *_EXTRAS_OF.get(item, ())]
    if item in known:
        return [item]
    if found := [name for name, (_, m) in known.items() if m.name == item]:
        return found
    plain = item.removeprefix("selection_")
    if plain in _SELECTED:
        extra = GRADIENT if plain in _OF_GRADIENT or plain.startswith("grad_") else SELECTION
        raise ValueError(f'{item!r} is a column of selection, which cannot be chosen alone: choose "{extra}"')
    names = [*PRESETS, *EXTRAS, *dict.fromkeys(m.name for _, m in known.values())]
    close = get_close_matches(item, dict.fromkeys([*names, *known]), n=3)
    guess = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ValueError(
        f"unknown metric {item!r}; {guess}Known are {', '.join(names)}, and their columns, such as weight_rms for the "
        "rms of weights"
    )
