"""Training dynamics of spectral optimizers: exact under any sharding, nearly free.

    from scion_telemetry import Tracker, every, load_run

Names are loaded on first use, so that reading a run needs neither torch nor wandb.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scion_telemetry.metrics.declare import custom
    from scion_telemetry.schedule import Schedule, at, every, log_spaced
    from scion_telemetry.store import Run, Runs, load_run, load_runs
    from scion_telemetry.tracker import Tracker

_HOME = {
    "Run": "store",
    "Runs": "store",
    "Schedule": "schedule",
    "Tracker": "tracker",
    "at": "schedule",
    "custom": "metrics.declare",
    "every": "schedule",
    "load_run": "store",
    "load_runs": "store",
    "log_spaced": "schedule",
}

__all__ = ["Run", "Runs", "Schedule", "Tracker", "at", "custom", "every", "load_run", "load_runs", "log_spaced"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
