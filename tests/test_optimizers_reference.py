"""Scion and Dion2 in float64 against an independent reference with the exact polar factor: 20 steps equal to 1e-10."""

import math
from typing import Any

import numpy as np
import pytest
import reference_optimizers as ref
import torch
from torch import Tensor, nn

from scion_telemetry.optim import Dion2, Orthogonalizer, Scion

EXACT = Orthogonalizer(name="svd", dtype=torch.float64)
STEPS = 20
# 1e-8 is added to denominators where the reference divides by the bare norm.
CLOSE: dict[str, float] = {"atol": 1e-10, "rtol": 1e-10}
NEAR: dict[str, float] = {"atol": 1e-6, "rtol": 1e-6}


def _lr(step: int) -> float:
    return 0.02 * (1 + math.cos(math.pi * step / STEPS)) / 2 + 1e-3


def _gradients(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heavy = torch.rand(shape[0], generator=generator, dtype=torch.float64).exp().view(-1, *[1] * (len(shape) - 1))
    return [heavy * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def _run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], gradients: list[list[Tensor]]) -> None:
    for t in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _lr(t)
        for p, g in zip(params, gradients, strict=True):
            p.grad = g[t].clone()
        optimizer.step()


def _equal(actual: Tensor, expected: np.ndarray, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(actual.detach(), torch.from_numpy(expected), **tolerance)


@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("adjust", ["spectral_norm", "rms_norm", None])
def test_dion2(fraction: float, adjust: str | None) -> None:
    shapes = [(8, 12), (12, 8), (8, 12), (9, 9), (1, 6), (6, 1), (5, 3)]
    factors = {
        "spectral_norm": lambda m, n: math.sqrt(m / n),
        "rms_norm": lambda m, n: 0.2 * math.sqrt(max(m, n)),
        None: lambda m, n: 1.0,
    }
    gradients = [_gradients(s, i) for i, s in enumerate(shapes)]
    params = [nn.Parameter(_gradients(s, 100 + i)[0]) for i, s in enumerate(shapes)]
    oracles = [
        ref.Dion2Reference(
            p.detach().numpy(), fraction=fraction, ef_decay=0.9, weight_decay=0.1, factor=factors[adjust](*p.shape)
        )
        for p in params
    ]
    options: dict[str, Any] = {"fraction": fraction, "ef_decay": 0.9, "weight_decay": 0.1, "adjust_lr": adjust}
    optimizer = Dion2(params, **options, newton_schulz_func=EXACT)
    _run(optimizer, params, gradients)
    for p, oracle, g in zip(params, oracles, gradients, strict=True):
        for t in range(STEPS):
            oracle.step(g[t].numpy(), _lr(t))
        _equal(p, oracle.w, CLOSE)
        _equal(optimizer.state[p]["momentum"], oracle.m, CLOSE)


SPECTRAL = {"orthogonalizer": EXACT}
GEOMETRIES: list[tuple[str, dict[str, Any], Any, list[tuple[int, ...]], dict[str, float]]] = [
    ("Spectral", SPECTRAL, ref.spectral, [(6, 10), (10, 6), (6, 10), (5, 3), (1, 4), (4, 1)], CLOSE),
    ("SpectralConv", SPECTRAL, ref.spectral_conv, [(6, 4, 3, 3), (4, 2, 5), (3, 2, 3, 5)], CLOSE),
    ("ColNorm", {"transpose": True}, ref.embedding_rows, [(10, 4), (3, 8)], NEAR),
    ("RowNorm", {}, ref.output_rows, [(10, 4), (3, 8)], NEAR),
    ("Sign", {}, ref.sign, [(10, 4), (3, 8)], CLOSE),
    ("BiasRMS", {}, ref.rms, [(7,), (8, 1, 1), (1, 1, 8)], NEAR),
]


@pytest.mark.parametrize(("norm", "kwargs", "lmo", "shapes", "tolerance"), GEOMETRIES, ids=[g[0] for g in GEOMETRIES])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
@pytest.mark.parametrize("unconstrained", [False, True])
def test_scion(
    norm: str, kwargs: Any, lmo: Any, shapes: list[Any], tolerance: Any, momentum: float, unconstrained: bool
) -> None:
    gradients = [_gradients(s, i) for i, s in enumerate(shapes)]
    params = [nn.Parameter(_gradients(s, 100 + i)[0]) for i, s in enumerate(shapes)]
    options: dict[str, Any] = {"momentum": momentum, "scale": 3.0, "unconstrained": unconstrained}
    oracles = [ref.ScionReference(p.detach().numpy(), lmo, **options) for p in params]
    _run(Scion(params, norm=norm, norm_kwargs=kwargs, **options), params, gradients)
    for p, oracle, g in zip(params, oracles, gradients, strict=True):
        for t in range(STEPS):
            oracle.step(g[t].numpy(), _lr(t))
        _equal(p, oracle.w, tolerance)


@pytest.mark.parametrize("shape", [(5,), (4, 3), (0,)])
def test_adamw_groups_are_torch_adamw(shape: tuple[int, ...]) -> None:
    gradients = _gradients(shape, 0) if shape != (0,) else [torch.zeros(0, dtype=torch.float64)] * STEPS
    ours, theirs = (nn.Parameter(gradients[0] + 1) for _ in range(2))
    options: dict[str, Any] = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    _run(Dion2([{"params": [ours], "algorithm": "adamw"}], **options, epsilon=1e-6), [ours], [gradients])
    _run(torch.optim.AdamW([theirs], **options, eps=1e-6), [theirs], [gradients])
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cautious", [False, True])
def test_lion_groups(cautious: bool) -> None:
    gradients = _gradients((4, 3), 0)
    param = nn.Parameter(gradients[0] + 1)
    w, m = param.detach().numpy().copy(), np.zeros((4, 3))
    group = {"params": [param], "algorithm": "lion", "cautious_wd": cautious}
    _run(Dion2([group], betas=(0.8, 0.9), weight_decay=0.1), [param], [gradients])
    for t in range(STEPS):
        g = gradients[t].numpy()
        update = np.sign(0.8 * m + 0.2 * g)
        m = 0.9 * m + 0.1 * g
        w = w - _lr(t) * 0.1 * w * ((update * w >= 0) if cautious else 1) - _lr(t) * update
    _equal(param, w, CLOSE)
