"""What a flush costs this rank: numbers of the tracker about itself."""

import time
from dataclasses import dataclass

from scion_telemetry.rows import Scalar

OWN = ("telemetry_ms", "telemetry_bytes", "telemetry_collectives", "telemetry_rows", "steps_per_second")
"""Scalars that the tracker writes itself, beside totals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushStats:
    """What one flush cost this rank.

    Args:
        step: Its step.
        collectives: Collectives of this flush.
        bytes: Bytes that they were given on this rank; 0 on one process.
        numbers: Numbers in the buffers that are merged, 8 bytes each; the rest are products for singular values.
        milliseconds: Time that this rank's training thread spent in the tracker since the flush before. On an
            accelerator that is the time to queue the work.
    """

    step: int
    collectives: int
    bytes: int
    numbers: int
    milliseconds: float = 0.0


def cost_scalars(stats: FlushStats, steps: int, seconds: float | None) -> list[Scalar]:
    """What the flush cost, and how fast the steps since the one before were."""
    found = {
        "telemetry_ms": stats.milliseconds,
        "telemetry_bytes": float(stats.bytes),
        "telemetry_collectives": float(stats.collectives),
    }
    if steps and seconds:
        found["steps_per_second"] = steps / seconds
    return [Scalar(step=stats.step, name=name, value=value) for name, value in found.items()]


class Clock:
    """Time spent inside, and time between flushes."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._depth = 0
        self._entered = 0.0
        self._lap: float | None = None

    def __enter__(self) -> None:
        if self._depth == 0:
            self._entered = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent += time.perf_counter() - self._entered

    def lap(self) -> tuple[float, float | None]:
        """Seconds inside since the lap before, and seconds altogether (None at the first)."""
        now = time.perf_counter()
        spent, self._spent, self._entered = self._spent + now - self._entered, 0.0, now
        between = None if self._lap is None else now - self._lap
        self._lap = now
        return spent, between
