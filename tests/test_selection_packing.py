"""One float64 a row: whatever goes in comes out, whoever adds zeros to it."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tracked import gauss

from scion_telemetry import Tracker, at
from scion_telemetry.optim import Dion2
from scion_telemetry.places import Slices
from scion_telemetry.selected import AGE_BITS, COUNT_BITS, SelectionLog, Unpacked, pack, shift, unpack
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

OLDEST, MOST = (1 << AGE_BITS) - 1, (1 << COUNT_BITS) - 1
SMALLEST, LARGEST = 2.0**-149, (2 - 2**-23) * 2.0**127  # of float32

scores = st.one_of(
    st.floats(min_value=0, width=32, allow_infinity=False),
    st.sampled_from([0.0, SMALLEST, 2 * SMALLEST, 2.0**-126, 1.0, LARGEST]),
)
rows = st.lists(
    st.tuples(scores, st.booleans(), st.one_of(st.just(0), st.integers(0, OLDEST)), st.integers(0, MOST)), min_size=1
)
every_case = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def packed(table: list[tuple[float, bool, int, int]]) -> Tensor:
    values, before, ages, counts = zip(*table, strict=True)
    return pack(
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(before),
        torch.tensor(ages, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
    )


def table(found: Unpacked) -> list[tuple[float, bool, int, int]]:
    assert found.selected.tolist() == (found.ages == 0).tolist()
    columns = (found.scores, found.before, found.ages, found.counts)
    return list(zip(*(c.tolist() for c in columns), strict=True))


def float32_bits(x: float) -> int:
    return int(struct.unpack("I", struct.pack("f", x))[0])


@every_case
@given(rows)
def test_what_is_packed_is_unpacked(numbers: list[tuple[float, bool, int, int]]) -> None:
    found = table(unpack(packed(numbers).numpy()))
    assert found == numbers
    assert [float32_bits(f[0]) for f in found] == [float32_bits(n[0]) for n in numbers]


@every_case
@given(rows, st.integers(1, 5), st.randoms(use_true_random=False))
def test_adding_the_zeros_of_other_ranks_changes_nothing(
    numbers: list[tuple[float, bool, int, int]], world: int, random: object
) -> None:
    """Also -0.0, in any order."""
    own = packed(numbers)
    owner = random.randrange(world)  # type: ignore[attr-defined]
    total = torch.zeros_like(own)
    for rank in range(world):
        total += own if rank == owner else torch.full_like(own, random.choice([0.0, -0.0]))  # type: ignore[attr-defined]
    assert torch.equal(total.view(torch.int64), own.view(torch.int64))
    assert table(unpack(total.numpy())) == numbers


@every_case
@given(rows)
def test_what_is_packed_is_a_normal_number(numbers: list[tuple[float, bool, int, int]]) -> None:
    """A subnormal one is zero to a processor that is told to flush them, and a NaN may change on its way."""
    found = packed(numbers)
    assert torch.isfinite(found).all()
    assert (found >= torch.finfo(torch.float64).tiny).all()


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_nan_and_keep_the_rest(score: float) -> None:
    numbers = [(score, before, age, count) for before in (True, False) for age in (0, 7, OLDEST) for count in (0, MOST)]
    own = packed(numbers)
    found = table(unpack((own + 0.0).numpy()))
    assert all(math.isnan(f[0]) for f in found)
    assert [f[1:] for f in found] == [n[1:] for n in numbers]


def test_a_zero_with_a_sign_is_a_zero() -> None:
    found = table(unpack(packed([(-0.0, True, 3, 2), (-0.0, False, 0, 1)]).numpy()))
    assert found == [(0.0, True, 3, 2), (0.0, False, 0, 1)]
    assert all(math.copysign(1, f[0]) == 1 for f in found)


def test_ages_and_counts_stop_at_the_last() -> None:
    numbers = [(1.5, False, age, 3) for age in (OLDEST, OLDEST + 1, 10 * OLDEST, (1 << 31) - 1)]
    assert table(unpack(packed(numbers).numpy())) == [(1.5, False, OLDEST, 3)] * 4
    numbers = [(1.5, True, 4, count) for count in (MOST, MOST + 1, (1 << 31) - 1)]
    assert table(unpack(packed(numbers).numpy())) == [(1.5, True, 4, MOST)] * 3


def test_any_shape_is_unpacked() -> None:
    numbers = [(float(i), i % 2 == 0, i, i) for i in range(24)]
    found = unpack(packed(numbers).view(2, 3, 4).numpy().transpose(2, 0, 1))
    assert found.ages.shape == found.scores.shape == (4, 2, 3)
    assert np.array_equal(found.ages, np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 3000), st.lists(st.integers(0, 3000), min_size=1, max_size=20))
def test_counts_of_any_window(window: int, times: list[int]) -> None:
    """Exact up to 1,023 steps; beyond them at most a unit too large, and never 0 for a row that was selected."""
    n = len(times)
    key = torch.zeros(n, 1)
    log = SelectionLog({key: Slices(shape=(n, 1), dim=-2, positions=None)}, torch.device("cpu"), 0)
    truth = torch.tensor([min(t, window) for t in times], dtype=torch.int32)
    log.count.copy_(truth)
    told, windows = log.show([key], [torch.ones(n)], [torch.tensor([], dtype=torch.int64)], window)
    assert windows == [window]
    unit = 1 << shift(window)
    counts = (unpack(told.numpy()).counts * unit).tolist()
    assert (unit == 1) == (window < 1 << COUNT_BITS)
    assert counts == [min(MOST, math.ceil(t / unit)) * unit for t in truth.tolist()]
    log.commit()
    assert not log.count.any(), "counted anew"


# ---------------------------------------------------------------------- through the tracker


def run(steps: int, schedule: object, grads: object, shape: tuple[int, int] = (4, 6)) -> tuple[MemorySink, list[int]]:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(shape))})
    optimizer, sink = Dion2(model.parameters(), fraction=0.25, ef_decay=0.5, newton_schulz_func=_cheap), MemorySink()
    times = [0] * shape[0]

    def see(event: object) -> None:
        for i in event.selections[0].indices.tolist():  # type: ignore[attr-defined]
            times[i] += 1

    optimizer.register_step_observer(see)
    with Tracker(model, optimizer, schedule=schedule, metrics=["weight_rms", "selection"], sinks=[sink]):  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            model["w"].grad = grads(step)  # type: ignore[operator]
            optimizer.step()
    return sink, times


def _cheap(x: Tensor, epsilon: float) -> Tensor:
    return x


def test_a_window_of_more_than_a_thousand_steps() -> None:
    """Row 3 at step 7 alone, row 2 in one step of ten, row 1 otherwise, row 0 never."""

    def grads(step: int) -> Tensor:
        row = 3 if step == 7 else 2 if step % 10 == 0 else 1
        return torch.eye(4)[row].unsqueeze(1).expand(4, 6) * 1000.0 * step

    sink, times = run(1500, at(1500), grads)
    assert times == [0, 1349, 150, 1]
    (row,) = sink.selection
    assert row.values["window"] == 1500
    assert row.values["coverage"] == 0.75
    assert row.values["starved"] == 0.5, "0 and 1 of 1,500"
    assert row.values["age_max"] == 1500
    assert row.values["frequency_at_0.25"] == pytest.approx(1349 / 1500, abs=2 / 1500)
    selected = [s.values["selected"] for s in sink.slices]
    assert all(abs(a - b) <= 1 for a, b in zip(selected, times, strict=True)), (selected, times)


def test_rows_without_mass_count_where_subnormal_numbers_are_flushed() -> None:
    def flushing(rank: int, world: int) -> tuple[list[float], list[float]]:
        if not torch.set_flush_denormal(True):
            return [0, 0.75, 0.25, 3], [3, 0, 0, 0]  # this processor cannot
        sink, _ = run(3, at(3), lambda step: torch.zeros(4, 6))
        values = sink.selection[0].values
        names = ("threshold", "starved", "coverage", "age_max")
        return [values[n] for n in names], [s.values["selected"] for s in sink.slices]

    (found,) = run_forked(flushing, 1)
    assert found == ([0, 0.75, 0.25, 3], [3, 0, 0, 0]), "the first of equal rows"


def test_rows_that_have_never_mass_have_their_ages() -> None:
    sink, _ = run(5, at(2, 5), lambda step: torch.eye(4)[1].unsqueeze(1) * gauss(4, 6, seed=step).abs())
    assert [r.values["age_max"] for r in sink.selection] == [2, 5]
    assert [r.values["captured_mass"] for r in sink.selection] == [1, 1]
    assert [r.values["threshold"] > 0 for r in sink.selection] == [True, True]
