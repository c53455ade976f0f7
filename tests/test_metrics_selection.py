"""What Dion2 selects, against closed forms, nulls of flat scores and brute force."""

import math
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
import torch
from selected_data import selected, stacked
from torch import Tensor, nn

from scion_telemetry import Tracker, every
from scion_telemetry.metrics.selection import FRACTIONS, WORLDS, Selected
from scion_telemetry.metrics.selection_columns import SELECTION_METRICS, finish_selection
from scion_telemetry.optim import Dion2
from scion_telemetry.places import Slices
from scion_telemetry.selected import AGE_BITS, COUNT_BITS, SelectionLog, pack, shift, unpack
from scion_telemetry.sinks import MemorySink

FINISH = {metric.name: metric.finish for metric in SELECTION_METRICS}


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def chosen(scores: Tensor, indices: Tensor, ages: Tensor | None = None, **fields: object) -> Selected:
    """The selection ``indices`` ``[B, k]`` of one parameter with scores ``[B, n]``."""
    flags = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, indices, True)
    return selected(scores, flags, ages=ages, **fields)


def top(scores: Tensor, k: int, **fields: object) -> Selected:
    return chosen(scores, scores.topk(k, dim=-1).indices, **fields)


def value(name: str, selected: Selected) -> float:
    (found,) = FINISH[name](selected).tolist()
    return float(found)


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
    scores = top(gaussian_rows(n, d), n // 4)
    assert value("captured_mass", scores) == pytest.approx(expected, abs=2e-4)
    assert value("gini", scores) == pytest.approx(cv / math.sqrt(math.pi), abs=2e-4)
    assert value("participation_ratio", scores) == pytest.approx(1 / (1 + cv**2), abs=1e-5)


def test_heavy_tail_of_lognormal_rows() -> None:
    """Log-normal with σ = 1: C(.25) = Φ(σ - Φ⁻¹(.75)), Gini = 2Φ(σ/√2) - 1, participation e^-σ²."""
    scores = torch.randn(1, 1 << 18, generator=torch.Generator().manual_seed(0)).exp()
    normal = NormalDist()
    found = top(scores, scores.size(-1) // 4)
    assert value("captured_mass", found) == pytest.approx(normal.cdf(1 - normal.inv_cdf(0.75)), abs=0.003)
    assert value("gini", found) == pytest.approx(2 * normal.cdf(1 / math.sqrt(2)) - 1, abs=0.003)
    assert value("participation_ratio", found) == pytest.approx(math.exp(-1), abs=0.02)


@pytest.mark.parametrize("n", [1, 2, 7, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_distribution_by_brute_force(n: int, seed: int) -> None:
    r, k = uniform(1, n, seed=seed), max(1, n // 3)
    values, found = np.sort(r[0].double().numpy()), top(r, k)
    pairs = sum(abs(a - b) for a in values for b in values)
    assert value("gini", found) == pytest.approx(pairs / (2 * n * values.sum()), abs=1e-14)
    assert value("participation_ratio", found) == pytest.approx(values.sum() ** 2 / (n * (values**2).sum()), rel=1e-14)
    assert value("captured_mass", found) == pytest.approx(values[n - k :].sum() / values.sum(), rel=1e-14)
    assert value("threshold", found) == pytest.approx(values[n - k], rel=1e-14)


def test_closed_forms_of_equal_and_of_single_scores() -> None:
    n = 8
    flat, one = torch.ones(1, n), torch.eye(n)[:1]
    assert value("gini", top(flat, 2)) == 0
    assert value("participation_ratio", top(flat, 2)) == 1
    assert value("captured_mass", top(flat, 2)) == 0.25
    assert value("gini", top(one, 2)) == pytest.approx((n - 1) / n)
    assert value("participation_ratio", top(one, 2)) == pytest.approx(1 / n)
    assert value("captured_mass", top(one, 2)) == 1
    assert value("threshold", top(one, 2)) == 0, "a row without mass was selected too"


def test_stacked_matrices_are_averaged() -> None:
    r = uniform(3, 16)
    for name in ("gini", "participation_ratio", "captured_mass"):
        alone = [value(name, top(row[None], 4)) for row in r]
        assert value(name, top(r, 4)) == pytest.approx(sum(alone) / 3, rel=1e-13)
    assert value("k", top(r, 4)) == 12
    assert value("fraction", top(r, 4)) == 0.25
    assert value("threshold", top(r, 4)) == pytest.approx(float(r.topk(4).values.min()))


def test_scores_without_mass_or_with_nan_give_nan() -> None:
    for scores in (torch.zeros(1, 5), torch.tensor([[1.0, math.nan, 2.0, 3.0]])):
        found = top(scores, 2)
        assert math.isnan(value("captured_mass", found))
        assert math.isnan(value("gini", found))
        assert math.isnan(value("participation_ratio", found))
    assert math.isnan(value("threshold", chosen(scores, torch.tensor([[1, 3]]))))


def test_parameters_of_one_shape_are_finished_together_as_each_alone() -> None:
    r = [uniform(2, 9, seed=i) for i in range(3)]
    alone = [top(scores, 2 + i) for i, scores in enumerate(r)]
    together = stacked(alone)
    assert finish_selection(together) == [row for s in alone for row in finish_selection(s)]


# ---------------------------------------------------------------------- curves, nulls, tails


@pytest.mark.parametrize("n", [1, 3, 16, 50])
def test_curves_by_brute_force(n: int) -> None:
    scores, gradient = uniform(2, n, seed=3), uniform(2, n, seed=4)
    counts = (uniform(2, n, seed=5) * 7).long() + 1
    (row,) = finish_selection(top(scores, max(1, n // 4), gradient=gradient, counts=counts, window=9))
    for name, values in (("mass", scores), ("grad_mass", gradient), ("frequency", counts.double() / 9)):
        for f in FRACTIONS:
            k = max(1, math.ceil(f * n))
            shares = [sum(sorted(r, reverse=True)[:k]) / sum(r) for r in values.double().tolist()]
            assert row[f"{name}_at_{f:g}"] == pytest.approx(sum(shares) / 2, rel=1e-12), (name, f)


def test_flat_rows_have_the_mass_and_gini_that_their_null_says() -> None:
    n, d = 16384, 768
    (row,) = finish_selection(top(gaussian_rows(n, d), n // 4, length=d))
    assert row["flat_mass"] == pytest.approx(0.2587, abs=5e-5)
    assert row["flat_gini"] == pytest.approx(0.0154, abs=5e-5)
    assert row["captured_mass"] == pytest.approx(row["flat_mass"], abs=2e-4)
    assert row["gini"] == pytest.approx(row["flat_gini"], abs=2e-4)
    assert row["excess_mass"] == pytest.approx(0, abs=3e-4)
    assert row["excess_mass"] == pytest.approx((row["captured_mass"] - row["flat_mass"]) / (1 - row["flat_mass"]))
    assert row["hill"] > 80, "no tail"


@pytest.mark.parametrize("index", [1.5, 3.0])
def test_tail_index_of_pareto_rows(index: float) -> None:
    scores = (1 - uniform(1, 1 << 16)) ** (-1 / index)
    assert value("hill", top(scores, 4)) == pytest.approx(index, rel=0.05)
    assert "hill" not in finish_selection(top(scores[:, :1023], 4))[0]
    assert "hill" in finish_selection(top(scores[:, :1024], 4))[0]


def test_ties_at_the_threshold() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert value("ties", chosen(scores, torch.tensor([[0, 1], [0, 1]]))) == 2
    assert value("ties", chosen(scores, torch.tensor([[0, 4], [0, 1]]))) == 0


# ---------------------------------------------------------------------- over a window


def test_frequencies_in_a_window() -> None:
    counts = torch.tensor([[100, 99, 98, 1, 0, 2, 0, 100]])
    found = chosen(torch.ones(1, 8), torch.tensor([[0, 1, 2, 7]]), counts=counts, window=100)
    (row,) = finish_selection(found)
    assert row["window"] == 100
    assert row["coverage"] == 6 / 8
    assert row["starved"] == 4 / 8, "less than a tenth of a half of the steps"
    assert row["always"] == 3 / 8
    ordered = sorted(counts[0].tolist())
    pairs = sum(abs(a - b) for a in ordered for b in ordered)
    assert row["frequency_gini"] == pytest.approx(pairs / (2 * 8 * sum(ordered)))


def test_error_feedback() -> None:
    flags = torch.tensor([[True, False, False, False]])
    scores, gradient = torch.tensor([[8.0, 4.0, 2.0, 2.0]]), torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    fields = {"ef_decay": 0.5, "energy": 25.0, "kept": 9.0, "gradient": gradient}
    (row,) = finish_selection(selected(scores, flags, **fields))
    assert row["horizon"] == 1 / ((1 - 0.5) * 0.25) == 8
    assert row["unselected_energy"] == pytest.approx(math.sqrt(16 / (16 + 9 / 0.25)))
    assert row["ef_growth"] == pytest.approx(16 / 4 / 8)
    assert row["grad_gini"] == 0
    unknown = {"horizon", "unselected_energy", "ef_growth", "grad_gini"} | {f"grad_mass_at_{f:g}" for f in FRACTIONS}
    assert set(row) - set(finish_selection(selected(scores, flags))[0]) == unknown


# ---------------------------------------------------------------------- within shards


def brute_shards(scores: list[float], shards: list[list[int]], fraction: float) -> tuple[float, float, float]:
    """Regret, overlap, imbalance of one matrix, with Python's sets."""

    def largest(among: list[int], k: int) -> set[int]:
        return set(sorted(among, key=lambda i: (-scores[i], i))[:k])

    most = max(1, math.ceil(fraction * max(map(len, shards))))  # every shard selects as many as the largest one
    local = set().union(*(largest(s, most) for s in shards if s))
    everywhere = largest(list(range(len(scores))), len(local))
    k = max(1, math.ceil(fraction * len(scores)))
    best = largest(list(range(len(scores))), k)
    mass = [sum(scores[i] for i in chosen) for chosen in (local, everywhere)]
    most = max(len(best & set(s)) / len(s) for s in shards if s)
    return 1 - mass[0] / mass[1], len(local & everywhere) / len(local), most / (k / len(scores)) - 1


@pytest.mark.parametrize("fraction", [0.125, 0.25, 0.4, 1.0])
@pytest.mark.parametrize("cuts", [[4, 8], [1, 2, 5], [7], [12]])
def test_shards_by_brute_force(fraction: float, cuts: list[int]) -> None:
    n = 13
    scores = uniform(2, n, seed=6) ** 3
    edges = [0, *cuts, n]
    shards = [list(range(a, b)) for a, b in pairwise(edges)]
    found = top(scores, 3, fraction=fraction, shards=tuple(np.array(s) for s in shards))
    (row,) = finish_selection(found)
    truths = [brute_shards(r, shards, fraction) for r in scores.double().tolist()]
    for name, each in zip(("regret", "overlap", "imbalance"), zip(*truths, strict=True), strict=True):
        assert row[name] == pytest.approx(sum(each) / 2, abs=1e-12), name


def test_regret_of_equal_shards_and_where_there_are_enough_rows() -> None:
    n = 20
    scores = uniform(1, n, seed=7)
    (row,) = finish_selection(top(scores, 5, fraction=0.25))
    assert "regret" not in row, "it is in one piece"
    for world in WORLDS:
        if world > n:
            assert f"regret_at_{world}" not in row
            continue
        size = math.ceil(n / world)
        shards = [list(range(a, min(a + size, n))) for a in range(0, n, size)]
        expected = brute_shards(scores[0].double().tolist(), shards, 0.25)[0]
        assert row[f"regret_at_{world}"] == pytest.approx(expected, abs=1e-12)


# ---------------------------------------------------------------------- ages


@pytest.mark.parametrize("scale", [3, 60, 1000, 100_000])
@pytest.mark.parametrize("n", [1, 2, 100, 999])
def test_age_quantiles_are_exact(scale: int, n: int) -> None:
    ages = (uniform(1, n).square() * scale).long()
    exact = np.sort(ages[0].numpy())
    found = chosen(uniform(1, n), torch.tensor([[0]]), ages)
    assert value("age_p50", found) == exact[math.ceil(0.5 * n) - 1]
    assert value("age_p99", found) == exact[math.ceil(0.99 * n) - 1]
    assert value("age_max", found) == exact[-1]


# ---------------------------------------------------------------------- on the way: packed, and between flushes


def test_packing_keeps_every_bit_of_scores_and_ages() -> None:
    scores = torch.cat([uniform(500) * 1e-30, uniform(500) * 1e30, torch.tensor([0.0, 1e-45, 3.4e38])])
    ages = torch.randint(0, 3000, scores.shape, generator=torch.Generator().manual_seed(1)).int()
    ages[::3] = 0
    before = torch.rand(scores.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    counts = torch.randint(0, 1 << COUNT_BITS, scores.shape, generator=torch.Generator().manual_seed(3)).int()
    found = unpack(pack(scores, before, ages, counts).numpy().reshape(1, -1))
    assert np.array_equal(found.scores[0], scores.double().numpy())
    assert np.array_equal(found.ages[0], ages.numpy())
    assert np.array_equal(found.counts[0], counts.numpy())
    assert np.array_equal(found.selected[0], ages.numpy() == 0)
    assert np.array_equal(found.before[0], before.numpy())


def test_packed_scores_that_are_not_finite_are_nan_and_old_ages_stop_at_the_last() -> None:
    scores, last = torch.tensor([math.nan, math.inf, 1.0]), (1 << AGE_BITS) - 1
    ages, counts = torch.tensor([last + 5, 0, last]).int(), torch.tensor([0, 1, (1 << COUNT_BITS) - 1]).int()
    found = unpack(pack(scores, torch.tensor([True, False, True]), ages, counts).numpy())
    assert np.array_equal(found.scores, [math.nan, math.nan, 1.0], equal_nan=True)
    assert found.ages.tolist() == [last, 0, last]
    assert found.counts.tolist() == counts.tolist()
    assert found.selected.tolist() == [False, True, False]
    assert found.before.tolist() == [True, False, True]


def test_adding_the_zeros_of_other_ranks_changes_no_bit() -> None:
    packed = pack(
        uniform(64), uniform(64, seed=1) < 0.5, (uniform(64, seed=2) * 9).int(), (uniform(64, seed=3) * 9).int()
    )
    merged = torch.zeros(3, 64, dtype=torch.float64)
    for rank, part in enumerate(torch.arange(64).split([20, 0, 44])):
        merged[rank, part] = packed[part]
    assert torch.equal(merged.sum(0).view(torch.int64), packed.view(torch.int64))


def test_the_log_against_python_sets() -> None:
    """Two matrices, one of them stacked, some steps without a flush and some without one of the parameters."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": (1, 7), "b": (3, 5)}
    params = {name: torch.zeros(size) for name, size in sizes.items()}
    log = SelectionLog(
        {params[n]: Slices(shape=(b, r, 1), dim=-2, positions=None) for n, (b, r) in sizes.items()},
        torch.device("cpu"),
        10,
    )
    last = {name: [10] * (b * r) for name, (b, r) in sizes.items()}
    times = {name: [0] * len(steps) for name, steps in last.items()}
    latest: dict[str, set[int]] = {}
    flushed = dict.fromkeys(sizes, 10)
    for step in range(11, 31):
        there = ["a", "b"] if step % 4 else ["b"]
        scores = {n: torch.rand(sizes[n] if n == "b" else sizes[n][1:], generator=generator) for n in there}
        indices = {n: scores[n].topk(2, dim=-1).indices.sort(-1).values for n in there}
        sets = {
            n: {i + b * sizes[n][1] for b, row in enumerate(indices[n].view(sizes[n][0], 2).tolist()) for i in row}
            for n in there
        }
        arguments = ([params[n] for n in there], [indices[n] for n in there])
        if step % 3:
            log.note(*arguments, step)
        else:
            packed, windows = log.show(arguments[0], [scores[n] for n in there], arguments[1], step)
            log.commit()
            assert windows == [step - flushed[n] for n in there]
            parts = packed.split([math.prod(sizes[n]) for n in there])
        for n in there:
            for i in sets[n]:
                last[n][i], times[n][i] = step, times[n][i] + 1
        if step % 3 == 0:
            for n, part in zip(there, parts, strict=True):
                found = unpack(part.numpy())
                assert np.array_equal(found.scores, scores[n].flatten().double().numpy())
                assert set(np.flatnonzero(found.selected)) == sets[n]
                assert set(np.flatnonzero(found.before)) == latest.get(n, set())
                assert found.ages.tolist() == [step - t for t in last[n]]
                assert found.counts.tolist() == times[n], "selections since this parameter was last shown"
                times[n], flushed[n] = [0] * len(times[n]), step
        latest.update(sets)


@pytest.mark.parametrize("window", [1, 2, 1023, 1024, 5000, 70_000])
def test_counts_of_long_windows_fit(window: int) -> None:
    assert window >> shift(window) < 1 << COUNT_BITS
    assert shift(window) == 0 or window >> (shift(window) - 1) >= 1 << COUNT_BITS


# ---------------------------------------------------------------------- churn


def test_churn_closed_forms() -> None:
    def churn(now: list[int], before: list[int]) -> float:
        flags = torch.zeros(2, 1, 8, dtype=torch.bool)
        flags[0, 0, now], flags[1, 0, before] = True, True
        return value("churn", selected(torch.ones(1, 8), flags[0], before=flags[1]))

    assert churn([0, 1, 2, 3], [0, 1, 2, 3]) == 0
    assert churn([0, 1, 2, 3], [4, 5, 6, 7]) == 1
    assert churn([0, 1], [1, 2, 3, 4]) == pytest.approx(1 - 1 / 5)


@pytest.mark.parametrize("alpha", [0.5, 0.25, 0.125])
def test_churn_null_of_random_selection(alpha: float) -> None:
    """Random rows: |∩|/|∪| = α/(2-α)."""
    n, generator = 20_000, torch.Generator().manual_seed(0)
    k, param = int(alpha * n), torch.zeros(20_000, 1)
    log = SelectionLog({param: Slices(shape=(n, 1), dim=-2, positions=None)}, torch.device("cpu"), 0)
    for step in (1, 2):
        indices = torch.randperm(n, generator=generator)[:k].sort().values
        found = unpack(log.show([param], [torch.ones(n)], [indices], step)[0].numpy().reshape(1, n))
    flags, before = torch.from_numpy(found.selected), torch.from_numpy(found.before)
    assert value("churn", selected(torch.ones(1, n), flags, before=before)) == pytest.approx(
        1 - alpha / (2 - alpha), abs=0.02
    )


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
