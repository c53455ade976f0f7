"""The catalogue: what may be chosen, what a choice needs, and what is left out of a row."""

import math

import pytest
import torch
from torch import Tensor

from scion_telemetry.metrics.catalogue import (
    METRICS,
    PARTIALS,
    PRESETS,
    QUANTITIES,
    SELECTION_METRICS,
    SELECTION_PARTIALS,
    Measured,
    choose,
    finish,
    finish_selection,
    selection_shape,
)
from scion_telemetry.metrics.pieces import MatrixShape

SHAPE = MatrixShape.of((4, 3), "hidden")


def names(metrics: str | list[str]) -> list[str]:
    return [name for name, _, _ in choose(metrics).columns]


def constant(shape: MatrixShape, **values: float) -> Measured:
    """Merged partial results that are the same number everywhere; 0 where none is given."""
    known = {**PARTIALS, **SELECTION_PARTIALS}

    def get(quantity: str, partial: str) -> Tensor:
        value = values.get(f"{quantity}_{partial}", values.get(partial, 0.0))
        return torch.full((known[partial].size(shape),), value, dtype=torch.float64)

    return Measured(shape=shape, get=get)


def test_the_default_preset_has_the_columns_that_were_promised() -> None:
    operator = ["rms", "max_abs", "nonfinite", "spectral", "spectral_upper", "rms_to_rms", "l1_to_rms", "rms_to_inf"]
    assert names("basic") == [
        *(f"weight_{n}" for n in operator),
        *(f"{q}_{n}" for q in ("grad", "momentum") for n in operator[:3]),
        *(f"update_{n}" for n in operator),
        "update_weight_ratio",
    ]
    assert choose().columns == choose("basic").columns


def test_names_are_unique_and_everything_is_described() -> None:
    for metrics in (METRICS, SELECTION_METRICS):
        assert len({m.name for m in metrics}) == len(metrics)
        for metric in metrics:
            assert metric.unit
            assert metric.formula
    assert all(m.source and m.needs and set(m.needs) <= set(PARTIALS) for m in METRICS)
    assert not set(PARTIALS) & set(SELECTION_PARTIALS)


def test_columns_come_in_one_order_however_they_are_asked_for() -> None:
    assert names(["weight_rms", "grad_rms"]) == names(["grad_rms", "weight_rms"]) == ["weight_rms", "grad_rms"]
    assert names(["rms"]) == [f"{q}_rms" for q in QUANTITIES]
    assert names(["norms", "weight_spectral"]) == [
        c for c in names("full") if c in {*names("norms"), "weight_spectral"}
    ]
    assert names("weight_ratio") == ["update_weight_ratio"]
    assert set(names("full")) >= set(names("basic")) >= set(names("norms"))


def test_units_cover_every_column() -> None:
    assert set(choose("full").units()) == set(names("full"))


@pytest.mark.parametrize("bad", ["spektral", "weight_weight_ratio", "", ["rms", "Weight_rms"]])
def test_an_unknown_name_is_refused_with_the_known_ones(bad: str | list[str]) -> None:
    with pytest.raises(ValueError, match="unknown metric") as error:
        choose(bad)
    for known in (*PRESETS, "rms_to_inf", "weight_rms_to_inf"):
        assert known in str(error.value)


def test_a_choice_needs_no_more_than_it_uses() -> None:
    assert choose(["weight_rms"]).partials == {"weight": ("pieces", "row_squares")}
    assert choose("update_weight_ratio").partials == {
        "weight": ("pieces", "row_squares"),
        "update": ("pieces", "row_squares"),
    }
    assert not any("sigma" in p for partials in choose("norms").partials.values() for p in partials)


def test_what_nobody_had_is_left_out() -> None:
    choice = choose("full")
    only_weights = constant(SHAPE, weight_pieces=2.0, weight_sigma_ranks=1.0, row_squares=1.0)
    assert set(finish(choice, only_weights)) == {c for c in names("full") if c.startswith("weight_")}
    no_sigma = constant(SHAPE, weight_pieces=1.0)
    missing = {"weight_spectral", "weight_spectral_upper", "weight_rms_to_rms"}
    assert set(finish(choice, no_sigma)) == {c for c in names("full") if c.startswith("weight_")} - missing
    assert finish(choice, constant(SHAPE)) == {}


def test_sigma_is_the_mean_over_the_ranks_that_measured_it_and_the_largest_of_a_stack() -> None:
    stack = MatrixShape.of((2, 4, 3), "expert")
    table = {"sigma": [6.0, 10.0], "sigma_upper": [9.0, 11.0], "sigma_ranks": [3.0, 2.0]}

    def get(quantity: str, partial: str) -> Tensor:
        if partial in table:
            return torch.tensor(table[partial], dtype=torch.float64)
        return torch.ones(PARTIALS[partial].size(stack), dtype=torch.float64)

    values = finish(choose("spectral"), Measured(shape=stack, get=get))
    assert values["weight_spectral"] == 5
    assert finish(choose("spectral_upper"), Measured(shape=stack, get=get))["weight_spectral_upper"] == 5.5


@pytest.mark.parametrize(
    ("update", "weight", "expected"),
    [(4.0, 16.0, 0.5), (0.0, 4.0, 0.0), (4.0, 0.0, math.inf), (0.0, 0.0, math.nan), (math.nan, 0.0, math.nan)],
)
def test_ratio_of_update_and_weight(update: float, weight: float, expected: float) -> None:
    measured = constant(SHAPE, pieces=1.0, update_row_squares=update, weight_row_squares=weight)
    assert finish(choose("weight_ratio"), measured) == {"update_weight_ratio": pytest.approx(expected, nan_ok=True)}


def test_a_selection_that_did_not_happen_has_no_row_and_the_first_one_no_churn() -> None:
    shape = selection_shape(SHAPE, -2)
    assert finish_selection(constant(shape)) == {}
    every = {m.name for m in SELECTION_METRICS}
    assert set(finish_selection(constant(shape, selected=2.0, scores=1.0))) == every - {"churn"}
    assert set(finish_selection(constant(shape, selected=2.0, selected_before=2.0, scores=1.0))) == every


@pytest.mark.parametrize(
    ("shape", "role", "d_out", "d_in"),
    [
        ((6, 4), "hidden", 6, 4),
        ((6, 4), "embedding", 4, 6),
        ((6, 4), "head", 6, 4),
        ((5,), "vector", 5, 5),
        ((3, 6, 4), "expert", 6, 4),
        ((6, 4, 3, 3), "conv", 6, 36),
        ((6, 4, 3), "conv", 6, 12),
    ],
)
def test_maps_of_every_role(shape: tuple[int, ...], role: str, d_out: int, d_in: int) -> None:
    found = MatrixShape.of(shape, role)
    assert found.d_in == d_in
    assert found.d_out == d_out
    assert found.numel == math.prod(shape)
