"""How long rows wait for their selection, against the geometric law of random selection."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from scion_telemetry import _plot_nulls as nulls
from scion_telemetry import _plot_page as page
from scion_telemetry._plot_axes import GREY, PLAIN
from scion_telemetry._plot_data import Floats
from scion_telemetry._plot_selection import everything, missing
from scion_telemetry._plot_selection_data import groups, second_half
from scion_telemetry.store import Run

_COLUMNS = ["age_p50", "age_p99", "age_max"]
_QUANTILES = (0.1, 0.5, 0.9)
_NEVER = "oldest never: its oldest row has not been selected since the tracker began; it stands at the steps since then"


def age_distribution(run: Run) -> Figure:
    """Share of rows older than a given age: a panel per matrix, or bands beyond 24.

    A run stores three points of the curve at every flush: the ages that 50 %, 1 % and less than one row exceed. Their
    medians over the second half of the steps are joined, and whiskers reach from the 10 % to the 90 % quantile over
    these steps; below 100 rows no share of 1 % exists, and its point is left out. A row that was never selected is as
    old as the tracker, and the corner says so, with a note on what it means. The dashed steps are the geometric law
    (1 - α)^(a + 1) of random selection; age 0 is selected now.
    """
    title, what = "age of rows since they were last selected", "share of rows that are older, second half of the steps"
    if not set(_COLUMNS) <= set(run.selection.columns) or not run.selection["age_max"].notna().any():
        return page.said(title, what, missing(run))
    if reason := everything(run):
        return page.said(title, what, reason)
    frame = second_half(run.selection.dropna(subset=_COLUMNS))
    rows = frame["k"] / frame["fraction"] if {"k", "fraction"} <= set(frame.columns) else pd.Series(1e3, frame.index)
    never = frame["age_max"] >= frame["step"] - int(run.info.get("start_step", 0))
    frame = frame.assign(rows=rows, never=never, share=frame["fraction"] if "fraction" in frame.columns else np.nan)
    names = [str(n) for n in frame["param"].cat.categories if (frame["param"] == n).any()]
    roles = dict(zip(run.params["name"], run.params["role"], strict=True))
    many = len(names) > page.MANY
    kinds = groups(names, [str(roles.get(n, "unknown")) for n in names])
    where = kinds if many else {name: [i] for i, name in enumerate(names)}
    points = _points(frame, names)
    keys = [page.key(page.MOMENTUM, "median, 99 % and oldest row, joined", marker="o", markersize=5, linewidth=1)]
    keys += [page.null_key("random selection, geometric")]
    over = f"{page.BAND_WORDS}" if many else "median and 10-90 % over these steps"
    members_of = {name: frame[frame["param"].isin([names[i] for i in members])] for name, members in where.items()}
    waiting = [name for name, mine in members_of.items() if mine["never"].mean() > 0.5]
    notes = [_NEVER] if waiting else []
    figure, axes = page.panels(title, f"{what}  ·  {over}", len(where), keys=keys, notes=notes)
    least = 0.5 / max(100.0, float(frame["rows"].max()))
    for ax, (name, members) in zip(axes, where.items(), strict=True):
        page.dress(ax, f"{name} ({len(members)})" if many else name)
        share, oldest = float(members_of[name]["share"].median()), float(np.median(points[members, 1, 2]))
        _ages(ax, points[members], heights(frame, [names[i] for i in members]), share, least)
        waits = "never" if name in waiting else f"{oldest:.0f}"
        # Shares are large at small ages, so that nothing is drawn in this corner.
        text = f"α = {share:.3g}\noldest {waits}"
        ax.text(0.03, 0.04, text, transform=ax.transAxes, va="bottom", fontsize=8, color=GREY, **PLAIN)
    _limits(axes, points, least)
    page.outer(axes, "age [steps]", "share of rows that are older")
    return figure


def heights(frame: pd.DataFrame, names: list[str]) -> Floats:
    """Shares at which the three ages stand: one half, one hundredth, and one row."""
    rows = float(frame.loc[frame["param"].isin(names), "rows"].median())
    return np.array([0.5, 0.01, 1 / max(1.0, rows)])


def _points(frame: pd.DataFrame, names: list[str]) -> Floats:
    """Quantiles over steps of the three ages: [n, 3 quantiles, 3 ages]."""
    grouped = frame.groupby("param", observed=True)[_COLUMNS]
    each = [grouped.quantile(q).loc[names].to_numpy(dtype=np.float64) for q in _QUANTILES]
    return np.stack(each, axis=1)


def _ages(ax: Axes, points: Floats, height: Floats, share: float, least: float) -> None:
    order = np.argsort(-height)
    if height[2] > height[1]:  # of fewer than a hundred rows, one is more than a hundredth
        order = order[order != 1]
    y, middle = height[order], points[:, 1][:, order]
    if len(points) == 1:
        low, high = points[0, 0][order], points[0, 2][order]
        ax.hlines(y, low, high, color=page.MOMENTUM, linewidth=4, alpha=0.3, gid="whiskers")
        ax.plot(middle[0], y, color=page.MOMENTUM, marker="o", markersize=5, linewidth=1, gid="age")
    else:
        first, low, half, high, last = np.quantile(middle, [0, 0.1, 0.5, 0.9, 1], axis=0)
        ax.fill_betweenx(y, first, last, color=page.MOMENTUM, alpha=0.15, linewidth=0)
        ax.fill_betweenx(y, low, high, color=page.MOMENTUM, alpha=0.3, linewidth=0)
        ax.plot(half, y, color=page.MOMENTUM, marker="o", markersize=5, linewidth=1, gid="median")
    if 0 < share < 1:
        ages = np.arange(0.0, max(2, int(np.ceil(np.log(least) / np.log(1 - share)))))
        ax.plot(ages, nulls.geometric_survival(ages, share), **page.NULL, drawstyle="steps-post", gid="null")


def _limits(axes: list[Axes], points: Floats, least: float) -> None:
    most = float(np.nanmax(points))
    ticks = [t for d in range(7) for t in (10**d, 3 * 10**d) if t <= 1.5 * most]
    for ax in axes:
        ax.set_xscale("symlog", linthresh=1, linscale=0.4)
        ax.set_yscale("log")
        ax.set(xlim=(-0.1, 1.5 * max(most, 10.0)), ylim=(least, 1.2))
        ax.set_xticks([0, *ticks])
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
        ax.minorticks_off()
