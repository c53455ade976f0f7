"""The catalogue: what may be chosen, what a choice needs, and what is left out of a row."""

import math
from collections.abc import Sequence

import pytest
import torch
from selected_data import selected
from truth import spec

from scion_telemetry.finish import Finisher
from scion_telemetry.metrics.catalogue import HISTOGRAMS, METRICS, PARTIALS, PRESETS
from scion_telemetry.metrics.choice import Choice, Metrics, choose
from scion_telemetry.metrics.declare import QUANTITIES, Merge, custom
from scion_telemetry.metrics.pieces import MatrixShape
from scion_telemetry.metrics.selection_columns import SELECTION_METRICS, finish_selection
from scion_telemetry.plan import make_plan
from scion_telemetry.reduce import Buffers, Schema
from scion_telemetry.rows import Batch

UNKNOWN = -math.inf


def names(metrics: Metrics) -> list[str]:
    return [name for name, _, _ in choose(metrics).columns]


def finished(
    choice: Choice, shapes: Sequence[tuple[int, ...]] = ((4, 3),), role: str = "hidden", **values: float | list[float]
) -> Batch:
    """What comes of merged partial results: those given, of all parameters or by their own; otherwise 0 or -inf."""
    plan = make_plan([[spec(f"w{i}", shape, role) for i, shape in enumerate(shapes)]])
    kinds = [(q, p, [s.shape for s in plan]) for q, ps in choice.partials.items() for p in ps]
    buffers = Buffers(Schema.of(kinds), torch.device("cpu"))
    for quantity, partial, _ in kinds:
        value = values.get(f"{quantity}_{partial.name}", values.get(partial.name))
        if value is None:
            continue
        for n in range(len(plan)):
            own = buffers.view((quantity, partial.name), n)
            own.copy_(torch.tensor(value, dtype=torch.float64).expand_as(own))
    return Finisher(plan).batch(1, choice, buffers.to_host())


def row(choice: Choice, **values: float | list[float]) -> dict[str, float]:
    found = finished(choice, **values).layers
    return dict(found[0].values) if found else {}


def test_the_default_preset_has_the_columns_that_were_promised() -> None:
    operator = ["rms", "max_abs", "nonfinite", "spectral", "spectral_upper", "rms_to_rms", "l1_to_rms", "rms_to_inf"]
    assert names("basic") == [
        *(f"weight_{n}" for n in (*operator, "decay", "radius_share")),
        *(f"{q}_{n}" for q in ("grad", "momentum") for n in operator[:3]),
        *(f"update_{n}" for n in (*operator, "lr")),
        "update_weight_ratio",
    ]
    assert choose().columns == choose("basic").columns


def test_names_are_unique_and_everything_is_described() -> None:
    for metrics in (METRICS, SELECTION_METRICS, HISTOGRAMS):
        assert len({m.name for m in metrics}) == len(metrics)
        for metric in metrics:
            assert metric.unit
            assert metric.formula
    assert all(m.source and set(m.needs) <= set(PARTIALS) for m in (*METRICS, *HISTOGRAMS))
    assert {m.name for m in METRICS if not m.needs} == {"missing"}
    assert all({p for _, p in m.also} <= set(PARTIALS) and {q for q, _ in m.also} <= set(QUANTITIES) for m in METRICS)
    used = {p for m in (*METRICS, *HISTOGRAMS) for p in m.needs} | {p for m in METRICS for _, p in m.also}
    assert set(PARTIALS) - used == {"pieces", "elements"}, "partial results that no metric needs"
    assert {name for name, p in PARTIALS.items() if p.name != name} == set()


def test_columns_come_in_one_order_however_they_are_asked_for() -> None:
    assert names(["weight_rms", "grad_rms"]) == names(["grad_rms", "weight_rms"]) == ["weight_rms", "grad_rms"]
    assert names({"grad_rms": 2, "weight_rms": 1}) == ["weight_rms", "grad_rms"]
    assert names(["rms"]) == [f"{q}_rms" for q in QUANTITIES]
    assert names(["norms", "weight_spectral"]) == [
        c for c in names("full") if c in {*names("norms"), "weight_spectral"}
    ]
    assert names("weight_ratio") == ["update_weight_ratio"]
    assert set(names("full")) >= set(names("basic")) >= set(names("norms"))
    assert set(names("full")) >= set(names("spectral"))
    assert names("full") == [f"{q}_{m.name}" for q in QUANTITIES for m in METRICS if q in m.quantities]


def test_units_cover_every_column_and_histogram() -> None:
    assert set(choose("full").units()) == set(names("full"))
    assert choose(["row_norms", "weight_rms"]).units() == {
        "weight_rms": "entry",
        **{f"{q}_row_norms": "entry" for q in QUANTITIES},
    }


@pytest.mark.parametrize("bad", ["spektral", "weight_weight_ratio", "", ["rms", "Weight_rms"], {"rmz": 2}], ids=repr)
def test_an_unknown_name_is_refused_with_the_known_ones(bad: Metrics) -> None:
    with pytest.raises(ValueError, match="unknown metric") as error:
        choose(bad)
    for known in (*PRESETS, "rms_to_inf", "weight_rms", "row_norms"):
        assert known in str(error.value)


def test_a_column_of_selection_is_refused_with_what_brings_it() -> None:
    """Those that are there with the gradient's scores alone need the further name."""
    scores, two = torch.ones(1, 4), torch.tensor([[True, True, False, False]])
    facts = ({"ef_decay": 0.9}, {"ef_decay": 0.9, "gradient": scores})
    plain, both = (finish_selection(selected(scores, two, **more))[0].keys() for more in facts)
    for name in (m.name for m in SELECTION_METRICS):
        extra = "selection_gradient" if name in both - plain else "selection"
        for asked in (name, f"selection_{name}"):
            with pytest.raises(ValueError, match=f'{asked}\' is a column of selection.*: choose "{extra}"$'):
                choose(["norms", asked])
        assert extra in choose(extra).extras
    assert {"grad_gini", "ef_growth"} <= both - plain


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None], ids=repr)
def test_a_multiple_that_is_no_whole_number_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"metrics\['norms'\] is every how many flushes: a whole number >= 1, got "):
        choose({"norms": bad})  # type: ignore[dict-item]


@pytest.mark.parametrize("bad", [3, None, ["rms", 3]], ids=repr)
def test_what_is_no_choice_is_refused(bad: object) -> None:
    with pytest.raises(TypeError, match="metric"):
        choose(bad)  # type: ignore[arg-type]


def test_a_choice_needs_no_more_than_it_uses() -> None:
    def needed(metrics: Metrics) -> dict[str, tuple[str, ...]]:
        return {q: tuple(p.name for p in partials) for q, partials in choose(metrics).partials.items()}

    assert needed(["weight_rms"]) == {"weight": ("pieces", "squares")}
    assert needed("update_weight_ratio") == {"weight": ("pieces", "squares"), "update": ("pieces", "squares")}
    assert needed(["weight_row_norms"]) == {"weight": ("pieces", "row_squares")}
    assert not any("sigma" in p for partials in needed("norms").values() for p in partials)
    assert choose("norms").names("grad") == {"pieces", "squares", "largest", "nonfinite"}
    assert choose(["weight_rms"]).names("grad") == frozenset()


def test_multiples_say_at_which_flushes_a_column_is_measured() -> None:
    choice = choose({"norms": 1, "spectral": 3, "weight_row_norms": 2})
    norms, spectral = set(names("norms")), set(names("spectral"))
    for flush in range(12):
        at = choice.at(flush)
        expected = norms | (spectral if flush % 3 == 0 else set())
        assert {c for c, _, _ in at.columns} == expected
        assert [h for h, _, _ in at.histograms] == ["weight_row_norms"] * (flush % 2 == 0)
        assert ("sigma" in at.names("weight")) == (flush % 3 == 0)
        assert at is choice.at(flush + 6), "worked out once"
    assert choice.at(0) is choice


def test_the_smallest_multiple_of_a_column_counts() -> None:
    choice = choose({"norms": 4, "weight_rms": 2, "rms": 3})
    assert "weight_rms" in {c for c, _, _ in choice.at(2).columns}
    assert {c for c, _, _ in choice.at(3).columns} == {f"{q}_rms" for q in QUANTITIES[1:]}
    assert choose({"weight_rms": 1}).every == {}


def test_what_nobody_had_is_left_out() -> None:
    choice = choose("full")
    found = row(choice, weight_pieces=2.0, weight_sigma_ranks=1.0, weight_squares=1.0, row_squares=1.0)
    always, unknown = {"grad_missing"}, {"weight_decay", "weight_radius_share", "weight_coherence"}
    weights = {c for c in names("full") if c.startswith("weight_")}
    assert set(found) == weights - unknown | always
    assert found["grad_missing"] == 1
    sigmas = ("spectral", "spectral_upper", "rms_to_rms", "sigma_ratio", "stable_rank")
    assert set(row(choice, weight_pieces=1.0)) == weights - unknown - {f"weight_{n}" for n in sigmas} | always
    assert row(choose("norms")) == {}


@pytest.mark.parametrize(
    ("column", "partial"),
    [
        ("weight_decay", "decay"),
        ("update_lr", "lr"),
        ("update_polar_error", "polar"),
        *(
            (f"momentum_{n}", m)
            for n, m in (
                ("participation_rank", "gram_rank"),
                ("gram_lower", "gram_lower"),
                ("gram_upper", "gram_upper"),
            )
        ),
    ],
)
def test_a_setting_that_nobody_knows_is_left_out_and_nan_is_not(column: str, partial: str) -> None:
    assert PARTIALS[partial].merge is Merge.MAX
    assert row(choose([column]), pieces=1.0) == {}
    assert row(choose([column]), pieces=1.0, **{partial: 0.5}) == {column: 0.5}


def test_sigma_is_the_mean_over_the_ranks_that_measured_it_and_the_largest_of_a_stack() -> None:
    found = finished(
        choose(["weight_spectral", "weight_spectral_upper"]),
        [(2, 4, 3)],
        "expert",
        pieces=1.0,
        sigma=[6.0, 10.0],
        sigma_upper=[9.0, 11.0],
        sigma_ranks=[3.0, 2.0],
    )
    assert found.layers[0].values == {"weight_spectral": 5, "weight_spectral_upper": 5.5}
    unmeasured = finished(choose(["weight_spectral"]), [(2, 4, 3)], "expert", pieces=1.0, sigma_ranks=[1.0, 0.0])
    assert unmeasured.layers == (), "one of the experts was measured by nobody"


@pytest.mark.parametrize(
    ("update", "weight", "expected"),
    [(4.0, 16.0, 0.5), (0.0, 4.0, 0.0), (4.0, 0.0, math.inf), (0.0, 0.0, math.nan), (math.nan, 0.0, math.nan)],
)
def test_ratio_of_update_and_weight(update: float, weight: float, expected: float) -> None:
    found = row(choose("weight_ratio"), pieces=1.0, update_squares=update, weight_squares=weight)
    assert found == {"update_weight_ratio": pytest.approx(expected, nan_ok=True)}


def test_a_selection_that_did_not_happen_has_no_row_and_the_first_one_no_churn() -> None:
    scores, none = torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.bool)
    two = torch.tensor([[True, True, False, False]])
    assert finish_selection(selected(scores, none)) == [{}]
    (first,) = finish_selection(selected(scores, two))
    (second,) = finish_selection(selected(scores, two, before=two))
    assert set(second) - set(first) == {"churn"}
    order = [m.name for m in SELECTION_METRICS]
    assert list(second) == [name for name in order if name in second]
    assert {"k", "fraction", "captured_mass", "gini", "age_max"} <= set(first)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "l 3"}, ValueError, "letters, digits and underscores, got 'l 3'"),
        ({"merge": "mean"}, ValueError, "merge must be 'sum' or 'max', got 'mean'"),
        (
            {"quantities": "weight"},
            ValueError,
            "quantities must be a list of weight, grad, momentum, update, got 'weight'",
        ),
        ({"quantities": []}, ValueError, "got \\[\\]"),
        ({"quantities": ["weights"]}, ValueError, r"got \['weights'\]"),
        ({"measure": 3}, TypeError, "measure and finish of metric 'l3' must be functions, got 3"),
        ({"finish": 3}, TypeError, "must be functions"),
    ],
)
def test_a_metric_of_ones_own_that_cannot_be_is_refused(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        custom(**{"name": "l3", "measure": lambda x: x.sum(), **options})  # type: ignore[arg-type]


def test_a_metric_of_ones_own_with_the_name_of_another_is_refused() -> None:
    with pytest.raises(ValueError, match="there is a metric 'rms' already"):
        choose(["norms", custom("rms", lambda x: x.sum())])
    twice = [custom("mine", lambda x: x.sum()), custom("mine", lambda x: x.sum())]
    with pytest.raises(ValueError, match="there is a metric 'mine' already"):
        choose(twice)


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
