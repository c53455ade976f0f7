"""Names beside lines and points: short enough to fit, and apart from each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from scion_telemetry._plot_axes import PLAIN, Scale
from scion_telemetry._plot_data import Floats

End = tuple[float, float, str, Any]
"""Where a line ends: x, y as drawn, its name and its colour."""


def shorten(names: Sequence[str], limit: int = 28) -> list[str]:
    """Names that fit beside a panel: where one is too long, what all share is cut, then the front of what is left.

    The end of a name tells layers apart: ``model.decoder.layers.11.attn.wq`` becomes ``layers.11.attn.wq`` among its
    like, and ``…`` stands for what had to go without being shared.
    """
    parts = [name.split(".") for name in names]
    if len(names) > 1 and max(map(len, names)) > limit:
        most = min(map(len, parts)) - 1
        head = _shared(parts, most)
        tail = _shared([part[::-1] for part in parts], most - head)
        parts = [part[head : len(part) - tail] for part in parts]
    short = [".".join(part) for part in parts]
    return [name if len(name) <= limit else "…" + name[1 - limit :] for name in short]


def _shared(parts: Sequence[Sequence[str]], most: int) -> int:
    count = 0
    while count < most and len({part[count] for part in parts}) == 1:
        count += 1
    return count


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move labels apart: positions in [0, 1] in the order of size, at least ``gap`` from each other if they fit."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    gap = min(gap, 1.0 / max(len(heights) - 1, 1))
    placed = [min(max(heights[i], 0.0), 1.0) for i in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    if placed and placed[-1] > 1.0:
        placed[-1] = 1.0
        for i in range(len(placed) - 2, -1, -1):
            placed[i] = min(placed[i], placed[i + 1] - gap)
    out = [0.0] * len(heights)
    for where, i in zip(placed, order, strict=True):
        out[i] = where
    return out


def direct_labels(ax: Axes, scale: Scale, ends: Sequence[End], *, gap: float = 0.055) -> None:
    """Name lines at their right end, with a leader where the name had to move.

    Args:
        ax: The panel, its scale already set.
        scale: That scale.
        ends: x and y (as drawn) of a line's end, its name and colour.
        gap: Height of a label as a fraction of the panel.
    """
    heights = [scale.height(y) for _, y, _, _ in ends]
    names = shorten([name for _, _, name, _ in ends]) if ends else []
    for (x, y, _, colour), name, height in zip(ends, names, spread(heights, gap), strict=True):
        ax.annotate(
            name,
            (x, y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=[0.75 * part for part in to_rgb(colour)],  # thin letters need more contrast than lines
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
            **PLAIN,
        )


def name_points(ax: Axes, x: NDArray[Any], y: Floats, names: Sequence[str]) -> None:
    """Name the highest and the lowest point, where the axis has no room for every name."""
    if not np.isfinite(y).any():
        return
    for i, up in ((int(np.nanargmax(y)), True), (int(np.nanargmin(y)), False)):
        ax.annotate(
            shorten(names)[i],
            (float(x[i]), float(y[i])),
            xytext=(0, 6 if up else -6),
            textcoords="offset points",
            ha="left" if i < x.size / 3 else "right" if i > 2 * x.size / 3 else "center",
            va="bottom" if up else "top",
            fontsize=9,
            **PLAIN,
        )
