"""Scion: steepest descent under a norm of the user's choice for every layer (arXiv 2502.07529)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithm import Work, add_all_, scale_all_
from .base import SpectralOptimizer
from .events import Gram, ParamFacts, StepEvent, StepSettings
from .gram import unbound
from .grid import Dims, Grid
from .layout import Layout, local, on_mesh, take_piece
from .norms import Norm, Spectral, SpectralConv, make_norm
from .options import FLAG, NOT_NEGATIVE, POSITIVE, UNIT_INTERVAL, Check
from .orthogonalize import one_by_one
from .settings import scion_settings
from .transport import hollow


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
        "weight_decay": 0.0,
        "nesterov": False,
    }
    own = frozenset({"weight_decay"})  # Dion2's is meant for matrices that nothing else keeps small
    checks: Mapping[str, Check] = {
        "lr": NOT_NEGATIVE,
        "momentum": UNIT_INTERVAL,
        "scale": POSITIVE,
        "norm_kwargs": (lambda v: isinstance(v, Mapping), "a dict"),
        "unconstrained": FLAG,
        "weight_decay": NOT_NEGATIVE,
        "nesterov": FLAG,
    }

    def prepare(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """The momentum buffer, unless momentum is 1 and the gradient itself is used."""
        _norm(options, param.ndim)
        return {} if options["momentum"] == 1 else {"momentum_buffer": torch.zeros_like(param)}

    def view(self, param: Tensor, options: Mapping[str, Any]) -> tuple[Layout, Dims | None]:
        """A stack of matrices or a convolution, as the norm has it."""
        stacked = param.ndim == 3 and _norm(options, param.ndim).stacks
        return Layout.of(param), Dims.of(param.ndim, stacked=stacked)

    def facts(self, param: Tensor, grid: Grid, options: Mapping[str, Any]) -> ParamFacts:
        """Shows every update; an owner assembles those whose norm needs the whole matrix."""
        norm = _norm(options, param.ndim)
        whole = _must_gather(norm, grid) or not (grid.cut(grid.dims.rows) or grid.cut(grid.dims.columns))
        # A stack's matrices are whole on the ranks that hold them, and measured there.
        alone = param.ndim >= 2 and grid.dims.rows == 0
        gram = isinstance(norm, Spectral | SpectralConv) and norm.shows_gram
        return ParamFacts(algorithm=self.name, shows_update=True, owner_shows=whole and alone, shows_gram=gram)

    def settings(self, options: Mapping[str, Any]) -> StepSettings:
        """Steps of length lr · scale in the norm of the group."""
        return scion_settings(options, [_norm(options, ndim) for ndim in _ndims(options)])

    def step(self, work: Work) -> Iterator[None]:
        """Average, find the direction, shrink, move."""
        options, lr = work.options, float(work.options["lr"])
        norm = _norm(options, len(work.layout.shape))
        averages = self._average(work)
        gather = _must_gather(norm, work.exchange.grid)
        shown: list[Gram] = []
        if gather and work.exchange.moves:
            moved = [_cast(a, norm) for a in averages]
            like = hollow(moved)
            whole = yield from work.exchange.gather(moved)
            owners = list(whole)
            owned = dict(zip(owners, _directions(norm, (whole.pop(i) for i in owners), work, shown), strict=True))
            directions = yield from work.exchange.scatter(owned if work.notify is None else dict(owned), like)
        else:
            owners, directions = list(range(len(averages))), tuple(_directions(norm, averages, work, shown))
            owned = dict(enumerate(directions)) if gather or not work.layout.sharded_dims else {}
        if work.notify is not None:
            event = StepEvent(
                algorithm=self.name,
                params=work.params,
                lr=lr,
                scale=-lr,
                directions=directions,
                owned=owned,
                grams=dict(zip(owners, shown, strict=True)) if shown else {},
            )
            work.notify(event)
        if not options["unconstrained"]:
            scale_all_(work.weights, 1 - lr)
        if options["weight_decay"]:
            scale_all_(work.weights, 1 - lr * float(options["weight_decay"]))
        add_all_(work.weights, directions, alpha=-lr)

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
        if work.options["nesterov"]:
            return tuple(b * (1 - momentum) + g * momentum for b, g in zip(buffers, work.grads, strict=True))
        return buffers


class ScionLightAlgorithm(ScionAlgorithm):
    """The rule of ScionLight: the gradient is the state."""

    def prepare(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Nothing to keep."""
        _norm(options, param.ndim)
        if options["nesterov"]:
            raise ValueError("ScionLight has no nesterov: the gradient of the step alone is not kept; use Scion")
        return {}

    def _average(self, work: Work) -> tuple[Tensor, ...]:
        return work.grads

    def step(self, work: Work) -> Iterator[None]:
        """Step with the gradient as it has accumulated, then shrink it."""
        yield from super().step(work)
        if work.options["momentum"] != 1:
            scale_all_(work.grads, 1 - work.options["momentum"])


class Scion(SpectralOptimizer):
    """Scion. ``momentum`` is **one minus** the usual β: 1 means no momentum (the convention of the Scion authors).

        buf <- (1-m) buf + m g,    W <- (1-lr) W,    W <- W - lr · scale · lmo(buf)

    With ``unconstrained=True`` the second part is left out; otherwise weights stay in the ball of radius ``scale``.

    Args:
        params: Parameters, named parameters or groups (see ``group_params``).
        lr: Learning rate, >= 0.
        momentum: One minus β, in (0, 1].
        norm: Spectral, SpectralConv, ColNorm, RowNorm, RowPower, BiasRMS, Sign, Auto (by number of dimensions), or a
            name of rakkit/disco (``embed_sqrt``, …), see ``optim.norms``.
        norm_kwargs: Options of the norm.
        scale: Radius, > 0.
        unconstrained: Leave out the pull towards zero.
        weight_decay: A decoupled decay besides: W <- (1 - lr·weight_decay) W, >= 0. Disco's (lr γ, decay λ) is
            ``unconstrained=True, lr=γ, weight_decay=λ``.
        nesterov: Use (1-m) buf + m g, with buf already updated, for the direction.
        process_group: Replicas of plain parameters that share the work (DDP); None: every rank works for itself.
        agree_on_gradients: Where ranks may lack different gradients, agree on them in every step.

    Raises:
        ValueError: For a value out of range, an unknown norm, or a parameter that cannot be stepped.

    Source: Pethick et al., arXiv 2502.07529; LIONS-EPFL/scion; nesterov and weight decay of rakkit/disco.
    """

    _algorithm_class: type[ScionAlgorithm] = ScionAlgorithm

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
        weight_decay: float = 0.0,
        nesterov: bool = False,
        process_group: dist.ProcessGroup | None = None,
        agree_on_gradients: bool = False,
    ) -> None:
        defaults = {
            "algorithm": "scion",
            "lr": lr,
            "momentum": momentum,
            "norm": norm,
            "norm_kwargs": {} if norm_kwargs is None else norm_kwargs,
            "scale": scale,
            "unconstrained": unconstrained,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(
            params,
            defaults,
            algorithms=(self._algorithm_class(),),
            process_group=process_group,
            agree_on_gradients=agree_on_gradients,
        )

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
                number += 1
                if not (param.numel() and on_mesh(param)):
                    continue
                layout = Layout.of(param)
                generator = torch.Generator(device="cpu").manual_seed(seed * 1_000_003 + number - 1)
                norm = _norm(group, param.ndim)
                full = norm.init_(torch.empty(layout.shape, dtype=torch.float32), generator) * group["scale"]
                local(param).copy_(take_piece(full, layout))


class ScionLight(Scion):
    """Scion without a momentum buffer: ``p.grad`` is the average. ``momentum`` is **one minus** the usual β.

        W <- (1-lr) W - lr · scale · lmo(p.grad),    p.grad <- (1-m) p.grad

    Backward adds the next gradient to what is left, so **gradients must not be zeroed**: p.grad is
    Σ (1-m)^(age) g, Scion's buffer over m, and every lmo gives the same direction. A user who calls ``zero_grad`` turns
    momentum off; with momentum 1 nothing is kept, and gradients are zeroed as for every optimizer. Checkpoints carry
    the gradients.

    Args:
        params: As of ``Scion``.
        **options: As of ``Scion``, without nesterov.

    Source: LIONS-EPFL/scion, ScionLight.
    """

    _algorithm_class = ScionLightAlgorithm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of Scion."""
        super().add_param_group(param_group)
        self._drop()

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer, with the gradients as state; one that is missing as zeros and ``has_grad`` 0.

        Every parameter has both, so that distributed checkpoints find the same keys at any time on any rank.
        """
        for param, state in self.state.items():
            grad = param.grad
            state["grad"] = torch.zeros_like(param, requires_grad=False) if grad is None else grad
            state["has_grad"] = torch.tensor(float(grad is not None))
        found = super().state_dict()
        found["state"] = {number: dict(state) for number, state in found["state"].items()}
        self._drop()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore, the gradients too; a parameter whose checkpoint has none is left without."""
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            has, grad = state.get("has_grad", True), state.get("grad")
            dtype = param.grad_dtype  # None allows any
            keeps = grad is not None and (has is None or has)
            param.grad = grad.to(dtype or grad.dtype) if keeps else None
        self._drop()

    def _drop(self) -> None:
        # The names stay: torch's tools load what an optimizer already has names for.
        for group in self.param_groups:
            self.state.update((param, {"grad": None, "has_grad": None}) for param in group["params"])


def _directions(norm: Norm, matrices: Iterable[Tensor], work: Work, shown: list[Gram]) -> list[Tensor]:
    """Scaled directions; ``shown`` takes what the orthogonaliser tells of each matrix where somebody looks."""
    # Cast and scaled one by one: another copy of all of them would be the largest tensor of the step.
    cast, scale = (_cast(m, norm) for m in matrices), float(work.options["scale"])
    batch = isinstance(norm, Spectral) and len(work.params) > 1 and not one_by_one(work.weights[0])
    stack = list(cast) if batch else []
    if isinstance(norm, Spectral | SpectralConv):
        show = shown.append if work.grams else None
        lmos = norm.lmo(torch.stack(stack), None, show).unbind() if stack else (norm.lmo(m, None, show) for m in cast)
    else:
        lmos = (norm.lmo(m, work.layout.shape) for m in cast)
    found = [_cast(u if scale == 1 else u * scale, norm) for u in lmos]
    if stack:
        shown[:] = [part for gram in shown for part in unbound(gram)]
    return found


def _cast(matrix: Tensor, norm: Norm) -> Tensor:
    return matrix if norm.dtype is None else matrix.to(norm.dtype)


def _norm(options: Mapping[str, Any], ndim: int) -> Norm:
    """The norm of a group; to ``Auto`` a stack of experts is a stack of matrices and not a convolution."""
    experts = options["norm"] == "Auto" and options.get("role") == "expert"
    return make_norm("Spectral" if experts else options["norm"], ndim, options["norm_kwargs"])


def _ndims(options: Mapping[str, Any]) -> list[int]:
    return [param.ndim for param in options["params"]]


def _must_gather(norm: Norm, grid: Grid) -> bool:
    """Whether a rank's piece is not enough, or the work is worth sharing between replicas."""
    rows, columns = grid.cut(grid.dims.rows), grid.cut(grid.dims.columns)
    need = {"entry": False, "row": columns, "column": rows, "matrix": rows or columns}[norm.extent]
    return need or isinstance(norm, Spectral | SpectralConv)
