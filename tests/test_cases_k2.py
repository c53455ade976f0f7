"""Reported mistakes with empty, uneven and missing pieces, and with ranks that are left alone."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from tracked import gauss, named, rows

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2, Orthogonalizer, Scion, group_params
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(90)
EXACT = Orthogonalizer(name="svd", dtype=torch.float32)


def thin(name: str, rank: int, world: int) -> tuple[dict[str, Tensor], dict[tuple[int, str], Any]]:
    """Three steps of layers of three rows and of one, whole or by FSDP2."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(gauss(*p.shape, seed=i))
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups, sink = group_params(model), MemorySink()
    optimizer: torch.optim.Optimizer = (
        Scion(groups, lr=0.1, momentum=0.3, norm_kwargs={"orthogonalizer": EXACT})
        if name == "Scion"
        else Dion2(groups, lr=0.1, fraction=0.5, selection_scope="global", newton_schulz_func=EXACT)
    )
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        for step in range(3):
            optimizer.zero_grad()
            model(gauss(5, 4, seed=50 + step)).square().sum().backward()
            optimizer.step()
    whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}
    return whole, rows(sink)


@pytest.mark.parametrize("name", ["Scion", "Dion2"])
@pytest.mark.parametrize("world", [2, 4])
def test_c25_matrices_of_one_row_under_fsdp2(name: str, world: int) -> None:
    alone, right = thin(name, 0, 1)
    cut, found = run_forked(lambda r, w: thin(name, r, w), world, timeout=40)[0]
    for n, p in alone.items():
        torch.testing.assert_close(cut[n], p, atol=1e-5, rtol=0)
    assert set(found) == set(right)
    for place, values in right.items():
        # 1e-4: weights of other rounding; entries that cancel in a step of length 1 are not far from zero.
        assert found[place] == pytest.approx(dict(values), rel=0.02, abs=1e-4), place


# ---------------------------------------------------------------------- one rank alone


def alone(what: str, rank: int, file: Path) -> tuple[str, float]:
    """Rank 0 does what every rank must do; what comes of it, and after how many seconds."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    model = named(w=torch.ones(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = None if what == "constructing" else Tracker(model, optimizer, schedule=every(1), process_group=group)
    dist.barrier()
    if rank == 1:
        while not file.exists():
            time.sleep(0.05)
        return "", 0.0
    start, found = time.monotonic(), "nothing"
    try:
        if tracker is None:
            Tracker(model, optimizer, process_group=group)
        elif what == "stepping":
            optimizer.step()
        elif what == "flushing":
            tracker.flush()
        else:
            {"state": tracker.state_dict, "verifying": tracker.verify, "closing": tracker.close}[what]()
    except Exception as error:
        found = type(error).__name__
    seconds = time.monotonic() - start
    file.touch()
    return found, seconds


@pytest.mark.parametrize("what", ["constructing", "stepping", "state", "verifying", "closing"])
def test_what_rank_0_does_alone_raises_in_the_time_of_its_group(what: str, tmp_path: Path) -> None:
    """Two seconds here, as the user chose; nobody waits for half an hour."""
    found, seconds = run_forked(lambda r, w: alone(what, r, tmp_path / "done"), 2, timeout=30)[0]
    assert found not in ("nothing", ""), what
    assert 1.5 < seconds < 10


def test_flush_needs_no_other_rank(tmp_path: Path) -> None:
    found, seconds = run_forked(lambda r, w: alone("flushing", r, tmp_path / "done"), 2, timeout=30)[0]
    assert found == "nothing"
    assert seconds < 2
