"""Figures of several panels: one heading and one legend above them, notes below, all panels of one size."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from scion_telemetry import _plot_labels as label
from scion_telemetry._plot_axes import GREY, PLAIN

MANY: Final = 24
"""Up to this many matrices have a panel or a line each; more become bands of quantiles."""

NULL: Final[dict[str, Any]] = {"color": "black", "linestyle": (0, (5, 3)), "linewidth": 1.2}
"""How a null is drawn, in every figure."""

MOMENTUM: Final = "#0072B2"
GRADIENT: Final = "#D55E00"
SELECTIONS: Final = "#009E73"

Keys = Sequence[tuple[Any, str]]

_HEAD = 0.95  # inches above the panels
_NOTE = 0.2  # inches a line of notes


def page(
    title: str, subtitle: str, *, size: tuple[float, float], keys: Keys = (), notes: Sequence[str] = ()
) -> tuple[Figure, Any]:
    """A figure with its heading; the panels go into the second thing returned, a subfigure of this size in inches."""
    width, height = size
    foot = 0.1 + _NOTE * len(notes)
    figure = Figure(figsize=(width, height + _HEAD + foot), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    parts: Any = figure.subfigures(3, 1, height_ratios=[_HEAD, height, foot])
    head, body, below = parts
    left = 0.14 / width
    head.text(left, 1 - 0.12 / _HEAD, title, va="top", fontsize=13, fontweight="bold", **PLAIN)
    head.text(left, 1 - 0.38 / _HEAD, subtitle, va="top", fontsize=9, color=GREY, **PLAIN)
    if keys:
        where = {"loc": "upper left", "bbox_to_anchor": (left - 0.05 / width, 1 - 0.58 / _HEAD), "borderaxespad": 0.0}
        handles, names = [handle for handle, _ in keys], [name for _, name in keys]
        head.legend(handles, names, ncols=len(keys), frameon=False, fontsize=9, handlelength=2.2, **where)
    below.text(left, 0.98, "\n".join(notes), va="top", fontsize=9, color=GREY, linespacing=1.25, **PLAIN)
    return figure, body


def said(title: str, subtitle: str, message: str) -> Figure:
    """A figure that has nothing to draw and says why; it is also its label."""
    figure, body = page(title, subtitle, size=(11, 4))
    figure.set_label(message)
    body.text(0.5, 0.5, message, ha="center", va="center", fontsize=11, color=GREY, **PLAIN)
    return figure


def panels(
    title: str,
    subtitle: str,
    count: int,
    *,
    keys: Keys,
    notes: Sequence[str] = (),
    cell: tuple[float, float] = (2.75, 2.35),
    least: float = 11.0,
    sharey: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A grid of panels that share their axes; wider ones where there are few."""
    columns = _columns(count)
    rows = -(-count // columns)
    width = max(least, columns * cell[0])
    height = rows * cell[1] if rows > 1 else 1.5 * cell[1] + (1.2 if columns == 1 else 0)
    figure, body = page(title, subtitle, size=(width, height), keys=keys, notes=notes)
    grid = body.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)
    for ax in grid.ravel()[count:]:
        ax.remove()
    for column in range(columns):
        lowest = (count - 1 - column) // columns
        grid[lowest, column].tick_params(labelbottom=True)
    return figure, list(grid.ravel()[:count])


def _columns(count: int) -> int:
    """Columns of a grid: few cells left empty, never more than six, wider than high."""
    if count <= 12:
        return {1: 1, 2: 2, 4: 2, 3: 3, 5: 3, 6: 3, 9: 3}.get(count, 4)
    return min((6, 5, 4), key=lambda c: (-count % c, -c))


def bar(figure: Figure, image: Any, name: str) -> None:
    """What the colours mean, in the heading at the right."""
    width, height = (float(size) for size in figure.get_size_inches())
    ax = figure.add_axes((1 - 2.9 / width, 1 - 0.42 / height, 2.6 / width, 0.13 / height))
    made = figure.colorbar(image, cax=ax, orientation="horizontal", format=PercentFormatter(1.0, decimals=0))
    made.set_label(name, fontsize=9)
    made.ax.tick_params(labelsize=8, length=2)
    made.locator = MaxNLocator(nbins=4)
    made.update_ticks()


def dress(ax: Axes, title: str = "") -> None:
    """Light guides, no box, a small title that fits."""
    ax.grid(color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=9)
    if title:
        ax.set_title(label.shorten([title], 34)[0], fontsize=9, loc="left", pad=3, **PLAIN)


def outer(axes: Sequence[Axes], x: str, y: str) -> None:
    """Name the axes of a grid once: x below the lowest panel of each column, y left of the first of each row."""
    for ax in axes:
        spec = ax.get_subplotspec()
        assert spec is not None
        below = {o.colspan.start for a in axes if (o := a.get_subplotspec()) and o.rowspan.start > spec.rowspan.start}
        if spec.colspan.start not in below:
            ax.set_xlabel(x, fontsize=9, **PLAIN)
        if spec.colspan.start == 0:
            ax.set_ylabel(y, fontsize=9, **PLAIN)


def band(ax: Axes, x: Any, lines: Any, colour: str) -> None:
    """Median, 10-90 % and range of many lines [n, len(x)]."""
    least, low, middle, high, most = np.nanquantile(lines, [0, 0.1, 0.5, 0.9, 1], axis=0)
    ax.fill_between(x, least, most, color=colour, alpha=0.15, linewidth=0)
    ax.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0)
    ax.plot(x, middle, color=colour, linewidth=1.8, gid="median")


def key(colour: str, name: str, **look: Any) -> tuple[Any, str]:
    """A line in a legend."""
    return Line2D([], [], **{"color": colour, "linewidth": 1.8, **look}), name


def null_key(name: str) -> tuple[Any, str]:
    """The null in a legend."""
    return Line2D([], [], **NULL), name


def patch_key(colour: str, name: str, alpha: float = 0.3) -> tuple[Any, str]:
    """A band in a legend."""
    return Patch(facecolor=colour, alpha=alpha), name


BAND_WORDS: Final = "median, 10-90 %, min-max of the matrices"
