"""Scalars that a tracker writes of itself, and what a test about the user's own sees without them."""

from collections.abc import Iterable

from scion_telemetry.rows import Scalar

COST = ("telemetry_ms", "telemetry_bytes", "telemetry_collectives", "telemetry_rows", "steps_per_second")
"""What a flush cost, and how fast training goes."""


def is_total(name: str) -> bool:
    """``weight_rms/total``, ``weight_rms/total.hidden``."""
    return name.partition("/")[2].partition(".")[0] == "total"


def users(scalars: Iterable[Scalar]) -> list[Scalar]:
    """Those that the user logged."""
    return [s for s in scalars if s.name not in COST and not is_total(s.name)]
