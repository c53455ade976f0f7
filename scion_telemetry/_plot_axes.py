"""How one panel is dressed: scale, heading, legend row, and the looks of the roles.

Everything goes through ``Axes`` methods: neither pyplot nor rcParams nor a backend is touched, so that figures can be
made in any thread, without a display, and beside the user's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from scion_telemetry._plot_data import Floats

GREY: Final = "#6B6B6B"
"""Second lines, notes and zeros."""

PLAIN: Final[Mapping[str, Any]] = MappingProxyType({"parse_math": False, "usetex": False})
"""Names of parameters may hold ``$`` and ``_``; they are text, never formulas."""

# Okabe and Ito's palette, safe for the common colour vision deficiencies (Wong, Nature Methods 8:441, 2011).
PALETTE: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#6B6B6B", "#000000")

_ROLES: Final[Mapping[str, tuple[str, Any, str]]] = MappingProxyType(
    {
        # role: colour, line style, marker
        "hidden": ("#0072B2", "-", "o"),
        "embedding": ("#E69F00", "--", "s"),
        "head": ("#D55E00", ":", "D"),
        "vector": ("#009E73", "-.", "^"),
        "conv": ("#56B4E9", "-", "P"),
        "expert": ("#CC79A7", "-", "X"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The y axis: linear or logarithmic, its limits, and where zeros stand on a logarithmic one."""

    log: bool
    low: float
    high: float
    floor: float

    def place(self, values: Floats) -> Floats:
        """Values as drawn: on a logarithmic axis a zero is moved to the floor."""
        return np.where(values == 0.0, self.floor, values) if self.log else values

    def height(self, value: float) -> float:
        """Where a value stands on the axis: 0 at the lower edge, 1 at the upper one."""
        low, high = (np.log(self.low), np.log(self.high)) if self.log else (self.low, self.high)
        return float(((np.log(value) if self.log else value) - low) / (high - low))


def role_look(role: str) -> tuple[str, Any, str]:
    """Colour, line style and marker of a role; grey for one that is unknown."""
    return _ROLES.get(role, (GREY, (0, (1, 3)), "*"))


def scale_for(values: Floats, *, log: bool | None = None, least_span: float = 0.0) -> Scale:
    """Choose the axis for these values (NaN ignored).

    Args:
        values: Any shape.
        log: True where a logarithm is wanted; None takes it where the values span more than a factor of 30. Values
            that are negative, or all zero, always get a linear axis.
        least_span: Smallest range of a linear axis, so that noise is not blown up.
    """
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    if not finite.size:
        return Scale(log=False, low=0.0, high=1.0, floor=0.0)
    low, high = float(finite.min()), float(finite.max())
    if positive.size and low >= 0 and log is not False and (log or high > 30 * positive.min()):
        least = float(positive.min())
        pad = max(1.15, (high / least) ** 0.05)
        zeros = positive.size < finite.size
        floor = least / pad**2 if zeros else least
        return Scale(log=True, low=floor / pad, high=high * pad, floor=floor)
    span = max(high - low, least_span, 0.05 * max(abs(low), abs(high)), 1e-12)
    middle = low / 2 + high / 2
    return Scale(log=False, low=middle - 0.56 * span, high=middle + 0.56 * span, floor=0.0)


def set_scale(ax: Axes, scale: Scale) -> None:
    """Give the axis this scale, with light guides for the eye."""
    ax.set_yscale("log" if scale.log else "linear")
    ax.set_ylim(scale.low, scale.high)
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def step_axis(ax: Axes, notes: Sequence[str], steps: NDArray[Any]) -> None:
    """Let the x axis span these steps, label it, and put the notes of the panel below."""
    if steps.size:
        low, high = float(steps.min()), float(steps.max())
        pad = 0.01 * (high - low) or 1.0
        ax.set_xlim(low - pad, high + pad)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    ax.set_xlabel("\n".join(["optimizer step", *notes]), fontsize=9, **PLAIN)


def value_axis(ax: Axes, label: str, unit: str) -> None:
    """Label the y axis, with the unit where there is one; ``1`` is the unit of a ratio."""
    ax.set_ylabel(f"{label} [{unit}]" if unit not in ("", "1") else label, fontsize=9, **PLAIN)
    ax.tick_params(labelsize=9)


def heading(ax: Axes, title: str, subtitle: str, *, legend: bool = False) -> None:
    """Title, a grey second line, and room for a legend row below them."""
    rise = 20 if legend else 5
    ax.annotate(
        subtitle,
        (0, 1),
        xytext=(0, rise),
        xycoords="axes fraction",
        textcoords="offset points",
        va="bottom",
        fontsize=9,
        color=GREY,
        **PLAIN,
    )
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=rise + (14 if subtitle else 2), **PLAIN)


def legend_row(ax: Axes, keys: Sequence[tuple[Any, str]]) -> None:
    """A legend in one row between the heading and the panel, where no data is."""
    if not keys:
        return
    ax.legend(
        [handle for handle, _ in keys],
        [label for _, label in keys],
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=len(keys),
        frameon=False,
        fontsize=9,
        borderaxespad=0.1,
        handlelength=2.2,
        columnspacing=1.4,
    )


def empty(ax: Axes, message: str) -> None:
    """A panel that has nothing to draw and says so."""
    ax.text(0.5, 0.5, message, transform=ax.transAxes, ha="center", va="center", fontsize=11, color=GREY, **PLAIN)
    ax.set_yticks([])
    ax.spines[["top", "right", "left"]].set_visible(False)
