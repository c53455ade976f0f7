"""Options of parameter groups: what is allowed, and the message when it is not."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from .orthogonalize import Orthogonalizer

Check = tuple[Callable[[Any], bool], str]
"""A predicate, and the text of what it allows."""

NOT_NEGATIVE: Check = (lambda v: _finite(v) and v >= 0, "a number >= 0")
POSITIVE: Check = (lambda v: _finite(v) and v > 0, "a number > 0")
UNIT_INTERVAL: Check = (lambda v: _finite(v) and 0 < v <= 1, "in (0, 1]")
BETAS: Check = (lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers in [0, 1)")
FLAG: Check = (lambda v: isinstance(v, bool), "True or False")


def _finite(value: Any) -> bool:
    # True would pass for 1, and a tensor is a number too (a compiled step takes its lr as one).
    return not isinstance(value, str | bool) and math.isfinite(value)


def one_of(*choices: object) -> Check:
    """One of some values."""
    return (lambda v: any(v == c and type(v) is type(c) for c in choices), " or ".join(map(repr, choices)))


def check_options(options: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Refuse option values that are out of range (ValueError): what, got what, allowed what."""
    for option, (allowed, text) in checks.items():
        value = options[option]
        try:
            good = allowed(value)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ValueError(f"{option} must be {text}, got {value!r}")


def plain(value: Any) -> Any:
    """An option as checkpoints and tables can hold it: an orthogonaliser as its text, a dict as a copy.

    A function has no such form and stays.
    """
    if isinstance(value, Orthogonalizer):
        return value.text
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


def without_functions(value: Any) -> Any:
    """An option with the names of functions in their places."""
    if callable(value):
        return f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"
    return {key: without_functions(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value
