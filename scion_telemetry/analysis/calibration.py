"""How to get a calibration window: steps at fraction 1, where rows decay alike and momentum shows their true mass."""

from .stretches import FEWEST_STEPS


def calibration_snippet(fraction: float = 0.25, *, warm_up: int = 200, steps: int = FEWEST_STEPS) -> str:
    """Lines to paste over the head of a training loop: a window at fraction 1 in the same run.

    They use ``optimizer``, ``total_steps`` and ``train_step()``, which stand for the user's own.

    Args:
        fraction: What is trained at before and after.
        warm_up: Steps before the window; the learning rate should have reached its peak.
        steps: Length of the window.

    Raises:
        ValueError: The window is too short, ``warm_up`` negative, or the fraction out of range.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be in (0, 1), got {fraction!r}: at 1 the whole run is a calibration")
    if steps < FEWEST_STEPS:
        raise ValueError(f"steps must be >= {FEWEST_STEPS}, got {steps!r}: momentum has to forget what was before")
    if warm_up < 0:
        raise ValueError(f"warm_up must be >= 0, got {warm_up!r}")
    return (
        "from scion_telemetry.optim import set_fraction\n"
        "\n"
        "for step in range(total_steps):\n"
        f"    set_fraction(optimizer, 1.0 if {warm_up} <= step < {warm_up + steps} else {fraction:g})\n"
        "    train_step()  # forward, backward, optimizer.step(), as before\n"
    )
