"""A model to train, a parameter with a gradient, and both optimizers behind one signature."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scion_telemetry.optim import Dion2, Orthogonalizer, Scion

EXACT = Orthogonalizer(name="svd", dtype=torch.float32)


def scion(params: Any, **options: Any) -> Scion:
    return Scion(params, **{"lr": 0.1, "momentum": 0.1, **options})


def dion2(params: Any, **options: Any) -> Dion2:
    return Dion2(params, **{"fraction": 0.5, **options})


MAKERS = [scion, dion2]
Make = Callable[..., torch.optim.Optimizer]
both = pytest.mark.parametrize("make", MAKERS)


def small_model(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) / 3)
    return model


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.flip(-1)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, t).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def one_param(shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return param


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, atol=0, rtol=0)
