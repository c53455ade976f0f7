"""Where rows go: one module a destination. Importing this package imports no vendor.

    from scion_telemetry.sinks import ConsoleSink, CsvSink, MemorySink, WandbSink

A sink of your own needs the three methods of ``scion_telemetry.rows.Sink`` and nothing from here.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .console import ConsoleSink
    from .csv import CsvSink
    from .memory import MemorySink
    from .wandb import WandbSink

__all__ = ["ConsoleSink", "CsvSink", "MemorySink", "WandbSink"]

_HOMES = MappingProxyType({"ConsoleSink": "console", "CsvSink": "csv", "MemorySink": "memory", "WandbSink": "wandb"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
