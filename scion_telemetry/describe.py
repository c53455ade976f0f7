"""What the tracker reads off a model and an optimizer: names, roles, options, and what the optimizer will show."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scion_telemetry.optim.events import ObservableOptimizer, ParamFacts
from scion_telemetry.optim.groups import clean_name, infer_roles
from scion_telemetry.optim.layout import Layout, local
from scion_telemetry.plan import ParamSpec
from scion_telemetry.rows import ParamInfo, Value

_NOT_OPTIONS = frozenset({"params", "param_names", "role", "name", "algorithm"})

MOMENTUM_KEYS = ("momentum", "momentum_buffer", "exp_avg")
"""Where optimizers keep their momentum: Dion2, Scion and SGD and Muon, the Adam family."""


def parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The parameters that the optimizer steps, by clean name, in model order; tied ones once.

    Raises:
        ValueError: When the optimizer steps a parameter that the model does not have, two have the same name without
            wrapper prefixes, parameters are on several devices, or FSDP1 has sharded them.
    """
    _refuse_fsdp1(model)
    stepped = {param for group in optimizer.param_groups for param in group["params"]}
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
            f"the optimizer steps {len(foreign)} parameters that the model does not have, of shapes "
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


def describe(model: nn.Module, optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> list[ParamSpec]:
    """This rank's parameters, as the other ranks need to know them."""
    roles = infer_roles(model)
    aliases: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(param, []).append(clean_name(name))
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    return [
        _spec(name, param, groups[param], roles[param], aliases[param], facts(optimizer, param))
        for name, param in params.items()
    ]


def facts(optimizer: torch.optim.Optimizer, param: Tensor) -> ParamFacts:
    """What the optimizer shows of a parameter: nothing, unless it is one of ours."""
    if isinstance(optimizer, ObservableOptimizer):
        return optimizer.facts(param)
    return ParamFacts(algorithm=type(optimizer).__name__)


def decoupled_decay(optimizer: torch.optim.Optimizer) -> dict[Tensor, float]:
    """lr · weight decay of every parameter whose decay is decoupled from its update.

    Known are the AdamW and Lion groups of our own optimizers, torch's Adam family where its groups say so, and
    ``torch.optim.Muon``. For others a decay counts as part of the update.
    """
    decay: dict[Tensor, float] = {}
    for group in optimizer.param_groups:
        own = (
            isinstance(optimizer, ObservableOptimizer)
            and "weight_decay" in group
            and not group.get("cautious_wd", False)
        )
        decoupled = own or group.get("decoupled_weight_decay", False) or isinstance(optimizer, torch.optim.Muon)
        factor = float(group["lr"]) * float(group["weight_decay"]) if decoupled else 0.0
        decay.update(dict.fromkeys(group["params"], factor))
    return decay


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
    value = value.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    if isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements != param.placements:
        value = value.redistribute(param.device_mesh, param.placements)
    return local(value)


def _spec(
    name: str, param: Tensor, group: Mapping[str, Any], role: str, names: Sequence[str], shown: ParamFacts
) -> ParamSpec:
    try:
        if param.is_complex() or param.layout != torch.strided:
            raise ValueError(
                f"dtype {param.dtype} and layout {param.layout} are not measured; only dense real tensors are"
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
        runs=tuple(layout.runs(d) for d in range(param.ndim)),
        select_dim=shown.select_dim,
        shows_update=shown.shows_update,
        owner_shows=shown.owner_shows,
        heads=shown.heads,
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
