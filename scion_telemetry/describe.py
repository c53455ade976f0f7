"""What the tracker reads off a model and an optimizer: names, roles, options, and what the optimizer will show."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from scion_telemetry.optim.events import ObservableOptimizer, ParamFacts, StepSettings
from scion_telemetry.optim.groups import clean_name, infer_roles
from scion_telemetry.optim.layout import Layout, local, on_mesh
from scion_telemetry.plan import ParamSpec
from scion_telemetry.rows import ParamInfo, Value

_NOT_OPTIONS = frozenset({"params", "param_names", "role", "name", "algorithm"})

MOMENTUM_KEYS = ("momentum", "momentum_buffer", "exp_avg")
"""Where optimizers keep their momentum: Dion2, Scion and SGD and Muon, the Adam family."""


def parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The parameters that the optimizers step, by clean name, in model order; tied ones once.

    Raises:
        ValueError: When an optimizer steps a parameter that the model does not have, two optimizers step the same, two
            have the same name without wrapper prefixes, parameters are on several devices, or FSDP1 has sharded them.
    """
    _refuse_fsdp1(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # after a forward without a backward the parameters are not the sharded ones
            module.reshard()
    stepped: set[Tensor] = set()
    for optimizer in optimizers:
        own = {param for group in optimizer.param_groups for param in group["params"]}
        if twice := own & stepped:
            raise ValueError(f"{len(twice)} parameters are stepped by two of the optimizers; each belongs to one")
        stepped |= own
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if param in stepped and found.setdefault(clean_name(name), param) is not param:
            raise ValueError(
                f"{name!r} and another parameter are both called {clean_name(name)!r} without the prefixes that "
                "wrappers add (module, _orig_mod, ...); rename one of them"
            )
    if foreign := stepped - set(found.values()):
        shapes = sorted(str(tuple(param.shape)) for param in foreign)
        raise ValueError(
            f"an optimizer steps {len(foreign)} parameters that the model does not have, of shapes "
            f"{', '.join(shapes[:5])}; pass the model that the optimizer was made for, after sharding or wrapping it"
        )
    devices = {param.device for param in found.values()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise ValueError(
            f"parameters must be on one device and have storage, got {', '.join(sorted(map(str, devices)))}; move the "
            "model to one device (to_empty for meta) before attaching the tracker"
        )
    return found


def _refuse_fsdp1(model: nn.Module) -> None:
    # Its pieces are flat tensors of this rank that do not say where they lie: they would pass for whole vectors.
    for module in model.modules():
        if "_fsdp_wrapped_module" in module._modules:
            strategy = getattr(getattr(module, "sharding_strategy", None), "name", None)
            if strategy != "NO_SHARD":
                raise ValueError(
                    f"the model is sharded by FullyShardedDataParallel (FSDP1, {strategy}), whose pieces cannot be "
                    "measured as parts of a layer; use fully_shard (FSDP2)"
                )


def describe(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], params: Mapping[str, Tensor]
) -> list[ParamSpec]:
    """This rank's parameters, as the other ranks need to know them."""
    roles = infer_roles(model)
    aliases: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(param, []).append(clean_name(name))
    found = {}
    for optimizer in optimizers:
        groups = {param: group for group in optimizer.param_groups for param in group["params"]}
        norms = natural_norms(optimizer, roles)
        for name, own in params.items():
            if own in groups:
                shown = facts(optimizer, own)
                found[name] = _spec(name, own, groups[own], roles[own], aliases[own], shown, norms.get(own))
    return [found[name] for name in params]


def facts(optimizer: torch.optim.Optimizer, param: Tensor) -> ParamFacts:
    """What the optimizer shows of a parameter: nothing, unless it is one of ours."""
    if isinstance(optimizer, ObservableOptimizer):
        return optimizer.facts(param)
    return ParamFacts(algorithm=type(optimizer).__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the optimizer's group says of a parameter's step.

    Args:
        lr: Learning rate.
        decay: λ of the decoupled weight decay.
        scale: Length of a full step over lr in the natural norm of the rule; None where it has none.
        radius: Norm that the weight settles at; None where there is none.
        kept: Factor on every entry of the weight before the update is added; 1 where only some entries decay.
        fraction: Share of slices that is selected; None where nothing is.
        ef_decay: What the selected part of the momentum is multiplied by afterwards.
    """

    lr: float
    decay: float = 0.0
    scale: float | None = None
    radius: float | None = None
    kept: float = 1.0
    fraction: float | None = None
    ef_decay: float | None = None


def settings(optimizer: torch.optim.Optimizer, roles: Mapping[Tensor, str]) -> dict[Tensor, Setting]:
    """Learning rate, decoupled weight decay and radius of every parameter with its role, as they are now.

    Decay is known of our own optimizers, of torch's Adam family where its groups say that it is decoupled, and of
    ``torch.optim.Muon``. With others a decay counts as part of the update.
    """
    found: dict[Tensor, Setting] = {}
    for group in optimizer.param_groups:
        if not isinstance(optimizer, ObservableOptimizer):
            decoupled = group.get("decoupled_weight_decay", False) or isinstance(optimizer, torch.optim.Muon)
            decay, lr = float(group.get("weight_decay", 0.0)) if decoupled else 0.0, float(group.get("lr", math.nan))
            found.update(dict.fromkeys(group["params"], Setting(lr=lr, decay=decay, kept=1 - lr * decay)))
            continue
        together = optimizer.settings(group)
        kept = 1.0 if group.get("cautious_wd", False) else 1 - together.lr * together.decay
        for param in group["params"]:
            # Parameters of several roles have no norm together, but each has its own.
            own = _settings(optimizer, group, param, roles) if together.scale is None else together
            found[param] = Setting(
                lr=own.lr,
                decay=own.decay,
                scale=own.scale,
                radius=own.radius,
                kept=kept,
                fraction=group.get("fraction"),
                ef_decay=group.get("ef_decay", group.get("mu")),
            )
    return found


def natural_norms(optimizer: torch.optim.Optimizer, roles: Mapping[Tensor, str]) -> dict[Tensor, str | None]:
    """The metric in which the rule of every parameter measures a step; None where no single one fits."""
    if not isinstance(optimizer, ObservableOptimizer):
        return {}
    return {p: _settings(optimizer, g, p, roles).norm for g in optimizer.param_groups for p in g["params"]}


def _settings(
    optimizer: ObservableOptimizer, group: Mapping[str, Any], param: Tensor, roles: Mapping[Tensor, str]
) -> StepSettings:
    return optimizer.settings({**group, "params": [param], "role": group.get("role", roles.get(param))})


def find_momentum(state: Mapping[str, Any], param: Tensor) -> Tensor | None:
    """The momentum in an optimizer's state of one parameter, None where it keeps none."""
    for key in MOMENTUM_KEYS:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == param.shape:
            return piece_like(value, param)
    return None


def piece_like(value: Tensor, param: Tensor) -> Tensor:
    """This rank's piece of a gradient or momentum, cut as its parameter is.

    Communicates only where the value lies otherwise: tensor parallelism leaves gradients that are not added up yet.
    """
    if value.layout != torch.strided:
        value = value.to_dense()
    if isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements != param.placements:
        value = value.redistribute(param.device_mesh, param.placements)
    return local(value).detach()


def _spec(
    name: str,
    param: Tensor,
    group: Mapping[str, Any],
    role: str,
    names: Sequence[str],
    shown: ParamFacts,
    norm: str | None,
) -> ParamSpec:
    try:
        if param.layout != torch.strided or not param.dtype.is_floating_point or param.dtype.itemsize < 2:
            raise ValueError(
                f"dtype {param.dtype} and layout {param.layout} are not measured; only dense tensors of 16 to 64 bit "
                "floating-point numbers are"
            )
        layout = Layout.of(param)
    except ValueError as error:
        raise ValueError(f"parameter {name!r}: {error}") from error
    role = group.get("role", role)
    if role in ("vector", "conv") and shown.select_dim is not None:  # selected from, so stepped as a matrix or a stack
        role = "expert" if param.ndim == 3 else "hidden"
    info = ParamInfo(
        name=name,
        aliases=tuple(n for n in names if n != name),
        role="head" if role == "tied" else role,
        shape=tuple(param.shape),
        dtype=str(param.dtype).removeprefix("torch."),
        layout=layout.describe(),
        algorithm=shown.algorithm,
        options={key: _plain(value) for key, value in group.items() if _is_option(key, shown)},
    )
    return ParamSpec(
        info=info,
        # A rank that the mesh leaves out has the parameter and no piece of it.
        runs=tuple(layout.runs(d) if on_mesh(param) else () for d in range(param.ndim)),
        select_dim=shown.select_dim,
        shows_update=shown.shows_update,
        owner_shows=shown.owner_shows,
        heads=shown.heads,
        norm=norm,
        shared=shown.shared,
        shows_gram=shown.shows_gram,
        digest=_digest(local(param.detach())) if dist.is_available() and dist.is_initialized() else 0,
    )


def _digest(piece: Tensor) -> int:
    """Sum of the bits, as whole numbers: the same on every device, in whatever order they are added."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[piece.element_size()]
    return int(piece.view(bits).sum(dtype=torch.int64))


def _is_option(key: str, shown: ParamFacts) -> bool:
    return key in shown.options if shown.options else key not in _NOT_OPTIONS


def _plain(value: Any) -> Value:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return json.dumps(value, default=_called) if isinstance(value, Mapping | list | tuple) else _called(value)


def _called(value: Any) -> str:
    return str(getattr(value, "__name__", repr(value)))
