"""Every column of ``selection``, declared once: formula, unit, and where it means something."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from scion_telemetry.metrics.declare import Array
from scion_telemetry.metrics.selection import (
    ALWAYS,
    FRACTIONS,
    STARVED,
    TAIL_LEAST,
    WORLDS,
    Selected,
    age_quantile,
    captured_mass,
    churn,
    count,
    curve,
    ef_growth,
    equal_shards,
    excess_mass,
    flat_mass,
    flat_spread,
    frequency,
    gini,
    hill,
    horizon,
    imbalance,
    overlap,
    participation_ratio,
    realised,
    regret,
    threshold,
    ties,
    unselected_energy,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionMetric:
    """One column of ``selection``.

    Args:
        name: Of the column.
        finish: A number for each of the G parameters.
        there: Where it means something; None: always.
        unit: Unit, "1" for a ratio.
        formula: For people.
    """

    name: str
    finish: Callable[[Selected], Array]
    there: Callable[[Selected], Array | bool] | None = None
    unit: str = "1"
    formula: str


def _has_gradient(s: Selected) -> bool:
    return s.gradient is not None


def _curve_columns(name: str, values: Callable[[Selected], Array], of: str) -> Iterator[SelectionMetric]:
    def finish(place: int, s: Selected) -> Array:
        return s.cached(name, lambda: curve(values(s)))[..., place]

    for i, fraction in enumerate(FRACTIONS):
        yield SelectionMetric(
            name=f"{name}_at_{fraction:g}",
            finish=partial(finish, i),
            there=_has_gradient if name.startswith("grad") else None,
            formula=f"share of {of} that the largest {fraction:g} of the slices hold",
        )


def _gradient(s: Selected) -> Array:
    assert s.gradient is not None
    return s.gradient


def _columns() -> Iterator[SelectionMetric]:
    column = SelectionMetric
    yield column(name="k", finish=count, unit="slices", formula="rows or columns selected, of all stacked matrices")
    yield column(name="fraction", finish=realised, formula="k / n, as realised after rounding on every shard")
    yield column(
        name="captured_mass",
        finish=captured_mass,
        formula="share of the momentum's L1 mass in the selected slices",
    )
    yield column(
        name="flat_mass",
        finish=lambda s: s.cached("flat", lambda: flat_mass(realised(s), s.length)),
        formula="captured mass if rows were flat",
    )
    yield column(
        name="excess_mass",
        finish=excess_mass,
        there=lambda s: realised(s) < 1,
        formula="(captured - flat) / (1 - flat)",
    )
    yield column(name="gini", finish=lambda s: gini(s.scores), formula="Σ (2i - n - 1) r_(i) / (n Σ r)")
    yield column(
        name="flat_gini",
        finish=lambda s: np.full(len(s.scores), flat_spread(s.length) / math.sqrt(math.pi)),
        formula="Gini coefficient if rows were flat: √((π/2 - 1) / d) / √π",
    )
    yield column(
        name="participation_ratio", finish=lambda s: participation_ratio(s.scores), formula="(Σ r)² / (n Σ r²)"
    )
    yield column(
        name="hill",
        finish=lambda s: hill(s.scores),
        there=lambda s: s.n >= TAIL_LEAST,
        formula="1 / mean ln(r_(i) / r_(k+1)) of the largest tenth, where n >= 1024",
    )
    yield column(name="threshold", finish=threshold, unit="L1 norm", formula="smallest selected score")
    yield column(name="ties", finish=ties, unit="slices", formula="not selected, with the score of the threshold")
    yield from _over_time()
    yield from _of_momentum()
    yield column(
        name="rows_communicated",
        finish=lambda s: count(s) * s.travels,
        unit="slices",
        formula="selected slices that travel between ranks: k where several ranks step a matrix together, else 0",
    )
    yield from _of_shards()
    yield from _curve_columns("mass", lambda s: s.scores, "the momentum's L1 mass")
    yield from _curve_columns("grad_mass", _gradient, "the gradient's L1 mass")
    yield from _curve_columns("frequency", frequency, "the selections of the window")


def _over_time() -> Iterator[SelectionMetric]:
    column = SelectionMetric
    yield column(
        name="churn",
        finish=churn,
        there=lambda s: np.asarray(s.before.any((-2, -1))),
        formula="1 - |K_t ∩ K_{t-1}| / |K_t ∪ K_{t-1}|",
    )
    for name, q in (("age_p50", 0.5), ("age_p99", 0.99)):
        formula = f"{q:.0%} quantile of the steps since a slice was last selected"
        yield column(name=name, finish=partial(age_quantile, q=q), unit="steps", formula=formula)
    yield column(
        name="age_max",
        finish=lambda s: np.asarray(s.ages.max((-2, -1)), dtype=float),
        unit="steps",
        formula="largest of it",
    )
    yield column(
        name="window",
        finish=lambda s: s.window.astype(float),
        unit="steps",
        formula="steps over which frequencies are counted: since selections were measured last",
    )
    yield column(
        name="coverage",
        finish=lambda s: (s.counts > 0).mean((-2, -1)),
        formula="share of slices selected at least once in the window",
    )
    yield column(
        name="starved",
        finish=lambda s: (frequency(s) < STARVED * realised(s)[:, None, None]).mean((-2, -1)),
        formula="share of slices selected less than a tenth as often as the mean",
    )
    yield column(
        name="always",
        finish=lambda s: (frequency(s) >= ALWAYS).mean((-2, -1)),
        formula="share of slices selected in at least 99 % of the steps",
    )
    yield column(
        name="frequency_gini",
        finish=lambda s: gini(frequency(s)),
        formula="Gini coefficient of the frequencies in the window",
    )


def _of_momentum() -> Iterator[SelectionMetric]:
    column = SelectionMetric
    yield column(
        name="horizon",
        finish=horizon,
        there=lambda s: ~np.isnan(s.ef_decay),
        unit="steps",
        formula="1 / ((1 - ef_decay) · fraction): steps that a row's momentum averages",
    )
    yield column(
        name="unselected_energy",
        finish=unselected_energy,
        there=lambda s: s.energy is not None and (s.ef_decay > 0) & (s.energy != 0),
        formula="‖M_unselected‖_F / ‖M‖_F before the selected part decays; beside a norm of the momentum",
    )
    yield column(
        name="ef_growth",
        finish=ef_growth,
        there=lambda s: (~np.isnan(s.ef_decay)) & (s.gradient is not None),
        formula="‖M‖₁ / ‖G‖₁ · (1 - ef_decay) · fraction; 1 for a gradient that does not change",
    )
    yield column(
        name="grad_gini",
        finish=lambda s: gini(_gradient(s)),
        there=_has_gradient,
        formula="Gini coefficient of the gradient's L1 norms",
    )


def _of_shards() -> Iterator[SelectionMetric]:
    def is_cut(s: Selected) -> bool:
        return len(s.shards) > 1

    for name, finish, formula in (
        ("regret", regret, "1 - mass(largest of every shard) / mass(as many, the largest of all)"),
        ("overlap", overlap, "|largest of every shard ∩ as many, the largest of all| / k"),
        ("imbalance", imbalance, "most of the largest of all in one shard, over its share, minus 1"),
    ):
        yield SelectionMetric(
            name=name, finish=partial(_with_shards, finish), there=is_cut, formula=f"{formula}; shards as they are"
        )
    for world in WORLDS:
        yield SelectionMetric(
            name=f"regret_at_{world}",
            finish=partial(_as_if, world),
            there=partial(_divides, world),
            # Training with local scope loses more, since each shard levels its rows to a threshold of its own: .0165
            # against .0011 here, in a study with 2 shards at fraction .25.
            formula=f"the regret if this step's slices were cut into {world} shards of ⌈n / {world}⌉",
        )


def _with_shards(finish: Callable[[Selected, list[Array]], Array], s: Selected) -> Array:
    return finish(s, list(s.shards))


def _as_if(world: int, s: Selected) -> Array:
    return regret(s, equal_shards(s.n, world))


def _divides(world: int, s: Selected) -> bool:
    return s.n >= world


SELECTION_METRICS: tuple[SelectionMetric, ...] = tuple(_columns())


def finish_selection(selected: Selected) -> list[dict[str, float]]:
    """All columns of every parameter that mean something; none where nothing was selected."""
    some = selected.selected.any((-2, -1))
    rows: list[dict[str, float]] = [{} for _ in range(len(selected.scores))]
    for metric in SELECTION_METRICS:
        there = True if metric.there is None else metric.there(selected)
        if np.any(there):
            with np.errstate(divide="ignore", invalid="ignore"):
                values = metric.finish(selected).tolist()
            for g in np.flatnonzero(some & there).tolist():
                rows[g][metric.name] = float(values[g])
    return rows
