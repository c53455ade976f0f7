"""Reported mistakes in the numerics of norms, spectra and distributions."""

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tracked import gauss, named, rms, rows

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2
from scion_telemetry.rows import Histogram
from scion_telemetry.sinks import MemorySink

ROW_NORMS = ["weight_row_norms"]


def measured(metrics: Any = "full", **params: Tensor) -> MemorySink:
    """One step of length 0; gradients are the weights where these are finite."""
    model, sink = named(**params), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for p in model.values():
        p.grad = p.detach().nan_to_num(1.0, 1.0, 1.0)  # 0 times an infinity is NaN
    with Tracker(model, optimizer, schedule=every(1), metrics=metrics, sinks=[sink]):
        optimizer.step()
    assert all(not p.requires_grad or p.dtype == params[n].dtype for n, p in model.items())
    return sink


def histogram(sink: MemorySink, param: str) -> Histogram:
    (found,) = [h for h in sink.histograms if h.param == param]
    return found


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_c28_c29_one_entry_that_is_not_finite(bad: float) -> None:
    """Training goes on at once; the healthy layer is as alone; σ₁ of the other one is NaN, its entry is counted."""
    broken, ones = gauss(16, 8), torch.ones(3, 3)
    broken[5, 3] = ones[1, 1] = bad
    start = time.monotonic()
    found = rows(measured(broken=broken, ones=ones, healthy=gauss(16, 8, seed=1)))
    assert time.monotonic() - start < 2
    for name in ("broken", "ones"):
        row = found[1, name]
        assert (row["weight_nonfinite"], row["grad_nonfinite"]) == (1, 0)
        assert math.isnan(row["weight_spectral"])
        assert math.isnan(row["weight_rms_to_rms"])
        for column in ("weight_frobenius", "weight_max_abs"):
            assert math.isnan(row[column]) if math.isnan(bad) else row[column] == math.inf
    truth = rows(measured(healthy=gauss(16, 8, seed=1)))[1, "healthy"]
    assert found[1, "healthy"] == pytest.approx(dict(truth), rel=1e-12, nan_ok=True)
    sigma = float(torch.linalg.svdvals(gauss(16, 8, seed=1).double())[0])
    assert truth["weight_spectral"] == pytest.approx(sigma, rel=1e-6)


def test_c30_bf16_weights_have_every_metric_and_a_histogram() -> None:
    low = gauss(32, 16).bfloat16()
    sinks = [measured({"full": 1, "weight_row_norms": 1}, w=x) for x in (low, low.float())]
    one, other = (dict(rows(s)[1, "w"]) for s in sinks)
    assert set(one) == set(other)
    assert one == pytest.approx(other, rel=1e-5, nan_ok=True)
    assert histogram(sinks[0], "w") == histogram(sinks[1], "w")


def test_c40_ratios_of_singular_values_of_deficient_matrices() -> None:
    """No condition number is offered, and asking for it says so; σ₂/σ₁ is 0 for rank 1, NaN for zeros, never 1e20."""
    with pytest.raises(ValueError, match="unknown metric 'condition_number'"):
        measured(["condition_number"], w=gauss(3, 2))
    rank_1 = gauss(8, 1) @ gauss(1, 4, seed=1)
    found = rows(measured(one=rank_1, zero=torch.zeros(8, 4)))
    assert found[1, "one"]["weight_sigma_ratio"] == pytest.approx(0, abs=1e-3)
    assert found[1, "one"]["weight_stable_rank"] == pytest.approx(1, rel=1e-5)
    assert found[1, "zero"]["weight_spectral"] == found[1, "zero"]["weight_frobenius"] == 0
    assert math.isnan(found[1, "zero"]["weight_sigma_ratio"])
    assert math.isnan(found[1, "zero"]["weight_stable_rank"])


def test_c41_distributions_of_a_large_layer() -> None:
    """No quantiles of entries are offered; those of row norms are within the width of a bin, at any size."""
    with pytest.raises(ValueError, match="unknown metric 'quantile'"):
        measured(["quantile"], w=gauss(3, 2))
    w = torch.ones(4097, 4096)
    lengths = gauss(4097).exp()
    w *= lengths.unsqueeze(1) / 64  # √4096
    start = time.monotonic()
    sink = measured([*ROW_NORMS, "weight_rms"], w=w)
    assert time.monotonic() - start < 10
    found = histogram(sink, "w")
    assert sum(found.count) == 4097
    ordered = lengths.sort().values
    for share in (0.5, 0.99):
        seen, edge = 0.0, math.nan
        for log2, count in zip(found.log2, found.count, strict=True):
            seen += count
            if seen >= share * 4097:
                edge = log2
                break
        truth = float(ordered[math.ceil(share * 4097) - 1])
        assert 2**edge <= truth * (1 + 1e-6)
        assert truth <= 2 ** (edge + 0.25) * (1 + 1e-6)
    assert sink.value(1, "w", "weight_rms") == pytest.approx(rms(w), rel=1e-7)


def test_c42_histograms_of_what_is_not_finite() -> None:
    """62 finite rows and 2 others; nothing but NaN gives one bin for what is not finite, and no finite one."""
    some = gauss(64, 3)
    some[10, 1], some[40, 0] = math.nan, math.inf
    sink = measured(ROW_NORMS, some=some, none=torch.full((5, 2), math.nan), zero=torch.zeros(4, 2))
    found = histogram(sink, "some")
    assert math.isnan(found.log2[-1])
    assert (sum(found.count[:-1]), found.count[-1]) == (62, 2)
    finite = some[some.isfinite().all(-1)].double().norm(dim=-1)
    assert sum(found.mass[:-1]) == pytest.approx(float(finite.sum()), rel=1e-6)
    for n, log2 in enumerate(found.log2[:-1]):
        inside = (finite >= 2**log2) & (finite < 2 ** (log2 + 0.25))
        assert int(inside.sum()) == found.count[n]
    nothing = histogram(sink, "none")
    assert [math.isnan(x) for x in nothing.log2] == [True]
    assert nothing.count == (5,)
    assert histogram(sink, "zero").log2 == (-math.inf,)


def test_c43_the_spectral_norm_is_no_eigenvalue() -> None:
    generator = torch.Generator().manual_seed(12)
    square = torch.randn(100, 100, generator=generator)
    found = rows(measured(nilpotent=torch.tensor([[0.0, 1.0], [0.0, 0.0]]), square=square))
    assert found[1, "nilpotent"]["weight_spectral"] == pytest.approx(1, rel=1e-9)
    truth = float(torch.linalg.svdvals(square.double())[0])
    assert found[1, "square"]["weight_spectral"] == pytest.approx(truth, rel=1e-3)
    assert (
        found[1, "square"]["weight_spectral"]
        <= truth * (1 + 1e-9)
        <= found[1, "square"]["weight_spectral_upper"] * (1 + 1e-6)
    )


def test_c44_complex_parameters_are_refused_by_name() -> None:
    model = nn.ParameterDict({"plain": nn.Parameter(gauss(2)), "wave": nn.Parameter(torch.tensor([3 + 4j, 0]))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 'wave': dtype torch\.complex64"):
        Tracker(model, optimizer)
    with pytest.raises(ValueError, match="complex"):
        Dion2([model["wave"]])


def test_large_entries_of_bf16_do_not_overflow() -> None:
    """1e30 squared is beyond float32."""
    low = (gauss(8, 6) * 1e30).bfloat16()
    row = rows(measured(w=low))[1, "w"]
    assert row["weight_rms"] == pytest.approx(rms(low), rel=1e-7)
    assert row["weight_spectral"] == pytest.approx(float(torch.linalg.svdvals(low.double())[0]), rel=1e-5)
    assert row["weight_nonfinite"] == 0
