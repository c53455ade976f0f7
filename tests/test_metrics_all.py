"""Every metric against a float64 formula, for every kind of parameter; histograms, own metrics, and how often."""

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from parity import compare, momentum_of
from torch import Tensor, nn
from truth import flushed, layer_values, worst

from scion_telemetry import Tracker, every
from scion_telemetry.describe import Setting
from scion_telemetry.metrics.catalogue import METRICS
from scion_telemetry.metrics.choice import choose
from scion_telemetry.metrics.declare import QUANTITIES, custom
from scion_telemetry.optim import Dion2, Orthogonalizer, Scion
from scion_telemetry.rows import column
from scion_telemetry.sinks import MemorySink

EXACT = Orthogonalizer(name="polar_express", dtype=torch.float32)
ROLES = {
    "embed": "embedding",
    "up": "hidden",
    "bias": "vector",
    "experts": "expert",
    "conv": "conv",
    "line": "conv",
    "wide": "hidden",
    "head": "head",
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Zoo(nn.Module):
    """A parameter of every role, with a dead row, zeros, and rows of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 9, bias=False)
        self.bias = nn.Parameter(torch.empty(9))
        self.experts = nn.Parameter(torch.empty(3, 5, 7))
        self.conv = nn.Conv2d(4, 6, 3, bias=False)
        self.line = nn.Conv1d(1, 6, 3, bias=False)
        self.wide = nn.Linear(160, 130, bias=False)
        self.head = nn.Linear(9, 13, bias=False)
        for i, p in enumerate(self.parameters()):
            p.data = randn(*p.shape, seed=i) * torch.linspace(0.5, 2, len(p)).view(-1, *[1] * (p.ndim - 1))
        self.up.weight.data[4] *= 1e-4
        self.wide.weight.data[:, 7] = 0

    def backward(self, step: int) -> None:
        for i, p in enumerate(self.parameters()):
            p.grad = randn(*p.shape, seed=100 * step + i)


def by_role(model: Zoo, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """Matrices by the optimizer's own rule, everything else by Scion's geometries."""
    own = {"hidden", "head", "expert"} if kind is Dion2 else set(ROLES.values())
    groups = []
    for name, p in model.named_parameters():
        role = ROLES[name.removesuffix(".weight")]
        groups.append({"params": [(name, p)], "role": role, **({} if role in own else {"algorithm": "scion"})})
    return kind(groups, lr=0.02, **options)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "Scion": lambda m: by_role(m, Scion, momentum=0.1),
    "Scion, unconstrained": lambda m: by_role(m, Scion, momentum=0.1, unconstrained=True, weight_decay=0.1),
    "Dion2 rows": lambda m: by_role(m, Dion2, fraction=0.4, select_dim="rows"),
    "Dion2 columns": lambda m: by_role(m, Dion2, fraction=0.4, select_dim="cols"),
    "Dion2 whole": lambda m: by_role(m, Dion2, fraction=1.0, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_column_of_every_kind_of_parameter(name: str) -> None:
    model = Zoo()
    found = compare(model, OPTIMIZERS[name](model), model.backward, roles=ROLES)
    assert found.rows >= 3 * len(ROLES)
    assert found.error <= 1e-7


def test_no_metric_is_left_untested() -> None:
    seen: set[str] = set()
    for name in ("SGD", "Scion"):
        model = Zoo()
        seen |= compare(model, OPTIMIZERS[name](model), model.backward, roles=ROLES, steps=2).columns
    assert seen == {column(q, m.name) for m in METRICS for q in m.quantities}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_four_quantities_beside_each_other(dtype: torch.dtype) -> None:
    """Without an optimizer: weights, gradients and momenta of every role, with all that relates two of them."""
    weights = {n.removesuffix(".weight"): p.detach().to(dtype) for n, p in Zoo().named_parameters()}
    grads = {n: randn(*w.shape, seed=7 + i).to(dtype) for i, (n, w) in enumerate(weights.items())}
    momenta = {
        n: (g.double() + 0.5 * w.double()).to(dtype) for (n, w), g in zip(weights.items(), grads.values(), strict=True)
    }
    columns = [
        c for c, q, m in choose("full").columns if q != "update" and m.name not in ("missing", "decay", "radius_share")
    ]
    batch = flushed(weights, ROLES, columns, grads=grads, momenta=momenta)
    assert [row.param for row in batch.layers] == list(weights)
    for row in batch.layers:
        name = row.param
        truth = layer_values({"weight": weights[name], "grad": grads[name], "momentum": momenta[name]}, ROLES[name])
        assert worst(row.values, truth) <= 1e-7


# ---------------------------------------------------------------------- what Newton-Schulz and groups tell


def schatten(m: Tensor) -> dict[str, float]:
    """What traces of powers of A = MMᵀ / ‖M‖² say, from the singular values."""
    p = torch.linalg.svdvals(m.double()).square()
    length, p = float(p.sum().sqrt()), p / p.sum()
    trace3, trace4 = float((p**3).sum()), float((p**4).sum())
    return {
        "participation_rank": 1 / float((p**2).sum()),
        "gram_lower": length * math.sqrt(trace4 / trace3),
        "gram_upper": length * trace4 ** (1 / 8),
    }


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (130, 160), (3, 5, 7)])
@pytest.mark.parametrize("kind", ["Scion", "Dion2", "Dion2, a part"])
def test_what_newton_schulz_knows_of_the_momentum(shape: tuple[int, ...], kind: str) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(randn(*shape))})
    if kind == "Scion":
        geometry = {"norm": "Spectral", "norm_kwargs": {"orthogonalizer": EXACT}}
        optimizer: torch.optim.Optimizer = Scion(model.parameters(), lr=0.02, momentum=0.1, **geometry)
    else:
        fraction = 0.5 if "part" in kind else 1.0
        options = {"fraction": fraction, "select_dim": "rows", "ef_decay": 0.5, "newton_schulz_func": EXACT}
        optimizer = Dion2(model.parameters(), lr=0.02, **options)
    sink, chosen = MemorySink(), []
    optimizer.register_step_observer(lambda e: chosen.extend(s.indices.clone() for s in e.selections))  # type: ignore[attr-defined]
    names = ["participation_rank", "gram_lower", "gram_upper"]
    with Tracker(model, optimizer, schedule=every(1), metrics=names, sinks=[sink]) as tracker:
        for step in (1, 2):
            model["w"].grad = randn(*shape, seed=step)
            optimizer.step()
            tracker.flush()
            momentum = momentum_of(optimizer.state[model["w"]]).detach().clone().view(-1, *shape[-2:])
            if chosen:  # after the step the selected rows have decayed by a half
                indices = chosen[-1].view(len(momentum), -1)
                momentum = torch.stack([2 * m[i] for m, i in zip(momentum, indices, strict=True)])
            each = [schatten(m) for m in momentum]
            for name in names:
                expected = max(values[name] for values in each)
                assert sink.value(step, "w", f"momentum_{name}") == pytest.approx(expected, rel=1e-4), (step, name)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting(lr=0.1), {"weight_decay": 0.0}),
        (Setting(lr=0.1, decay=0.25), {"weight_decay": 0.25}),
        (Setting(lr=0.1, decay=0.25, radius=4.0), {"weight_decay": 0.25}),
    ],
)
def test_a_radius_without_a_norm_gives_no_share(setting: Setting, expected: dict[str, float]) -> None:
    batch = flushed(
        {"w": randn(4, 3)}, {"w": "hidden"}, ["weight_decay", "weight_radius_share"], settings={"w": setting}
    )
    assert batch.layers[0].values == expected


def test_a_weight_settles_at_its_radius() -> None:
    """Constrained Scion, pushed one way: W tends to scale · direction, so the share tends to 1 as 1 - (1 - lr)^t."""
    model, sink = nn.ParameterDict({"w": nn.Parameter(torch.zeros(5, 4))}), MemorySink()
    optimizer = Scion([{"params": [*model.named_parameters()], "role": "head", "scale": 3.0, "norm": "Sign"}], lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), metrics=["radius_share", "rms_to_inf"], sinks=[sink]):
        for _ in range(20):
            model["w"].grad = torch.ones(5, 4)
            optimizer.step()
    shares = [r.values["weight_radius_share"] for r in sink.layers]
    assert shares == pytest.approx([1 - 0.9**t for t in range(1, 21)], rel=1e-5)
    assert sink.layers[-1].values["weight_rms_to_inf"] == pytest.approx(3 * shares[-1], rel=1e-6)


# ---------------------------------------------------------------------- histograms


def quarter_octaves(values: np.ndarray[Any, Any]) -> dict[float, tuple[float, float]]:
    """Edge to count and mass, by numpy.histogram over explicit edges; zeros and what is not finite by hand."""
    finite = values[np.isfinite(values)]
    found = {}
    if (finite == 0).any():
        found[-math.inf] = (float((finite == 0).sum()), 0.0)
    positive = finite[finite > 0]
    if positive.size:
        low, high = math.floor(4 * math.log2(positive.min())) - 1, math.ceil(4 * math.log2(positive.max())) + 2
        edges = np.array([2.0 ** (i / 4) for i in range(low, high)])
        count, _ = np.histogram(positive, edges)
        mass, _ = np.histogram(positive, edges, weights=positive)
        for i, (n, total) in enumerate(zip(count, mass, strict=True)):
            if n:
                found[(low + i) / 4] = (float(n), float(total))
    return found


@pytest.mark.parametrize(
    ("shape", "role"),
    [
        ((300, 40), "hidden"),
        ((300, 40), "embedding"),
        ((3, 50, 7), "expert"),
        ((60, 4, 3, 3), "conv"),
        ((1, 9), "head"),
    ],
)
def test_histograms_against_numpy(shape: tuple[int, ...], role: str) -> None:
    x = randn(*shape) * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    if shape[0] > 3:
        x[2] = 0.0
    (found,) = flushed({"w": x}, {"w": role}, ["weight_row_norms"]).histograms
    assert (found.step, found.param, found.name) == (1, "w", "weight_row_norms")
    lengths = (x if role == "expert" else x.flatten(1)).double().norm(dim=-1).flatten().numpy()
    expected = quarter_octaves(lengths)
    assert list(found.log2) == sorted(expected)
    assert dict(zip(found.log2, found.count, strict=True)) == {edge: n for edge, (n, _) in expected.items()}
    for edge, mass in zip(found.log2, found.mass, strict=True):
        assert mass == pytest.approx(expected[edge][1], rel=1e-7)
    assert sum(found.count) == lengths.size


def test_powers_of_two_lie_in_the_bin_that_they_begin() -> None:
    x = torch.diag(2.0 ** torch.arange(-20, 21))
    (found,) = flushed({"w": x}, {"w": "hidden"}, ["weight_row_norms"]).histograms
    assert found.log2 == tuple(float(i) for i in range(-20, 21))
    assert found.mass == tuple(2.0**i for i in range(-20, 21))


def test_rows_that_are_not_finite_have_a_bin_of_their_own() -> None:
    x = torch.eye(6)
    x[0, 1], x[1, 1], x[2] = math.nan, math.inf, 0.0
    (found,) = flushed({"w": x}, {"w": "hidden"}, ["weight_row_norms"]).histograms
    assert found.log2[:2] == (-math.inf, 0.0)
    assert math.isnan(found.log2[2])
    assert found.count == (1, 3, 2)
    assert found.mass[:2] == (0.0, 3.0)
    assert math.isnan(found.mass[2])


def test_vectors_have_no_histogram_and_only_chosen_ones_come() -> None:
    weights = {"w": randn(4, 3), "b": randn(5)}
    roles = {"w": "hidden", "b": "vector"}
    batch = flushed(weights, roles, ["row_norms", "weight_rms"], grads={"w": randn(4, 3, seed=1)})
    assert [(h.param, h.name) for h in batch.histograms] == [("w", "weight_row_norms"), ("w", "grad_row_norms")]
    assert flushed(weights, roles, "full").histograms == ()


# ---------------------------------------------------------------------- metrics of one's own


CUBES = custom(
    "l3", lambda x: x.abs().pow(3).sum(dtype=torch.float64), finish=lambda total, numel: (total / numel) ** (1 / 3)
)
LEAST = custom("least", lambda x: -float(x.min()), merge="max", finish=lambda v, _: -v, quantities=["weight", "update"])


def test_own_metrics_of_all_quantities_and_roles() -> None:
    model, sink = Zoo(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    metrics = [CUBES, LEAST, "weight_rms"]
    with Tracker(model, optimizer, schedule=every(1), metrics=metrics, sinks=[sink]) as tracker:
        for step in (1, 2):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            model.backward(step)
            optimizer.step()
            tracker.flush()
            for name, p in model.named_parameters():
                x = {
                    "weight": p.detach(),
                    "grad": p.grad,
                    "momentum": optimizer.state[p]["momentum_buffer"],
                    "update": p.detach().double() - before[name].double(),
                }
                (row,) = [r.values for r in sink.layers if (r.step, r.param) == (step, name.removesuffix(".weight"))]
                assert set(row) == {f"{q}_l3" for q in QUANTITIES} | {"weight_least", "update_least", "weight_rms"}
                for q in QUANTITIES:
                    expected = float(x[q].double().abs().pow(3).mean()) ** (1 / 3)  # type: ignore[union-attr]
                    assert row[f"{q}_l3"] == pytest.approx(expected, rel=1e-6), (name, q)
                for q in ("weight", "update"):
                    assert row[f"{q}_least"] == pytest.approx(float(x[q].min()), rel=1e-7)  # type: ignore[union-attr]
    assert sink.run is not None
    assert sink.run.units["grad_l3"] == "1"
    assert "momentum_least" not in sink.run.layer_columns


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_own_metrics_of_an_update_that_is_shown(fraction: float) -> None:
    model, sink = nn.ParameterDict({"w": nn.Parameter(torch.zeros(6, 8))}), MemorySink()
    optimizer = Dion2(model.parameters(), lr=0.5, fraction=fraction, select_dim="rows", weight_decay=0.0)
    with Tracker(model, optimizer, schedule=every(1), metrics=[CUBES, LEAST], sinks=[sink]):
        model["w"].grad = randn(6, 8)
        optimizer.step()
    update = model["w"].detach().double()  # from 0
    assert sink.value(1, "w", "update_l3") == pytest.approx(float(update.abs().pow(3).mean()) ** (1 / 3), rel=1e-6)
    assert sink.value(1, "w", "update_least") == pytest.approx(float(update.min()), rel=1e-6)


@pytest.mark.parametrize("place", ["measure", "finish"])
def test_one_that_raises_leaves_its_cells_empty_with_one_warning(place: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: Any) -> float:
        if place == "finish" or args[0].size(2) == 1:  # a vector
            raise ZeroDivisionError("no such number")
        return float(args[0].sum())

    own = custom(
        "mine", (lambda x: x.sum()) if place == "finish" else broken, finish=broken if place == "finish" else None
    )
    model, sink = nn.ParameterDict({"m": nn.Parameter(randn(4, 3)), "v": nn.Parameter(randn(5))}), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING),
        Tracker(model, optimizer, schedule=every(1), metrics=[own, "weight_rms", CUBES], sinks=[sink]),
    ):
        for _ in range(3):
            for p in model.values():
                p.grad = p.detach().clone()
            optimizer.step()
    assert sink.steps == [1, 2, 3]
    for row in sink.layers:
        there = {q for q in QUANTITIES if f"{q}_mine" in row.values}
        assert there == ({"weight", "grad", "update"} if place == "measure" and row.param == "m" else set())
        assert {"weight_rms", "weight_l3", "grad_l3", "update_l3"} <= set(row.values)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1, "of a metric, once"
    assert "mine" in said[0]
    assert "ZeroDivisionError: no such number" in said[0]


def test_one_whose_result_is_no_number_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    own = custom("mine", lambda x: x, quantities=["weight"])  # a tensor of many numbers
    model, sink = nn.ParameterDict({"w": nn.Parameter(randn(4, 3))}), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING),
        Tracker(model, optimizer, schedule=every(1), metrics=[own, "weight_rms"], sinks=[sink]),
    ):
        optimizer.step()
    assert set(sink.layers[0].values) == {"weight_rms"}
    assert len(caplog.records) == 1


# ---------------------------------------------------------------------- how often


def test_columns_that_are_not_due_are_absent() -> None:
    model, sink = Zoo(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = every(2, first=False)
    metrics = {"norms": 1, "spectral": 3, "weight_row_norms": 2}
    with Tracker(model, optimizer, schedule=schedule, metrics=metrics, sinks=[sink]):
        for step in range(1, 17):
            model.backward(step)
            optimizer.step()
    assert sink.steps == [2, 4, 6, 8, 10, 12, 14, 16]
    full = [r for r in sink.layers if r.param == "up"]
    norms = {c for c, _, _ in choose("norms").columns}
    always = {c for c in norms if c in full[0].values}
    assert always == norms, "SGD has all of them"
    sometimes = set(full[0].values) - norms
    assert {"weight_spectral", "update_rms_to_rms", "weight_coherence"} <= sometimes
    for number, row in enumerate(full):
        assert set(row.values) == always | (sometimes if number % 3 == 0 else set())
    assert [h.step for h in sink.histograms if h.param == "up"] == [2, 6, 10, 14]
    assert sink.run is not None
    assert set(sink.run.layer_columns) == {c for c, _, _ in choose(["norms", "spectral"]).columns}
    sigma = torch.linalg.svdvals(model.up.weight.detach().double())[0]
    assert "weight_spectral" not in full[-1].values
    assert sigma > 0


def test_totals_come_with_their_columns() -> None:
    model, sink = Zoo(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), metrics={"weight_rms": 1, "weight_frobenius": 2}, sinks=[sink]):
        for step in range(1, 5):
            model.backward(step)
            optimizer.step()
    found = [(s.step, s.name) for s in sink.scalars if s.name.endswith("/total")]
    expected = [
        (1, "weight_rms"),
        (1, "weight_frobenius"),
        (2, "weight_rms"),
        (3, "weight_rms"),
        (3, "weight_frobenius"),
    ]
    assert found == [(step, f"{name}/total") for step, name in [*expected, (4, "weight_rms")]]
