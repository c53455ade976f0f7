"""Evidence on one matrix that no run gave."""

from typing import Any

import numpy as np

from scion_telemetry.analysis import Evidence, Limits, advise_matrix, theory


def evidence(**changes: Any) -> Evidence:
    """Rows that grow alike, on one rank, and half of the mass in a sixteenth of them: it breaks no limit anywhere."""
    facts: dict[str, Any] = {
        "param": "w",
        "role": "hidden",
        "shape": (64, 256),
        "matrices": 1,
        "n": 64,
        "width": 256,
        "shards": 1,
        "scope": "local",
        "fraction": 0.25,
        "steps": 1000,
        "total_steps": 100_000,
        "ef_decay": 0.95,
        "lr": 0.02,
        "weight_decay": 0.01,
        "decays_selected": False,
        "source": "slices",
        "rates": np.ones((1, 64)),
        "late": 0,
        "never": 0.0,
        "age_p99": 3.0,
        "regret": None,
        "regret_at": {},
        "mass_source": "calibration",
    }
    return Evidence(**{**facts, "mass": {f: f**0.25 for f in FRACTIONS}, **changes})


FRACTIONS = (0.0625, 0.125, 0.25, 0.5, 0.75)
FLAT = {f: theory.flat_mass(f, 256) for f in FRACTIONS}
"""Captured mass of rows of noise."""


def one(limits: Limits | None = None, **changes: Any) -> Any:
    return advise_matrix(evidence(**changes), limits or Limits())
