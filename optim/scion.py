"""Scion: steepest descent under a norm of the user's choice for every layer (arXiv 2502.07529)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import NOT_NEGATIVE, POSITIVE, UNIT_INTERVAL, Check, SpectralOptimizer, Work, add_all_, scale_all_
from .events import ParamFacts, StepEvent
from .grid import Dims, Grid
from .layout import Layout, local, take_piece
from .norms import Norm, Spectral, SpectralConv, make_norm


class ScionAlgorithm:
    """The rule of Scion; ``algorithm="scion"`` in a parameter group."""

    name = "scion"
    defaults: Mapping[str, Any] = {
        "lr": 1e-3,
        "momentum": 1.0,
        "norm": "Auto",
        "norm_kwargs": {},
        "scale": 1.0,
        "unconstrained": False,
    }
    checks: Mapping[str, Check] = {
        "lr": NOT_NEGATIVE,
        "momentum": UNIT_INTERVAL,
        "scale": POSITIVE,
        "norm_kwargs": (lambda v: isinstance(v, Mapping), "a dict"),
        "unconstrained": (lambda v: isinstance(v, bool), "True or False"),
    }

    def prepare(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """The momentum buffer, unless momentum is 1 and the gradient itself is used."""
        _norm(options, param.ndim)
        return {} if options["momentum"] == 1 else {"momentum_buffer": torch.zeros_like(param)}

    def facts(self, param: Tensor, grid: Grid, options: Mapping[str, Any]) -> ParamFacts:
        """Shows every update; an owner assembles those whose norm needs the whole matrix."""
        norm = _norm(options, param.ndim)
        whole = _must_gather(norm, grid) or not (grid.cut(grid.dims.rows) or grid.cut(grid.dims.columns))
        return ParamFacts(algorithm=self.name, shows_update=True, owner_shows=whole and param.ndim >= 2)

    def dims(self, param: Tensor, options: Mapping[str, Any]) -> Dims:
        """A stack of matrices or a convolution, as the norm has it."""
        return Dims.of(param.ndim, stacked=param.ndim == 3 and _norm(options, param.ndim).stacks)

    def step(self, work: Work) -> Iterator[None]:
        """buf <- (1-m) buf + m g;  W <- (1-lr) W if constrained;  W <- W - lr · scale · lmo(buf)."""
        options = work.options
        norm = _norm(options, len(work.layout.shape))
        averages = self._average(work)
        if _must_gather(norm, work.exchange.grid):
            moved = [a.to(norm.dtype) if norm.dtype else a for a in averages]
            whole = yield from work.exchange.gather(moved)
            owned = {
                i: u.to(moved[0].dtype)
                for i, u in zip(whole, self._directions(norm, list(whole.values()), work), strict=True)
            }
            directions = yield from work.exchange.scatter(owned, moved)
        else:
            directions = tuple(self._directions(norm, averages, work))
            owned = {} if work.layout.sharded_dims else dict(enumerate(directions))
        if work.notify is not None:
            work.notify(
                StepEvent(
                    algorithm=self.name,
                    params=work.params,
                    lr=float(options["lr"]),
                    scale=-float(options["lr"]),
                    directions=directions,
                    owned=owned,
                )
            )
        if not options["unconstrained"]:
            scale_all_(work.weights, 1 - float(options["lr"]))
        add_all_(work.weights, directions, alpha=-float(options["lr"]))

    def _average(self, work: Work) -> tuple[Tensor, ...]:
        momentum = work.options["momentum"]
        if momentum == 1:
            return work.grads
        for param, state in zip(work.params, work.states, strict=True):
            if "momentum_buffer" not in state:  # momentum was 1 until the user changed the group
                state["momentum_buffer"] = torch.zeros_like(param)
        buffers = work.buffers("momentum_buffer")
        scale_all_(buffers, 1 - momentum)
        add_all_(buffers, work.grads, alpha=momentum)
        return buffers

    @staticmethod
    def _directions(norm: Norm, matrices: Iterable[Tensor], work: Work) -> list[Tensor]:
        matrices = list(matrices)
        if isinstance(norm, Spectral) and len(matrices) > 1:
            found = list(norm.lmo(torch.stack(matrices)).unbind())
        else:
            found = [norm.lmo(m, work.layout.shape) for m in matrices]
        return [u * work.options["scale"] for u in found]


class Scion(SpectralOptimizer):
    """Scion. ``momentum`` is **one minus** the usual β: 1 means no momentum (the convention of the Scion authors).

        buf <- (1-m) buf + m g,    W <- (1-lr) W,    W <- W - lr · scale · lmo(buf)

    With ``unconstrained=True`` the second part is left out; otherwise weights stay in the ball of radius ``scale``.

    Args:
        params: Parameters, named parameters or groups (see ``group_params``).
        lr: Learning rate, >= 0.
        momentum: One minus β, in (0, 1].
        norm: Spectral, SpectralConv, ColNorm, RowNorm, BiasRMS, Sign, or Auto (by number of dimensions).
        norm_kwargs: Options of the norm, see ``optim.norms``.
        scale: Radius, > 0.
        unconstrained: Leave out the pull towards zero.
        process_group: Replicas of plain parameters that share the work (DDP); None: every rank works for itself.

    Raises:
        ValueError: For a value out of range, an unknown norm, or a parameter that cannot be stepped.

    Source: Pethick et al., arXiv 2502.07529; LIONS-EPFL/scion.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 1.0,
        norm: str = "Auto",
        norm_kwargs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
        unconstrained: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "algorithm": "scion",
            "lr": lr,
            "momentum": momentum,
            "norm": norm,
            "norm_kwargs": dict(norm_kwargs or {}),
            "scale": scale,
            "unconstrained": unconstrained,
        }
        super().__init__(params, defaults, algorithms=(ScionAlgorithm(),), process_group=process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that names its ``norm`` does not inherit the ``norm_kwargs`` of the default norm."""
        super().add_param_group({"norm_kwargs": {}, **param_group} if "norm" in param_group else param_group)

    @torch.no_grad()
    def init(self, seed: int = 0) -> None:
        """Fill all weights with random ones of norm ``scale``, the same for any sharding and number of ranks.

        Every rank draws the whole weight of one parameter at a time and keeps its piece.
        """
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                layout = Layout.of(param)
                generator = torch.Generator(device="cpu").manual_seed(seed * 1_000_003 + number)
                norm = _norm(group, param.ndim)
                full = norm.init_(torch.empty(layout.shape, dtype=torch.float32), generator) * group["scale"]
                local(param).copy_(take_piece(full, layout))
                number += 1


def _norm(options: Mapping[str, Any], ndim: int) -> Norm:
    """The norm of a group; to ``Auto`` a stack of experts is a stack of matrices and not a convolution."""
    experts = options["norm"] == "Auto" and options.get("role") == "expert"
    return make_norm("Spectral" if experts else options["norm"], ndim, options["norm_kwargs"])


def _must_gather(norm: Norm, grid: Grid) -> bool:
    """Whether a rank's piece is not enough, or the work is worth sharing between replicas."""
    rows, columns = grid.cut(grid.dims.rows), grid.cut(grid.dims.columns)
    if grid.dims.columns is None:  # a vector is one row, so cutting it cuts the row
        rows, columns = False, rows
    need = {"entry": False, "row": columns, "column": rows, "matrix": rows or columns}[norm.extent]
    return need or isinstance(norm, Spectral | SpectralConv)
