"""The selected fraction as something that may change during training."""

from typing import Any

from torch.optim import Optimizer

from .options import UNIT_INTERVAL

_SELECTING = frozenset({"dion2"})
"""Dion3 is a variant of this rule and goes by its name in groups."""


def set_fraction(optimizer: Optimizer, fraction: float) -> None:
    """Let every group that selects (Dion2, Dion3) select this share of rows or columns from its next step on.

    The top-k is by L1 norm of the momentum's rows (or columns). Momentum stays; fraction 1 selects everything.

    Args:
        optimizer: A ``Dion2`` or ``Dion3``.
        fraction: Share in (0, 1].

    Raises:
        ValueError: The fraction is out of range, or no group of the optimizer selects.
    """
    allowed, text = UNIT_INTERVAL
    if not isinstance(fraction, int | float) or not allowed(fraction):
        raise ValueError(f"fraction must be {text}, got {fraction!r}")
    # Every group has a fraction, as torch fills in all defaults; of the others it means nothing.
    groups: list[dict[str, Any]] = [group for group in optimizer.param_groups if group.get("algorithm") in _SELECTING]
    if not groups:
        raise ValueError(
            f"no parameter group of {type(optimizer).__name__} selects: expected a Dion2 or Dion3 with a group of "
            f"algorithm {' or '.join(map(repr, sorted(_SELECTING)))}"
        )
    for group in groups:
        group["fraction"] = float(fraction)
