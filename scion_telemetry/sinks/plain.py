"""Facts about a run as plain JSON values, and JSON that every parser takes."""

import json
import math
from collections.abc import Mapping
from typing import Any

from scion_telemetry.rows import RunInfo, Value, text


def plain(value: object) -> Value:
    """``value`` as JSON can hold it; a NaN or an infinity becomes the text ``NaN``, ``inf`` or ``-inf``.

    Numbers of other libraries (numpy scalars, 0-d tensors) become Python numbers, anything else its ``str``.
    """
    if not isinstance(value, str | int | float | bool | None) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else text(float(value))
    if isinstance(value, str | int | None):  # bool is an int
        return value
    return str(value)


def plain_mapping(values: Mapping[str, Any]) -> dict[str, Value]:
    """``plain`` of every value, names as strings, in the given order."""
    return {str(name): plain(value) for name, value in values.items()}


def nonfinite_names(run: RunInfo) -> list[str]:
    """Attributes that are NaN or infinite and hence stand as text: a reader turns exactly these back into numbers."""
    as_text = {name: plain(value) for name, value in run.attributes.items() if not isinstance(value, str)}
    return [name for name, value in as_text.items() if value in ("NaN", "inf", "-inf")]


def strict_json(value: object, *, indent: int | None = None) -> str:
    """JSON without the bare ``NaN`` that browsers and other parsers refuse.

    Raises:
        ValueError: ``value`` holds a NaN or an infinity that ``plain`` has not seen.
    """
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
