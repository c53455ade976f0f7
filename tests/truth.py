"""What a row should say: every column by float64 brute force on whole tensors, and what the collector says instead."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from scion_telemetry.collect import FLAGS, Collector
from scion_telemetry.describe import Setting
from scion_telemetry.finish import Finisher
from scion_telemetry.metrics.choice import Choice, Metrics, choose
from scion_telemetry.plan import ParamSpec, make_plan
from scion_telemetry.reduce import Buffers
from scion_telemetry.rows import Batch, ParamInfo
from scion_telemetry.sheet import Flush

ROUNDING = 1e-12
"""Relative rounding of the float64 SVD that the interval is held against."""

SIGMA = ("spectral", "spectral_upper", "sigma_ratio", "stable_rank", "rms_to_rms", "coherence")
"""Metrics that an iteration finds: from one side, as close as a test says."""
COSINES = ("grad_cosine", "weight_cosine", "previous_cosine")
"""Differences of sums that may cancel: held to an absolute error."""
OF_OPTIMIZERS = (
    "missing",
    "decay",
    "radius_share",
    "participation_rank",
    "gram_lower",
    "gram_upper",
    "lr",
    "previous_cosine",
    "polar_error",
)
"""Metrics that four tensors do not tell."""


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
    """Every column of the full preset but ``spectral_upper`` and ``OF_OPTIMIZERS``, for the quantities given."""
    values: dict[str, float] = {}
    for quantity, x in quantities.items():
        found = {**_entries(x), **_operator(maps(x, role)), **_stored(x, role)}
        values.update({f"{quantity}_{name}": value for name, value in found.items()})
        if quantity != "weight":
            values.pop(f"{quantity}_coherence", None)
    x = {q: t.detach().double().flatten() for q, t in quantities.items()}
    if {"grad", "momentum"} <= set(x):
        values["momentum_grad_cosine"] = cosine(x["momentum"], x["grad"])
    if {"update", "weight"} <= set(x):
        values["update_weight_cosine"] = cosine(x["update"], x["weight"])
        values["update_weight_ratio"] = ratio(values["update_frobenius"], values["weight_frobenius"])
        if maps(quantities["weight"], role).size(0) and not _is_vector(quantities["weight"], role):
            values["update_row_weight_ratio"] = _row_ratio(quantities["update"], quantities["weight"], role)
    return values


def cosine(a: Tensor, b: Tensor) -> float:
    """<a, b> / (‖a‖ ‖b‖); NaN where one is 0."""
    return ratio(float(a @ b), float(a.norm()) * float(b.norm()))


def ratio(over: float, under: float) -> float:
    """over / under as IEEE has it."""
    if under == 0:
        return math.nan if over == 0 or math.isnan(over) else math.inf
    return over / under


def _is_vector(x: Tensor, role: str) -> bool:
    return role == "vector" or x.ndim < 2


def _entries(x: Tensor) -> dict[str, float]:
    x = x.detach().double()
    return {
        "rms": math.sqrt(float(x.square().mean())),
        "frobenius": math.sqrt(float(x.square().sum())),
        "max_abs": float(x.abs().max()),
        "mean_abs": float(x.abs().mean()),
        "nonfinite": float((~torch.isfinite(x)).sum()),
        "zero_share": float((x == 0).double().mean()),
    }


def _operator(dense: Tensor) -> dict[str, float]:
    d_out, d_in = dense.shape[-2:]
    sigma = float(torch.linalg.matrix_norm(dense, ord=2).max()) if bool(torch.isfinite(dense).all()) else math.nan
    return {
        "spectral": sigma,
        "rms_to_rms": sigma * math.sqrt(d_in / d_out),
        "l1_to_rms": float(dense.norm(dim=-2).max()) / math.sqrt(d_out),
        "rms_to_inf": float(dense.norm(dim=-1).max()) * math.sqrt(d_in),
    }


def _rows(x: Tensor, role: str) -> Tensor:
    """``[B, m, n]`` as stored."""
    x = x.detach().double()
    return x if x.ndim == 3 and role != "conv" else x.flatten(1)[None]


def _stored(x: Tensor, role: str) -> dict[str, float]:
    """What is said of rows as they are stored, and of the rank of single matrices; nothing of vectors."""
    if _is_vector(x, role):
        return {}
    dense = _rows(x, role)
    lengths = dense.norm(dim=-1)
    each = lengths.flatten()
    ordered = each * math.nan if bool(torch.isnan(each).any()) else each.sort().values
    middle = (float(ordered[(len(each) - 1) // 2]) + float(ordered[len(each) // 2])) / 2
    root, finite = math.sqrt(dense.size(-1)), bool(torch.isfinite(dense).all())
    found = {
        "row_rms_max": float(each.max()) / root,
        "row_rms_min": float(each.min()) / root,
        "row_rms_median": middle / root,
        "dead_rows": float((each <= 0.01 * middle).double().mean()) if not math.isnan(middle) else math.nan,
        "row_magnitude": float(each.max()),
    }
    unit = torch.where(lengths.unsqueeze(-1) > 0, dense / lengths.unsqueeze(-1), 0.0)
    found["coherence"] = float(torch.linalg.matrix_norm(unit, ord=2).max()) if finite else math.nan
    if dense.size(0) == 1:
        sigma = torch.linalg.svdvals(dense[0]) if finite else torch.full((2,), math.nan, dtype=torch.float64)
        second = float(sigma[1]) if len(sigma) > 1 else 0.0
        found["sigma_ratio"] = ratio(second, float(sigma[0]))
        found["stable_rank"] = ratio(float(dense.square().sum()), float(sigma[0]) ** 2)
    return found


def _row_ratio(update: Tensor, weight: Tensor, role: str) -> float:
    pairs = zip(
        _rows(update, role).norm(dim=-1).flatten().tolist(),
        _rows(weight, role).norm(dim=-1).flatten().tolist(),
        strict=True,
    )
    shares = [ratio(u, w) for u, w in pairs if u or w]
    return math.nan if any(map(math.isnan, shares)) else max(shares, default=0.0)


def worst(row: Mapping[str, float], truth: Mapping[str, float], *, sigma: float = 0.01) -> float:
    """The largest relative error of the exact columns; asserts that each σ₁ is in its interval, ``sigma`` off at most.

    The row must have exactly the columns of ``truth`` and, beside each σ₁, its upper bound.
    """
    upper = {f"{name}_upper" for name in truth if name.endswith("_spectral")}
    assert set(row) == set(truth) | upper, set(row) ^ (set(truth) | upper)
    errors = [0.0]
    for name, expected in truth.items():
        got = row[name]
        metric = name.partition("_")[2]
        if math.isnan(expected) or math.isinf(expected):
            assert got == expected or (math.isnan(got) and math.isnan(expected)), (name, got, expected)
        elif metric == "spectral":
            # Differences of weights before and after are kept in float32.
            above = 1e-7 if name.startswith("update") else ROUNDING
            assert got <= expected * (1 + above), (name, got, expected)
            assert expected <= row[f"{name}_upper"] * (1 + above), (name, row[f"{name}_upper"], expected)
            assert got >= expected * (1 - sigma), (name, got, expected)
        elif metric in SIGMA:
            low, high = _bounds(metric, expected, sigma)
            assert low <= got <= high, (name, got, expected)
        elif metric in COSINES:
            assert abs(got - expected) <= 1e-6, (name, got, expected)
        else:
            errors.append(abs(got - expected) / abs(expected) if expected else abs(got))
    return max(errors)


def _bounds(metric: str, expected: float, sigma: float) -> tuple[float, float]:
    """Where a number may lie that is made of estimates from below."""
    match metric:
        case "rms_to_rms":
            return expected * (1 - sigma), expected * (1 + 1e-7)
        case "coherence":  # rows are made unit in the dtype of the piece
            return expected * (1 - sigma), expected * (1 + 1e-6)
        case "stable_rank":
            return expected * (1 - 1e-6), expected / (1 - sigma) ** 2
        case _:  # σ₂ is surely there from 1/500 of σ₁ on
            return expected * (1 - 5 * sigma) - 2e-3, expected / (1 - sigma) + 1e-6


# ---------------------------------------------------------------------- what the collector says


def spec(name: str, shape: Sequence[int], role: str = "hidden", **options: object) -> ParamSpec:
    """A parameter of which this process holds all."""
    info = ParamInfo(name=name, role=role, shape=tuple(shape), dtype="", layout="whole", algorithm="none")
    return ParamSpec(info=info, runs=tuple(((0, n),) for n in shape), **options)  # type: ignore[arg-type]


def flushed(
    weights: Mapping[str, Tensor],
    roles: Mapping[str, str],
    metrics: Metrics | Choice,
    *,
    grads: Mapping[str, Tensor] | None = None,
    momenta: Mapping[str, Tensor] | None = None,
    settings: Mapping[str, Setting] | None = None,
) -> Batch:
    """One flush of whole tensors, as the collector and the finishing formulas give it."""
    choice = metrics if isinstance(metrics, Choice) else choose(metrics)
    plan = make_plan([[spec(name, w.shape, roles[name]) for name, w in weights.items()]])
    collector = Collector(plan, weights, rank=0, group=None, step=0)
    buffers = Buffers(collector.schema(choice), collector.device, flags=FLAGS)
    known = {weights[n]: s for n, s in (settings or {}).items()} or dict.fromkeys(weights.values(), Setting(lr=0.1))
    flush = Flush(step=1, choice=choice, buffers=buffers, settings=known)
    for name, grad in (grads or {}).items():
        weights[name].grad = grad
    kept = {weights[name]: momentum for name, momentum in (momenta or {}).items()}
    momentum: Callable[[Tensor], Tensor | None] = kept.get
    collector.measure(momentum, flush, set(weights.values()))
    assert collector.reduce(flush) == (0, 0)
    return Finisher(plan).batch(1, choice, buffers.to_host())


def measured(x: Tensor, role: str = "hidden") -> dict[str, float]:
    """All weight columns of a whole tensor that four tensors tell."""
    full = choose("full")
    columns = [c for c, q, m in full.columns if q == "weight" and m.name not in OF_OPTIMIZERS]
    (row,) = flushed({"w": x}, {"w": role}, columns).layers
    return dict(row.values)
