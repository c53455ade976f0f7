"""What a row should say: every column by float64 brute force on whole tensors, and what the collector says instead."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from scion_telemetry.collect import Collector
from scion_telemetry.metrics.catalogue import choose
from scion_telemetry.plan import ParamSpec, make_plan
from scion_telemetry.reduce import Buffers
from scion_telemetry.rows import ParamInfo
from scion_telemetry.scalars import Window
from scion_telemetry.tracker import make_batch

ROUNDING = 1e-12
"""Relative rounding of the float64 SVD that the interval is held against."""


def maps(x: Tensor, role: str) -> Tensor:
    """The dense maps ``[B, d_out, d_in]`` that a parameter is."""
    x = x.detach().double()
    if role == "vector" or x.ndim < 2:
        return torch.diag(x.flatten())[None]
    if x.ndim == 3 and role != "conv":
        return x
    flat = x.flatten(1)[None]
    return flat.mT if role == "embedding" else flat


def layer_values(quantities: Mapping[str, Tensor], role: str) -> dict[str, float]:
    """Every column of the full preset but ``spectral_upper``, for the quantities given."""
    values: dict[str, float] = {}
    for quantity, x in quantities.items():
        x, dense = x.detach().double(), maps(x, role)
        d_out, d_in = dense.shape[-2:]
        sigma = float(torch.linalg.matrix_norm(dense, ord=2).max()) if bool(torch.isfinite(dense).all()) else math.nan
        found = {
            "rms": math.sqrt(float(x.square().mean())),
            "frobenius": math.sqrt(float(x.square().sum())),
            "max_abs": float(x.abs().max()),
            "nonfinite": float((~torch.isfinite(x)).sum()),
            "spectral": sigma,
            "rms_to_rms": sigma * math.sqrt(d_in / d_out),
            "l1_to_rms": float(dense.norm(dim=-2).max()) / math.sqrt(d_out),
            "rms_to_inf": float(dense.norm(dim=-1).max()) * math.sqrt(d_in),
        }
        values.update({f"{quantity}_{name}": value for name, value in found.items()})
    if "update" in quantities:
        over, under = values["update_frobenius"], values["weight_frobenius"]
        values["update_weight_ratio"] = over / under if under else math.nan if over == 0 else math.inf
    return values


def worst(row: Mapping[str, float], truth: Mapping[str, float], *, sigma: float = 0.01) -> float:
    """The largest relative error of the exact columns; asserts that each σ₁ is in its interval, ``sigma`` off at most.

    The row must have exactly the columns of ``truth`` and, beside each σ₁, its upper bound.
    """
    upper = {f"{name}_upper" for name in truth if name.endswith("_spectral")}
    assert set(row) == set(truth) | upper, set(row) ^ (set(truth) | upper)
    errors = [0.0]
    for name, expected in truth.items():
        got = row[name]
        if math.isnan(expected) or math.isinf(expected):
            assert got == expected or (math.isnan(got) and math.isnan(expected)), (name, got, expected)
        elif name.endswith("_spectral"):
            assert got <= expected * (1 + ROUNDING) <= row[f"{name}_upper"] * (1 + 2 * ROUNDING), (name, got, expected)
            assert got >= expected * (1 - sigma), (name, got, expected)
        elif name.endswith("_rms_to_rms"):
            assert expected * (1 - sigma) <= got <= expected * (1 + ROUNDING), (name, got, expected)
        else:
            errors.append(abs(got - expected) / abs(expected) if expected else abs(got))
    return max(errors)


def measured(x: Tensor, role: str = "hidden") -> dict[str, float]:
    """All weight columns of a whole tensor, as the collector and the finishing formulas give them."""
    info = ParamInfo(name="w", role=role, shape=tuple(x.shape), dtype="", layout="whole", algorithm="none")
    plan = make_plan([[ParamSpec(info=info, runs=tuple(((0, n),) for n in x.shape))]])
    choice = choose([c for c, q, _ in choose("full").columns if q == "weight"])
    collector = Collector(plan, choice, {"w": x}, rank=0, group=None, step=0)
    window = Window(names=(), first=0, end=0)
    buffers = Buffers(collector.schema, x.device, extra=window.size)
    collector.measure({}, {}, buffers)
    collector.reduce(buffers)
    (row,) = make_batch(1, plan, choice, buffers.to_host(), window).layers
    return dict(row.values)
