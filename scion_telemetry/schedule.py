"""When to measure: a schedule is a function from the number of steps taken (1, 2, …) to yes or no."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """True at the steps to measure; ``str`` of it describes it."""

    def __call__(self, step: int) -> bool:
        """Whether to measure step number ``step``, 1 for the first."""


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    rule: Callable[[int], bool]

    def __call__(self, step: int) -> bool:
        return self.rule(step)

    def __str__(self) -> str:
        return self.name


def every(n: int, *, first: bool = True) -> Schedule:
    """Steps n, 2n, 3n, …, and step 1 unless ``first`` is False.

    Raises:
        ValueError: Unless n is a whole number >= 1.
    """
    _require_count(n, "every(n)")
    return _Named(f"every({n})" if first else f"every({n}, first=False)", lambda s: s % n == 0 or (first and s == 1))


def at(*steps: int) -> Schedule:
    """Exactly these steps.

    Raises:
        ValueError: Without steps, or for one that is not a whole number >= 1.
    """
    if not steps:
        raise ValueError("at() needs at least one step, such as at(1, 10, 100)")
    for step in steps:
        _require_count(step, "at(...)")
    chosen = frozenset(steps)
    return _Named(f"at({', '.join(map(str, sorted(chosen)))})", chosen.__contains__)


def log_spaced(per_decade: int = 10) -> Schedule:
    """Steps spread evenly on a logarithmic axis: 1, 2, 3, …, then ``per_decade`` of every factor of ten.

    Raises:
        ValueError: Unless ``per_decade`` is a whole number >= 1.
    """
    _require_count(per_decade, "log_spaced(per_decade)")

    def rule(step: int) -> bool:
        # A step counts when some power of 10^(1/per_decade) rounds to it.
        exponent = round(math.log10(step) * per_decade)
        return any(round(10 ** (e / per_decade)) == step for e in (exponent - 1, exponent, exponent + 1))

    return _Named(f"log_spaced({per_decade})", rule)


def name_of(schedule: Schedule) -> str:
    """What to call a schedule: its ``str``, or its name where that shows an address, which differs between ranks."""
    text = str(schedule)
    return text if " at 0x" not in text else str(getattr(schedule, "__qualname__", type(schedule).__qualname__))


def _require_count(n: object, what: str) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{what} needs whole numbers >= 1, got {n!r}")
