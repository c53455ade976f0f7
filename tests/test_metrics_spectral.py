"""σ₁ and its interval: every kind of matrix from a cold start, whole and in pieces, and a drifting one kept warm."""

import math

import pytest
import torch
from torch import Tensor

from scion_telemetry.metrics import spectral
from scion_telemetry.metrics.spectral import Estimate, Krylov
from scion_telemetry.optim.orthogonalize import make_orthogonalizer

ROUNDING = 1e-12


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(n: int, k: int, seed: int) -> Tensor:
    return torch.linalg.qr(randn(n, k, seed=seed).double()).Q


def with_spectrum(rows: int, columns: int, sigma: Tensor, seed: int = 1) -> Tensor:
    k = len(sigma)
    return ((orthogonal(rows, k, seed) * sigma.double()) @ orthogonal(columns, k, seed + 1).mT).float()


def truth(w: Tensor) -> float:
    return float(torch.linalg.svdvals(w.double())[0]) if w.numel() else 0.0


def holds(found: Estimate, sigma: float, *, within: float = 0.01) -> None:
    assert float(found.lower) <= sigma * (1 + ROUNDING)
    assert float(found.upper) >= sigma * (1 - ROUNDING)
    assert float(found.lower) >= sigma * (1 - within)


def newton_schulz(rows: int, columns: int) -> Tensor:
    return make_orthogonalizer("dion_ns5")(randn(rows, columns, seed=3), epsilon=1e-7).float()


MATRICES = {
    "gaussian": randn(300, 300),
    "gaussian tall": randn(700, 150),
    "gaussian wide": randn(150, 700),
    "low rank": randn(256, 8) @ randn(8, 200, seed=1) + 0.01 * randn(256, 200, seed=2),
    "power law": with_spectrum(200, 180, torch.arange(1, 181) ** -1.0),
    "slow power law": with_spectrum(200, 180, torch.arange(1, 181) ** -0.3),
    "orthogonal": orthogonal(200, 200, 5).float(),
    "semi-orthogonal": orthogonal(400, 160, 5).float(),
    "newton-schulz": newton_schulz(256, 192),
    "two equal leaders": with_spectrum(200, 180, torch.cat([torch.tensor([3.0, 3.0]), torch.ones(178)])),
    "rank 1": torch.outer(randn(200), randn(190, seed=1)),
    "ill-conditioned": with_spectrum(200, 180, torch.logspace(0, -12, 180)),
    "one large entry": torch.zeros(150, 150).index_put((torch.tensor(7), torch.tensor(9)), torch.tensor(4.0)),
    "nilpotent": torch.diag(torch.ones(149), 1),
    "zero": torch.zeros(140, 150),
    "small gaussian": randn(40, 64),
    "small nilpotent": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
    "small zero": torch.zeros(3, 5),
    "row": randn(1, 300),
    "column": randn(300, 1),
    "one entry": torch.tensor([[-3.0]]),
}


@pytest.mark.parametrize("w", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cold_start_of_a_whole_matrix(w: Tensor, seed: int) -> None:
    holds(spectral.largest_singular_value(w, seed=seed), truth(w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(60, 50), (200, 150)], ids=["gram", "lanczos"])
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    w = randn(*shape).to(dtype)
    holds(spectral.largest_singular_value(w), truth(w))


def test_small_matrices_are_exact() -> None:
    w = randn(128, 500)
    assert float(spectral.largest_singular_value(w).lower) == pytest.approx(truth(w), rel=1e-13)


def pieces(w: Tensor, row_cuts: list[int], column_cuts: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every block of a grid, with its row and column indices."""
    rows = torch.arange(w.size(0)).split(row_cuts)
    columns = torch.arange(w.size(1)).split(column_cuts)
    return [(w[r][:, c], r, c) for r in rows for c in columns]


def in_pieces(
    w: Tensor, row_cuts: list[int], column_cuts: list[int], *, steps: int = spectral.COLD_STEPS, seed: int = 0
) -> Estimate:
    """The recurrence that ranks run together: one problem a piece, sums taken over all of them."""
    both = len(row_cuts) > 1 and len(column_cuts) > 1
    width = min(spectral.BLOCK, w.size(1))
    start = spectral.random_start(w.size(1), width, torch.Generator().manual_seed(seed), w.device)
    problems = [
        Krylov(
            piece=block,
            place=columns,
            rows=(rows, w.size(0)) if both else None,
            start=start,
            squares=w.double().square().sum(),
        )
        for block, rows, columns in pieces(w, row_cuts, column_cuts)
    ]

    def total(t: Tensor) -> Tensor:  # what a sum over ranks gives to each of them
        parts = t.view(len(problems), -1)
        return parts.sum(dim=0).repeat(len(problems))

    spectral.run(problems, steps=steps, total=total)
    estimates = [p.estimate() for p in problems]
    for other in estimates[1:]:
        assert torch.equal(other.lower, estimates[0].lower)
    return estimates[0]


def rows_in_two(w: Tensor) -> tuple[list[int], list[int]]:
    first = w.size(0) // 3 + 1
    return [first, w.size(0) - first], [w.size(1)]


@pytest.mark.parametrize("w", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("seed", range(5))
def test_cold_start_in_row_pieces(w: Tensor, seed: int) -> None:
    holds(in_pieces(w, *rows_in_two(w), seed=seed), truth(w))


@pytest.mark.parametrize("name", ["gaussian", "power law", "newton-schulz", "small gaussian", "rank 1"])
def test_cold_start_in_blocks(name: str) -> None:
    w = MATRICES[name]
    row_cuts, _ = rows_in_two(w)
    holds(in_pieces(w, row_cuts, [10, w.size(1) - 10]), truth(w))


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-38, 1e-42, 1e-44])
def test_extreme_magnitudes_in_pieces(size: float) -> None:
    """Down to the last float32 there is: momenta of dead parameters decay to where products round to nothing."""
    w = randn(150, 140) * size
    holds(in_pieces(w, [50, 100], [140]), truth(w), within=0.01 if size >= 1e-38 else math.inf)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("leaning", [1.0, 1e-3, 1e-6, 0.0])
def test_more_steps_than_dimensions_invent_nothing(columns: int, leaning: float) -> None:
    """The Krylov space is used up before the steps are; what rounding leaves must not become a new direction."""
    for seed in range(10):
        w = with_spectrum(9, columns, torch.logspace(0, -6, columns), seed=seed)
        v = torch.linalg.svd(w.double()).Vh
        start = (v[-1] + leaning * v[0]).float().unsqueeze(1)  # hardly leans on the leading vector
        problem = Krylov(piece=w, place=None, rows=None, start=start, squares=w.double().square().sum())
        spectral.run([problem], steps=20, total=lambda t: t)
        found = problem.estimate()
        holds(found, truth(w), within=math.inf if columns > 1 else 1e-5)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8])
def test_the_interval_closes_when_the_space_is_used_up(columns: int) -> None:
    for seed in range(5):
        w = randn(9, columns, seed=seed)
        assert float(in_pieces(w, [4, 5], [columns], seed=seed).upper) <= truth(w) * (1 + 1e-5)


def warm_errors(matrices: list[Tensor]) -> list[float]:
    """Relative errors of a cold first estimate and 4-step warm ones; every interval is checked."""
    generator = torch.Generator().manual_seed(0)
    start = spectral.random_start(matrices[0].size(1), spectral.BLOCK, generator, torch.device("cpu"))
    errors = []
    for i, w in enumerate(matrices):
        problem = Krylov(piece=w, place=None, rows=None, start=start, squares=w.double().square().sum())
        steps = spectral.WARM_STEPS if i else spectral.COLD_STEPS
        spectral.run([problem], steps=steps, total=lambda t: t)
        found, sigma = problem.estimate(), truth(w)
        holds(found, sigma, within=math.inf)
        errors.append(1 - float(found.lower) / sigma)
        start = problem.next_start(generator)
    return errors


def check_warm(errors: list[float]) -> None:
    assert max(errors) <= 0.01
    assert max(errors[3:]) <= 0.005


def test_a_drifting_weight_stays_within_one_percent() -> None:
    w, matrices = randn(160, 140, seed=9) / 20, []
    for step in range(100):  # every update orthogonal, as a spectral optimizer's is
        update = make_orthogonalizer("svd")(randn(160, 140, seed=100 + step % 7) + randn(160, 140, seed=step))
        w = w - 0.02 * update
        matrices.append(w)
    check_warm(warm_errors(matrices))


def test_leaders_that_cross_are_followed() -> None:
    u, v, rest = orthogonal(160, 2, 1), orthogonal(140, 2, 2), randn(160, 140, seed=3).double() / 40
    matrices = []
    for step in range(100):
        leaders = torch.tensor([2.0 - step / 100, 1.0 + step / 100], dtype=torch.float64)  # they meet at step 50
        matrices.append(((u * leaders) @ v.mT + rest).float())
    check_warm(warm_errors(matrices))


def test_a_matrix_that_leaves_zero_is_found() -> None:
    w = randn(160, 140)
    errors = warm_errors([torch.zeros(160, 140) + 1e-3 * torch.outer(w[:, 0], w[0]), *([w] * 8)])
    assert errors[-1] <= 0.01
