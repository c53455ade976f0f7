"""What Dion2 selects, against closed forms, nulls of flat scores and brute force."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scion_telemetry import Tracker, every
from scion_telemetry.metrics import selection
from scion_telemetry.metrics.selection import AGE_BINS, History
from scion_telemetry.optim import Dion2
from scion_telemetry.sinks import MemorySink


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def signed(scores: Tensor, k: int) -> Tensor:
    return selection.signed_scores(scores, scores.topk(k, dim=-1).indices)


def gaussian_rows(n: int, d: int) -> Tensor:
    return torch.randn(1, n, d, generator=torch.Generator().manual_seed(0)).abs().sum(-1)


# ---------------------------------------------------------------------- the distribution of scores


def test_flat_null_of_gaussian_rows() -> None:
    """i.i.d. Gaussian rows of length d: CV = √((π/2 - 1)/d), C(α) = α + φ(Φ⁻¹(1-α)) CV, Gini = CV/√π."""
    n, d, alpha = 16384, 768, 0.25
    cv = math.sqrt((math.pi / 2 - 1) / d)
    normal = NormalDist()
    expected = alpha + normal.pdf(normal.inv_cdf(1 - alpha)) * cv
    assert expected == pytest.approx(0.2587, abs=5e-5)
    assert cv / math.sqrt(math.pi) == pytest.approx(0.0154, abs=5e-5)
    scores = signed(gaussian_rows(n, d), n // 4)
    assert selection.captured_mass(scores) == pytest.approx(expected, abs=2e-4)
    assert selection.gini(scores) == pytest.approx(cv / math.sqrt(math.pi), abs=2e-4)
    assert selection.participation_ratio(scores) == pytest.approx(1 / (1 + cv**2), abs=1e-5)


def test_heavy_tail_of_lognormal_rows() -> None:
    """Log-normal with σ = 1: C(.25) = Φ(σ - Φ⁻¹(.75)), Gini = 2Φ(σ/√2) - 1, participation e^-σ²."""
    scores = torch.randn(1, 1 << 18, generator=torch.Generator().manual_seed(0)).exp()
    normal = NormalDist()
    found = signed(scores, scores.size(-1) // 4)
    assert selection.captured_mass(found) == pytest.approx(normal.cdf(1 - normal.inv_cdf(0.75)), abs=0.003)
    assert selection.gini(found) == pytest.approx(2 * normal.cdf(1 / math.sqrt(2)) - 1, abs=0.003)
    assert selection.participation_ratio(found) == pytest.approx(math.exp(-1), abs=0.02)


@pytest.mark.parametrize("n", [1, 2, 7, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_distribution_by_brute_force(n: int, seed: int) -> None:
    r, k = uniform(1, n, seed=seed), max(1, n // 3)
    values, found = np.sort(r[0].double().numpy()), signed(r, k)
    pairs = sum(abs(a - b) for a in values for b in values)
    assert selection.gini(found) == pytest.approx(pairs / (2 * n * values.sum()), abs=1e-14)
    assert selection.participation_ratio(found) == pytest.approx(values.sum() ** 2 / (n * (values**2).sum()), rel=1e-14)
    assert selection.captured_mass(found) == pytest.approx(values[n - k :].sum() / values.sum(), rel=1e-14)
    assert selection.threshold(found, k) == pytest.approx(values[n - k], rel=1e-14)


def test_closed_forms_of_equal_and_of_single_scores() -> None:
    n = 8
    flat, one = torch.ones(1, n), torch.eye(n)[:1]
    assert selection.gini(signed(flat, 2)) == 0
    assert selection.participation_ratio(signed(flat, 2)) == 1
    assert selection.captured_mass(signed(flat, 2)) == 0.25
    assert selection.gini(signed(one, 2)) == pytest.approx((n - 1) / n)
    assert selection.participation_ratio(signed(one, 2)) == pytest.approx(1 / n)
    assert selection.captured_mass(signed(one, 2)) == 1
    assert selection.threshold(signed(one, 2), 2) == 0, "a row without mass was selected too"


def test_stacked_matrices_are_averaged() -> None:
    r = uniform(3, 16)
    for measure in (selection.gini, selection.participation_ratio, selection.captured_mass):
        alone = [measure(signed(row[None], 4)) for row in r]
        assert measure(signed(r, 4)) == pytest.approx(sum(alone) / 3, rel=1e-13)
    assert selection.threshold(signed(r, 4), 12) == pytest.approx(float(r.topk(4).values.min()))


def test_scores_without_mass_or_with_nan_give_nan() -> None:
    for scores in (torch.zeros(1, 5), torch.tensor([[1.0, math.nan, 2.0, 3.0]])):
        found = signed(scores, 2)
        assert math.isnan(selection.captured_mass(found))
        assert math.isnan(selection.gini(found))
        assert math.isnan(selection.participation_ratio(found))
    assert math.isnan(selection.threshold(selection.signed_scores(scores, torch.tensor([[1, 3]])), 2))


# ---------------------------------------------------------------------- ages


@pytest.mark.parametrize("scale", [3, 60, 1000, 100_000])
def test_age_quantiles(scale: int) -> None:
    ages = (uniform(1, 999).square() * scale).int()
    counts = selection.age_histogram(ages)
    assert float(counts.sum()) == 999
    exact = np.sort(ages[0].numpy())
    for q in (0.5, 0.99):
        expected = exact[math.ceil(q * 999) - 1]
        got = selection.age_quantile(counts, q)
        if expected < 64:
            assert got == expected
        else:
            assert expected * 2 ** (-1 / 8) <= got <= expected


def test_ages_beyond_the_last_bin_and_no_ages() -> None:
    counts = selection.age_histogram(torch.tensor([[2**31 - 1]], dtype=torch.int32))
    assert counts.size(0) == AGE_BINS
    assert float(counts[-1]) == 1
    assert math.isnan(selection.age_quantile(torch.zeros(AGE_BINS), 0.5))


def test_histories_merge_over_shards() -> None:
    ages = (uniform(1, 100) * 500).int()
    parts = [selection.age_histogram(part) for part in ages.split([40, 0, 60], dim=-1)]
    assert torch.equal(sum(parts), selection.age_histogram(ages))


# ---------------------------------------------------------------------- churn


def test_churn_closed_forms() -> None:
    assert selection.churn(both=4, now=4, before=4) == 0
    assert selection.churn(both=0, now=4, before=4) == 1
    assert selection.churn(both=1, now=2, before=4) == pytest.approx(1 - 1 / 5)
    assert math.isnan(selection.churn(both=0, now=0, before=0))


@pytest.mark.parametrize("alpha", [0.5, 0.25, 0.125])
def test_churn_null_of_random_selection(alpha: float) -> None:
    """Random rows: |∩|/|∪| = α/(2-α)."""
    n, generator = 20_000, torch.Generator().manual_seed(0)
    k = int(alpha * n)
    history = History.start(torch.zeros(1, n), 0)
    for step in (1, 2):
        indices = torch.randperm(n, generator=generator)[:k].sort().values[None]
        both = float(history.repeated(indices))
        before = history.selected
        history.update(indices, step)
    assert selection.churn(both, k, before) == pytest.approx(1 - alpha / (2 - alpha), abs=0.02)


# ---------------------------------------------------------------------- through the tracker


class Scripted:
    """A Dion2 on one matrix ``[n, d]`` whose gradients are chosen row by row."""

    def __init__(self, shape: tuple[int, ...], **options: object) -> None:
        self.model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(shape))})
        self.optimizer = Dion2(self.model.parameters(), lr=0.01, weight_decay=0.0, **options)  # type: ignore[arg-type]
        self.sink = MemorySink()
        self.tracker = Tracker(self.model, self.optimizer, schedule=every(1), sinks=[self.sink])

    def step(self, grad: Tensor) -> dict[str, float]:
        self.model["w"].grad = grad
        self.optimizer.step()
        self.tracker.flush()
        return dict(self.sink.selection[-1].values)


def rows(*sizes: float, d: int = 12) -> Tensor:
    return torch.tensor(sizes).unsqueeze(-1).expand(-1, d).contiguous()


def test_a_scripted_run() -> None:
    run = Scripted((4, 12), fraction=0.5, ef_decay=0.0)
    first = run.step(rows(4.0, 3.0, 2.0, 1.0))
    assert "churn" not in first, "nothing to compare the first selection with"
    assert first["k"] == 2
    assert first["fraction"] == 0.5
    assert first["captured_mass"] == pytest.approx(0.7)
    assert first["threshold"] == pytest.approx(36)
    assert (first["age_p50"], first["age_max"]) == (0, 1), "rows that were never selected age from the start"
    second = run.step(rows(0.0, 0.0, 0.0, 0.0))  # the momentum left is (0, 0, 2, 1)
    assert second["churn"] == 1
    assert second["captured_mass"] == 1
    assert (second["age_p50"], second["age_p99"], second["age_max"]) == (0, 1, 1)
    third = run.step(rows(0.0, 5.0, 6.0, 0.0))
    assert third["churn"] == pytest.approx(1 - 1 / 3)
    assert (third["age_p50"], third["age_max"]) == (0, 2)


def test_churn_compares_with_the_step_before_even_off_schedule() -> None:
    run = Scripted((4, 12), fraction=0.25, ef_decay=0.0)
    run.tracker._schedule = lambda step: step != 2  # type: ignore[method-assign]
    run.step(rows(1.0, 0.0, 0.0, 0.0))
    run.step(rows(0.0, 1.0, 0.0, 0.0))
    assert run.step(rows(0.0, 1.0, 0.0, 0.0))["churn"] == 0


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (8, 1, 1)])
def test_matrices_with_one_row_or_column(shape: tuple[int, ...]) -> None:
    """Dion2 steps them as matrices, so they are measured as such."""
    run = Scripted(shape, fraction=0.5)
    found = run.step(torch.ones(shape))
    assert found["k"] == shape[0] if len(shape) == 3 else 1
    row = dict(run.sink.layers[-1].values)
    assert row["update_rms"] > 0
    run.tracker.close()


def test_a_convolution_that_dion2_steps_as_a_stack() -> None:
    model, sink = nn.Conv1d(4, 8, 3, bias=False), MemorySink()
    optimizer = Dion2(model.parameters(), fraction=0.5)
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
        model(torch.ones(1, 4, 5)).sum().backward()
        optimizer.step()
    assert sink.selection[0].values["k"] == 8 * 2, "two of the three columns of every [4, 3] slice"
    assert sink.selection[0].values["fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("stack", [False, True])
def test_nan_scores_reach_the_row(stack: bool) -> None:
    run = Scripted((2, 6, 8) if stack else (6, 8), fraction=0.25)
    grad = torch.ones(2, 6, 8) if stack else torch.ones(6, 8)
    grad[..., 1, 2] = math.nan
    found = run.step(grad)
    for name in ("captured_mass", "gini", "participation_ratio", "threshold"):
        assert math.isnan(found[name]), name
    assert found["age_max"] == 1


def test_bfloat16_scores_do_not_saturate() -> None:
    """400 and 5120 ones: a bfloat16 sum would stick at 256."""
    grad = torch.zeros(2, 5120, dtype=torch.bfloat16)
    grad[0, :400] = 1
    grad[1] = 1
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros_like(grad))})
    optimizer, sink = Dion2(model.parameters(), fraction=0.5), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
        model["w"].grad = grad
        optimizer.step()
    found = sink.selection[0].values
    assert found["threshold"] == 5120
    assert found["captured_mass"] == pytest.approx(5120 / 5520, rel=1e-7)
