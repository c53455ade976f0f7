"""Model to parameter groups by role, and the routing table that a user can print."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

logger = logging.getLogger(__name__)

Options = Mapping[str, Any]

ROLES: Mapping[str, Options] = {
    "hidden": {},
    "expert": {},
    "conv": {"algorithm": "scion", "norm": "SpectralConv"},
    "embedding": {"algorithm": "scion", "norm": "ColNorm", "norm_kwargs": {"transpose": True}, "unconstrained": True},
    "head": {"algorithm": "scion", "norm": "RowNorm", "unconstrained": True},
    "tied": {"algorithm": "scion", "norm": "Sign", "unconstrained": True},
    "vector": {"algorithm": "scion", "norm": "BiasRMS", "unconstrained": True},
}
"""What each role is stepped with; the empty ones by the optimizer's own rule."""

_NEVER_ORTHOGONAL = frozenset({"embedding", "head", "tied"})
_HEAD_NAMES = frozenset({"lm_head", "head", "output", "unembed", "unembedding", "embed_out", "classifier"})
_TABLE_NAME = re.compile(r"(^|[._])(pos([._]|emb|$)|position|wpe|wte|embed)", re.IGNORECASE)
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"})


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; ``print`` shows which parameter is stepped how."""

    def table(self) -> list[dict[str, Any]]:
        """One dict a parameter: name, role, shape, and the options that its group sets."""
        return [
            {"name": name, "role": group["role"], "shape": tuple(param.shape), **_own_options(group)}
            for group in self
            for name, param in group["params"]
        ]

    def __str__(self) -> str:
        lines = [("name", "role", "shape", "stepped with")]
        for row in self.table():
            options = ", ".join(f"{k}={v}" for k, v in row.items() if k not in ("name", "role", "shape"))
            lines.append(
                (
                    row["name"],
                    row["role"],
                    "x".join(map(str, row["shape"])) or "scalar",
                    options or "the optimizer's rule",
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(line[:3], widths, strict=True)), line[3]]) for line in lines
        )


def group_params(
    model: nn.Module, *, roles: Mapping[str, Options] | None = None, overrides: Mapping[str, Options] | None = None
) -> ParamGroups:
    """Parameter groups of a model, by the role of each parameter.

    Hidden matrices and experts are left to the optimizer's own rule; embeddings, heads, convolutions and vectors get
    the geometry that Scion gives them (``ROLES``). Frozen parameters are left out, tied ones appear once.

    Args:
        model: The model, sharded or not.
        roles: Options to add or replace by role: ``{"embedding": {"scale": 8.0}}``.
        overrides: Options to add or replace by regular expression on the parameter's name, with or without its
            ``.weight``; of several patterns the first that matches wins. ``role`` may be overridden too, and
            ``algorithm``, which then starts from its own defaults.

    Raises:
        ValueError: For an unknown role, a pattern that decides nothing, or a model without trainable parameters.
    """
    roles, overrides = dict(roles or {}), dict(overrides or {})
    for role in [*roles, *(o["role"] for o in overrides.values() if "role" in o)]:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; known are {', '.join(ROLES)}")
    found = infer_roles(model)
    unused = set(overrides)
    groups: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        pattern = next((p for p in overrides if _matches(p, name)), None)
        unused.discard(pattern or "")
        own = dict(overrides[pattern]) if pattern is not None else {}
        role = own.pop("role", found[param])
        options = _options(role, {**roles.get(role, {}), **own})
        if found[param] in _NEVER_ORTHOGONAL and _orthogonalised(options):
            logger.warning(
                "%r has the role %s by type and name and would be orthogonalised: its rows lose their lengths",
                clean_name(name),
                found[param],
            )
        group = groups.setdefault(repr((role, sorted(options.items()))), {"params": [], "role": role, **options})
        group["params"].append((clean_name(name), param))
    if unused:
        names = ", ".join(clean_name(n) for n, _ in model.named_parameters())
        raise ValueError(
            f"override pattern {sorted(unused)[0]!r} matches no trainable parameter that an earlier pattern has not "
            f"taken; names are {names}"
        )
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient")
    if not any(g["role"] in ("hidden", "expert", "conv") for g in groups.values()):
        logger.warning("no hidden matrix found: nothing will be orthogonalised (are the weights flattened to 1-D?)")
    return ParamGroups(groups.values())


def _options(role: str, chosen: Options) -> dict[str, Any]:
    """Options of a role with those that were chosen; another algorithm takes none of the role's own."""
    own = ROLES[role]
    same = chosen.get("algorithm", own.get("algorithm")) == own.get("algorithm")
    return {**(own if same else {}), **chosen}


def _orthogonalised(options: Options) -> bool:
    algorithm, norm = options.get("algorithm"), options.get("norm", "Auto")
    return algorithm in (None, "dion2", "scion") and norm in ("Auto", "Spectral", "spectral", "image_spectral")


def infer_roles(model: nn.Module) -> dict[Tensor, str]:
    """Role of every parameter: embedding, hidden, head, tied, vector, conv or expert.

    Read from module types, shapes and names: an ``nn.Embedding`` is an embedding; a Linear layer is the head when it is
    called so (``head``, ``lm_head``, ``output``, …) or when it is the last one and as tall as an embedding; a tensor
    that is both is tied; what has at most one dimension longer than 1 is a vector. A table of no layer, such as
    ``pos_embed [1, n, d]``, is an embedding by its name.
    """
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [(name, m.weight) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    heads = {w for name, w in linears if name.rpartition(".")[2] in _HEAD_NAMES}
    if linears and linears[-1][1].shape[0] in {e.shape[0] for e in embeddings}:
        heads.add(linears[-1][1])
    tied = embeddings & {w for _, w in linears}
    convolutions = {m.weight for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)}
    layers = convolutions | {w for _, w in linears}
    roles: dict[Tensor, str] = {}
    for name, param in model.named_parameters():
        extents = sum(size > 1 for size in param.shape)
        if extents <= 1 and param not in heads | embeddings:
            roles[param] = "vector"
        elif param in tied:
            roles[param] = "tied"
        elif param in embeddings or (extents == 2 and param not in layers and _TABLE_NAME.search(name)):
            roles[param] = "embedding"
        elif param in heads:
            roles[param] = "head"
        elif param in convolutions or param.ndim > 3:
            roles[param] = "conv"
        else:
            roles[param] = "expert" if param.ndim == 3 else "hidden"
    return roles


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers add and without a trailing ``.weight``."""
    return _unwrapped(name).removesuffix(".weight")


def _unwrapped(name: str) -> str:
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in _WRAPPERS), last])


def _matches(pattern: str, name: str) -> bool:
    return any(re.search(pattern, seen) for seen in (clean_name(name), _unwrapped(name)))


def _own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "role")}
