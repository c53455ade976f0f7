"""What options say of a step: its length in which metric, and the radius that weights settle at."""

from collections.abc import Mapping, Sequence
from typing import Any

from .events import StepSettings
from .norms import BiasRMS, ColNorm, Norm, RowNorm, RowPower, Sign, Spectral


def make_settings(
    lr: float, decay: float, norm: str | None = None, scale: float | None = None, *, everywhere: bool = True
) -> StepSettings:
    """Settings with the radius that follows from them.

    Args:
        lr: Learning rate.
        decay: λ, where a weight is multiplied by 1 - lr λ.
        norm: Metric in which a step has length lr · scale.
        scale: That length over lr.
        everywhere: Every entry decays in every step.
    """
    known = norm is not None and scale is not None
    radius = scale / decay if known and scale is not None and decay > 0 and everywhere else None
    return StepSettings(lr=lr, decay=decay, norm=norm, scale=scale if known else None, radius=radius)


def scion_settings(options: Mapping[str, Any], norms: Sequence[Norm]) -> StepSettings:
    """Of a group of Scion.

    Both decays together: (1 - lr)(1 - lr wd) = 1 - lr (1 + wd - lr wd).

    Args:
        options: The group.
        norms: Geometry of each of its parameters.
    """
    lr, pull, decay = float(options["lr"]), float(not options["unconstrained"]), float(options["weight_decay"])
    role = options.get("role")
    fits = {metric_of(n, p.ndim, role) for n, p in zip(norms, options["params"], strict=True)}
    norm = fits.pop() if len(fits) == 1 else None
    return make_settings(lr, pull + decay - lr * pull * decay, norm, float(options["scale"]))


def dion2_settings(options: Mapping[str, Any]) -> StepSettings:
    """Of a group of Dion2, where the selected part has singular values 1 before ``adjust_lr``.

    Heads are orthonormal each for itself, which says nothing exact of σ₁ of them together. Dion3 divides rows by
    running means afterwards: the Frobenius norm stays, and σ₁ does where rows have equal lengths (k <= d_in).
    """
    adjust, whole = options["adjust_lr"], options["fraction"] == 1
    heads = options["num_heads"] not in (None, 1)
    norm: str | None = None
    if adjust == "rms_norm":
        norm = "rms" if whole else None  # of fewer rows it is smaller, by how much depends on both sides
    elif not heads:
        flipped = any(transposed(p.ndim, options.get("role")) for p in options["params"])
        norm = "spectral" if adjust is None else None if flipped else "rms_to_rms"
    everywhere = options["decay_on"] == "all" or whole
    scale = 0.2 if adjust == "rms_norm" else 1.0
    return make_settings(float(options["lr"]), float(options["weight_decay"]), norm, scale, everywhere=everywhere)


def metric_of(norm: Norm, ndim: int, role: str | None) -> str | None:
    """Metric in which ``lmo`` has norm 1 for every shape; None where it depends on the shape.

    Args:
        norm: The geometry.
        ndim: Dimensions of the parameter.
        role: Of its group. Without one, a geometry that transposes is taken to be that of an embedding.
    """
    if isinstance(norm, BiasRMS):
        return "rms"
    if isinstance(norm, Sign) and not norm.normalized:
        return "max_abs"
    found = _operator_norm(norm)
    if found is None or ndim < 2 or role == "vector":
        return None
    name, flipped = found
    seen = flipped and ndim == 2 if role is None else transposed(ndim, role)
    return name if seen == flipped else None


def transposed(ndim: int, role: str | None) -> bool:
    """Whether the telemetry takes operator norms of the transpose: of the table ``[vocab, d]`` of an embedding."""
    return role == "embedding" and ndim != 3


def _operator_norm(norm: Norm) -> tuple[str, bool] | None:
    """Operator norm in which ``lmo`` has norm 1, and whether it is that of the transpose."""
    match norm:
        case Spectral(normalized=True, max=False):
            return "rms_to_rms", norm.transpose
        case ColNorm(normalized=False):
            return "l1_to_rms", norm.transpose
        case RowNorm(normalized=True):
            return "rms_to_inf", norm.transpose
        case RowPower(power=-0.5) | Sign(normalized=True):
            return "rms_to_inf", False  # rows of ±1/d_in have length 1/√d_in
        case RowPower(power=0.5):
            return "l1_to_rms", True
        case _:
            return None
