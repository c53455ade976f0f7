"""Every norm of a weight against closed forms, golden numbers and float64 brute force."""

import math

import pytest
import torch
from golden_data import Case, cases
from torch import Tensor
from truth import layer_values, measured, worst

from scion_telemetry.metrics import norms
from scion_telemetry.metrics.pieces import MatrixShape, as_matrices

EXACT = 1e-7

GOLDEN = cases("norms.npz", op="norms")
COUNTING = torch.arange(1.0, 16.0).view(5, 3)  # Σ x² = 1240, σ₁ from its golden number


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_closed_forms_of_one_to_fifteen() -> None:
    row = measured(COUNTING)
    assert row["weight_frobenius"] == pytest.approx(math.sqrt(1240), rel=1e-14)
    assert row["weight_rms"] == pytest.approx(math.sqrt(1240 / 15), rel=1e-14)
    assert row["weight_max_abs"] == 15
    assert row["weight_nonfinite"] == 0
    assert row["weight_spectral"] == pytest.approx(35.182648, rel=1e-6)
    assert row["weight_rms_to_rms"] == pytest.approx(35.182648 * math.sqrt(3 / 5), rel=1e-6)
    columns, rows = 9 + 36 + 81 + 144 + 225, 169 + 196 + 225
    assert row["weight_l1_to_rms"] == pytest.approx(math.sqrt(columns / 5), rel=1e-14)
    assert row["weight_rms_to_inf"] == pytest.approx(math.sqrt(3 * rows), rel=1e-14)


@pytest.mark.parametrize("case", GOLDEN, ids=repr)
def test_golden_norms(case: Case) -> None:
    x = case.input("W")
    role = "vector" if x.ndim == 1 else "embedding" if case.params["transpose"] else "hidden"
    row = measured(x, role)
    sigma = float(case.output("truth/rms_to_rms"))  # found from below, within the rounding that intervals allow for
    assert sigma * (1 - 1e-5) <= row["weight_rms_to_rms"] <= sigma * (1 + 1e-6)
    for name, column in (("l1_to_rms", EXACT), ("rms_to_inf", EXACT), ("supremum", 1e-12)):
        got = row["weight_max_abs" if name == "supremum" else f"weight_{name}"]
        assert got == pytest.approx(float(case.output(f"truth/{name}")), rel=column), name


SHAPES = {
    "vector": (torch.Size([7]), "vector"),
    "scalar": (torch.Size([]), "vector"),
    "one entry": (torch.Size([1]), "vector"),
    "gain [8, 1, 1]": (torch.Size([8, 1, 1]), "vector"),
    "row [1, 7]": (torch.Size([1, 7]), "head"),
    "column [7, 1]": (torch.Size([7, 1]), "hidden"),
    "embedding": (torch.Size([50, 6]), "embedding"),
    "table as a head": (torch.Size([50, 6]), "head"),
    "experts": (torch.Size([3, 5, 7]), "expert"),
    "one expert": (torch.Size([1, 5, 7]), "expert"),
    "convolution": (torch.Size([8, 4, 3, 3]), "conv"),
    "convolution 1-d": (torch.Size([8, 4, 3]), "conv"),
    "convolution 1-d of one channel": (torch.Size([8, 1, 3]), "conv"),
    "convolution to one channel": (torch.Size([1, 1, 3]), "conv"),
    "more rows than a block": (torch.Size([700, 300]), "hidden"),
}


@pytest.mark.parametrize(("shape", "role"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shapes_and_dtypes_against_brute_force(shape: torch.Size, role: str, dtype: torch.dtype) -> None:
    x = randn(*shape).to(dtype)
    assert worst(measured(x, role), layer_values({"weight": x}, role)) <= EXACT


@pytest.mark.parametrize("entry", [0.037, 0.1, 1 / 3, 3e-4])
@pytest.mark.parametrize("shape", [(300, 320), (700, 300), (17, 640), (1, 8192), (2, 4099)])
def test_entries_of_one_size_whose_roundings_all_go_the_same_way(shape: tuple[int, int], entry: float) -> None:
    """As updates by signs are; here and there, a row of them is zero."""
    x = randn(*shape).sign() * entry
    x[1::3] = 0
    assert worst(measured(x), layer_values({"weight": x}, "hidden")) <= EXACT
    assert worst(measured(x[::3]), layer_values({"weight": x[::3]}, "hidden")) <= EXACT


SCALED = {
    "a size for each row": lambda s, r: s * r.exp(),
    "two halves": lambda s, r: s * torch.where(torch.arange(len(s)) < len(s) // 2, 0.037, 0.011).unsqueeze(1),
    "with zeros": lambda s, r: torch.where(randn(*s.shape, seed=5) < -1.5, 0.0, s * 0.037),
    "a few large ones": lambda s, r: s * (3 * randn(*s.shape, seed=6)).exp(),
    "rows of very different sizes": lambda s, r: randn(*s.shape, seed=7) * (8 * r).exp(),
    "half of the rows tiny": lambda s, r: randn(*s.shape, seed=8) * torch.where(r > 0, 1.0, 1e-25),
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("shape", [(300, 320), (64, 257), (100, 1024), (256, 512)])
def test_roundings_that_do_not_average_out(shape: tuple[int, int], kind: str) -> None:
    x = SCALED[kind](randn(*shape).sign(), randn(shape[0], 1, seed=4))
    for seen in (x, x.T.contiguous().T, x.T):
        assert worst(measured(seen), layer_values({"weight": seen}, "hidden")) <= EXACT


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float64,) * 2])
@pytest.mark.parametrize("n", [1, 1000, 65537, 200_000])
def test_inner_products_within_1e_7_of_both_lengths(n: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    sign = randn(n).sign() * 0.037
    for a, b in ((randn(n), randn(n, seed=1)), (sign, sign), (sign, randn(n)), (randn(n) * 1e-25, randn(n) * 1e-20)):
        x, y = a.to(dtypes[0]), b.to(dtypes[1])
        truth = float((x.double() * y.double()).sum())
        assert abs(float(norms.dot(x, y)) - truth) <= 1e-7 * float(x.double().norm() * y.double().norm())


@pytest.mark.parametrize("size", [1e30, 1e-30, 1.0])
@pytest.mark.parametrize("shape", [(20, 30), (150, 140)], ids=["gram", "lanczos"])
def test_extreme_magnitudes(size: float, shape: tuple[int, int]) -> None:
    x = randn(*shape) * size
    assert worst(measured(x), layer_values({"weight": x}, "hidden")) <= EXACT


@pytest.mark.parametrize("shape", [(9, 4), (140, 150), (6,), (2, 3, 4)])
def test_zeros(shape: tuple[int, ...]) -> None:
    row = measured(torch.zeros(shape), "vector" if len(shape) == 1 else "hidden")
    undefined = {"weight_sigma_ratio", "weight_stable_rank"} & set(row)
    assert all(math.isnan(row.pop(name)) for name in undefined)
    assert len(undefined) == 2 * (len(shape) == 2)
    assert row.pop("weight_zero_share") == 1
    assert row.pop("weight_dead_rows", 1) == 1, "no row is longer than 1 % of the median row"
    assert set(row.values()) == {0.0}


@pytest.mark.parametrize("shape", [(16, 8), (150, 140)], ids=["gram", "lanczos"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_entries_are_findings(shape: tuple[int, int], bad: float) -> None:
    x = randn(*shape)
    x[3, 2] = bad
    row = measured(x)
    assert row["weight_nonfinite"] == 1
    for name in ("spectral", "spectral_upper", "rms_to_rms"):
        assert math.isnan(row[f"weight_{name}"])
    for name in ("rms", "frobenius", "max_abs", "l1_to_rms", "rms_to_inf"):
        assert math.isnan(row[f"weight_{name}"]) if math.isnan(bad) else row[f"weight_{name}"] == math.inf


def test_nan_beside_infinity_counts_both() -> None:
    row = measured(torch.tensor([[1.0, math.nan], [math.inf, -math.inf]]))
    assert row["weight_nonfinite"] == 3
    assert math.isnan(row["weight_max_abs"])


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 5, 6)])
def test_an_empty_piece_is_neutral(shape: tuple[int, ...]) -> None:
    piece = torch.empty(shape)
    x = as_matrices(piece, MatrixShape.of((8, *shape[1:]) if shape[0] == 0 else shape, "hidden"))
    found = norms.measure([x], frozenset((*norms.WHOLE, *norms.VECTORS)))
    assert float(found.pop("largest")) == -math.inf
    assert float(found.pop("pieces")) == 1
    assert found["row_squares"].numel() == x.size(0) * x.size(1)
    assert found["column_squares"].numel() == x.size(0) * x.size(2)
    assert all(float(values.sum()) == 0 for values in found.values())


def test_measuring_leaves_float64_weights_alone() -> None:
    x = randn(5, 3).double()
    before = x.clone()
    measured(x)
    assert torch.equal(x, before)


def test_shape_factors_are_not_rounded_in_the_dtype_of_the_weight() -> None:
    x = randn(4097, 10).bfloat16()  # 4097 is 4096 in bfloat16
    row = measured(x)
    assert row["weight_l1_to_rms"] == pytest.approx(float(x.double().norm(dim=0).max()) / math.sqrt(4097), rel=1e-13)
