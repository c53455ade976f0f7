"""The panels that figures are made of; each fills one ``Axes`` from one table."""

from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from scion_telemetry import _plot_axes as dress
from scion_telemetry import _plot_labels as label
from scion_telemetry import _plot_lines as draw
from scion_telemetry import words
from scion_telemetry._plot_data import Curve, Table, column_table, curves
from scion_telemetry._plot_selection import missing
from scion_telemetry.store import Run

_TICKS: Final = 60  # names that fit under a panel
_CAPTURED: Final = "captured_mass"
_FLAT: Final = (("flat_mass", "flat rows"), ("fraction", "flat momentum: realised fraction k/n"))


def absent(ax: Axes, column: str, message: str) -> None:
    """A panel without data, titled like the one with data; why is also its label."""
    dress.heading(ax, words.title(column), words.formula(column))
    dress.empty(ax, message)
    ax.set_label(message)
    ax.set_xticks([])


def over_steps(
    ax: Axes,
    table: Table,
    *,
    unit: str = "",
    log: bool | None = None,
    flat: Table | None = None,
    flat_label: str = "",
    remark: str = "",
) -> None:
    """One column over the steps.

    Args:
        ax: The panel.
        table: The column.
        unit: Unit for the y axis.
        log: True for a logarithmic axis, None for what the range asks for.
        flat: A reference on the same axis, drawn dashed.
        flat_label: What the legend calls it.
        remark: A last line below the panel.
    """
    notes = draw.mark_findings(ax, table)
    if not np.isfinite(table.values).any():
        absent(ax, table.column, "no finite data")
        dress.step_axis(ax, notes, table.steps)
        return
    shown = table.values.ravel() if flat is None else np.r_[table.values.ravel(), flat.values.ravel()]
    scale = dress.scale_for(shown, log=log, least_span=0.0 if flat is None else 0.05)
    dress.set_scale(ax, scale)
    many = len(table.names) > draw.SINGLE
    keys = draw.bands(ax, table, scale) if many else draw.single_lines(ax, table, scale)
    if flat is not None:
        keys.append(draw.reference(ax, flat, flat_label))
    notes += draw.mark_zeros(ax, scale, table.steps, table.values)
    how = [words.formula(table.column), "median, 10-90 %, min-max per role" if many else ""]
    dress.heading(ax, words.title(table.column), "  ·  ".join(filter(None, how)), legend=bool(keys))
    dress.legend_row(ax, keys)
    dress.value_axis(ax, words.title(table.column), unit)
    dress.step_axis(ax, [*notes, *filter(None, [remark])], table.steps)


def captured(ax: Axes, run: Run, *, remark: bool = False) -> None:
    """Captured mass over the steps against that of flat rows, or the realised fraction where it is not known."""
    if _CAPTURED not in run.selection.columns or run.selection.empty:
        absent(ax, _CAPTURED, missing(run))
        return
    table = column_table(run, run.selection, _CAPTURED)
    flat, name = None, ""
    for column, label_of in _FLAT:
        if flat is None and column in run.selection.columns and run.selection[column].notna().any():
            flat, name = column_table(run, run.selection, column), label_of
    # Rows that are not selected keep their momentum and grow until they are, which levels the scores.
    text = "error feedback flattens the momentum: a curve near the reference does not mean that fewer rows would do"
    over_steps(ax, table, log=False, flat=flat, flat_label=name, remark=text if remark else "")


def losses(ax: Axes, run: Run) -> None:
    """Every logged scalar whose name holds ``loss``; a dozen at most."""
    names = [str(n) for n in run.scalars.columns if "loss" in str(n).lower()]
    lines = curves(run, names)
    dress.heading(ax, "loss", "as logged, mean over ranks, not smoothed", legend=True)
    if not lines:
        dress.empty(ax, "no loss logged: tracker.log(loss=loss)")
        ax.set_xticks([])
        return
    notes = [f"{len(lines) - draw.LABELLED} more losses not drawn"] if len(lines) > draw.LABELLED else []
    lines = lines[: draw.LABELLED]
    values = np.concatenate([c.values for c in lines])
    if not np.isfinite(values).any():
        dress.empty(ax, "no finite data")
        draw.cross_out(ax, np.unique(np.concatenate([curve.steps for curve in lines])))
        dress.step_axis(ax, notes, run.scalars["step"].to_numpy())
        return
    scale = dress.scale_for(values)
    dress.set_scale(ax, scale)
    ends = [_curve(ax, curve, i, scale, notes) for i, curve in enumerate(lines)]
    label.direct_labels(ax, scale, [end for end in ends if end])
    dress.value_axis(ax, "loss", "")
    dress.step_axis(ax, notes, run.scalars["step"].to_numpy())


def _curve(ax: Axes, curve: Curve, i: int, scale: dress.Scale, notes: list[str]) -> label.End | None:
    """Draw one scalar, add to the notes what its line cannot show, and return where its label goes."""
    colour = dress.PALETTE[i % len(dress.PALETTE)]
    y, finite = scale.place(curve.values), np.isfinite(curve.values)
    marker = "o" if curve.steps.size <= 30 else None  # rare values are points that were measured, not a trend
    draw.line(ax, curve.steps, y, ~finite, color=colour, linewidth=1.5, marker=marker, markersize=3.5)
    notes += [f"{curve.name}: {note}" for note in draw.mark_zeros(ax, scale, curve.steps, curve.values)]
    if not finite.all():
        gone = curve.steps[~finite]
        draw.cross_out(ax, gone)
        notes.append(f"× {curve.name}: no finite value at {gone.size} of its steps, first at step {gone[0]}")
    if not finite.any():
        return None
    return float(curve.steps[finite][-1]), float(y[finite][-1]), curve.name, colour


def by_layer(ax: Axes, table: Table, step: int) -> None:
    """One column at one step, a point per parameter in model order, colour and marker by role."""
    row = int(np.flatnonzero(table.steps == step)[0])
    values, findings = table.values[row], table.findings[row]
    keep = np.flatnonzero(np.isfinite(values) | findings)
    values, findings = values[keep], findings[keep]
    names = [table.names[i] for i in keep]
    roles = np.array([table.roles[i] for i in keep], dtype=object)
    x = np.arange(keep.size)
    scale = dress.scale_for(values, log=True)
    dress.set_scale(ax, scale)
    keys = [draw.role_points(ax, x, scale.place(values), roles == role, role) for role in dict.fromkeys(roles)]
    if np.isfinite(values).any():
        middle = float(np.median(scale.place(values[np.isfinite(values)])))
        ax.axhline(middle, color=dress.GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=0)
        keys.append((Line2D([], [], color=dress.GREY, linestyle=(0, (4, 3))), f"median {middle:.2g}"))
    else:
        dress.empty(ax, "no finite data")
    notes = draw.mark_zeros(ax, scale, x, values)
    if findings.any():
        draw.cross_out(ax, x[findings])
        notes.append(
            f"× {int(findings.sum())} NaN or infinite, first: {label.shorten([names[int(np.argmax(findings))]])[0]}"
        )
    title = words.title(table.column)
    dress.heading(ax, f"{title} at step {step}", words.formula(table.column), legend=bool(keys))
    dress.legend_row(ax, keys)
    dress.value_axis(ax, title, "")
    every = -(-len(names) // _TICKS)
    ax.set_xticks(x[::every], label.shorten(names)[::every], rotation=90, fontsize=8, **dress.PLAIN)
    if every > 1:
        label.name_points(ax, x, scale.place(values), names)
    pad = max(0.7, 0.015 * keep.size)
    ax.set_xlim(-pad, keep.size - 1 + pad)
    where = "parameters in model order" + (f", every {every}th named" if every > 1 else "")
    ax.set_xlabel("\n".join([where, *notes]), fontsize=9, **dress.PLAIN)
