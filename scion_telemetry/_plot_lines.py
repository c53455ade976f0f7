"""The content of one panel: lines, bands and points, and marks for what they cannot show."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from scion_telemetry._plot_axes import GREY, PLAIN, Scale, role_look
from scion_telemetry._plot_data import Bools, Floats, Table
from scion_telemetry._plot_labels import direct_labels, shorten

LABELLED: Final = 12
"""Up to this many lines carry their own name."""

SINGLE: Final = 24
"""Up to this many lines are drawn one by one; more become a band per role."""

Key = tuple[Line2D, str]
"""A handle and its label in a legend."""

_ALARM: Final = "#C00000"
_LEVELS: Final = 4
_FEW: Final = 8  # a band of fewer lines than this says less than the lines


def depth_colours(count: int) -> list[Any]:
    """Colours from the first to the last parameter: viridis without its yellow end, which is unreadable on white."""
    return [colormaps["viridis"](0.8 * i / max(count - 1, 1)) for i in range(count)]


def mark_zeros(ax: Axes, scale: Scale, x: NDArray[Any], values: Floats) -> list[str]:
    """Show the zeros of a logarithmic panel at its lower edge, and count them in a note."""
    zero = values == 0.0
    if not scale.log or not zero.any():
        return []
    at = x[zero.any(axis=1)] if values.ndim == 2 else x[zero]
    ax.plot(
        at, np.full(at.size, scale.floor), "v", color=GREY, fillstyle="none", markersize=7, clip_on=False, gid="zeros"
    )
    count = int(zero.sum())
    return [f"▽ {count} {'zero' if count == 1 else 'zeros'} drawn at the lower edge"]


def mark_findings(ax: Axes, table: Table) -> list[str]:
    """Mark every step with a NaN or an infinity at the upper edge, and name the first in a note."""
    findings = table.findings
    if not findings.any():
        return []
    cross_out(ax, table.steps[findings.any(axis=1)])
    row = int(np.flatnonzero(findings.any(axis=1))[0])
    first = table.names[int(np.flatnonzero(findings[row])[0])]
    count, params = int(findings.sum()), int(findings.any(axis=0).sum())
    where = f"in {params} of {len(table.names)} parameters, " if len(table.names) > 1 else ""
    plural = "value" if count == 1 else "values"
    return [f"× {count} NaN or infinite {plural} {where}first: {shorten([first])[0]}, step {table.steps[row]}"]


def cross_out(ax: Axes, x: NDArray[Any]) -> None:
    """Red crosses on the upper edge of the panel."""
    where = ax.get_xaxis_transform()
    height = np.full(len(x), 0.985)
    ax.plot(x, height, "x", color=_ALARM, markersize=7, markeredgewidth=1.8, transform=where, clip_on=False, gid="nan")


def line(ax: Axes, x: NDArray[Any], y: Floats, gap: Bools, **look: Any) -> None:
    """One line over the points that exist; it breaks at findings, and a point between two breaks is a dot."""
    use = np.isfinite(y) | gap
    x, y = x[use], y[use]
    ax.plot(x, y, **look)
    known = np.isfinite(y)
    before, after = np.r_[False, known[:-1]], np.r_[known[1:], False]
    alone = known & ~before & ~after
    if alone.any():
        ax.plot(x[alone], y[alone], linestyle="none", marker="o", markersize=4, color=look["color"])


def single_lines(ax: Axes, table: Table, scale: Scale) -> list[Key]:
    """Up to ``SINGLE`` lines coloured by depth, named at the end or by a colour bar. Returns the keys of the legend."""
    colours = depth_colours(len(table.names))
    drawn = scale.place(table.values)
    ends = []
    for j, name in enumerate(table.names):
        style = role_look(table.roles[j])[1]
        line(ax, table.steps, drawn[:, j], table.findings[:, j], color=colours[j], linestyle=style, linewidth=1.4)
        known = np.flatnonzero(np.isfinite(drawn[:, j]))
        if known.size:
            ends.append((float(table.steps[known[-1]]), float(drawn[known[-1], j]), name, colours[j]))
    if len(table.names) <= LABELLED:
        direct_labels(ax, scale, ends)
    else:
        _depth_bar(ax, table.names)
    roles = list(dict.fromkeys(table.roles))
    if len(roles) == 1:
        return []
    return [
        (Line2D([], [], color="black", linestyle=role_look(role)[1]), f"{role} ({table.roles.count(role)})")
        for role in roles
    ]


def _depth_bar(ax: Axes, names: Sequence[str]) -> None:
    """The colours from the first to the last parameter, close to the panel so that nobody seeks what it belongs to."""
    bar = ax.inset_axes((1.02, 0.0, 0.02, 1.0))
    bar.imshow(np.array([depth_colours(len(names))]).swapaxes(0, 1), origin="lower", aspect="auto", gid="depth")
    bar.set_xticks([])
    short = shorten(names, 22)
    bar.set_yticks([0, len(names) - 1], [short[0], short[-1]], fontsize=9, rotation=90)
    bar.yaxis.tick_right()
    bar.tick_params(length=0)
    for text, side in zip(bar.get_yticklabels(), ("bottom", "top"), strict=True):
        text.set(verticalalignment=side, **PLAIN)
    bar.spines[:].set_visible(False)


def bands(ax: Axes, table: Table, scale: Scale) -> list[Key]:
    """Many lines as one band per role, the lowest and highest parameter of the last step named. Returns legend keys."""
    drawn = scale.place(table.values)
    keys: list[Key] = []
    for role in dict.fromkeys(table.roles):
        mine = np.flatnonzero(np.array(table.roles) == role)
        colour, style, _ = role_look(role)
        keys.append((Line2D([], [], color=colour, linestyle=style, linewidth=2), f"{role} ({mine.size})"))
        if mine.size > _FEW:
            _band(ax, table.steps, drawn[:, mine], colour)
        else:
            for j in mine:
                look = {"color": colour, "linestyle": style, "linewidth": 1.3}
                line(ax, table.steps, drawn[:, j], table.findings[:, j], **look)
    _name_extremes(ax, table, drawn, scale)
    return keys


def _band(ax: Axes, steps: NDArray[Any], block: Floats, colour: str) -> None:
    known = np.isfinite(block).any(axis=1)
    x = steps[known]
    if not x.size:
        return
    least, low, middle, high, most = np.nanquantile(block[known], [0, 0.1, 0.5, 0.9, 1], axis=1)
    ax.fill_between(x, least, most, color=colour, alpha=0.15, linewidth=0)
    ax.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0)
    ax.plot(x, middle, color=colour, linewidth=2, marker="o" if x.size == 1 else None)


def _name_extremes(ax: Axes, table: Table, drawn: Floats, scale: Scale) -> None:
    known = np.flatnonzero(np.isfinite(drawn).any(axis=1))
    if not known.size:
        return
    last = known[-1]
    ends = []
    for j in dict.fromkeys([int(np.nanargmax(drawn[last])), int(np.nanargmin(drawn[last]))]):
        colour = role_look(table.roles[j])[0]
        if table.roles.count(table.roles[j]) > _FEW:
            line(ax, table.steps, drawn[:, j], table.findings[:, j], color=colour, linewidth=0.8, alpha=0.9)
        ends.append((float(table.steps[last]), float(drawn[last, j]), table.names[j], colour))
    direct_labels(ax, scale, ends)


def reference(ax: Axes, table: Table, label: str) -> Key:
    """A table as dashed lines, one for each level that parameters share; a band where the levels are many."""
    known = np.isfinite(table.values).any(axis=1)
    x, block = table.steps[known], table.values[known]
    look: dict[str, Any] = {"color": "black", "linestyle": (0, (5, 3)), "linewidth": 1.2}
    _, first = np.unique(np.round(block, 3), axis=1, equal_nan=True, return_index=True)
    levels = block[:, first]
    if levels.shape[1] > _LEVELS:
        ax.fill_between(x, np.nanmin(block, axis=1), np.nanmax(block, axis=1), color="black", alpha=0.08, linewidth=0)
        levels = np.nanmedian(block, axis=1, keepdims=True)
    for level in levels.T:
        ax.plot(x, level, **look, gid="reference")
    return Line2D([], [], **look), label


def role_points(ax: Axes, x: NDArray[Any], y: Floats, mine: Bools, role: str) -> Key:
    """The points of one role, and their legend key."""
    colour, _, marker = role_look(role)
    size = 6 if x.size <= 100 else 4
    look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": "none", "markersize": size, "alpha": 0.85}
    ax.plot(x[mine], y[mine], **look)
    return Line2D([], [], **look), f"{role} ({int(mine.sum())})"
