"""How unequal the rows are that an optimizer selects from: captured-mass curves and heatmaps, with their nulls."""

from fractions import Fraction
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scion_telemetry import _plot_labels as label
from scion_telemetry import _plot_nulls as nulls
from scion_telemetry import _plot_page as page
from scion_telemetry._plot_axes import PLAIN
from scion_telemetry._plot_data import Floats
from scion_telemetry._plot_selection_data import Curves, groups, last_curves
from scion_telemetry.store import Run

NOTHING: Final = "not measured: no optimizer of this run selects rows or columns"

_EVERYTHING: Final = "nothing to tell: every row is selected at every step (fraction 1)"

NOT_YET: Final = "nothing measured yet"

_NO_GRADIENT = "gradient not measured: choose the metric selection_gradient"
_WHAT = "share of the L1 mass in the α·n rows (or columns) of largest L1 norm"
_RISE = {"mass": ("momentum", page.MOMENTUM), "grad_mass": ("gradient", page.GRADIENT)}


def missing(run: Run, metric: str = "selection", declared: bool | None = None) -> str:
    """Why a figure of selections has nothing to draw.

    Args:
        run: The run.
        metric: What it shows.
        declared: Whether the run was to measure that; by default whether it has columns of selections.
    """
    if declared or (declared is None and run.info.get("selection_columns")):
        return NOT_YET if declared or run.selection.empty else "not measured: this run has no such columns"
    if run.selection.empty and not any(options.get("selection") for options in run.params["options"]):
        return NOTHING
    return f"not measured: choose the metric {metric}"


def everything(run: Run) -> str:
    """Why a figure of who is selected has nothing to tell of a run at fraction 1 throughout; empty for other runs."""
    known = run.selection["fraction"].dropna() if "fraction" in run.selection else run.selection.iloc[:0, 0]
    return _EVERYTHING if len(known) and bool((known >= 1).all()) else ""


def mass_curves(run: Run, *, step: int | None = None) -> Figure:
    """Captured-mass curves C(α) of momentum and gradient against flat rows: a panel per matrix, or bands beyond 24.

    C(α) is the share of the L1 mass in the α·n rows (or columns) of largest L1 norm. The dashed line is what rows of
    independent Gaussian entries would show. Error feedback levels the momentum, so what the rows really are shows in
    the gradient, or in the momentum of a run at fraction 1. The dot is what the optimizer selected.

    Args:
        run: The run.
        step: A measured step; by default the last one at which each curve was measured.

    Raises:
        ValueError: No curve was measured at this step.
    """
    title = "captured-mass curves C(α)"
    found = {prefix: curves for prefix in _RISE if (curves := last_curves(run, prefix, step))}
    if not found:
        return page.said(title, _WHAT, missing(run))
    first = next(iter(found.values()))
    many = len(first.names) > page.MANY
    where = groups(first.names, first.roles) if many else {name: [i] for i, name in enumerate(first.names)}
    keys = [page.key(colour, name) for prefix, (name, colour) in _RISE.items() if prefix in found]
    keys.append(page.null_key("flat rows"))
    if not many:
        keys.append(page.key("black", "selected in this step", linestyle="none", marker="o", markersize=5))
    notes = [] if "grad_mass" in found else [_NO_GRADIENT]
    subtitle = "  ·  ".join(filter(None, [_WHAT, _when(found), page.BAND_WORDS if many else ""]))
    figure, axes = page.panels(title, subtitle, len(where), keys=keys, notes=notes)
    for ax, (name, members) in zip(axes, where.items(), strict=True):
        chosen = [first.names[i] for i in members]
        page.dress(ax, f"{name} ({len(members)})" if many else name)
        for prefix, curves in found.items():
            _draw_curves(ax, curves, chosen, _RISE[prefix][1], dot=prefix == "mass" and not many)
        _draw_flat(ax, first, members)
        if many:
            _name_highest(ax, first, members)
        ax.set(xlim=(0, 1), ylim=(0, 1.02), xticks=[0, 0.25, 0.5, 0.75, 1], yticks=[0, 0.25, 0.5, 0.75, 1])
    page.outer(axes, "fraction α of the rows", "share of L1 mass")
    return figure


def mass_heatmap(run: Run, *, step: int | None = None) -> Figure:
    """C(α) of every matrix for momentum, gradient and selection frequency, with its null in the strip below.

    The white line is where half is reached: the further left of the dashed null, the more concentrated. Frequencies are
    counted since selections were measured last; their null is random selection over as many steps, which is never quite
    even.

    Args:
        run: The run.
        step: A measured step; by default the last one at which each curve was measured.

    Raises:
        ValueError: No curve was measured at this step.
    """
    title, prefixes = "concentration of rows, matrix by matrix", ("mass", "grad_mass", "frequency")
    what = "C(α): share of the total that the most important α of the rows hold, parameters in model order"
    found = {prefix: curves for prefix in prefixes if (curves := last_curves(run, prefix, step))}
    if not found:
        return page.said(title, what, missing(run))
    names = list(dict.fromkeys(n for n in map(str, run.params["name"]) for c in found.values() if n in c.names))
    height = float(np.clip(0.24 * len(names) + 1.3, 3.2, 13.0))
    keys = [
        page.key("#BBBBBB", "half of the total (white line)", linewidth=2.5),
        page.null_key("half of the total under the null of the strip below"),
    ]
    notes = [] if "grad_mass" in found else [_NO_GRADIENT]
    figure, body = page.page(title, f"{what}  ·  {_when(found)}", size=(15, height), keys=keys, notes=notes)
    strip = 0.24 / (height - 1.3)
    axes = body.subplots(2, len(found), squeeze=False, sharex="col", height_ratios=[1, strip])
    image: Any = None
    for column, (prefix, curves) in enumerate(found.items()):
        image = _heat(axes[0, column], curves, names, _HEADS[prefix], named=column == 0)
        _strip(axes[1, column], axes[0, column], curves)
    page.bar(figure, image, "share of the total")
    return figure


_HEADS = {
    "mass": "momentum: L1 mass",
    "grad_mass": "gradient: L1 mass",
    "frequency": "selection frequency: selections in the window",
}


def _heat(ax: Axes, curves: Curves, names: list[str], head: str, *, named: bool) -> Any:
    table = np.full((len(names), curves.at.size), np.nan)
    table[[names.index(name) for name in curves.names]] = curves.values
    ax.set_facecolor("#DDDDDD")
    image = ax.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    half = np.array([_half(row, curves.at) for row in table])
    edges = np.arange(len(names) + 1) - 0.5
    ax.plot(np.repeat(half, 2), np.repeat(edges, 2)[1:-1], color="white", linewidth=1.6, gid="half")
    ax.set_title(head, fontsize=10, loc="left", **PLAIN)
    every = -(-len(names) // 45)
    ax.set_yticks(np.arange(0, len(names), every), label.shorten(names)[::every] if named else [], fontsize=8, **PLAIN)
    ax.tick_params(bottom=False, labelbottom=False, length=2)
    return image


def _strip(ax: Axes, above: Axes, curves: Curves) -> None:
    """The null as a row of its own, and as a line through the rows above."""
    null = null_curve(curves)
    ax.imshow(null[None], aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest", gid="null")
    for one in (above, ax):
        one.axvline(_half(null, curves.at), **NULL_ON_COLOUR, gid="null")
    kind = "random selection" if curves.prefix == "frequency" else "flat rows"
    ax.set_yticks([])
    ax.set_title(f"null: {kind}", fontsize=9, loc="left", pad=2)
    some = [i for i, f in enumerate(curves.at) if f in _TICKS] or [0, curves.at.size - 1]
    ax.set_xticks(some, [str(Fraction(float(curves.at[i])).limit_denominator(64)) for i in some], fontsize=8)
    ax.set_xlabel("fraction α of the rows", fontsize=9)


NULL_ON_COLOUR: Final = {**page.NULL, "linewidth": 1.4}
_TICKS = (1 / 64, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 15 / 16)


def null_curve(curves: Curves) -> Floats:
    """The null of all these curves: the median over matrices of flat rows, or of random selection."""
    if curves.prefix == "frequency":
        known = np.isfinite(curves.window) & np.isfinite(curves.fraction)
        kinds = set(zip(curves.window[known], curves.fraction[known], strict=True))
        each = {kind: nulls.random_curve(curves.at, int(kind[0]), kind[1]) for kind in kinds}
        rows = [each[kind] for kind in zip(curves.window[known], curves.fraction[known], strict=True)]
        return np.median(rows, axis=0) if rows else curves.at
    widths = {width: nulls.flat_curve(curves.at, width) for width in set(curves.width)}
    return np.asarray(np.median([widths[width] for width in curves.width], axis=0))


def _half(row: Floats, at: Floats) -> float:
    """Where a curve reaches half of its total, in columns of the heatmap; NaN where it was not measured."""
    if not np.isfinite(row).all():
        return float("nan")
    return float(np.interp(0.5, row, np.arange(at.size)))


def _draw_curves(ax: Axes, curves: Curves, names: list[str], colour: str, *, dot: bool) -> None:
    mine = [i for i, name in enumerate(curves.names) if name in set(names)]
    if not mine:
        return
    x = np.r_[0.0, curves.at, 1.0]
    lines = np.pad(curves.values[mine], ((0, 0), (1, 1)), constant_values=(0.0, 1.0))
    if len(names) > 1:
        page.band(ax, x, lines, colour)
        return
    ax.plot(x, lines[0], color=colour, linewidth=1.8, gid=curves.prefix)
    if dot and np.isfinite(curves.captured[mine[0]]):
        ax.plot(curves.fraction[mine], curves.captured[mine], "o", color="black", markersize=5, gid="selected")


def _draw_flat(ax: Axes, curves: Curves, members: list[int]) -> None:
    """One dashed line where the rows are of one length, else the shortest and the longest."""
    known = sorted({w for i in members if (w := curves.width[i]) is not None})
    x = np.r_[0.0, np.linspace(0.01, 0.99, 50), 1.0]
    for width in dict.fromkeys([known[0], known[-1]] if known else [None]):
        y = np.r_[0.0, nulls.flat_curve(x[1:-1], width), 1.0]
        ax.plot(x, y, **page.NULL, gid="null")


def _name_highest(ax: Axes, curves: Curves, members: list[int]) -> None:
    at = int(np.argmin(np.abs(curves.at - 0.25)))
    values = curves.values[members, at]
    if not np.isfinite(values).any():
        return
    best = members[int(np.nanargmax(values))]
    name = label.shorten([curves.names[best]], 18)[0]
    text = f"highest at {curves.at[at]:g}:\n{name}\n{curves.values[best, at]:.2f}"
    ax.text(0.98, 0.04, text, transform=ax.transAxes, ha="right", va="bottom", fontsize=8, color=page.MOMENTUM, **PLAIN)


def _when(found: dict[str, Curves]) -> str:
    """At which steps these curves were measured."""
    steps = np.concatenate([curves.steps for curves in found.values()])
    low, high = int(steps.min()), int(steps.max())
    return f"step {low}" if low == high else f"last measured, steps {low} to {high}"
