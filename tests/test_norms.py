"""Every geometry is what it claims: lmo(g) has norm 1 in it and reaches the dual norm of g."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scion_telemetry.optim.norms import (
    NORMS,
    BiasRMS,
    ColNorm,
    Norm,
    RowNorm,
    RowPower,
    Sign,
    Spectral,
    SpectralConv,
    make_norm,
)
from scion_telemetry.optim.orthogonalize import Orthogonalizer

EXACT = Orthogonalizer(name="svd", dtype=torch.float64)
MATRICES = [(6, 10), (10, 6), (7, 7), (1, 5), (5, 1)]


def _gauss(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _sigma(x: Tensor) -> float:
    return torch.linalg.svdvals(x)[0].item()


def _spectral(scale: Callable[[int, int], float]) -> Callable[[Tensor], float]:
    return lambda x: _sigma(x) / scale(*x.shape)


def _conv(x: Tensor) -> float:
    return _sigma(x.flatten(1)) * math.sqrt(x.shape[1] / x.shape[0]) * math.prod(x.shape[2:])


# The norm that each geometry is of, written out; x is [d_out, d_in].
CASES: list[tuple[Norm, Callable[[Tensor], float], list[tuple[int, ...]]]] = [
    (Spectral(orthogonalizer=EXACT), _spectral(lambda m, n: math.sqrt(m / n)), MATRICES),
    (Spectral(orthogonalizer=EXACT, normalized=False), _spectral(lambda m, n: math.sqrt(m)), MATRICES),
    (Spectral(orthogonalizer=EXACT, max=True), _spectral(lambda m, n: max(1.0, math.sqrt(m / n))), MATRICES),
    (Spectral(orthogonalizer=EXACT, transpose=True), _spectral(lambda m, n: math.sqrt(n / m)), MATRICES),
    (SpectralConv(orthogonalizer=EXACT), _conv, [(6, 4, 3), (6, 4, 3, 5), (8, 2, 1, 1), (3, 4, 2, 3, 2)]),
    (ColNorm(), lambda x: x.square().mean(-2).sqrt().max().item(), MATRICES),
    (ColNorm(normalized=True), lambda x: x.shape[1] * x.square().mean(-2).sqrt().max().item(), MATRICES),
    (ColNorm(transpose=True), lambda x: x.square().mean(-1).sqrt().max().item(), MATRICES),
    (RowNorm(), lambda x: math.sqrt(x.shape[1]) * x.norm(dim=-1).max().item(), MATRICES),
    (RowNorm(normalized=False), lambda x: x.norm(dim=-1).max().item(), MATRICES),
    (RowNorm(transpose=True), lambda x: math.sqrt(x.shape[0]) * x.norm(dim=-2).max().item(), MATRICES),
    (RowPower(power=0.5), lambda x: x.norm(dim=-1).max().item() / math.sqrt(x.shape[1]), MATRICES),
    (RowPower(power=-1.0), lambda x: x.shape[1] * x.norm(dim=-1).max().item(), MATRICES),
    (Sign(), lambda x: x.shape[-1] * x.abs().max().item(), [*MATRICES, (7,)]),
    (Sign(normalized=False), lambda x: x.abs().max().item(), [*MATRICES, (7,)]),
    (BiasRMS(), lambda x: x.square().mean().sqrt().item(), [(7,), (1,), (), (8, 1, 1), (1, 1, 8), (1, 8), (8, 1)]),
    (BiasRMS(whole=True), lambda x: x.square().mean().sqrt().item(), [*MATRICES, (7,), (1,), (8, 1, 1), (2, 3, 4)]),
]
PAIRS = [(norm, size, shape) for norm, size, shapes in CASES for shape in shapes]
IDS = [f"{type(n).__name__}{i}-{'x'.join(map(str, s))}" for i, (n, _, s) in enumerate(PAIRS)]


@pytest.mark.parametrize(("norm", "size", "shape"), PAIRS, ids=IDS)
def test_lmo_has_norm_one_and_no_other_direction_of_norm_one_goes_further(
    norm: Norm, size: Callable[[Tensor], float], shape: tuple[int, ...]
) -> None:
    g = _gauss(*shape)
    direction = norm.lmo(g)
    assert direction.shape == g.shape
    assert size(direction) == pytest.approx(1, rel=1e-6)
    reached = (g * direction).sum().item()
    for seed in range(1, 200):
        # Directions near the best one and far from it.
        other = direction + _gauss(*shape, seed=seed) * 10.0 ** -(seed % 4)
        assert (g * other).sum().item() / size(other) <= reached * (1 + 1e-6)


# The dual norms in closed form, for one matrix.
@pytest.mark.parametrize("shape", MATRICES)
def test_dual_norms(shape: tuple[int, int]) -> None:
    g = _gauss(*shape)
    m, n = shape
    nuclear = torch.linalg.svdvals(g).sum()
    for norm, dual in [
        (Spectral(orthogonalizer=EXACT), math.sqrt(m / n) * nuclear),
        (Spectral(orthogonalizer=EXACT, normalized=False), math.sqrt(m) * nuclear),
        (ColNorm(), math.sqrt(m) * g.norm(dim=-2).sum()),
        (ColNorm(normalized=True), math.sqrt(m) * g.norm(dim=-2).sum() / n),
        (RowNorm(), g.norm(dim=-1).sum() / math.sqrt(n)),
        (Sign(), g.abs().sum() / n),
    ]:
        torch.testing.assert_close((g * norm.lmo(g)).sum(), torch.as_tensor(dual), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("norm", "size", "shape"), PAIRS, ids=IDS)
def test_zeros_give_zeros_and_the_gradient_is_left_alone(norm: Norm, size: Any, shape: tuple[int, ...]) -> None:
    assert not norm.lmo(torch.zeros(shape)).any()
    g = _gauss(*shape)
    kept = g.clone()
    norm.lmo(g).fill_(9)
    torch.testing.assert_close(g, kept, atol=0, rtol=0)


@pytest.mark.parametrize(("norm", "size", "shape"), PAIRS, ids=IDS)
def test_bfloat16(norm: Norm, size: Callable[[Tensor], float], shape: tuple[int, ...]) -> None:
    g = _gauss(*shape).bfloat16()
    direction = norm.lmo(g)
    assert direction.dtype == (norm.dtype or torch.bfloat16)
    assert size(direction.double()) == pytest.approx(1, rel=2e-2)


@pytest.mark.parametrize(
    "norm",
    [ColNorm(), ColNorm(transpose=True), RowNorm(), RowPower(power=0.5), Sign(), Spectral(orthogonalizer=EXACT)],
)
def test_stacks_are_loops(norm: Norm) -> None:
    stack = _gauss(3, 5, 4)
    torch.testing.assert_close(norm.lmo(stack), torch.stack([norm.lmo(g) for g in stack]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("norm", "size", "shape"), PAIRS, ids=IDS)
def test_a_piece_that_has_what_is_needed_gives_the_piece_of_the_whole(
    norm: Norm, size: Any, shape: tuple[int, ...]
) -> None:
    """Cut wherever ``extent`` allows, evenly or not, down to nothing; counts are those of the whole."""
    g = _gauss(*shape)
    whole = norm.lmo(g)
    rows, columns = max(g.ndim - 2, 0), g.ndim - 1
    cuts = {"entry": [rows, columns], "row": [rows], "column": [columns], "matrix": []}[norm.extent]
    for dim in {d for d in cuts if g.ndim}:
        for length in range(shape[dim] + 1):
            pieces = g.split([length, shape[dim] - length], dim)
            found = torch.cat([norm.lmo(piece, shape) for piece in pieces], dim)
            torch.testing.assert_close(found, whole, atol=0, rtol=1e-12)
    torch.testing.assert_close(norm.lmo(g, shape), whole, atol=0, rtol=0)


@pytest.mark.parametrize("norm", [ColNorm(normalized=True, transpose=True), ColNorm(normalized=True), Sign()])
def test_counts_are_of_the_whole_also_in_stacks(norm: Norm) -> None:
    g = _gauss(3, 5, 4)
    dim = {"entry": 2, "row": 1, "column": 2}[norm.extent]
    found = torch.cat([norm.lmo(piece, g.shape) for piece in g.split([1, g.shape[dim] - 1], dim)], dim)
    torch.testing.assert_close(found, norm.lmo(g), atol=0, rtol=1e-12)
    one = norm.lmo(g[:, :1] if dim == 1 else g[..., :1])
    assert (one - (norm.lmo(g)[:, :1] if dim == 1 else norm.lmo(g)[..., :1])).abs().max() > 0.01  # it does matter


@pytest.mark.parametrize(("norm", "size", "shape"), PAIRS, ids=IDS)
def test_initial_weights_have_norm_one(norm: Norm, size: Callable[[Tensor], float], shape: tuple[int, ...]) -> None:
    w = torch.full(shape, 7.0, dtype=torch.float64)
    assert norm.init_(w, torch.Generator().manual_seed(0)) is w
    if isinstance(norm, BiasRMS):
        assert not w.any()
    elif isinstance(norm, SpectralConv):
        for tap in w.flatten(2).unbind(-1):  # every tap is semi-orthogonal, times √(out/in) / taps
            values = torch.linalg.svdvals(tap) * math.prod(shape[2:]) * math.sqrt(shape[1] / shape[0])
            torch.testing.assert_close(values, torch.ones_like(values), atol=1e-10, rtol=0)
    else:
        assert size(w) == pytest.approx(1, rel=1e-6)
    if isinstance(norm, Spectral):
        values = torch.linalg.svdvals(w)
        torch.testing.assert_close(values, values[0].expand_as(values), atol=1e-10, rtol=0)
    again = norm.init_(torch.empty_like(w), torch.Generator().manual_seed(0))
    torch.testing.assert_close(w, again, atol=0, rtol=0)


def test_initial_convolutions_of_any_memory_format() -> None:
    for order in [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]:
        w = torch.zeros(4, 4, 4, 4).permute(order)
        SpectralConv().init_(w, torch.Generator().manual_seed(0))
        expected = SpectralConv().init_(torch.zeros(4, 4, 4, 4), torch.Generator().manual_seed(0))
        torch.testing.assert_close(w, expected, atol=0, rtol=0)


def test_semi_orthogonal_weights_are_uniform() -> None:
    # The entries of a uniform orthogonal matrix have mean 0 and variance 1/n; a QR without its signs has not.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([Spectral().init_(torch.empty(4, 4), generator) for _ in range(2000)])
    assert drawn.mean(0).abs().max() < 5 * 0.5 / math.sqrt(2000)
    assert (drawn.square().mean(0) - 0.25).abs().max() < 0.03


def test_dimension_factors_of_a_4x16_weight() -> None:
    g = _gauss(4, 16)
    lr, scale = 0.1, 3.0
    assert _sigma(lr * scale * Spectral(orthogonalizer=EXACT).lmo(g)) == pytest.approx(0.15)
    assert _sigma(lr * scale * Spectral(orthogonalizer=EXACT, max=True).lmo(g)) == pytest.approx(0.30)
    entries = lr * scale * Sign().lmo(g).abs()
    torch.testing.assert_close(entries, torch.full_like(entries, 0.01875))


def test_auto_chooses_by_dimensions_and_what_cannot_be_is_refused() -> None:
    kinds = [type(make_norm("Auto", ndim)) for ndim in range(5)]
    assert kinds == [BiasRMS, BiasRMS, Spectral, SpectralConv, SpectralConv]
    with pytest.raises(ValueError, match="unknown norm 'Muon'; known are Auto, Spectral"):
        make_norm("Muon", 2)
    with pytest.raises(ValueError, match="'Spectral' needs at least 2 dimensions, got a parameter with 1"):
        make_norm("Spectral", 1)
    with pytest.raises(ValueError, match=r"norm_kwargs of 'Sign'.*stepz"):
        make_norm("Sign", 2, {"stepz": 3})
    with pytest.raises(ValueError, match=r"unknown orthogonaliser 'x'"):
        make_norm("Spectral", 2, {"orthogonalizer": "x"})


def test_every_named_norm_is_covered_here() -> None:
    assert {type(norm) for norm, _, _ in CASES} == set(NORMS.values())
