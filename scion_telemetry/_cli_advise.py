"""Advice on the fraction for the terminal: tables by role and of the matrices that hold a role back."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape, render
from rich.table import Table

from scion_telemetry.analysis import Advice, Candidate, Evidence, GroupAdvice, Limits, MatrixAdvice
from scion_telemetry.analysis.records import FLOPS, STATE

_SHOWN = 10
"""Matrices in the table of those that need most."""

_NAME_WIDTH = 20
"""Narrowest column of names; longer ones are folded."""

LIMITS = {
    "age": "p99 age",
    "overdue": "overdue rows",
    "mass": "captured mass",
    "regret": "local regret",
    "horizon": "horizon",
    "flat": "mass says nothing",
    "unmeasured": "mass unknown",
    "saving": "no FLOPs saved",
    "none": "smallest tried",
}
"""Limits as they are printed."""

_CALIBRATE = """\
# A calibration window: momentum at a fraction below 1 always looks flat, because error feedback lets rows that are not
# selected grow until they are. At fraction 1 all rows decay alike, and their L1 norms show how the mass really lies.
# {steps} steps at fraction 1, once the learning rate has reached its peak, are enough; the Tracker goes on, and
# `scion-telemetry advise RUN` finds the window by itself. Its metrics have to include "selection", as "basic" does.
#
# Put this over the head of your training loop ({where}):
"""


def calibration_text(snippet: str, warm_up: int, steps: int) -> str:
    """The snippet with what it is for, as a comment above it: the whole is Python."""
    where = f"the window is steps {warm_up + 1} to {warm_up + steps} as the Tracker counts them, from 1"
    return _CALIBRATE.format(steps=steps, where=where) + snippet


def print_advice(console: Console, advice: Advice) -> None:
    """All of it: by role, what to change, per candidate, the matrices that need most, and the caveat."""
    tables = [_groups(advice), *(_candidates(advice, group) for group in advice.groups), _matrices(advice)]
    # A terminal that is too narrow breaks the lines; rich would cut the numbers.
    console.width = max(console.width, *map(_width, tables))
    _say(console, [_training(advice)])
    console.print(tables[0])
    _say(console, [f"{group.role}: {change}" for group in advice.groups for change in group.changes])
    for table in tables[1:]:
        console.print(table)
    _say(console, _lines(advice))


def _say(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _training(advice: Advice) -> str:
    """Of when it is, and of how long a training where that matters."""
    given = advice.total_steps_from == "given"
    below = f"fractions below {1 - advice.limits.mu:.3g}, where no ef_decay keeps the horizon"
    if advice.length_matters:
        whose = "as told" if given else "this run's; --total-steps tells another"
        return f"For a training of {advice.total_steps} steps ({whose}), which may bar {below}; {STATE}."
    moved = {"--total-steps": given, "--horizon-share": advice.limits.horizon_share != Limits().horizon_share}
    idle = " and ".join(option for option, is_moved in moved.items() if is_moved)
    note = f" Without effect here: {idle}. The length only counts for {below}; none was tried." if idle else ""
    return f"{STATE[0].upper()}{STATE[1:]}.{note}"


def _width(table: Table) -> int:
    """What its numbers need; names, which fold, take at least ``_NAME_WIDTH``."""
    widths = (
        (column.overflow == "fold", max(cell_len(render(str(cell)).plain) for cell in (column.header, *column.cells)))
        for column in table.columns
    )
    return sum(2 + (min(width, _NAME_WIDTH) if folds else width) for folds, width in widths)


def _table(title: str, caption: str = "") -> Table:
    return Table(
        title=title,
        caption=caption or None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _groups(advice: Advice) -> Table:
    table = _table("Which fraction (rows are ranked by L1 norm)", "against less: what stops the next smaller fraction")
    for name in ("role", "matrices", "now", "advised", "scope", "against less", "worst matrix", "x limit"):
        if name == "worst matrix":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="left" if name == "role" else "right", no_wrap=True)
    for group in advice.groups:
        low, high = group.current
        table.add_row(
            group.role,
            str(group.matrices),
            f"{low:.3g}" if high - low < 5e-4 else f"{low:.3g}-{high:.3g}",
            f"[bold]{group.fraction:g}[/]",
            group.scope,
            LIMITS[group.binding],
            escape(group.worst),
            _number(group.worst_value),
        )
    return table


def _candidates(advice: Advice, group: GroupAdvice) -> Table:
    limits = advice.limits
    steps = "" if limits.max_age is None else f" and {limits.max_age:g} steps"
    caption = (
        "accept: share of the parameters; age and overdue rows: median and worst matrix, how many rows wait and how "
        f"long, not which; limit: {limits.age_horizons:g} horizons{steps}; overdue: rows rarer than once in it; drift, "
        f"regret, horizon: worst; mass, NS FLOPs: median; drift above {limits.drift:g} (!) only warns; ef': ef_decay "
        "to set with the fraction (other columns are for the run's own; ages shrink about as the horizon does); NS "
        f"FLOPs: {FLOPS}"
    )
    table = _table(f"{escape(group.role)}: predicted at every fraction", caption)
    numbers = ("p99 age", "limit", "overdue", "drift", "mass", "regret", "horizon", "ef'")
    names = ("fraction", "accept", *numbers, "NS FLOPs", "MB/step")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    matrices = [m for m in advice.matrices if m.evidence.role == group.role]
    for i, candidate in enumerate(matrices[0].candidates):
        cells = _candidate_cells([m.candidates[i] for m in matrices])
        flops = float(np.median([m.candidates[i].flops for m in matrices]))
        moved = sum(m.candidates[i].bytes for m in matrices) / 1e6
        style = "bold" if candidate.fraction == group.fraction else None
        accept = f"{group.accepted[candidate.fraction]:.0%}"
        table.add_row(f"{candidate.fraction:g}", accept, *cells, _number(flops), _number(moved), style=style)
    return table


def _candidate_cells(column: Sequence[Candidate]) -> list[str]:
    ages, overdue = [c.age_p99 for c in column], [c.overdue for c in column]
    masses, regrets = [c.mass for c in column if c.mass is not None], [c.regret for c in column if c.regret is not None]
    return [
        f"{np.median(ages):.0f} / {max(ages):.0f}",
        f"{np.median([c.age_limit for c in column]):.0f}",
        f"{np.median(overdue):.1%} / {max(overdue):.1%}",
        _number(max(c.drift for c in column)) + ("!" if any(c.warned for c in column) else ""),
        _number(float(np.median(masses))) if masses else "",
        _number(max(regrets)) if regrets else "",
        f"{max(c.horizon for c in column):.0f}",
        f"{min(c.ef_decay for c in column):.3g}",
    ]


def _matrices(advice: Advice) -> Table:
    ordered = sorted(advice.matrices, key=_need, reverse=True)
    table = _table(
        "Matrices that need most",
        "age: 99th percentile, measured at the end of this run and predicted, settled, at what the matrix needs",
    )
    table.add_column("parameter", overflow="fold")
    for name in ("n", "needs", "against less", "age now", "then", "never selected"):
        table.add_column(name, justify="right", no_wrap=True)
    held = [matrix for matrix in ordered if matrix.binding != "none"]
    for matrix in (held or ordered[:1])[:_SHOWN]:
        found, chosen = matrix.evidence, matrix.chosen
        table.add_row(
            escape(found.param),
            str(found.n),
            f"{matrix.fraction:g}",
            LIMITS[matrix.binding],
            "" if found.age_p99 is None else f"{found.age_p99:.0f}",
            f"{chosen.age_p99:.0f}",
            _never(found),
        )
    return table


def _never(found: Evidence) -> str:
    """A share of rows, which of frequency curves is a bound."""
    if found.never != found.never:
        return "not known"
    return f"{'<= ' if found.source == 'curve' and found.never > 0 else ''}{found.never:.1%}"


def _need(matrix: MatrixAdvice) -> tuple[float, float]:
    """Larger for a matrix that needs a larger fraction, or is further from the next smaller one."""
    smaller = [c for c in matrix.candidates if c.fraction < matrix.fraction]
    return matrix.fraction, max(smaller[0].failed.values(), default=0.0) if smaller else 0.0


def _lines(advice: Advice) -> Iterator[str]:
    for note in advice.notes:
        yield f"note: {note}"
    yield f"\n{advice.caveat}"
    seeds = ", ".join(f"{gap:g}: {count}" for gap, count in advice.seeds.items())
    yield f"Seeds per arm by the gap to be seen: {seeds}."
    yield "The limits are proposals, to be set by your own runs; what has been published of fractions is .25 and .5."


def _number(value: float) -> str:
    return "" if value != value else f"{value:.3g}" if value >= 0.01 else f"{value:.2g}"
