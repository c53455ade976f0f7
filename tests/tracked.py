"""For tests of the tracker: parameters by name, what was measured by step and parameter, and the same by float64."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from scion_telemetry.sinks import MemorySink

Values = Mapping[str, float]


def gauss(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def named(**params: Tensor) -> nn.ParameterDict:
    """A model that is nothing but its parameters, in this order."""
    model = nn.ParameterDict()
    for name, p in params.items():  # one by one: a dict would be sorted
        model[name] = nn.Parameter(p)
    return model


def set_grads(model: nn.Module, step: int) -> None:
    """Gradients that depend on the step and the place of the parameter alone."""
    for i, p in enumerate(model.parameters()):
        p.grad = gauss(*p.shape, seed=1000 * step + i).to(p.dtype)


def rows(sink: MemorySink) -> dict[tuple[int, str], Values]:
    """Layer rows by step and parameter."""
    return {(r.step, r.param): r.values for r in sink.layers}


def rms(x: Tensor) -> float:
    """Root mean square in float64."""
    return math.sqrt(float(x.detach().double().square().mean()))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters in float64."""
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def observed(model: nn.Module, step: Callable[[], object], kept: float = 1.0) -> dict[str, float]:
    """RMS of every update ``after - kept · before`` of one step."""
    before = weights(model)
    step()
    return {name: rms(p.detach().double() - kept * before[name]) for name, p in model.named_parameters()}
