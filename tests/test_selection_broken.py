"""A NaN in one row of one rank's momentum: what needs its score is NaN, everything else is as it was."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from selection_brute import CURVE, SHARDS, compare, follow, truth
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tracked import gauss, named

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2
from scion_telemetry.optim.layout import local
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(60)

SHAPES = {"broken": (8, 6), "sound": (8, 6), "experts": (4, 6, 5)}
STEPS, EF_DECAY, FRACTION = 6, 0.9, 0.25
OF_SCORES = {
    *("captured_mass", "excess_mass", "gini", "participation_ratio", "threshold", "unselected_energy", "ef_growth"),
    *(f"mass_at_{f:g}" for f in CURVE),
    *(f"regret_at_{w}" for w in SHARDS if w <= 8),
}
OF_SHARDS = {"regret", "overlap", "imbalance"}


def gradient(name: str, step: int, poison: float) -> Tensor:
    """Random ones; at step 3 an entry is broken: of row 5, and of the last row of the last expert."""
    found = gauss(*SHAPES[name], seed=10 * step + list(SHAPES).index(name))
    if name != "sound" and step == 3:
        found.view(-1, SHAPES[name][-1])[-3 if name == "broken" else -1, 2] = poison
    return found


def train(poison: float, scope: str, rank: int = 0, world: int = 1) -> dict[tuple[int, str], dict[str, float]]:
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None

    def place(x: Tensor) -> Tensor:
        return x if mesh is None else distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

    model = named(**{name: place(torch.ones(shape)) for name, shape in SHAPES.items()})
    options: dict[str, Any] = {"selection_scope": scope, "select_dim": "rows", "ef_decay": EF_DECAY}
    optimizer, sink = Dion2(list(model.items()), fraction=FRACTION, **options), MemorySink()
    metrics = ["basic", "selection_gradient", "selection_frequencies"]
    with Tracker(model, optimizer, schedule=every(1), metrics=metrics, sinks=[sink]):
        for step in range(1, STEPS + 1):
            for name, p in model.items():
                p.grad = place(gradient(name, step, poison))
            optimizer.step()
    assert len(sink.slices) == (8 + 8 + 24 if rank == 0 else 0)
    if mesh is not None and scope == "local":  # the poison did not spread to what the other rank keeps
        sound = local(optimizer.state[model["broken"]]["momentum"])
        assert bool(torch.isfinite(sound).all()) == (rank == 0)
        dist.barrier()
    return {(r.step, r.param): dict(r.values) for r in sink.selection}


def expected(name: str, scope: str, world: int) -> list[dict[str, float]]:
    """By step, as if the broken entry were larger than anything."""
    shape = SHAPES[name]
    cut = world > 1 and len(shape) == 2
    shards = [range(0, 4), range(4, 8)] if cut else [range(shape[-2])]
    gradients = [gradient(name, step, 1e9).reshape(-1, *shape[-2:]) for step in range(1, STEPS + 1)]
    moments = follow(gradients, [FRACTION] * STEPS, EF_DECAY, shards if scope == "local" else None)
    known: dict[str, Any] = {"length": shape[-1], "ef_decay": EF_DECAY, "travels": cut}
    return [truth(moments[: s + 1], s, shards=shards if cut else (), **known) for s in range(STEPS)]


def without(values: Mapping[str, float], names: set[str]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("world", [1, 2])
def test_one_broken_entry(poison: float, scope: str, world: int) -> None:
    if world == 1:
        rows = train(poison, scope)
    else:
        rows = run_forked(lambda r, w: train(poison, scope, r, w), world, timeout=50)[0]
    assert set(rows) == {(s, name) for s in range(1, STEPS + 1) for name in SHAPES}
    for name in SHAPES:
        for step, right in enumerate(expected(name, scope, world), 1):
            row, where = rows[step, name], (step, name)
            assert set(row) == set(right), (where, set(row) ^ set(right))
            if name == "sound" or step < 3:
                # Scores are float32 here, and what is made of them is as near.
                assert all(row[c] == pytest.approx(right[c], rel=1e-5, abs=1e-5) for c in right), where
                continue
            lost = {c for c in right if c in OF_SCORES | OF_SHARDS}
            of_gradient = {c for c in right if c.startswith("grad_")}
            assert {c for c in lost if not math.isnan(row[c])} == set(), where
            # The gradient is broken at its own step alone.
            assert all(math.isnan(row[c]) == (step == 3) for c in of_gradient), where
            kept = without(right, lost | of_gradient)
            assert {"k", "fraction", "age_max", "coverage", "churn", "always", "horizon", "frequency_gini"} <= set(kept)
            compare({c: row[c] for c in kept}, kept, where)
