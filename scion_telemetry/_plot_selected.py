"""Which rows an optimizer selected, how often, how long ago, and what selecting in shards costs, with the nulls."""

from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from scion_telemetry import _plot_axes as dress
from scion_telemetry import _plot_lines as draw
from scion_telemetry import _plot_nulls as nulls
from scion_telemetry import _plot_page as page
from scion_telemetry import _plot_panels as panel
from scion_telemetry._plot_axes import GREY, PLAIN
from scion_telemetry._plot_data import Table, column_table
from scion_telemetry._plot_selection import everything, missing
from scion_telemetry._plot_selection_data import (
    Curves,
    Ranked,
    Raster,
    groups,
    late_median,
    matrices,
    median_curves,
    ranked,
    raster,
    step_edges,
)
from scion_telemetry.store import Run

REGRET: Final = 0.05
"""From here on local selection loses too much; the default limit of advice."""

FREQUENCIES: Final = "selection_frequencies"

_GRID = (np.arange(200) + 0.5) / 200
_CELLS = 12  # rasters
_OWN: Final[dict[str, Any]] = {"linestyle": "none", "marker": "D", "markersize": 5, "fillstyle": "none"}


def selection_ranks(run: Run) -> Figure:
    """How often each row was selected over the whole run, rows sorted: a panel per matrix, or bands beyond 24.

    The dashed line is what random selection of as many rows over as many steps looks like once sorted: Binomial(T, α)
    / T; 95 % of such rows lie in the grey band. The dotted line is a tenth of the mean, below which a row is starved.
    """
    title, what = (
        "selection frequency by rank",
        "selections / steps of every row (or column), sorted, over the whole run",
    )
    if reason := everything(run):
        return page.said(title, what, reason)
    found = ranked(run)
    if not found:
        message = "no slices.csv with selections: it is written when the tracker of a run that selects rows closes"
        return page.said(title, what, missing(run) if run.selection.empty else message)
    many = len(found) > page.MANY
    names = [one.name for one in found]
    where = groups(names, [one.role for one in found]) if many else {name: [i] for i, name in enumerate(names)}
    keys = [
        page.key(page.SELECTIONS, "selected rows"),
        page.null_key("random selection, sorted"),
        page.patch_key("black", "95 % of randomly selected rows", 0.12),
        page.key(GREY, "starved below (a tenth of the mean)", linestyle=":", linewidth=1.2),
    ]
    subtitle = "  ·  ".join(filter(None, [what, page.BAND_WORDS if many else ""]))
    figure, axes = page.panels(title, subtitle, len(where), keys=keys)
    top = max(0.02, 1.04 * max(float(one.frequency[0]) for one in found))
    for ax, (name, members) in zip(axes, where.items(), strict=True):
        page.dress(ax, f"{name} ({len(members)})" if many else name)
        _ranks(ax, [found[i] for i in members])
        ax.set(xlim=(0, 1), ylim=(-0.03 * top, top), xticks=[0, 0.25, 0.5, 0.75, 1])
    page.outer(axes, "rank / rows, most selected first", "selections a step")
    return figure


def _ranks(ax: Axes, mine: list[Ranked]) -> None:
    share = float(np.median([one.share for one in mine]))
    steps = int(np.median([one.steps for one in mine]))
    low, high = nulls.binomial_quantile(steps, share, np.array([0.025, 0.975]))
    ax.axhspan(float(low), float(high), color="black", alpha=0.12, linewidth=0, gid="band")
    if len(mine) == 1:
        ax.plot(mine[0].places, mine[0].frequency, color=page.SELECTIONS, linewidth=1.8, gid="frequency")
    else:
        lines = np.array([np.interp(_GRID, one.places, one.frequency) for one in mine])
        page.band(ax, _GRID, lines, page.SELECTIONS)
    ax.plot(_GRID, nulls.binomial_quantile(steps, share, 1 - _GRID), **page.NULL, gid="null")
    ax.axhline(share / 10, color=GREY, linestyle=":", linewidth=1.2, gid="starved")
    every = np.concatenate([one.frequency / one.share for one in mine])
    always = np.concatenate([one.frequency for one in mine]) >= 0.99
    text = f"starved {(every < 0.1).mean():.1%}, always {always.mean():.1%}\nα = {share:.3g}, {steps} steps"
    ax.text(0.98, 0.97, text, transform=ax.transAxes, ha="right", va="top", fontsize=8, color=GREY, **PLAIN)


def frequencies_over_steps(run: Run) -> Figure:
    """How many rows were selected how often between flush and flush, over the steps: a panel per matrix or kind.

    This is the raster of selections with its rows put into bins of frequency, and counts every step, also those between
    flushes; it is drawn from the histogram ``selection_frequencies``. Between the dashed lines lie
    95 % of rows that are selected at random. A band at "never" and one near 1 that stay are rows that always lose or
    win; one narrow band at α is rotation.
    """
    title, what = (
        "selection frequencies over the steps",
        "share of rows by selections a step since selections were measured last",
    )
    table = run.histograms
    names = [str(n) for n in table.loc[table["name"] == FREQUENCIES, "param"].unique()]
    if not names:
        return page.said(title, what, missing(run, FREQUENCIES, FREQUENCIES in run.info.get("histograms", ())))
    names = [str(name) for name in table["param"].cat.categories if str(name) in set(names)]
    roles = dict(zip(run.params["name"], run.params["role"], strict=True))
    many = len(names) > _CELLS
    where = (
        groups(names, [str(roles.get(n, "unknown")) for n in names]) if many else {n: [i] for i, n in enumerate(names)}
    )
    keys = [page.null_key("95 % of rows under random selection lie between")]
    notes = ["of T steps between two flushes only multiples of 1/T can come: gaps between bands are no finding"]
    figure, axes = page.panels(title, what, len(where), keys=keys, notes=notes)
    found = [raster(run, [names[i] for i in members], FREQUENCIES) for members in where.values()]
    most = max(float(np.nanmax(one.share)) for one in found)
    image: Any = None
    for ax, (name, members), one in zip(axes, where.items(), found, strict=True):
        page.dress(ax, f"{name} ({len(members)})" if many else name)
        ax.grid(visible=False)
        image = _raster(ax, one, most)
    page.bar(figure, image, "share of rows")
    page.outer(axes, "optimizer step", "selections a step")
    return figure


def _raster(ax: Axes, one: Raster, most: float) -> Any:
    bins = one.edges.size
    edges = step_edges(one.steps)
    shown = np.ma.masked_equal(one.share, 0.0)
    image = ax.pcolormesh(edges, np.arange(bins + 1), shown, cmap="GnBu", norm=PowerNorm(0.5, 0, most), gid="share")
    known = np.isfinite(one.window) & np.isfinite(one.fraction)
    for q in (0.025, 0.975):
        ends = [
            float(nulls.binomial_quantile(int(w), f, np.array([q]))[0])
            for w, f in zip(one.window[known], one.fraction[known], strict=True)
        ]
        ax.plot(one.steps[known], [place(one, end) for end in ends], **page.NULL, gid="null")
    ticks = [i for i in range(1, bins) if abs(np.log2(one.edges[i]) % 1) < 1e-9]
    ax.set_yticks([0.5, *ticks], ["never", *(_octave(one.edges[i]) for i in ticks)])
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    return image


def place(one: Raster, frequency: float) -> float:
    """Where a frequency stands on the axis of a raster: bins of a quarter octave, below them "never"."""
    if frequency <= 0:
        return 0.5
    if one.edges.size == 1:
        return 1.0
    return float(np.clip(np.floor(4 * np.log2(frequency / one.edges[1]) + 1e-9) + 1.5, 0.5, one.edges.size))


def _octave(edge: float) -> str:
    return "1" if edge == 1 else f"1/{round(1 / edge)}" if edge < 1 else f"{edge:g}"


def churn_over_steps(run: Run) -> Figure:
    """Jaccard distance of the selections of two consecutive steps, against 1 - α / (2 - α) of random selection.

    Above the null: rows take turns, as error feedback makes flat rows do. Below it: the same rows win again and again.
    """
    figure = Figure(figsize=(11, 6.5), dpi=120, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    ax = figure.subplots()
    # It has no value at the first step; a set is never NaN.
    frame = run.selection.dropna(subset=["churn"]) if "churn" in run.selection.columns else run.selection.iloc[:0]
    if frame.empty:
        panel.absent(ax, "churn", missing(run))
        return figure
    if reason := everything(run):
        panel.absent(ax, "churn", reason)
        return figure
    table = column_table(run, frame, "churn")
    null = None
    if "fraction" in frame.columns:
        share = column_table(run, frame, "fraction", table.names)
        null = Table(
            column="churn",
            steps=share.steps,
            names=share.names,
            roles=share.roles,
            values=nulls.churn_of(share.values),
            findings=share.findings,
        )
    remark = "above the null rows take turns, below it the same ones win again and again"
    panel.over_steps(ax, table, log=False, flat=null, flat_label="random selection: 1 - α / (2 - α)", remark=remark)
    return figure


def regret_by_shards(run: Run) -> Figure:
    """Mass that is lost when every one of W equal shards selects for itself, against W; the median of the second half.

    Diamonds are the run's own shards, where its rows are cut. Dashed: what flat rows of the median size lose.
    """
    title, what = "regret of local selection", "1 - mass of the largest of every shard / of as many, the largest of all"
    curves = median_curves(run, "regret")
    if curves is None:
        return page.said(title, what, missing(run))
    if reason := everything(run):
        return page.said(title, what, reason)
    table = Table(
        column="regret",
        steps=curves.at.astype(np.int64),
        names=curves.names,
        roles=curves.roles,
        values=curves.values.T,
        findings=np.zeros(curves.values.T.shape, dtype=bool),
    )
    own, many = _own_regret(run), len(curves.names) > page.MANY
    keys = _regret_keys(curves, many=many, cut=bool(own))
    subtitle = "  ·  ".join([what, "median over the second half of the steps", *([page.BAND_WORDS] if many else [])])
    figure, body = page.page(title, subtitle, size=(11, 5.5), keys=keys)
    ax = body.subplots()
    top = float(np.nanmax(np.r_[curves.values.ravel(), [y for _, y in own], REGRET]))
    scale = dress.Scale(log=False, low=-0.02 * top, high=1.06 * top, floor=0.0)
    dress.set_scale(ax, scale)
    _ = draw.bands(ax, table, scale) if many else draw.single_lines(ax, table, scale)
    ax.axhline(REGRET, color="#C00000", linestyle=":", linewidth=1.5, gid="limit")
    if (null := _flat_regret(run, curves)) is not None:
        ax.plot(curves.at, null, **page.NULL, gid="null")
    if own:
        ax.plot(*zip(*own, strict=True), color="black", gid="own", **_OWN)
    _shard_axis(ax, sorted({*(float(w) for w in curves.at), *(x for x, _ in own)}))
    return figure


def _regret_keys(curves: Curves, *, many: bool, cut: bool) -> list[tuple[Any, str]]:
    keys = [page.key("#C00000", f"limit {REGRET:.0%}", linestyle=":", linewidth=1.5), page.null_key("flat rows")]
    if cut:
        keys.append(page.key("black", "the run's own shards", **_OWN))
    for role in dict.fromkeys(curves.roles) if many or len(set(curves.roles)) > 1 else ():
        colour, style, _ = dress.role_look(role)
        keys.append(page.key(colour if many else "black", f"{role} ({curves.roles.count(role)})", linestyle=style))
    return keys


def _shard_axis(ax: Axes, ticks: list[float]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{w:g}" for w in ticks])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xlabel("shards W", fontsize=9)
    ax.set_ylabel("mass lost, share of the largest", fontsize=9)
    ax.tick_params(labelsize=9)


def _own_regret(run: Run) -> list[tuple[float, float]]:
    """Number of shards and regret of every parameter whose rows are cut."""
    found = late_median(run, "regret")
    options = dict(zip(run.params["name"], run.params["options"], strict=True))
    return [
        (float(shards), value)
        for name, value in found.items()
        if (shards := options.get(name, {}).get("shards") or 0) > 1
    ]


def _flat_regret(run: Run, curves: Curves) -> Any:
    """Median over matrices of what flat rows would lose; None where the sizes are not known."""
    stacked = matrices(run)
    lines = [
        [nulls.flat_regret(round(rows / stacked.get(name, 1)), fraction, width, int(w)) for w in curves.at]
        for name, rows, fraction, width in zip(curves.names, curves.rows, curves.fraction, curves.width, strict=True)
        if width is not None and np.isfinite(rows) and np.isfinite(fraction) and rows > 0
    ]
    return np.median(lines, axis=0) if lines else None
