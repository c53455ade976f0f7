"""σ₁, its interval and σ₂: matrices of all kinds from a cold start, whole and in pieces, drifting ones kept warm."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.metrics import krylov, spectral
from scion_telemetry.metrics.spectral import Problem, Solved
from scion_telemetry.optim.orthogonalize import make_orthogonalizer
from scion_telemetry.testing import run_threads

ROUNDING = 1e-12


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(n: int, k: int, seed: int) -> Tensor:
    q: Tensor = torch.linalg.qr(randn(n, k, seed=seed).double()).Q
    return q


def with_spectrum(rows: int, columns: int, sigma: Tensor, seed: int = 1) -> Tensor:
    k = len(sigma)
    return ((orthogonal(rows, k, seed) * sigma.double()) @ orthogonal(columns, k, seed + 1).mT).float()


def truth(w: Tensor) -> float:
    return float(torch.linalg.svdvals(w.double())[0]) if w.numel() else 0.0


Found = tuple[Tensor, Tensor, Tensor]
"""σ₁ from below and above, σ₂ from below."""


def holds(found: Found, w: Tensor, *, within: float = 0.01) -> None:
    sigma = truths(w)
    lower, upper, second = (float(t) for t in found)
    assert lower <= sigma[0] * (1 + ROUNDING)
    assert upper >= sigma[0] * (1 - ROUNDING)
    assert lower >= sigma[0] * (1 - within)
    assert 0 <= second <= sigma[1] * (1 + ROUNDING)


def truths(w: Tensor) -> list[float]:
    """The two largest singular values; zeros for what is not there."""
    known: list[float] = torch.linalg.svdvals(w.double()).tolist() if w.numel() else []
    return [*known, 0.0, 0.0][:2]


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


def whole(w: Tensor, seed: int = 0) -> Found:
    lower, upper, second = spectral.solve_whole([w], seeds=[seed])
    return lower[0], upper[0], second[0]


@pytest.mark.parametrize("w", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cold_start_of_a_whole_matrix(w: Tensor, seed: int) -> None:
    holds(whole(w, seed), w)


def test_many_whole_matrices_at_once_are_as_one_by_one() -> None:
    matrices = list(MATRICES.values())
    lower, upper, second = spectral.solve_whole(matrices, seeds=range(len(matrices)))
    for i, w in enumerate(matrices):
        holds((lower[i], upper[i], second[i]), w)
        torch.testing.assert_close(lower[i], whole(w, i)[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(60, 50), (200, 150), (150, 200)], ids=["gram", "tall", "wide"])
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    w = randn(*shape).to(dtype)
    holds(whole(w), w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
def test_matrices_that_are_read_in_chunks(dtype: torch.dtype, wide: bool) -> None:
    w = (randn(2500, 260) * torch.linspace(1, 3, 260)).to(dtype)
    assert w.numel() > 2 * krylov.CHUNK
    w = w.mT if wide else w
    holds(whole(w), w)
    holds(whole(w.contiguous()), w)


@pytest.mark.parametrize(("columns", "error"), [(40, 1e-13), (500, 8e-6)])
def test_small_matrices_are_exact(columns: int, error: float) -> None:
    w = randn(spectral.EXACT_SIZE, columns)
    lower, upper, second = map(float, whole(w))
    truth = truths(w)
    assert lower == pytest.approx(truth[0], rel=error)
    assert upper == pytest.approx(truth[0], rel=1e-5)
    assert second == pytest.approx(truth[1], rel=error)
    assert lower * (1 - 1e-13) <= truth[0] <= upper


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_has_no_length(shape: tuple[int, int]) -> None:
    assert [float(t) for t in whole(torch.empty(shape))] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("shape", [(30, 20), (150, 140)], ids=["gram", "krylov"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_gives_nan_and_leaves_its_neighbours_alone(shape: tuple[int, int], bad: float) -> None:
    good, broken = randn(*shape), randn(*shape)
    broken[3, 4] = bad
    lower, upper, second = spectral.solve_whole([broken, good, broken], seeds=[0, 1, 2])
    for found in (lower, upper, second):
        assert found.isnan().tolist() == [True, False, True]
    holds((lower[1], upper[1], second[1]), good)


@pytest.mark.parametrize("size", [1e30, 1e-30])
@pytest.mark.parametrize("shape", [(30, 20), (150, 140)], ids=["gram", "krylov"])
def test_extreme_magnitudes_of_a_whole_matrix(size: float, shape: tuple[int, int]) -> None:
    w = randn(*shape) * size
    holds(whole(w), w)


@pytest.mark.parametrize("size", [1.0, 1e25, 1e-25, 1e-42, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_of_squares_in_any_range(size: float, dtype: torch.dtype) -> None:
    w = (randn(70, 300) * size).to(dtype)
    torch.testing.assert_close(spectral.sum_of_squares(w), w.double().square().sum(), rtol=1e-7, atol=0)


def pieces(w: Tensor, row_cuts: list[int], column_cuts: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every block of a grid, with its row and column indices."""
    rows = torch.split_with_sizes(torch.arange(w.size(0)), row_cuts)
    columns = torch.split_with_sizes(torch.arange(w.size(1)), column_cuts)
    return [(w[r][:, c], r, c) for r in rows for c in columns]


def in_pieces(
    w: Tensor, row_cuts: list[int], column_cuts: list[int], *, steps: int = spectral.COLD_STEPS, seed: int = 0
) -> Found:
    """The recurrence that ranks run together: one problem a piece, sums taken over all of them."""
    both = len(row_cuts) > 1 and len(column_cuts) > 1
    width = min(spectral.BLOCK, w.size(1))
    start = spectral.random_start(w.size(1), width, torch.Generator().manual_seed(seed), w.device)
    problems = [
        Problem(
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

    solved = solve(problems, steps, total)
    for other in solved.lower[1:]:
        assert torch.equal(other, solved.lower[0])
    return first(solved)


def solve(problems: list[Problem], steps: int, total: spectral.Sum = lambda t: t) -> Solved:
    return spectral.solve(problems, steps=steps, total=total, generator=torch.Generator().manual_seed(0))


def first(solved: Solved) -> Found:
    return solved.lower[0], solved.upper[0], solved.second[0]


def rows_in_two(w: Tensor) -> tuple[list[int], list[int]]:
    first = w.size(0) // 3 + 1
    return [first, w.size(0) - first], [w.size(1)]


@pytest.mark.parametrize("w", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("seed", range(5))
def test_cold_start_in_row_pieces(w: Tensor, seed: int) -> None:
    holds(in_pieces(w, *rows_in_two(w), seed=seed), w)


@pytest.mark.parametrize("name", ["gaussian", "power law", "newton-schulz", "small gaussian", "rank 1"])
def test_cold_start_in_blocks(name: str) -> None:
    w = MATRICES[name]
    row_cuts, _ = rows_in_two(w)
    holds(in_pieces(w, row_cuts, [10, w.size(1) - 10]), w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ranks_that_hold_nothing(dtype: torch.dtype) -> None:
    w = randn(150, 140).to(dtype)
    holds(in_pieces(w, [0, 150, 0], [140]), w)
    holds(in_pieces(w, [150], [0, 140, 0]), w)
    holds(in_pieces(w, [0, 150], [140, 0]), w)


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-38, 1e-42, 1e-44])
def test_extreme_magnitudes_in_pieces(size: float) -> None:
    """Down to the last float32 there is: momenta of dead parameters decay to where products round to nothing."""
    w = randn(150, 140) * size
    holds(in_pieces(w, [50, 100], [140]), w, within=0.01 if size >= 1e-38 else math.inf)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("leaning", [1.0, 1e-3, 1e-6, 0.0])
def test_more_steps_than_dimensions_invent_nothing(columns: int, leaning: float) -> None:
    """The Krylov space is used up before the steps are; what rounding leaves must not become a new direction."""
    for seed in range(10):
        w = with_spectrum(9, columns, torch.logspace(0, -6, columns), seed=seed)
        v = torch.linalg.svd(w.double()).Vh
        start = (v[-1] + leaning * v[0]).float().unsqueeze(1)  # hardly leans on the leading vector
        found = first(solve([alone(w, start)], 20))
        holds(found, w, within=math.inf if columns > 1 else 1e-5)


def alone(w: Tensor, start: Tensor) -> Problem:
    return Problem(piece=w, place=None, rows=None, start=start, squares=w.double().square().sum())


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8])
def test_the_interval_closes_when_the_space_is_used_up(columns: int) -> None:
    for seed in range(5):
        w = randn(9, columns, seed=seed)
        assert float(in_pieces(w, [4, 5], [columns], seed=seed)[1]) <= truths(w)[0] * (1 + 1e-5)


def warm_errors(matrices: list[Tensor], since: int = 10) -> list[float]:
    """Relative errors of a cold first estimate and of warm ones; every interval is checked."""
    generator = torch.Generator().manual_seed(0)
    start = spectral.random_start(matrices[0].size(1), spectral.BLOCK, generator, torch.device("cpu"))
    errors = []
    for i, w in enumerate(matrices):
        steps = spectral.steps_for(warm=i > 0, since=since)
        solved = spectral.solve([alone(w, start)], steps=steps, total=lambda t: t, generator=generator)
        holds(first(solved), w, within=math.inf)
        errors.append(1 - float(solved.lower[0]) / truths(w)[0])
        start = solved.starts[0]
    return errors


def check_warm(errors: list[float]) -> None:
    assert max(errors) <= 0.01
    assert max(errors[3:]) <= 0.005


def test_steps_depend_on_time_alone() -> None:
    assert [spectral.steps_for(warm=True, since=s) for s in (1, 2, 3, 5, 6, 1000)] == [2, 2, 3, 3, 4, 4]
    assert {spectral.steps_for(warm=False, since=s) for s in (0, 1, 1000)} == {spectral.COLD_STEPS}


@pytest.mark.parametrize("since", [1, 5, 10])
def test_a_drifting_weight_stays_within_one_percent(since: int) -> None:
    w, matrices = randn(160, 140, seed=9) / 20, []
    for step in range(60):  # every update orthogonal, as a spectral optimizer's is
        update = make_orthogonalizer("svd")(
            randn(160, 140, seed=100 + step % 7) + randn(160, 140, seed=step), epsilon=1e-7
        )
        w = w - 0.002 * since * update
        matrices.append(w)
    check_warm(warm_errors(matrices, since))


@pytest.mark.parametrize("since", [1, 5, 10])
def test_leaders_that_cross_are_followed(since: int) -> None:
    u, v, rest = orthogonal(160, 2, 1), orthogonal(140, 2, 2), randn(160, 140, seed=3).double() / 40
    matrices = []
    for step in range(100):
        leaders = torch.tensor([2.0 - step / 100, 1.0 + step / 100], dtype=torch.float64)  # they meet at step 50
        matrices.append(((u * leaders) @ v.mT + rest).float())
    check_warm(warm_errors(matrices, since))


@pytest.mark.parametrize("since", [1, 5, 10])
def test_a_leader_out_of_the_crowd_is_found(since: int) -> None:
    """It starts far below what the block follows, so that only the random vector of each start can meet it."""
    u, v, rest = orthogonal(160, 1, 1), orthogonal(140, 1, 2), randn(160, 140, seed=3).double() / 40
    check_warm(warm_errors([(step / 40 * u @ v.mT + rest).float() for step in range(60)], since))


def test_a_matrix_that_leaves_zero_is_found() -> None:
    w = randn(160, 140)
    errors = warm_errors([torch.zeros(160, 140) + 1e-3 * torch.outer(w[:, 0], w[0]), *([w] * 8)])
    assert errors[-1] <= 0.01


def test_a_matrix_that_was_broken_is_found_again() -> None:
    w = randn(160, 140)
    start = spectral.random_start(140, 8, torch.Generator().manual_seed(0), torch.device("cpu"))
    solved = solve([alone(w * math.nan, start), alone(w, start), alone(w * 0, start)], 4)
    assert solved.lower.isnan().tolist() == solved.upper.isnan().tolist() == [True, False, False]
    assert all(s.shape == (140, 8) and bool(s.isfinite().all()) for s in solved.starts)
    assert all(int(torch.linalg.matrix_rank(s)) == 8 for s in solved.starts)
    again = solve([alone(w, s) for s in solved.starts], 8)
    for i in range(3):
        holds((again.lower[i], again.upper[i], again.second[i]), w)


@pytest.mark.parametrize("name", ["gaussian", "power law", "newton-schulz", "two equal leaders"])
def test_the_second_value_is_close_too(name: str) -> None:
    w = MATRICES[name]
    assert float(in_pieces(w, *rows_in_two(w))[2]) >= 0.97 * truths(w)[1]
    assert float(whole(w)[2]) >= 0.97 * truths(w)[1]


@pytest.mark.parametrize("name", ["rank 1", "zero", "row", "column", "one entry"])
def test_there_is_no_second_value_where_there_is_one_direction(name: str) -> None:
    w = MATRICES[name]
    assert float(in_pieces(w, [1, w.size(0) - 1], [w.size(1)])[2]) == 0
    assert float(whole(w)[2]) == 0


# ---------------------------------------------------------------------- scaled, and many at once


def row_normalised(w: Tensor) -> tuple[Tensor, Tensor]:
    scale = w.double().norm(dim=1).reciprocal().float()
    return scale, scale.double().unsqueeze(1) * w.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-30])
@pytest.mark.parametrize("cut", ["rows", "columns", "both", "chunks"])
def test_a_scaled_matrix_is_not_copied(dtype: torch.dtype, size: float, cut: str) -> None:
    shape = (2300, 240) if cut == "chunks" else (150, 140)
    w = (randn(*shape) * torch.logspace(-2, 2, shape[0]).unsqueeze(1) * size).to(dtype)
    scale, scaled = row_normalised(w)
    squares = scaled.square().sum()
    a, b = shape[0] // 3, shape[1] // 4
    problems = []
    for r in (slice(0, a), slice(a, None)) if cut != "columns" else (slice(None),):
        for c in (slice(0, b), slice(b, None)) if cut in ("columns", "both") else (slice(None),):
            rows, columns = torch.arange(shape[0])[r], torch.arange(shape[1])[c]
            flip = cut == "columns"
            size_ = shape[0] if flip else shape[1]
            start = spectral.random_start(size_, 8, torch.Generator().manual_seed(0), w.device)
            problems.append(
                Problem(
                    piece=w[r, c].mT if flip else w[r, c],
                    place=rows if flip else columns,
                    rows=(rows, shape[0]) if cut == "both" else None,
                    start=start,
                    squares=squares,
                    row_scale=None if flip else scale[r],
                    column_scale=scale[r] if flip else None,
                )
            )
    count = len(problems)
    solved = solve(problems, spectral.COLD_STEPS, lambda t: t.view(count, -1).sum(dim=0).repeat(count))
    holds(first(solved), scaled)


CUTS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_solve_many_matrices_with_one_sum_a_step(world: int) -> None:
    """Uneven and empty pieces, every cut, every size and several dtypes in one go: the same on all ranks, and true."""
    names = [
        "gaussian",
        "gaussian wide",
        "power law",
        "small gaussian",
        "row",
        "one entry",
        "zero",
        "column",
        "nilpotent",
    ]
    cases = [(name, cut) for name in names for cut in CUTS]
    cases += [("broken", cut) for cut in CUTS]
    matrices = MATRICES | {"broken": torch.full((150, 140), math.nan)}

    def one(rank: int, name: str, cut: str) -> Problem:
        w = matrices[name].to(torch.bfloat16 if name == "gaussian" else torch.float32)
        of_rows, of_columns = CUTS[cut]
        # A grid over ranks where both sides are cut is a diagonal here: rank r holds some rows of some columns.
        blocks = [(r, c) for r in range(world if of_rows else 1) for c in range(world if of_columns else 1)]
        mine = [b for i, b in enumerate(blocks) if i % world == rank]
        rows = torch.arange(w.size(0)).tensor_split(world if of_rows else 1)
        columns = torch.arange(w.size(1)).tensor_split(world if of_columns else 1)
        flip = of_columns and not of_rows
        n = w.size(0) if flip else w.size(1)
        start = spectral.random_start(n, min(8, n), torch.Generator().manual_seed(7), w.device)
        squares = w.double().square().sum()
        r, c = (rows[mine[0][0]], columns[mine[0][1]])
        if cut == "both" and world > 1:  # one piece a rank: take all rows of the rank's columns, cut again by rows
            r, c = torch.arange(w.size(0)), columns[rank]
            r = torch.cat([r[rank:], r[:rank]])  # in any order
        piece = w[r][:, c]
        return Problem(
            piece=piece.mT if flip else piece,
            place=r if flip else c,
            rows=(r, w.size(0)) if cut == "both" else None,
            start=start,
            squares=squares,
        )

    def run(rank: int, world: int) -> tuple[Solved, int]:
        calls = 0

        def total(t: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            dist.all_reduce(t)
            return t

        solved = solve([one(rank, name, cut) for name, cut in cases], spectral.COLD_STEPS, total)
        return solved, calls

    results = run_threads(run, world)
    for solved, calls in results:
        assert calls == 2 * spectral.COLD_STEPS
        torch.testing.assert_close(solved.lower, results[0][0].lower, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(solved.starts, results[0][0].starts, strict=True):
            assert torch.equal(a, b)
    solved = results[0][0]
    for i, (name, _) in enumerate(cases):
        if name == "broken":
            assert all(t[i].isnan() for t in (solved.lower, solved.upper, solved.second))
        else:
            w = matrices[name].to(torch.bfloat16 if name == "gaussian" else torch.float32)
            holds((solved.lower[i], solved.upper[i], solved.second[i]), w)


def test_no_matrices_are_no_work() -> None:
    solved = solve([], 4)
    assert solved.lower.shape == solved.upper.shape == solved.second.shape == (0,)
    assert solved.starts == []
    assert [t.shape for t in spectral.solve_whole([], seeds=[])] == [(0,)] * 3


@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e38])
def test_entries_at_the_ends_of_float32(scale: float) -> None:
    """The factor that brings subnormal entries into range must not be infinite itself."""
    w = (randn(70, 80).clamp(-3, 3) * scale).float()
    lower, upper, _ = map(float, whole(w))
    assert lower <= truth(w) * (1 + ROUNDING)
    assert truth(w) <= upper * (1 + ROUNDING)
    assert lower == pytest.approx(truth(w), rel=1e-5)
