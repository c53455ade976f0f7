"""The fraction explorer: what advice predicts of every candidate fraction, and which one it chose."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from scion_telemetry import _plot_page as page
from scion_telemetry._plot_axes import GREY, PLAIN, role_look
from scion_telemetry._plot_data import Floats
from scion_telemetry._plot_nulls import flat_curve
from scion_telemetry.analysis import theory
from scion_telemetry.analysis.records import Advice, Candidate, GroupAdvice, MatrixAdvice

_LIMIT: Final[dict[str, Any]] = {"color": "#C00000", "linestyle": ":", "linewidth": 1.5, "gid": "limit"}

_NOW: Final[dict[str, Any]] = {"linestyle": "none", "marker": "^", "markersize": 8}

_PANELS: Final[tuple[tuple[str, str, Callable[[Candidate], float]], ...]] = (
    ("age that 99 % of the rows do not exceed", "steps", lambda c: c.age_p99),
    ("overdue rows: rarer than once in the age limit", "share of rows", lambda c: c.overdue),
    ("captured mass of unequalised rows", "share of L1 mass", lambda c: np.nan if c.mass is None else c.mass),
    ("Newton-Schulz by count, time falls less", "FLOPs relative to α = 1", lambda c: c.flops),
)


def fraction_explorer(advice: Advice) -> Figure:
    """What every candidate fraction would do, by role: age, overdue rows, mass, cost, traffic, and who accepts it.

    The broad vertical lines are the fractions that the advice takes, each with the limit that stands against the next
    smaller one; triangles on the axis are those of the run (its smallest and largest where they differ). Limits are
    dotted; random selection, flat rows and a cost in proportion to α are dashed.

    Args:
        advice: What :func:`scion_telemetry.analysis.advise` returned.
    """
    looks = [(role_look(g.role), f"{g.role} ({g.matrices})") for g in advice.groups]
    keys = [page.key(look[0], name, linestyle=look[1]) for look, name in looks]
    keys += [page.key("#C00000", "limit", linestyle=":", linewidth=1.5), page.key(GREY, "the run's own α", **_NOW)]
    keys += [page.null_key("random selection, flat rows, or in proportion to α")]
    subtitle = f"settled, predicted from the growth of every row's L1 score  ·  {page.BAND_WORDS}"
    notes = [_conclusion(group) for group in advice.groups]
    notes.append("this is about rows and cost, not about the loss: compare runs before a fraction is called as good")
    figure, body = page.page("fraction explorer", subtitle, size=(16, 8), keys=keys, notes=notes)
    grid = body.subplots(2, 3, sharex=True)
    axes = list(grid.ravel())
    tried = np.array(sorted({c.fraction for m in advice.matrices for c in m.candidates}))
    for ax, (title, unit, read) in zip(axes, _PANELS, strict=False):
        _title(ax, title, unit)
        for group in advice.groups:
            table = _table(tried, _members(advice, group), read)
            _band(ax, tried, table, role_look(group.role))
    _age(axes[0], tried, advice)
    _rare(axes[1], tried, advice)
    _mass(axes[2], tried, advice)
    axes[3].plot(tried, tried, **page.NULL, gid="null")
    axes[3].set_ylim(bottom=0)
    _traffic(axes[4], tried, advice)
    _accepted(axes[5], advice)
    _chosen(axes, advice)
    _now(axes, advice)
    _fraction_axis(grid, tried)
    return figure


def _fraction_axis(grid: Any, tried: Floats) -> None:
    grid[0, 0].set_xscale("log", base=2)
    grid[0, 0].set_xticks(tried, [f"{f:.4g}" for f in tried])
    grid[0, 0].xaxis.set_minor_locator(NullLocator())
    for ax in grid[1]:
        ax.set_xlabel("fraction α", fontsize=9)
        ax.tick_params(axis="x", labelsize=8)


def _members(advice: Advice, group: GroupAdvice) -> list[MatrixAdvice]:
    return [m for m in advice.matrices if m.evidence.role == group.role]


def _table(tried: Floats, mine: Sequence[MatrixAdvice], read: Callable[[Candidate], float]) -> Floats:
    """A number of every candidate, [matrices, fractions]; NaN where it is not known or not finite."""
    table = np.full((len(mine), tried.size), np.nan)
    for i, matrix in enumerate(mine):
        for candidate in matrix.candidates:
            table[i, int(np.searchsorted(tried, candidate.fraction))] = read(candidate)
    return np.where(np.isfinite(table), table, np.nan)


def _title(ax: Axes, title: str, unit: str) -> None:
    page.dress(ax)
    ax.set_title(title, fontsize=10, loc="left", pad=4, **PLAIN)
    ax.set_ylabel(unit, fontsize=9)


def _band(ax: Axes, tried: Floats, table: Floats, look: tuple[str, Any, str]) -> None:
    colour, style, marker = look
    known = np.isfinite(table).any(axis=0)
    if not known.any():
        return
    x = tried[known]
    least, low, middle, high, most = np.nanquantile(table[:, known], [0, 0.1, 0.5, 0.9, 1], axis=0)
    if len(table) > 1:
        ax.fill_between(x, least, most, color=colour, alpha=0.15, linewidth=0)
        ax.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0)
    ax.plot(x, middle, color=colour, linestyle=style, marker=marker, markersize=4, linewidth=1.8, gid="median")


def _age(ax: Axes, tried: Floats, advice: Advice) -> None:
    below = tried[tried < 1]
    ax.plot(below, [theory.random_age(0.99, float(f)) for f in below], **page.NULL, gid="null")
    limit = np.median(_table(tried, advice.matrices, lambda c: c.age_limit), axis=0)
    ax.plot(tried, limit, **_LIMIT)
    ax.set_yscale("symlog", linthresh=1)
    # Room above for the names of what was chosen.
    ax.set_ylim(0, 4 * max(ax.get_ylim()[1], float(np.nan_to_num(limit).max())))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _rare(ax: Axes, tried: Floats, advice: Advice) -> None:
    limit = np.median(_table(tried, advice.matrices, lambda c: c.age_limit), axis=0)
    null = [theory.overdue_share([float(f)], age) for f, age in zip(tried, limit, strict=True)]
    ax.plot(tried, null, **page.NULL, gid="null")
    ax.axhline(advice.limits.overdue, **_LIMIT)
    top = max(ax.get_ylim()[1], 2 * advice.limits.overdue)
    ax.set_ylim(-0.02 * top, top)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def _mass(ax: Axes, tried: Floats, advice: Advice) -> None:
    curves = [flat_curve(tried, width) for width in {m.evidence.width for m in advice.matrices}]
    ax.plot(tried, np.median(curves, axis=0), **page.NULL, gid="null")
    ax.axhline(advice.limits.mass, **_LIMIT)
    ax.set_ylim(0, 1.02)
    if all(m.evidence.mass_source == "none" for m in advice.matrices):
        _absent(ax, "not known: needs a calibration window\nat fraction 1, or the gradient's curves")


def _traffic(ax: Axes, tried: Floats, advice: Advice) -> None:
    _title(ax, "traffic between ranks, all matrices together", "MB a step")
    tables = {g.role: _table(tried, _members(advice, g), lambda c: c.bytes / 1e6).sum(axis=0) for g in advice.groups}
    if not any(table.any() for table in tables.values()):
        ax.set(ylim=(0, 1), yticks=[])
        _absent(ax, "nothing travels: no matrix of this run is cut")
        return
    for role, table in tables.items():
        colour, style, marker = role_look(role)
        ax.plot(tried, table, color=colour, linestyle=style, marker=marker, markersize=4, gid="total")
    ax.plot(tried, tried * max(table.max() for table in tables.values()) / tried.max(), **page.NULL, gid="null")
    ax.set_ylim(bottom=0)


def _accepted(ax: Axes, advice: Advice) -> None:
    _title(ax, "matrices that accept, by parameters", "share of parameters")
    for group in advice.groups:
        colour, style, marker = role_look(group.role)
        x = sorted(group.accepted)
        y = [group.accepted[f] for f in x]
        ax.plot(x, y, color=colour, linestyle=style, marker=marker, markersize=4, gid="accepted")
    ax.axhline(advice.limits.coverage, **_LIMIT)
    ax.set_ylim(-0.02, 1.04)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _absent(ax: Axes, words: str) -> None:
    ax.text(0.03, 0.95, words, transform=ax.transAxes, va="top", fontsize=9, color=GREY)


def _chosen(axes: Sequence[Axes], advice: Advice) -> None:
    """Mark what was chosen in every panel, and name it in the first."""
    for number, group in enumerate(advice.groups):
        for ax in axes:
            ax.axvline(group.fraction, color=role_look(group.role)[0], linewidth=6, alpha=0.25, gid="chosen", zorder=0)
        left = group.fraction > 0.25
        axes[0].annotate(
            f"{group.role}: α = {group.fraction:g}, binding: {group.binding}",
            (group.fraction, 0.98 - 0.07 * number),
            xycoords=("data", "axes fraction"),
            xytext=(-7 if left else 7, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="top",
            fontsize=9,
            fontweight="bold",
            **PLAIN,
        )


def _now(axes: Sequence[Axes], advice: Advice) -> None:
    """Mark what the run was at, on the axis of every panel."""
    for group in advice.groups:
        at = sorted(set(group.current))
        for ax in axes:
            colour, base = role_look(group.role)[0], ax.get_xaxis_transform()
            ax.plot(at, [0.0] * len(at), color=colour, transform=base, clip_on=False, gid="now", zorder=3, **_NOW)


def _conclusion(group: GroupAdvice) -> str:
    """The advice for a role in a line."""
    low, high = group.current
    now = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
    text = f"{group.role}: α = {group.fraction:g} (now {now}); binding: {group.binding}"
    if group.worst:
        text += f", worst {group.worst} at {group.worst_value:.4g} times the limit"
    return text
