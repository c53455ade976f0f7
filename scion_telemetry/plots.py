"""Figures of one run: functions from a :class:`scion_telemetry.store.Run` to a matplotlib ``Figure``.

    run = load_run("runs/a")
    save(overview(run), "overview.png")

No window is opened and no state of matplotlib is changed: pyplot is not imported, so the figures can be made without
a display, in any thread, and beside the user's own. What a line cannot show is marked: zeros on a logarithmic axis
stand at its lower edge, NaN and infinite values are crosses on the upper edge, and both are counted below the panel.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scion_telemetry import _plot_panels as panels
from scion_telemetry import words
from scion_telemetry._plot_ages import age_distribution
from scion_telemetry._plot_data import column_table
from scion_telemetry._plot_explorer import fraction_explorer
from scion_telemetry._plot_raster import selection_raster
from scion_telemetry._plot_selected import churn_over_steps, frequencies_over_steps, regret_by_shards, selection_ranks
from scion_telemetry._plot_selection import mass_curves, mass_heatmap
from scion_telemetry.store import Run

__all__ = [
    "FIGURES",
    "age_distribution",
    "captured_mass",
    "churn_over_steps",
    "fraction_explorer",
    "frequencies_over_steps",
    "mass_curves",
    "mass_heatmap",
    "missing",
    "norms_over_steps",
    "overview",
    "regret_by_shards",
    "save",
    "selection_ranks",
    "selection_raster",
    "suffix_of",
    "update_weight_by_layer",
]

_SUFFIXES: Final = (".png", ".svg", ".pdf")
_HEADLINE: Final = "weight_rms_to_rms"
_RATIO: Final = "update_weight_ratio"


def norms_over_steps(run: Run, column: str | None = None, *, params: Sequence[str] | None = None) -> Figure:
    """One column of ``run.layers`` over the steps, a line per parameter or, beyond 24, a band per role.

    Args:
        run: The run.
        column: A column of ``run.layers``; by default ``weight_rms_to_rms``, or the first of the weights without it.
        params: Names of the parameters to draw; all that have the column by default.

    Raises:
        ValueError: The column or a parameter is unknown.
    """
    figure, ax = _single(11, 6.5)
    if column is None:
        column = _headline(run)
        if column not in run.layers.columns:
            panels.absent(ax, column, f"not measured: this run has no column {column}")
            return figure
    table = column_table(run, run.layers, column, params)
    panels.over_steps(ax, table, unit=_unit(run, column), log=_log(column))
    return figure


def update_weight_by_layer(run: Run, *, step: int | None = None) -> Figure:
    """Frobenius norm of the update over that of the weight, parameter by parameter in model order, at one step.

    Args:
        run: The run.
        step: A step at which it was measured; the last one by default.

    Raises:
        ValueError: The ratio was not measured at this step.
    """
    figure, ax = _single(12, 7)
    if _RATIO not in run.layers.columns:
        panels.absent(ax, _RATIO, f"not measured: this run has no column {_RATIO}")
        return figure
    table = column_table(run, run.layers, _RATIO)
    at = table.last_step() if step is None else step
    if at is None:
        panels.absent(ax, _RATIO, "no finite data")
        return figure
    if at not in table.steps:
        shown = ", ".join(str(s) for s in table.steps[:10]) + (", …" if table.steps.size > 10 else "")
        raise ValueError(f"step {step!r} was not measured; measured steps: {shown}")
    panels.by_layer(ax, table, at)
    return figure


def captured_mass(run: Run) -> Figure:
    """Share of the momentum's L1 mass in the selected rows or columns, against that of a flat momentum.

    The reference is what rows of independent Gaussian entries would show, or the realised fraction k/n in runs that do
    not say it. With error feedback the optimizer itself flattens the momentum, so
    a curve near the reference does not mean that a smaller fraction would do.
    """
    figure, ax = _single(11, 6.5)
    panels.captured(ax, run, remark=True)
    return figure


def overview(run: Run) -> Figure:
    """Losses, weight norms, update/weight ratios and captured mass over the steps, 1600x1000 pixels."""
    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)  # type: ignore[union-attr, call-arg]
    axes = figure.subplots(2, 2)
    panels.losses(axes[0, 0], run)
    for ax, column in ((axes[0, 1], _headline(run)), (axes[1, 0], _RATIO)):
        if column in run.layers.columns:
            table = column_table(run, run.layers, column)
            panels.over_steps(ax, table, unit=_unit(run, column), log=_log(column))
        else:
            panels.absent(ax, column, f"not measured: this run has no column {column}")
    panels.captured(axes[1, 1], run)
    return figure


FIGURES: Final[Mapping[str, Callable[[Run], Figure]]] = MappingProxyType(
    {
        "overview": overview,
        "norms_over_steps": norms_over_steps,
        "update_weight_by_layer": update_weight_by_layer,
        "captured_mass": captured_mass,
        "mass_curves": mass_curves,
        "mass_heatmap": mass_heatmap,
        "selection_ranks": selection_ranks,
        "selection_raster": selection_raster,
        "frequencies_over_steps": frequencies_over_steps,
        "age_distribution": age_distribution,
        "churn_over_steps": churn_over_steps,
        "regret_by_shards": regret_by_shards,
    }
)
"""Name of every figure to the function that draws it for a run, in the order in which people look."""


# What takes more than a run: fraction_explorer(advise(run)).


def missing(figure: Figure) -> str | None:
    """Why a figure shows nothing but its title, as where nothing was measured; None for one that shows something."""
    labels = [str(figure.get_label()), *(str(ax.get_label()) for ax in figure.axes)]
    return next(filter(None, labels), None) if all(labels[1:]) else None


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of ``path``; missing folders are made.

    Raises:
        ValueError: The suffix is another one.
    """
    path, suffix = Path(path), suffix_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date the same run gives the same PDF; PNG carries none.
    stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    figure.savefig(path, format=suffix[1:], dpi=figure.dpi, metadata=stamp)


def suffix_of(path: str | Path) -> str:
    """Suffix of a figure's file in small letters, from which its format follows.

    Raises:
        ValueError: It is none of .png, .svg and .pdf.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"cannot write {str(path)!r}: the suffix must be one of {', '.join(_SUFFIXES)}, got {suffix!r}"
        )
    return suffix


def _single(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    return figure, figure.subplots()


def _unit(run: Run, column: str) -> str:
    return str(run.info.get("units", {}).get(column, ""))


def _log(column: str) -> bool | None:
    # Ratios differ between layers by decades even where each moves little; other columns get what their range asks for.
    return True if column == _RATIO else None


def _headline(run: Run) -> str:
    """The norm of the overview: RMS→RMS of the weights, or the first weight column of a run without it."""
    columns = [str(name) for name in run.layers.columns]
    return next((c for c in (_HEADLINE, *columns) if c in columns and words.quantity(c) == "weight"), _HEADLINE)
