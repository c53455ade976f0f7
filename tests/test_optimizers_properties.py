"""Any shape, fraction, dtype and combination of options: Scion, Dion2 and Dion3 against the plain references."""

import math
from typing import Any

import pytest
import reference_optimizers as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from scion_telemetry.optim import Dion2, Dion3, Orthogonalizer, Scion, ScionLight

pytestmark = pytest.mark.timeout(60)
STEPS = 4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""1e-8 in a denominator, or a badly conditioned momentum, moves a direction by so much at most."""
EXACT = {torch.float64: 1e-9, torch.float32: 2e-3}
"""Where nothing is added to denominators."""

_settings = settings(max_examples=150, deadline=None, derandomize=True, database=None)
_shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))
_dtypes = st.sampled_from([torch.float64, torch.float32])
_seeds = st.integers(0, 1000)
_lrs = st.sampled_from([0.0, 0.01, 0.3])
_decays = st.sampled_from([0.0, 0.1, 1.0])
FACTORS: dict[str | None, Any] = {
    "spectral_norm": lambda m, n: math.sqrt(m / n),
    "rms_norm": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    None: lambda m, n: 1.0,
}


def _gradients(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heavy = torch.rand(shape[0], generator=generator, dtype=torch.float64).exp().view(-1, *[1] * (len(shape) - 1))
    return [(heavy * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for _ in range(STEPS + 1)]


def _compare(
    make: Any, oracle_of: Any, shape: tuple[int, ...], seed: int, dtype: torch.dtype, lr: float, tolerance: Any = None
) -> Any:
    """Four steps of both; the optimizer, its parameter and the reference for more."""
    start, *gradients = _gradients(shape, seed, dtype)
    param = nn.Parameter(start.clone())
    optimizer, oracle = make(param), oracle_of(start.double().numpy())
    for g in gradients:
        param.grad = g.clone()
        optimizer.step()
        oracle.step(g.double().numpy(), lr)
    assert param.dtype == dtype
    _close(param.detach(), oracle.w, (tolerance or TOLERANCE)[dtype])
    return optimizer, param, oracle


def _close(found: Tensor, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=tolerance, rtol=tolerance)


@_settings
@given(
    shape=_shapes,
    seed=_seeds,
    dtype=_dtypes,
    lr=_lrs,
    fraction=st.floats(0.01, 1.0),
    ef_decay=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    weight_decay=_decays,
    adjust=st.sampled_from(list(FACTORS)),
    select_dim=st.sampled_from(["auto", "rows", "cols"]),
    decay_on=st.sampled_from(["all", "selected"]),
)
def test_dion2(
    shape: tuple[int, int],
    seed: int,
    dtype: torch.dtype,
    lr: float,
    fraction: float,
    ef_decay: float,
    weight_decay: float,
    adjust: str | None,
    select_dim: str,
    decay_on: str,
) -> None:
    options: dict[str, Any] = {
        "fraction": fraction,
        "ef_decay": ef_decay,
        "weight_decay": weight_decay,
        "select_dim": select_dim,
        "decay_on": decay_on,
    }
    exact = Orthogonalizer(name="svd", dtype=dtype)
    optimizer, param, oracle = _compare(
        lambda p: Dion2([p], lr=lr, newton_schulz_func=exact, adjust_lr=adjust, **options),
        lambda w: ref.Dion2Reference(w, factor=FACTORS[adjust](*shape), **options),
        shape,
        seed,
        dtype,
        lr,
        EXACT,
    )
    _close(optimizer.state[param]["momentum"], oracle.m, EXACT[dtype])


@_settings
@given(
    shape=_shapes,
    seed=_seeds,
    dtype=_dtypes,
    lr=_lrs,
    fraction=st.floats(0.01, 1.0),
    mu=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    beta2=st.sampled_from([0.0, 0.5, 0.95]),
    weight_decay=_decays,
    decay_on=st.sampled_from(["all", "selected"]),
)
def test_dion3(
    shape: tuple[int, int],
    seed: int,
    dtype: torch.dtype,
    lr: float,
    fraction: float,
    mu: float,
    beta2: float,
    weight_decay: float,
    decay_on: str,
) -> None:
    options: dict[str, Any] = {"fraction": fraction, "weight_decay": weight_decay, "decay_on": decay_on}
    exact = Orthogonalizer(name="svd", dtype=dtype)
    optimizer, param, oracle = _compare(
        lambda p: Dion3([p], lr=lr, mu=mu, muon_beta2=beta2, newton_schulz_func=exact, **options),
        lambda w: ref.Dion3Reference(w, factor=FACTORS["spectral_norm"](*shape), ef_decay=mu, beta2=beta2, **options),
        shape,
        seed,
        dtype,
        lr,
    )
    _close(optimizer.state[param]["momentum"], oracle.m, EXACT[dtype])
    _close(optimizer.state[param]["variance"], oracle.v, TOLERANCE[dtype])


MATRIX: dict[str, tuple[Any, dict[str, Any]]] = {
    "Spectral": (ref.spectral, {"orthogonalizer": "svd"}),
    "ColNorm": (ref.embedding_rows, {"transpose": True}),
    "RowNorm": (ref.output_rows, {}),
    "Sign": (ref.sign, {}),
}


@_settings
@given(
    shape=_shapes,
    seed=_seeds,
    dtype=_dtypes,
    lr=_lrs,
    norm=st.sampled_from(list(MATRIX)),
    momentum=st.sampled_from([0.05, 0.5, 1.0]),
    scale=st.sampled_from([0.5, 3.0]),
    unconstrained=st.booleans(),
    weight_decay=_decays,
    nesterov=st.booleans(),
    light=st.booleans(),
)
def test_scion(
    shape: tuple[int, int],
    seed: int,
    dtype: torch.dtype,
    lr: float,
    norm: str,
    momentum: float,
    scale: float,
    unconstrained: bool,
    weight_decay: float,
    nesterov: bool,
    light: bool,
) -> None:
    """ScionLight is the same rule, with the gradient for a buffer."""
    lmo, kwargs = MATRIX[norm]
    if norm == "Spectral":
        kwargs = {"orthogonalizer": Orthogonalizer(name="svd", dtype=dtype)}
    options: dict[str, Any] = {
        "momentum": momentum,
        "scale": scale,
        "unconstrained": unconstrained,
        "weight_decay": weight_decay,
    }
    _, expected, _ = _compare(
        lambda p: Scion([p], lr=lr, norm=norm, norm_kwargs=kwargs, nesterov=nesterov, **options),
        lambda w: ref.ScionReference(w, lmo, nesterov=nesterov, **options),
        shape,
        seed,
        dtype,
        lr,
        EXACT if norm in ("Spectral", "Sign") else TOLERANCE,
    )
    if not light or nesterov:
        return
    start, *gradients = _gradients(shape, seed, dtype)
    param = nn.Parameter(start.clone())
    optimizer = ScionLight([param], lr=lr, norm=norm, norm_kwargs=kwargs, **options)
    for g in gradients:
        param.grad = g.clone() if param.grad is None or momentum == 1 else param.grad + g
        optimizer.step()
    torch.testing.assert_close(param, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@_settings
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=_seeds, dtype=_dtypes, nesterov=st.booleans())
def test_scion_on_vectors_and_convolutions(shape: list[int], seed: int, dtype: torch.dtype, nesterov: bool) -> None:
    vector = len(shape) < 3
    size: tuple[int, ...] = (math.prod(shape),) if vector else tuple(shape)
    lmo = ref.rms if vector else ref.spectral_conv
    options: dict[str, Any] = {"momentum": 0.3, "scale": 2.0, "unconstrained": False, "nesterov": nesterov}
    kwargs = {} if vector else {"orthogonalizer": Orthogonalizer(name="svd", dtype=dtype)}
    _compare(
        lambda p: Scion([p], lr=0.1, norm_kwargs=kwargs, **options),
        lambda w: ref.ScionReference(w, lmo, **options),
        size,
        seed,
        dtype,
        0.1,
    )
