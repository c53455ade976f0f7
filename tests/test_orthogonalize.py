"""Orthogonalisers: against the scalar polynomial they are made of, the published bands, and the exact polar factor."""

from typing import Any

import pytest
import torch
from torch import Tensor

from scion_telemetry.optim.orthogonalize import (
    COEFFICIENTS,
    NAMES,
    Orthogonalizer,
    input_dtype,
    iterate,
    make_orthogonalizer,
    polar,
)

# Singular values for a Gaussian 64x256 after 5 steps in bfloat16 (widened by 0.01 to 0.02 for other seeds).
BANDS = {
    "lions_ns5": (0.67, 1.15),
    "newton_schulz": (0.67, 1.15),
    "muon_ns5": (0.67, 1.15),
    "dion_ns5": (0.96, 1.05),
    "polar_express": (0.85, 1.15),
    "polar_express_disco": (0.86, 1.14),
}


def _gauss(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (16, 16), (1, 5), (5, 1), (1, 1)])
def test_singular_values_go_through_the_scalar_polynomial(name: str, shape: tuple[int, int]) -> None:
    coefficients, epsilon = COEFFICIENTS[name], 1e-7
    x = _gauss(*shape, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    values = s / (coefficients.headroom * s.square().sum().sqrt() + epsilon)
    for a, b, c in coefficients.schedule(5):
        values = a * values + b * values**3 + c * values**5
    expected = u @ torch.diag(values) @ vt
    torch.testing.assert_close(iterate(x, coefficients, steps=5, epsilon=epsilon), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_published_bands(name: str, shape: tuple[int, int], seed: int) -> None:
    result = Orthogonalizer(name=name)(_gauss(*shape, seed=seed))
    assert result.dtype == torch.bfloat16
    values = torch.linalg.svdvals(result.double())
    low, high = BANDS[name]
    assert low <= values.min()
    assert values.max() <= high


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (48, 48)])
def test_muon_ns5_is_the_update_of_torch_muon_to_the_bit(shape: tuple[int, int]) -> None:
    param, grad = torch.nn.Parameter(torch.zeros(shape)), _gauss(*shape)
    param.grad = grad.clone()
    kwargs = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    torch.optim.Muon([param], **kwargs, adjust_lr_fn="match_rms_adamw").step()  # type: ignore[arg-type]
    expected = grad.new_zeros(shape).add_(Orthogonalizer(name="muon_ns5")(grad), alpha=-0.2 * max(shape) ** 0.5)
    torch.testing.assert_close(param.detach(), expected, atol=0, rtol=0)


def test_polar_express_converges_with_its_limit_triple() -> None:
    x = _gauss(32, 48, dtype=torch.float64)
    result = Orthogonalizer(name="polar_express_disco", steps=14, dtype=torch.float64)(x)
    torch.testing.assert_close(result, polar(x), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_input_is_neither_modified_nor_aliased(name: str, dtype: torch.dtype) -> None:
    for shape in [(8, 24), (24, 8), (3, 8, 24)]:
        x = 7 * _gauss(*shape).to(dtype)
        kept = x.clone()
        result = Orthogonalizer(name=name, dtype=dtype)(x)
        assert (result.shape, result.dtype) == (x.shape, dtype)
        result.zero_()
        torch.testing.assert_close(x, kept, atol=0, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_also_among_others(name: str) -> None:
    batch = torch.stack([torch.zeros(6, 4), _gauss(6, 4)])
    result = Orthogonalizer(name=name)(batch)
    assert not result[0].any()
    assert torch.linalg.svdvals(result[1].float()).max() > 0.5
    assert not Orthogonalizer(name=name)(torch.zeros(4, 6)).any()


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_loops_and_scale_does_not_matter(name: str) -> None:
    function = Orthogonalizer(name=name, dtype=torch.float64)
    batch = _gauss(2, 3, 6, 10, dtype=torch.float64)
    loop = torch.stack([torch.stack([function(x, 1e-12) for x in row]) for row in batch])
    torch.testing.assert_close(function(batch, 1e-12), loop, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(function(1000 * batch, 1e-12), loop, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(function(batch.mT, 1e-12), loop.mT, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polar_is_the_closest_semi_orthogonal_matrix(dtype: torch.dtype) -> None:
    x = _gauss(5, 9, dtype=dtype)
    factor = polar(x)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(factor @ factor.mT, torch.eye(5, dtype=dtype), atol=tolerance, rtol=0)
    stretch = factor.mT @ x  # symmetric and positive: x = factor · stretch
    torch.testing.assert_close(stretch, stretch.mT, atol=10 * tolerance, rtol=0)
    assert torch.linalg.eigvalsh(stretch).min() > -10 * tolerance
    assert polar(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_that_is_not_finite_shows_and_spoils_no_other(name: str, bad: float) -> None:
    batch = _gauss(2, 4, 6)
    healthy = Orthogonalizer(name=name)(batch)[1]
    batch[0, 1, 2] = bad
    result = Orthogonalizer(name=name)(batch)
    assert not result[0].isfinite().any()
    torch.testing.assert_close(result[1], healthy, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "nonsense"}, "unknown orthogonaliser 'nonsense'; known are lions_ns5, .*svd"),
        ({"name": "polar_express", "steps": 6}, "steps of polar_express must be between 1 and 5, got 6"),
        ({"name": "lions_ns5", "steps": 0}, "steps of lions_ns5 must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Orthogonalizer(**kwargs)


def test_callables_are_taken_as_they_are_and_say_their_dtype() -> None:
    def own(input: Tensor, /, epsilon: float) -> Tensor:
        return input

    assert make_orthogonalizer(own) is own
    assert input_dtype(own) == torch.bfloat16
    assert input_dtype(Orthogonalizer(name="svd", dtype=torch.float64)) == torch.float64
    with pytest.raises(TypeError, match=r"polar_express.*or a callable, got 3"):
        make_orthogonalizer(3)  # type: ignore[arg-type]
