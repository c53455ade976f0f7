"""Metrics that relate two tensors, or a tensor and its rule: by float64 on whole tensors, alone and in pieces."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from tracked import gauss, named, rows

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2, Scion
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(90)

SHAPES = {"ball": (10, 7), "free": (6, 8), "picked": (9, 5), "stack": (4, 6, 5), "adam": (5, 3), "bias": (11,)}
LRS = {"ball": 0.05, "free": 0.04, "picked": 0.03, "stack": 0.03, "adam": 0.02, "bias": 0.02}
DECAYS = {"ball": 1.0, "free": 0.5, "picked": 0.1, "stack": 0.1, "adam": 0.3, "bias": 0.3}
STEPS = 4
Found = dict[tuple[int, str], dict[str, float]]


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double().clone()


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def momentum_of(state: Any) -> Tensor:
    """Dion2's is called momentum, Scion's momentum_buffer, AdamW's exp_avg."""
    (found,) = [state[key] for key in ("momentum", "momentum_buffer", "exp_avg") if key in state]
    return found


def sigma(x: Tensor) -> float:
    return max(float(torch.linalg.svdvals(m)[0]) for m in x.view(-1, *x.shape[-2:]))


def polar_error(direction: Tensor) -> float:
    """Of rows (or columns) that should be orthonormal, the largest of a stack."""

    def one(x: Tensor) -> float:
        short = x if x.size(0) <= x.size(1) else x.mT
        return float((short @ short.mT - torch.eye(len(short), dtype=x.dtype)).norm()) / math.sqrt(len(short))

    return max(one(m) for m in direction.view(-1, *direction.shape[-2:]))


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    hidden: dict[str, Any] = {"role": "hidden", "norm": "Spectral", "scale": 2.0}
    free = {**hidden, "unconstrained": True, "scale": 3.0, "weight_decay": 0.5, "lr": 0.04}
    scion = Scion(
        [{"params": [model["ball"]], **hidden, "lr": 0.05}, {"params": [model["free"]], **free}], lr=1.0, momentum=0.3
    )
    options: dict[str, Any] = {"selection_scope": "global", "select_dim": "rows", "fraction": 0.4}
    dion2 = Dion2([model["picked"], model["stack"]], lr=0.03, weight_decay=0.1, **options)
    adamw = torch.optim.AdamW([model["adam"], model["bias"]], lr=0.02, weight_decay=0.3, foreach=False)
    return [scion, dion2, adamw]


def run(rank: int, world: int) -> tuple[Found, Found]:
    """What the tracker says of each step and parameter, and what whole tensors say."""
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None

    def place(x: Tensor) -> Tensor:
        return x if mesh is None else distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

    model = named(**{n: place(gauss(*s, seed=i)) for i, (n, s) in enumerate(SHAPES.items())})
    several, sink = optimizers(model), MemorySink()
    truth: Found = {}
    previous: dict[str, Tensor] = {}
    with Tracker(model, several, schedule=every(1), metrics="full", sinks=[sink]):
        for step in range(1, STEPS + 1):
            grads = {n: gauss(*s, seed=100 * step + i) for i, (n, s) in enumerate(SHAPES.items())}
            before = {n: whole(p) for n, p in model.items()}
            for name, p in model.items():
                p.grad = place(grads[name])
            for optimizer in several:
                optimizer.step()
            for name, p in model.items():
                after = whole(p)
                update = after - (1 - LRS[name] * DECAYS[name]) * before[name]
                truth[step, name] = related(name, after, update, grads[name].double(), previous.get(name))
                state = next(o.state[p] for o in several if p in o.state)
                momentum = whole(momentum_of(state))
                truth[step, name]["momentum_grad_cosine"] = cosine(momentum, grads[name].double())
                previous[name] = update
    return {key: dict(values) for key, values in rows(sink).items()}, truth


def related(name: str, after: Tensor, update: Tensor, grad: Tensor, previous: Tensor | None) -> dict[str, float]:
    found = {
        "update_lr": LRS[name],
        "weight_decay": DECAYS[name],
        "update_weight_cosine": cosine(update, after),
        "update_weight_ratio": float(update.norm() / after.norm()),
    }
    if previous is not None:
        found["update_previous_cosine"] = cosine(update, previous)
    if after.ndim > 1:
        lengths = update.norm(dim=-1) / after.norm(dim=-1)
        found["update_row_weight_ratio"] = float(lengths.max())
        found["update_row_rms_max"] = float(update.square().mean(-1).max().sqrt())
        found["update_row_rms_median"] = float(update.square().mean(-1).sqrt().flatten().quantile(0.5))
        found["weight_row_magnitude"] = float(after.norm(dim=-1).max())
    if name in ("ball", "free"):
        d_out, d_in = after.shape
        scale, radius = {"ball": (2.0, 2.0), "free": (3.0, 6.0)}[name]
        found["weight_radius_share"] = sigma(after) * math.sqrt(d_in / d_out) / radius
        found["update_polar_error"] = polar_error(update / (LRS[name] * scale) * math.sqrt(d_in / d_out))
    return found


def check(found: Found, truth: Found) -> None:
    assert set(found) == set(truth)
    for place, expected in truth.items():
        for name, right in expected.items():
            # Updates are known to the rounding of the weights; a share of the radius is an estimate from below.
            close = (
                pytest.approx(right, rel=0.01)
                if name == "weight_radius_share"
                else pytest.approx(right, rel=2e-4, abs=1e-5)
            )
            assert found[place][name] == close, (place, name)
        assert ("update_previous_cosine" in found[place]) == (place[0] > 1), place


def test_one_process() -> None:
    check(*run(0, 1))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_say_what_one_process_says(world: int) -> None:
    alone, _ = run(0, 1)
    found, truth = run_forked(run, world, timeout=40)[0]
    check(found, truth)
    assert set(found) == set(alone)
    for place, values in alone.items():
        assert set(found[place]) == set(values), place
        for name, value in values.items():
            estimated = any(
                part in name for part in ("spectral", "stable", "sigma", "rms_to_rms", "coherence", "radius")
            )
            assert found[place][name] == pytest.approx(value, rel=0.02 if estimated else 2e-4, abs=1e-5), (place, name)


def test_previous_cosine_is_of_consecutive_steps_on_any_schedule() -> None:
    """At every third step: with the update one step before, not three."""
    model = named(w=gauss(6, 4))
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    grads = {step: gauss(6, 4, seed=step).double() for step in range(1, 10)}
    with Tracker(model, optimizer, schedule=every(3, first=False), metrics=["previous_cosine"], sinks=[sink]):
        for grad in grads.values():
            model["w"].grad = grad.float()
            optimizer.step()
    assert sink.steps == [3, 6, 9]
    for step in sink.steps:
        truth = cosine(grads[step], grads[step - 1])
        assert sink.value(step, "w", "update_previous_cosine") == pytest.approx(truth, rel=1e-4, abs=1e-5)


def test_previous_cosine_at_multiples_of_flushes() -> None:
    model = named(w=gauss(6, 4))
    optimizer, sink = Scion(model.parameters(), lr=0.1, unconstrained=True, norm="Sign", momentum=0.3), MemorySink()
    grads = {step: gauss(6, 4, seed=step).double() for step in range(1, 10)}
    metrics = {"update_rms": 1, "previous_cosine": 3}
    with Tracker(model, optimizer, schedule=every(2), metrics=metrics, sinks=[sink]):
        signs = {}
        for step, grad in grads.items():
            model["w"].grad = grad.float()
            optimizer.step()
            momentum = momentum_of(optimizer.state[model["w"]]).double()
            signs[step] = momentum.sign()
    shown = {r.step: r.values for r in sink.layers}
    assert list(shown) == [1, 2, 4, 6, 8]
    assert {step for step, values in shown.items() if "update_previous_cosine" in values} == {6}  # flushes 0 and 3
    assert shown[6]["update_previous_cosine"] == pytest.approx(cosine(signs[6], signs[5]), abs=1e-6)
