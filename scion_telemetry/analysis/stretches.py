"""Steps at one fraction, in the selection table of a run."""

from dataclasses import dataclass

import pandas as pd

FEWEST_STEPS = 200
"""Steps at one fraction below which nothing is advised."""

FEWEST_ROWS = 5
"""Flushes in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Rows of one parameter in consecutive flushes at one realised fraction.

    Args:
        rows: Their part of the selection table, ascending in step.
        begin: Step after which it begins: that of the flush before, or of the tracker's start.
        end: Step of its last flush.
    """

    rows: pd.DataFrame
    begin: int
    end: int

    @property
    def fraction(self) -> float:
        """Realised k / n."""
        return float(self.rows["fraction"].iloc[0])

    @property
    def steps(self) -> int:
        """Length in steps, exact where the fraction changed at a flush."""
        return self.end - self.begin


def stretches(rows: pd.DataFrame, start: int) -> list[Stretch]:
    """Cut the selection rows of one parameter where its realised fraction changes.

    Args:
        rows: Of one parameter.
        start: Step at which the tracker attached.
    """
    rows = rows[rows["fraction"].notna()].sort_values("step")
    number = (rows["fraction"].diff().abs() > 1e-9).cumsum()
    found: list[Stretch] = []
    for _, part in rows.groupby(number, sort=True):
        found.append(Stretch(rows=part, begin=found[-1].end if found else start, end=int(part["step"].iloc[-1])))
    return found


def longest_last(parts: list[Stretch]) -> Stretch:
    """The last stretch that is long enough, or the longest where none is."""
    enough = [part for part in parts if part.steps >= FEWEST_STEPS and len(part.rows) >= FEWEST_ROWS]
    return enough[-1] if enough else max(parts, key=lambda part: part.steps)
