"""Scores, k and the deterministic top-k of Dion2."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scion_telemetry.optim import Dion2
from scion_telemetry.optim.selection import l1_scores, put_, selected_count, selection_dim, take, top_k

NAN = float("nan")


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 10_000), st.integers(1, 1000))
def test_k_is_the_ceiling_of_the_decimal_fraction(n: int, thousandths: int) -> None:
    """0.07 of 100 is 7, though 0.07 * 100 is 7.000000000000001 in binary."""
    exact = math.ceil(Fraction(thousandths, 1000) * n)
    assert selected_count(thousandths / 1000, n) == max(1, exact)


@pytest.mark.parametrize(
    ("fraction", "n", "k"),
    [(0.35, 17, 6), (0.25, 1, 1), (1e-9, 50, 1), (1, 9, 9), (1.0, 9, 9), (0.5, 0, 0), (1 / 3, 3, 1), (0.34, 3, 2)],
)
def test_k_rules(fraction: float, n: int, k: int) -> None:
    assert selected_count(fraction, n) == k


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, "a", None, NAN])
def test_fractions_out_of_range_are_refused(fraction: object) -> None:
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got"):
        Dion2([torch.nn.Parameter(torch.ones(2, 2))], fraction=fraction)  # type: ignore[arg-type]


def test_scores_are_l1_norms_in_float32() -> None:
    w = torch.arange(1.0, 16.0).view(5, 3)
    assert l1_scores(w, -2).tolist() == [6, 15, 24, 33, 42]
    assert l1_scores(-w, -1).tolist() == [35, 40, 45]
    assert l1_scores(torch.zeros(0, 3), -2).tolist() == []
    assert l1_scores(torch.zeros(0, 3), -1).tolist() == [0, 0, 0]
    assert l1_scores(w.double(), -2).dtype == l1_scores(w.bfloat16(), -2).dtype == torch.float32


def test_bfloat16_rows_do_not_saturate() -> None:
    momentum = torch.zeros(2, 5120, dtype=torch.bfloat16)
    momentum[0, :400] = 1
    momentum[1] = 1
    scores = l1_scores(momentum, -2)
    assert scores.tolist() == [400, 5120]
    assert top_k(scores, 1).tolist() == [1]


@pytest.mark.parametrize(
    ("scores", "k", "expected"),
    [
        ([1.0, 3.0, 2.0], 2, [1, 2]),  # ascending indices, not by score
        ([5.0, 5.0, 5.0, 5.0], 2, [0, 1]),
        ([1.0, 2.0, 2.0, 2.0], 2, [1, 2]),
        ([0.0, 0.0], 1, [0]),
        ([1.0, NAN, 9.0], 1, [1]),  # a poisoned row is selected and shows
        ([float("inf"), NAN, NAN], 2, [1, 2]),
        ([1.0, float("inf"), 2.0], 1, [1]),
        ([1.0, 2.0], 2, [0, 1]),
        ([], 0, []),
    ],
)
def test_top_k(scores: list[float], k: int, expected: list[int]) -> None:
    assert top_k(torch.tensor(scores), k).tolist() == expected


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(0, 6))
def test_top_k_against_a_sorted_list(rows: list[list[int]], k: int) -> None:
    expected = [sorted(sorted(range(6), key=lambda i, r=row: (-r[i], i))[:k]) for row in rows]
    assert top_k(torch.tensor(rows, dtype=torch.float32), k).tolist() == expected


@pytest.mark.parametrize(
    ("rows", "columns", "rows_cut", "columns_cut", "dim"),
    [
        (4, 8, False, False, -2),
        (8, 8, False, False, -2),
        (8, 4, False, False, -1),
        (8, 4, True, False, -2),
        (4, 8, True, False, -2),
        (4, 8, False, True, -1),
        (8, 8, False, True, -1),
        (8, 4, False, True, -1),
        (4, 8, True, True, -2),
        (8, 8, True, True, -2),
        (8, 4, True, True, -1),
    ],
)
def test_the_side_that_is_cut_is_selected_or_else_the_shorter_one(
    rows: int, columns: int, rows_cut: bool, columns_cut: bool, dim: int
) -> None:
    assert selection_dim(rows, columns, rows_cut=rows_cut, columns_cut=columns_cut) == dim


@pytest.mark.parametrize("choice", ["rows", "cols"])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_the_side_that_the_user_names_is_selected(choice: str, shape: tuple[int, int]) -> None:
    param = torch.nn.Parameter(torch.zeros(shape))
    param.grad = torch.arange(1.0, 25.0).view(shape)
    optimizer = Dion2([param], fraction=0.5, weight_decay=0.0, select_dim=choice)
    optimizer.step()
    moved = param.detach() != 0
    assert optimizer.facts(param).select_dim == (-2 if choice == "rows" else -1)
    lines = moved.any(1) if choice == "rows" else moved.any(0)
    assert lines.tolist() == [i >= len(lines) - len(lines) // 2 for i in range(len(lines))]  # the largest
    with pytest.raises(ValueError, match="select_dim must be 'auto' or 'rows' or 'cols', got 'columns'"):
        Dion2([param], select_dim="columns")


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("shape", [(5, 6), (3, 5, 6), (2, 3, 5, 6)])
def test_take_and_put_are_loops_over_stacks(dim: int, shape: tuple[int, ...]) -> None:
    x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    kept = x.clone()
    generator = torch.Generator().manual_seed(0)
    n = shape[dim]
    indices = torch.stack([torch.randperm(n, generator=generator)[:2] for _ in range(math.prod(shape[:-2]))])
    indices = indices.sort(-1).values.view(*shape[:-2], 2)
    taken = take(x, indices, dim)
    flat = zip(x.view(-1, *shape[-2:]), indices.view(-1, 2), strict=True)
    expected = torch.stack([_pick(m, i, dim) for m, i in flat]).view(taken.shape)
    torch.testing.assert_close(taken, expected, atol=0, rtol=0)
    taken.zero_()
    torch.testing.assert_close(x, kept, atol=0, rtol=0)  # a copy
    assert put_(x, indices, dim, -take(x, indices, dim)) is x
    torch.testing.assert_close(take(x, indices, dim), -expected, atol=0, rtol=0)
    rest = (x != kept).sum().item()
    assert rest == (expected != 0).sum().item()  # nothing else was written


def _pick(matrix: Tensor, indices: Tensor, dim: int) -> Tensor:
    return matrix[indices] if dim == -2 else matrix[:, indices]


def test_each_matrix_of_a_stack_selects_for_itself() -> None:
    """(4, 8, 16) at a quarter: 2 rows of every expert, and the same step as four separate matrices."""
    stack = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
    one = torch.nn.Parameter(stack.clone())
    many = [torch.nn.Parameter(m.clone()) for m in stack]
    one.grad = gradient.clone()
    for p, g in zip(many, gradient, strict=True):
        p.grad = g.clone()
    optimizer = Dion2([one], fraction=0.25)
    seen: list[Tensor] = []
    optimizer.register_step_observer(lambda event: seen.append(event.selections[0].indices.clone()))
    optimizer.step()
    Dion2(many, fraction=0.25).step()
    assert seen[0].shape == (4, 2)
    assert len({tuple(i) for i in seen[0].tolist()}) > 1
    torch.testing.assert_close(one.detach(), torch.stack([p.detach() for p in many]), atol=1e-6, rtol=0)
