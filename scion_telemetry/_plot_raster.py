"""Which rows an optimizer selected at each flush: the raster of rows over steps, with what random selection does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scion_telemetry import _plot_page as page
from scion_telemetry._plot_axes import PLAIN
from scion_telemetry._plot_data import Floats
from scion_telemetry._plot_selection import missing
from scion_telemetry._plot_selection_data import groups, step_edges
from scion_telemetry.store import Run

ROWS: Final = 224
FLUSHES: Final = 200
"""Cells of a panel, about a pixel each; where there are more rows or flushes, several share one."""

_CELL: Final = (2.75, 3.1)
_ALPHA: Final[dict[str, Any]] = {"color": page.GRADIENT, "linestyle": ":", "linewidth": 1.8}
_READ: Final = (
    "horizontal bands: rows that stay selected, or stay out; vertical edges: from that step on other rows, or more",
    "random selection: even noise, in which a row stays selected for a streak of 1 / (1 - α) flushes; shorter streaks: "
    "rows take turns; longer: the same ones win",
    "a flush sees one step: rows that take turns in time with the flushes can look as if they never won; "
    "selection_ranks counts every step",
)

Flags = NDArray[np.bool_]


def selection_raster(run: Run) -> Figure:
    """Which rows (or columns) were selected at each flush: a panel per matrix, or for a sample of 24 of them.

    Rows are sorted by how often they were selected, the most at the top, and are dark where they were. If the same rows
    won every time, all would be dark above the dotted line at α and nothing below it. Under random selection a row is
    selected with probability α at every flush, whatever it was before, so that it stays dark for 1 / (1 - α) flushes;
    above each panel stand the mean length that was found, and the one of random selection with as many rows at each
    flush over as many flushes. A flush sees one step: of rows that take turns at the pace of the flushes (every fourth
    step, flushed every tenth) some look as if they never won. Schedule flushes at an odd distance to see them move.

    Of more than 24 matrices as many of every kind (of every role, where there are many kinds) are shown, evenly spread
    over the model. Of more than 224 rows or 200 flushes several share a cell, which is as dark as its selected share.
    """
    title, what = "selected rows over the steps", "rows (or columns) by how often they were selected, most at the top"
    table = run.selected
    if table.empty:
        return page.said(title, what, missing(run, "selection_rows", bool(run.info.get("selection_rows"))))
    pairs = table[["param", "matrix"]].drop_duplicates()
    every = [(str(name), int(matrix)) for name, matrix in pairs.sort_values(["param", "matrix"]).to_numpy()]
    roles = dict(zip(run.params["name"], run.params["role"], strict=True))
    shown = sample(every, [str(roles.get(name, "unknown")) for name, _ in every], page.MANY)
    several = {name for name, matrix in every if matrix}
    found = {f"{n} [{m}]" if n in several else n: picture(run.raster(n, m).sort_index()) for n, m in shown}
    keys = [
        page.patch_key("black", "selected", 1.0),
        page.key("", "α: all dark above and nothing below if the same rows always won", **_ALPHA),
    ]
    notes = [*_READ, *_remarks(len(shown), len(every), list(found.values()))]
    figure, axes = page.panels(title, what, len(found), keys=keys, notes=notes, cell=_CELL)
    image: Any = None
    for ax, (name, one) in zip(axes, found.items(), strict=True):
        image = _draw(ax, name, one)
    if any(one.rows > 1 or one.flushes > 1 for one in found.values()):
        page.bar(figure, image, "selected share of a cell")
    page.outer(axes, "optimizer step", "rank / rows, most selected first")
    return figure


def sample(pairs: Sequence[tuple[str, int]], roles: Sequence[str], most: int) -> list[tuple[str, int]]:
    """At most so many matrices: as many of every kind, from its first to its last at even distances, kind by kind."""
    if len(pairs) <= most:
        return list(pairs)
    kinds = groups([name for name, _ in pairs], roles)
    each = max(1, most // len(kinds))
    found = []
    for members in kinds.values():
        places = np.round(np.linspace(0, len(members) - 1, min(each, len(members)))).astype(int)
        found += [pairs[members[i]] for i in places]
    return found[:most]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """What one panel draws.

    Args:
        x: Edges of the cells, steps, [S + 1].
        y: Edges of the cells, share of all rows, [R + 1].
        share: Selected share of each cell, most selected rows first, [R, S].
        rows: Rows that share a cell.
        flushes: Flushes that do.
        fraction: Mean share of the rows that are selected.
        streak: Mean number of flushes in a row at which a row is selected.
        random: The same under random selection.
    """

    x: Floats
    y: Floats
    share: Floats
    rows: int
    flushes: int
    fraction: float
    streak: float
    random: float


def picture(raster: Any) -> Picture:
    """Sort the rows of a raster, [flushes, rows], and put them into cells."""
    flags: Flags = raster.to_numpy(dtype=bool)
    order = np.argsort(-flags.sum(axis=0), kind="stable")
    times, count = flags.shape
    rows, flushes = -(-count // ROWS), -(-times // FLUSHES)
    first, start = np.arange(0, count, rows), np.arange(0, times, flushes)
    sums = np.add.reduceat(np.add.reduceat(flags[:, order].T.astype(float), first, axis=0), start, axis=1)
    sizes = np.outer(np.diff(np.append(first, count)), np.diff(np.append(start, times)))
    edges = step_edges(raster.index.to_numpy(dtype=np.int64))
    streak, random = streaks(flags)
    return Picture(
        x=np.append(edges[start], edges[-1]),
        y=np.append(first, count) / count,
        share=sums / sizes,
        rows=rows,
        flushes=flushes,
        fraction=float(flags.mean()),
        streak=streak,
        random=random,
    )


def streaks(flags: Flags) -> tuple[float, float]:
    """Mean length of runs of selected flushes, [flushes, rows], and that of random selection of as many rows.

    The latter is Σ α_t / (α_1 + Σ α_t (1 - α_(t-1))), the selections over the starts that are expected; towards
    1 / (1 - α) for many flushes.
    """
    share = flags.mean(axis=1)
    starts = flags[0].sum() + (flags[1:] & ~flags[:-1]).sum()
    expected = share[0] + (share[1:] * (1 - share[:-1])).sum()
    return float(flags.sum() / max(1, starts)), float(share.sum() / expected) if expected else 0.0


def _draw(ax: Axes, name: str, one: Picture) -> Any:
    page.dress(ax, name)
    ax.grid(visible=False)
    text = f"α = {one.fraction:.3g}, streak {one.streak:.2f} (random {one.random:.2f})"
    ax.set_title(f"{ax.get_title('left')}\n{text}", fontsize=8.5, loc="left", pad=3, **PLAIN)
    image = ax.pcolorfast(one.x, one.y, one.share, cmap="Greys", vmin=0.0, vmax=1.0)
    ax.axhline(one.fraction, **_ALPHA, gid="fraction")
    ax.set(xlim=(one.x[0], one.x[-1]), ylim=(1, 0), yticks=[0, 0.25, 0.5, 0.75, 1])
    return image


def _remarks(shown: int, of: int, found: Sequence[Picture]) -> list[str]:
    rows, flushes = max(one.rows for one in found), max(one.flushes for one in found)
    remarks = [f"{shown} of {of} matrices, of every kind evenly spread over the model"] if shown < of else []
    several = [f"{n} {what}" for n, what in ((rows, "rows"), (flushes, "flushes")) if n > 1]
    if several:
        remarks.append(f"up to {' and '.join(several)} share a cell, which is as dark as its selected share")
    return ["  ·  ".join(remarks)] if remarks else []
