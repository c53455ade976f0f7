"""Reported mistakes of what hangs on an optimizer: containers, rates that move on, frozen parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tracked import gauss, named, rms, rows, set_grads

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2, Scion
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked


class Container(torch.optim.Optimizer):
    """One optimizer to the outside, whose step is those of its parts."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([{"params": g["params"], "lr": g["lr"]} for o in parts for g in o.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


@pytest.mark.parametrize("tracked", ["the container", "its parts"])
def test_c85_a_container_steps_once(tracked: str) -> None:
    """Whichever of the two the tracker is given: one row a step."""
    model = named(a=gauss(6, 4), b=gauss(4))
    parts = (torch.optim.SGD([model["a"]], lr=0.1), torch.optim.SGD([model["b"]], lr=0.2))
    container, sink = Container(*parts), MemorySink()
    given: Any = container if tracked == "the container" else parts
    with Tracker(model, given, schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for step in (1, 2, 3):
            set_grads(model, step)
            container.step()
            assert tracker.step == step
    assert [(r.step, r.param) for r in sink.layers] == [(s, n) for s in (1, 2, 3) for n in ("a", "b")]
    for step in (1, 2, 3):
        assert sink.value(step, "a", "update_rms") == pytest.approx(0.1 * rms(gauss(6, 4, seed=1000 * step)), rel=1e-6)
        assert sink.value(step, "b", "update_rms") == pytest.approx(0.2 * rms(gauss(4, seed=1000 * step + 1)), rel=1e-6)
        assert sink.value(step, "b", "update_lr") == 0.2


RATES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1.0),
    "Dion2": lambda p: Dion2(p, lr=1.0, fraction=0.5),
    "Scion": lambda p: Scion(p, lr=1.0, unconstrained=True),
}


@pytest.mark.parametrize("name", RATES)
def test_c92_the_rate_is_that_of_the_step_and_not_of_the_next_one(name: str) -> None:
    model, sink = named(w=gauss(6, 4)), MemorySink()
    optimizer = RATES[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 ** (step + 1))
    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]):
        for step in (1, 2, 3):
            set_grads(model, step)
            optimizer.step()
            scheduler.step()
    assert [sink.value(s, "w", "update_lr") for s in (1, 2, 3)] == pytest.approx([0.1, 0.01, 0.001], rel=1e-12)


FROZEN = {"stuck": (6, 4), "mixed": (5, 3), "moves": (7,)}


def with_frozen(rank: int, world: int) -> dict[tuple[int, str], Any]:
    """A group with a frozen parameter alone, one with both kinds, and an empty one."""
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None

    def place(x: Tensor) -> Tensor:
        return x if mesh is None else distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

    model = named(**{n: place(gauss(*s, seed=i)) for i, (n, s) in enumerate(FROZEN.items())})
    model["stuck"].requires_grad_(False)
    groups: list[Any] = [
        {"params": [model["stuck"]]},
        {"params": [model["mixed"]]},
        {"params": [model["moves"]], "algorithm": "adamw"},
        {"params": []},
    ]
    optimizer, sink = Dion2(groups, lr=0.1, fraction=0.5, selection_scope="global", select_dim="rows"), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        for step in (1, 2):
            for name, p in model.items():
                p.grad = place(gauss(*FROZEN[name], seed=10 * step)) if p.requires_grad else None
            optimizer.step()
    return rows(sink)


@pytest.mark.parametrize("world", [1, 2])
def test_c94_frozen_parameters_and_empty_groups(world: int) -> None:
    found = with_frozen(0, 1) if world == 1 else run_forked(with_frozen, world, timeout=30)[0]
    for step in (1, 2):
        kinds = {name: {c.split("_")[0] for c in found[step, name]} for name in FROZEN}
        assert {c for c in found[step, "stuck"] if c.startswith(("grad_", "update_"))} == {"grad_missing"}
        assert found[step, "stuck"]["grad_missing"] == world
        assert found[step, "stuck"]["weight_rms"] == pytest.approx(rms(gauss(6, 4)), rel=1e-9)
        for name in ("mixed", "moves"):
            assert {"weight", "grad", "momentum", "update"} <= kinds[name]
            truth = rms(gauss(*FROZEN[name], seed=10 * step))
            assert found[step, name]["grad_rms"] == pytest.approx(truth, rel=1e-9)


def test_c94_everything_that_is_a_matrix_is_frozen() -> None:
    model = named(a=gauss(6, 4), b=gauss(4))
    model["a"].requires_grad_(False)
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        model["b"].grad = gauss(4, seed=1)
        optimizer.step()
    assert "update_rms" not in rows(sink)[1, "a"]
    assert sink.value(1, "b", "update_rms") == pytest.approx(0.1 * rms(gauss(4, seed=1)), rel=1e-6)
