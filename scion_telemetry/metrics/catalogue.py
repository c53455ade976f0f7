"""Every metric, declared once: quantity, partial results, how they merge, finishing formula, unit, source.

A partial result is a vector of numbers of a local piece, added (SUM) or compared (MAX) over ranks at its place in the
whole. A metric is a pure function of merged partial results, on the host. No metric gathers a matrix.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from scion_telemetry.metrics import selection
from scion_telemetry.metrics.pieces import MatrixShape
from scion_telemetry.rows import column

QUANTITIES = ("weight", "grad", "momentum", "update")


class Merge(StrEnum):
    """How partial results of several ranks become one."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """A kind of partial result.

    Args:
        name: Its name.
        merge: How ranks' results merge.
        size: Numbers it takes for a parameter of a shape; for a selection, of a vector of n scores.
    """

    name: str
    merge: Merge
    size: Callable[[MatrixShape], int]


def _one(shape: MatrixShape) -> int:
    return 1


PARTIALS: Mapping[str, Partial] = {
    p.name: p
    for p in (
        Partial(name="pieces", merge=Merge.SUM, size=_one),  # pieces that were measured; 0: nobody had the quantity
        Partial(name="row_squares", merge=Merge.SUM, size=lambda s: s.batch * s.rows),
        Partial(name="column_squares", merge=Merge.SUM, size=lambda s: s.batch * s.columns),
        Partial(name="nonfinite", merge=Merge.SUM, size=_one),
        Partial(name="largest", merge=Merge.MAX, size=_one),
        Partial(name="sigma", merge=Merge.SUM, size=lambda s: s.batch),  # each matrix measured by `sigma_ranks` ranks
        Partial(name="sigma_upper", merge=Merge.SUM, size=lambda s: s.batch),
        Partial(name="sigma_ranks", merge=Merge.SUM, size=lambda s: s.batch),
    )
}
"""Partial results of the quantities of a parameter."""

SELECTION_PARTIALS: Mapping[str, Partial] = {
    p.name: p
    for p in (
        Partial(name="scores", merge=Merge.SUM, size=lambda s: s.batch * s.rows),
        Partial(name="selected", merge=Merge.SUM, size=_one),
        Partial(name="selected_before", merge=Merge.SUM, size=_one),
        Partial(name="selected_both", merge=Merge.SUM, size=_one),
        Partial(name="ages", merge=Merge.SUM, size=lambda s: selection.AGE_BINS),
        Partial(name="oldest", merge=Merge.MAX, size=_one),
    )
}
"""Partial results of a selection; the "rows" of the shape are what is selected from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Merged partial results of one parameter, as finishing formulas read them (float64, on the host).

    Args:
        shape: The parameter.
        get: ``get(quantity, partial)``; an empty tensor where it was not chosen.
    """

    shape: MatrixShape
    get: Callable[[str, str], Tensor]

    def one(self, quantity: str, partial: str) -> float:
        """A partial result of one number."""
        return float(self.get(quantity, partial)[0])

    def frobenius(self, quantity: str) -> float:
        """√Σ x²."""
        return math.sqrt(float(self.get(quantity, "row_squares").sum()))

    def longest(self, quantity: str, side: str) -> float:
        """Largest L2 norm of the rows or columns of the map ``[d_out, d_in]``."""
        stored = (
            {"row_squares": "column_squares", "column_squares": "row_squares"}[side] if self.shape.transposed else side
        )
        return math.sqrt(float(self.get(quantity, "row_squares" if self.shape.vector else stored).max()))

    def sigma(self, quantity: str, partial: str = "sigma") -> float:
        """σ₁ or its upper bound, the largest of stacked matrices; max |entry| of a vector, which is a diagonal."""
        if self.shape.vector:
            return self.longest(quantity, "row_squares")
        ranks = self.get(quantity, "sigma_ranks")
        return float((self.get(quantity, partial) / ranks).max()) if bool((ranks > 0).all()) else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One column a quantity.

    Args:
        name: ``rms``; the column is ``weight_rms``.
        quantities: Those it exists for.
        needs: Partial results of its own quantity.
        also: Partial results of other quantities, as (quantity, partial).
        finish: From merged partial results and the quantity to the number.
        unit: Unit, "1" for a ratio.
        formula: For people.
        source: Where the definition comes from.
    """

    name: str
    quantities: tuple[str, ...] = QUANTITIES
    needs: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()
    finish: Callable[[Measured, str], float]
    unit: str
    formula: str
    source: str


_SIGMA = ("sigma", "sigma_upper", "sigma_ranks")
_SCION = "Large et al. arXiv 2405.14813; Pethick et al. arXiv 2502.07529"

METRICS: tuple[Metric, ...] = (
    Metric(
        name="rms",
        needs=("row_squares",),
        finish=lambda m, q: m.frobenius(q) / math.sqrt(m.shape.numel),
        unit="entry",
        formula="‖X‖_F / √numel",
        source="definition",
    ),
    Metric(
        name="frobenius",
        needs=("row_squares",),
        finish=lambda m, q: m.frobenius(q),
        unit="entry",
        formula="√Σ x²",
        source="definition",
    ),
    Metric(
        name="max_abs",
        needs=("largest", "row_squares"),
        # MAX may lose a NaN on its way; the sum of squares keeps it.
        finish=lambda m, q: math.nan if math.isnan(m.frobenius(q)) else m.one(q, "largest"),
        unit="entry",
        formula="max |x|",
        source="definition",
    ),
    Metric(
        name="nonfinite",
        needs=("nonfinite",),
        finish=lambda m, q: m.one(q, "nonfinite"),
        unit="entries",
        formula="number of NaN and infinite entries",
        source="definition",
    ),
    Metric(
        name="spectral",
        needs=("row_squares", *_SIGMA),
        finish=lambda m, q: m.sigma(q),
        unit="gain",
        formula="σ₁, from below",
        source="Golub and Kahan 1965; Lanczos with full reorthogonalisation",
    ),
    Metric(
        name="spectral_upper",
        needs=("row_squares", *_SIGMA),
        finish=lambda m, q: m.sigma(q, "sigma_upper"),
        unit="gain",
        formula="√(‖X‖_F² - Σ_{j≥2} θ_j) >= σ₁",
        source="Cauchy interlacing",
    ),
    Metric(
        name="rms_to_rms",
        needs=("row_squares", *_SIGMA),
        finish=lambda m, q: m.sigma(q) * math.sqrt(m.shape.d_in / m.shape.d_out if not m.shape.vector else 1.0),
        unit="gain",
        formula="σ₁ √(d_in / d_out)",
        source=_SCION,
    ),
    Metric(
        name="l1_to_rms",
        needs=("row_squares", "column_squares"),
        finish=lambda m, q: (
            m.longest(q, "column_squares") / math.sqrt(m.shape.rows if m.shape.vector else m.shape.d_out)
        ),
        unit="gain",
        formula="max column L2 norm / √d_out",
        source=_SCION,
    ),
    Metric(
        name="rms_to_inf",
        needs=("row_squares", "column_squares"),
        finish=lambda m, q: m.longest(q, "row_squares") * math.sqrt(m.shape.d_in),
        unit="gain",
        formula="√d_in · max row L2 norm",
        source=_SCION,
    ),
    Metric(
        name="weight_ratio",
        quantities=("update",),
        needs=("row_squares",),
        also=(("weight", "row_squares"),),
        finish=lambda m, q: _ratio(m.frobenius(q), m.frobenius("weight")),
        unit="1",
        formula="‖update‖_F / ‖weight‖_F",
        source="modded-nanogpt; Kosson et al. arXiv 2305.17212",
    ),
)
"""In the order of the columns of one quantity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionMetric:
    """One column of ``selection``; ``finish`` reads merged partial results by name."""

    name: str
    finish: Callable[[Measured], float]
    unit: str
    formula: str


def _scores(m: Measured) -> Tensor:
    return m.get("selection", "scores").view(m.shape.batch, -1)


def _selected(m: Measured) -> float:
    return m.one("selection", "selected")


SELECTION_METRICS: tuple[SelectionMetric, ...] = (
    SelectionMetric(
        name="k", finish=_selected, unit="slices", formula="rows or columns selected, of all stacked matrices"
    ),
    SelectionMetric(
        name="fraction",
        finish=lambda m: _selected(m) / (m.shape.batch * m.shape.rows),
        unit="1",
        formula="k / n, as realised after rounding on every shard",
    ),
    SelectionMetric(
        name="captured_mass",
        finish=lambda m: selection.captured_mass(_scores(m)),
        unit="1",
        formula="share of the momentum's L1 mass in the selected slices",
    ),
    SelectionMetric(
        name="gini", finish=lambda m: selection.gini(_scores(m)), unit="1", formula="Σ (2i - n - 1) r_(i) / (n Σ r)"
    ),
    SelectionMetric(
        name="participation_ratio",
        finish=lambda m: selection.participation_ratio(_scores(m)),
        unit="1",
        formula="(Σ r)² / (n Σ r²)",
    ),
    SelectionMetric(
        name="threshold",
        finish=lambda m: selection.threshold(_scores(m), _selected(m)),
        unit="L1 norm",
        formula="smallest selected score",
    ),
    SelectionMetric(
        name="churn",
        finish=lambda m: selection.churn(
            m.one("selection", "selected_both"), _selected(m), m.one("selection", "selected_before")
        ),
        unit="1",
        formula="1 - |K_t ∩ K_{t-1}| / |K_t ∪ K_{t-1}|",
    ),
    SelectionMetric(
        name="age_p50",
        finish=lambda m: selection.age_quantile(m.get("selection", "ages"), 0.5),
        unit="steps",
        formula="median of the steps since a slice was last selected",
    ),
    SelectionMetric(
        name="age_p99",
        finish=lambda m: selection.age_quantile(m.get("selection", "ages"), 0.99),
        unit="steps",
        formula="99th percentile of it",
    ),
    SelectionMetric(
        name="age_max", finish=lambda m: m.one("selection", "oldest"), unit="steps", formula="largest of it"
    ),
)

_BASIC = ("rms", "max_abs", "nonfinite")
_OPERATOR = ("spectral", "spectral_upper", "rms_to_rms", "l1_to_rms", "rms_to_inf")

PRESETS: Mapping[str, tuple[str, ...]] = {
    "basic": (
        *(column(q, n) for q in ("weight", "update") for n in (*_BASIC, *_OPERATOR)),
        *(column(q, n) for q in ("grad", "momentum") for n in _BASIC),
        "update_weight_ratio",
    ),
    "norms": (*(column(q, n) for q in QUANTITIES for n in _BASIC), "update_weight_ratio"),
    "full": tuple(column(q, m.name) for q in QUANTITIES for m in METRICS if q in m.quantities),
}
"""Named choices of columns: ``norms`` needs no iteration; ``basic`` adds operator norms of weights and updates;
``full`` has everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The chosen columns, in the order of the catalogue, and the partial results that they need.

    Args:
        columns: (column, quantity, metric).
        partials: By quantity, in the order of ``PARTIALS``.
    """

    columns: tuple[tuple[str, str, Metric], ...]
    partials: Mapping[str, tuple[str, ...]]

    def units(self) -> dict[str, str]:
        """Unit of every column."""
        return {name: metric.unit for name, _, metric in self.columns}


def choose(metrics: str | Sequence[str] = "basic") -> Choice:
    """The columns of a preset, or of a list of columns (``weight_rms``), metrics (``rms``) and presets.

    Raises:
        ValueError: For a name that is none of these; it lists the known ones.
    """
    known = {column(q, m.name): (q, m) for q in QUANTITIES for m in METRICS if q in m.quantities}
    wanted: set[str] = set()
    for name in [metrics] if isinstance(metrics, str) else metrics:
        if name in PRESETS:
            found = list(PRESETS[name])
        elif name in known:
            found = [name]
        elif not (found := [c for c, (_, m) in known.items() if m.name == name]):
            raise ValueError(
                f"unknown metric {name!r}; known are the presets {', '.join(PRESETS)}, the metrics "
                f"{', '.join(m.name for m in METRICS)} and the columns {', '.join(known)}"
            )
        wanted.update(found)
    columns = tuple((c, q, m) for c, (q, m) in known.items() if c in wanted)
    needed: dict[str, set[str]] = {}
    for _, quantity, metric in columns:
        needed.setdefault(quantity, {"pieces"}).update(metric.needs)
        for other, partial in metric.also:
            needed.setdefault(other, {"pieces"}).add(partial)
    partials = {q: tuple(p for p in PARTIALS if p in needed[q]) for q in QUANTITIES if q in needed}
    return Choice(columns=columns, partials=partials)


def selection_shape(shape: MatrixShape, dim: int, heads: int = 1) -> MatrixShape:
    """The scores of a selection as a shape: for every matrix or head m (``dim=-2``) or n (``dim=-1``) scores."""
    rows = shape.rows // heads if dim == -2 else shape.columns
    return MatrixShape(batch=shape.batch * heads, rows=rows, columns=1)


def finish(choice: Choice, measured: Measured) -> dict[str, float]:
    """All columns of a parameter; those of a quantity that nobody had are left out."""
    values: dict[str, float] = {}
    for name, quantity, metric in choice.columns:
        present = all(measured.one(q, "pieces") > 0 for q in (quantity, *(o for o, _ in metric.also)))
        if present and not (metric.needs[-1] == "sigma_ranks" and _unmeasured(measured, quantity)):
            values[name] = metric.finish(measured, quantity)
    return values


def finish_selection(measured: Measured) -> dict[str, float]:
    """All columns of a selection; none where nothing was selected."""
    if _selected(measured) == 0:
        return {}
    first = measured.one("selection", "selected_before") == 0  # nothing to compare the selection with yet
    return {m.name: m.finish(measured) for m in SELECTION_METRICS if not (first and m.name == "churn")}


def _unmeasured(measured: Measured, quantity: str) -> bool:
    ranks = measured.get(quantity, "sigma_ranks")
    return not measured.shape.vector and (ranks.numel() == 0 or bool((ranks == 0).any()))


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan if math.isnan(over) or over == 0 else math.inf
