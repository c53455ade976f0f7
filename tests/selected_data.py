"""Selections made by hand, for the formulas that finish them."""

import math

import numpy as np
from torch import Tensor

from scion_telemetry.metrics.selection import Selected


def selected(scores: Tensor, flags: Tensor, *, ages: Tensor | None = None, **fields: object) -> Selected:
    """One parameter ``[B, n]`` with the flagged slices selected; what is not given is not known.

    Fields ``before``, ``counts`` and ``gradient`` are tensors ``[B, n]``; others are numbers.
    """
    known: dict[str, object] = {"window": 1, "length": 1, "shards": (), "energy": None, "travels": 0.0}
    known |= dict.fromkeys(("fraction", "ef_decay", "kept"), math.nan)
    known |= {"before": flags & False, "counts": flags.long(), **fields}
    for name, value in known.items():
        if name in ("before", "counts", "gradient"):
            array = value.numpy()[None]  # type: ignore[attr-defined]
            known[name] = array.astype(float) if name == "gradient" else array
        elif value is not None and name not in ("length", "shards"):
            known[name] = np.array([value], dtype=float)
    return Selected(
        scores=scores.double().numpy()[None],
        selected=flags.numpy()[None],
        ages=((~flags).long() if ages is None else ages).numpy()[None],
        **known,  # type: ignore[arg-type]
    )


def stacked(alone: list[Selected]) -> Selected:
    """Several parameters of one shape together."""
    first = alone[0]
    arrays = ("scores", "selected", "before", "ages", "counts", "window", "fraction", "ef_decay", "kept", "travels")
    joined = {name: np.concatenate([getattr(s, name) for s in alone]) for name in arrays}
    maybe = {
        name: None if getattr(first, name) is None else np.concatenate([getattr(s, name) for s in alone])
        for name in ("gradient", "energy")
    }
    return Selected(**joined, **maybe, length=first.length, shards=first.shards)
