"""The figures of ``tune_fraction.md``, each a small PNG with a palette."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from tune_fraction_predict import agreement, by_balance, predict
from tune_fraction_report import costs, horizons, losses, rates, scopes
from tune_fraction_study import Study, ef_decay, late

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#6B6B6B"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#56B4E9", "#CC79A7")


def draw(study: Study, folder: Path) -> None:
    """Draw what the study has data for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        save(figure(study), folder / f"{name}.png")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG of 64 colours: a quarter of the bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


def _panels(count: int, *, width: float = 5.0, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * count, height), dpi=100, layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, count)).tolist()
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _fractions(ax: Axes, fractions: list[float]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(fractions, [f"{f:g}" for f in fractions])
    ax.minorticks_off()
    ax.set_xlabel("fraction")


def loss(study: Study) -> Figure:
    """Loss against fraction: every seed, then every learning rate."""
    figure, (left, right) = _panels(2)
    table = losses(study)
    seeds = [i for i, name in enumerate(table.columns) if name.startswith("seed")]
    x = [row[0] for row in table.rows]
    for i, colour in zip(seeds, COLOURS, strict=False):
        left.plot(x, [row[i] for row in table.rows], "o", color=colour, alpha=0.8, label=table.columns[i])
    left.plot(x, [row[seeds[-1] + 1] for row in table.rows], "-", color=GREY, label="mean")
    left.set_title("Same learning rate at every fraction")
    _by_rate(right, study)
    for ax in (left, right):
        _fractions(ax, x)
        ax.set_ylabel("validation loss, nats a byte")
        ax.legend(frameon=False, fontsize=9)
    return figure


def _by_rate(ax: Axes, study: Study) -> None:
    grid, title = rates(study), "By learning rate, seed 0"
    main = grid.columns.index(f"lr {study.sweep['lr'].iloc[0]:g}")
    worst = max(row[main] for row in grid.rows)
    for i, colour in zip(range(1, len(grid.columns) - 2), COLOURS, strict=False):
        values = [row[i] for row in grid.rows]
        if np.nanmin(values) > worst:
            title += f"\n({grid.columns[i]}: {np.nanmin(values):.2f} to {np.nanmax(values):.2f}, not drawn)"
        else:
            ax.plot([row[0] for row in grid.rows], values, "o-", color=colour, label=grid.columns[i])
    kept = horizons(study).rows
    if kept:
        label = f"lr {kept[0][1]:g}, horizon kept at {kept[0][6]:.0f} steps"
        ax.plot([row[0] for row in kept], [row[7] for row in kept], "kD--", markersize=5, label=label)
    ax.set_title(title, fontsize=11)


def frequencies(study: Study) -> Figure:
    """Predicted against realised frequency, a point a row, from the run at .25: on its gradients, and in other runs."""
    targets = [f for f in study.fractions if f < 1 and f != 0.25] or [0.25]
    source = study.of(0.25)
    figure = Figure(figsize=(4 * len(targets), 7.6), dpi=100, layout="constrained")
    axes = np.atleast_2d(figure.subplots(2, len(targets), sharex=True, sharey=True, squeeze=False))
    if source is None:
        return figure
    g = by_balance(study, source.path.name)
    for i, target in enumerate(targets):
        for ax, shadow in zip(axes[:, i], (target, None), strict=True):
            other = source if shadow else study.of(target)
            if other is None:
                continue
            realised = study.trace(other.path.name, shadow).frequency(0.5)
            predicted = predict(g, realised)
            x, y = (np.concatenate([rows[param] for param in realised]) for rows in (predicted, realised))
            ax.plot([0, 1], [0, 1], "-", color=GREY, linewidth=1)
            ax.plot(x, y, ".", color=BLUE, markersize=2, alpha=0.5)
            found = agreement(predicted, realised)
            where = "same gradients" if shadow else "another run"
            ax.set_title(f"{target:g}, {where}: r = {found[0]:.2f}, MAE = {found[2]:.3f}", fontsize=10)
            ax.grid(alpha=0.3)
    figure.supxlabel("frequency of a row as predicted from the run at fraction .25", fontsize=11)
    figure.supylabel("realised, second half of the run", fontsize=11)
    return figure


def mass(study: Study) -> Figure:
    """Curves of momentum, gradient and selections of the second half, seed 0: mean and range over matrices."""
    shown = [f for f in (1.0, 0.25, 0.0625) if f in study.fractions]
    figure, axes = _panels(len(shown), width=4.4)
    for ax, fraction in zip(axes, shown, strict=True):
        table = late(study.runs[f"fraction{fraction:g}-seed0"])
        for prefix, label, colour in (
            ("mass_at_", "momentum", BLUE),
            ("grad_mass_at_", "gradient", ORANGE),
            ("frequency_at_", "selections", GREEN),
        ):
            columns = [c for c in table.columns if c.startswith(prefix)]
            at = [0.0, *(float(c.removeprefix(prefix)) for c in columns), 1.0]
            mean = [0.0, *table[columns].mean().tolist(), 1.0]
            ax.plot(at, mean, color=colour, label=label)
            spread = table.groupby("param", observed=True)[columns].mean()
            low, high = spread.min().tolist(), spread.max().tolist()
            ax.fill_between(at, [0.0, *low, 1.0], [0.0, *high, 1.0], color=colour, alpha=0.15, linewidth=0)
        ax.plot([0, 1], [0, 1], ":", color=GREY, label="all alike")
        ax.set_title(f"trained at fraction {fraction:g}")
        ax.set_xlabel("share of the rows, largest first")
        ax.set_ylabel("share of the L1 mass, of the selections")
    axes[0].legend(frameon=False, loc="lower right")
    return figure


def ages(study: Study) -> Figure:
    """Ages in momentum horizons over the run, and the frequencies of rows in their order."""
    figure, (left, right) = _panels(2)
    for fraction, colour in zip([f for f in study.fractions if f < 1], COLOURS, strict=False):
        run = study.of(fraction)
        if run is None:
            continue
        age = run.selection.groupby("step")["age_p99"].mean() * (1 - ef_decay(run)) * fraction
        left.plot(age.index, age.to_numpy(), color=colour, label=f"fraction {fraction:g}")
        for param, f in study.trace(run.path.name).frequency(0.5).items():
            ranks = np.arange(1, len(f) + 1) / len(f)
            label = f"fraction {fraction:g}" if param.endswith("0.attn.wq") else None
            right.plot(ranks, -np.sort(-f), color=colour, linewidth=0.8, alpha=0.6, label=label)
    left.axhline(3, color=GREY, linestyle=":")
    left.text(
        1, 3.02, "3 horizons", color=GREY, fontsize=9, ha="right", va="bottom", transform=left.get_yaxis_transform()
    )
    left.set_xlabel("step")
    left.set_ylabel("p99 of the age in horizons, mean over matrices")
    right.set_xlabel("rank of a row in its matrix")
    right.set_ylabel("selections a step, second half of the run")
    for ax in (left, right):
        ax.legend(frameon=False, fontsize=9)
    return figure


def shards(study: Study) -> Figure:
    """Regret of selecting in shards, measured and counterfactual."""
    figure, (left, right) = _panels(2)
    base = study.of(0.25)
    if base is not None:
        table = late(base).groupby("param", observed=True)
        columns = [c for c in base.selection.columns if c.startswith("regret_at_")]
        values = table[columns].mean()
        at = [int(c.removeprefix("regret_at_")) for c in columns]
        left.plot(at, values.to_numpy().T, color=GREY, linewidth=0.7, alpha=0.6)
        left.plot(
            at, values.mean().to_numpy(), "o-", color=BLUE, label="as if in shards, of a whole run (each matrix grey)"
        )
    for row in scopes(study).rows:
        if row[1] in ("local", "global"):
            left.plot([row[0]], [row[4]], "s", color=RED if row[1] == "local" else GREEN)
    left.plot([], [], "s", color=RED, label="measured, local scope")
    left.plot([], [], "s", color=GREEN, label="measured, global scope")
    left.set_xscale("log", base=2)
    left.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
    left.set_xlabel("shards")
    left.set_ylabel("regret")
    left.set_ylim(top=1.3 * left.get_ylim()[1])  # room for the legend
    left.legend(frameon=False, fontsize=9)
    rows = scopes(study).rows
    colours = {"whole": GREY, "local": RED, "global": GREEN}
    for place, row in enumerate(rows):
        right.plot([place], [row[2]], "o", color=colours[row[1]], markersize=9)
    right.set_xticks(range(len(rows)), [f"{row[0]} {row[1]}" for row in rows])
    right.margins(0.15, 0.3)
    right.set_xlabel("ranks and scope")
    right.set_ylabel("validation loss, one run each")
    return figure


def cost(study: Study) -> Figure:
    """Time and bytes against fraction."""
    figure, (ax,) = _panels(1, width=6)
    table = costs(study)
    x: list[Any] = [row[0] for row in table.rows]
    shown = [i for i, c in enumerate(table.columns) if c.startswith(("time", "of full"))]
    for i, colour in zip(shown, COLOURS, strict=False):
        name = table.columns[i].replace("of full", "bytes")
        ax.plot(x, [row[i] for row in table.rows], "o-", color=colour, label=name)
    ax.plot(x, x, ":", color=GREY, label="fraction")
    _fractions(ax, x)
    ax.set_yscale("log", base=2)
    ax.set_yticks(x, [f"{f:g}" for f in x])
    ax.set_ylabel("relative to fraction 1")
    ax.legend(frameon=False, fontsize=9)
    return figure


FIGURES: dict[str, Callable[[Study], Figure]] = {
    "loss": loss,
    "frequencies": frequencies,
    "mass": mass,
    "ages": ages,
    "shards": shards,
    "cost": cost,
}
"""File name and function of every figure."""
