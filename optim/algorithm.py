"""What an update rule is, and what it is given: same-shaped parameters of one group."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .events import ParamFacts, StepEvent, StepSettings
from .grid import Dims, Grid
from .layout import Layout, local
from .options import Check
from .transport import Exchange

Notify = Callable[[StepEvent], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Same-shaped parameters of one group that step together.

    Args:
        params: The parameters.
        weights: Their local pieces.
        grads: The local pieces of their gradients.
        states: Their state, DTensors as the parameters are.
        options: The parameter group.
        layout: The layout they share.
        exchange: How their matrices move between ranks.
        notify: To be called with a ``StepEvent`` before the weights change; None when nobody observes.
        grams: Whether an observer looks at the ``Gram`` of what is orthonormalised.
    """

    params: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    states: tuple[dict[str, Any], ...]
    options: Mapping[str, Any]
    layout: Layout
    exchange: Exchange
    notify: Notify | None
    grams: bool = False

    def buffers(self, name: str) -> tuple[Tensor, ...]:
        """Local pieces of one state entry."""
        return tuple(piece(state[name], self.layout) for state in self.states)


class Algorithm(Protocol):
    """One update rule."""

    @property
    def name(self) -> str:
        """What ``group["algorithm"]`` says."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Its options and their defaults."""

    @property
    def checks(self) -> Mapping[str, Check]:
        """For each option a predicate and the text of what it allows."""

    @property
    def own(self) -> frozenset[str]:
        """Options whose default is not that of an optimizer which has this rule beside its main one."""

    def prepare(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Refuse a parameter it cannot step (ValueError); else its state, complete before the first step."""

    def view(self, param: Tensor, options: Mapping[str, Any]) -> tuple[Layout, Dims | None]:
        """The parameter as the matrices that the rule steps: their layout, and which dimensions are rows and columns.

        The layout is that of the parameter, or of a reshaped one whose pieces are views of its pieces (heads of an
        attention matrix). Without dimensions the rule steps entries one by one and shares nothing.
        """

    def facts(self, param: Tensor, grid: Grid, options: Mapping[str, Any]) -> ParamFacts:
        """What events will show of the parameter."""

    def settings(self, options: Mapping[str, Any]) -> StepSettings:
        """What a group of it says of its next step."""

    def step(self, work: Work) -> Iterator[None]:
        """Step all of ``work``, yielding while communication is in flight."""


def piece(tensor: Tensor, layout: Layout) -> Tensor:
    """The local piece of a tensor, in the shape that the layout gives it."""
    found = local(tensor)
    if found.ndim == len(layout.shape):
        return found
    return found.view(*layout.local_shape[:-1], found.shape[-1])  # one column: the running means of rows


def local_grad(param: Tensor, layout: Layout) -> Tensor:
    """The local piece of a gradient, zeros where there is none; refuses one that does not lie as its weight."""
    if param.grad is None:
        return torch.zeros_like(piece(param, layout), dtype=param.grad_dtype or param.dtype)
    if param.grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is sparse ({param.grad.layout}); only dense "
            "ones are stepped (nn.Embedding(..., sparse=False))"
        )
    if getattr(param.grad, "placements", None) != getattr(param, "placements", None):
        lies, own = Layout.of(param.grad), Layout.of(param)
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(param.shape)} lies as ({lies.describe()}), its weight as "
            f"({own.describe()}); redistribute the gradient to the weight's placements before step()"
        )
    return piece(param.grad, layout)


def scale_all_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply every tensor in place."""
    if _exact_foreach(tensors):
        torch._foreach_mul_(list(tensors), factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def add_all_(tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1.0) -> None:
    """Add ``alpha`` times ``others`` in place, tensor by tensor."""
    if _exact_foreach(tensors):
        torch._foreach_add_(list(tensors), list(others), alpha=alpha)
    else:
        for tensor, other in zip(tensors, others, strict=True):
            tensor.add_(other, alpha=alpha)


def _exact_foreach(tensors: Sequence[Tensor]) -> bool:
    # On a CPU, foreach kernels round the scalar to the dtype of the tensors: bfloat16 would decay by 0.98828, not 0.99.
    return tensors[0].dtype in (torch.float32, torch.float64)
