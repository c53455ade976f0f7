"""Reported costs and side effects of measuring: memory on a logging step, and metrics that fail."""

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tracked import gauss, named, rms, rows, set_grads

from scion_telemetry import Tracker, every
from scion_telemetry.metrics.declare import custom
from scion_telemetry.optim import Dion2
from scion_telemetry.optim.layout import local
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(90)


class Alive(TorchDispatchMode):
    """Bytes of tensors that were made inside and are alive, and their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if type(x) is Tensor}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if type(x) is Tensor:
                storage = x.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                if size and place not in given and place not in self._seen:
                    self._seen.add(place)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, place, size)
        return made

    def _gone(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self.now -= size


def peak(rank: int, world: int, layers: int = 20, side: int = 1024) -> tuple[int, int]:
    """Of a step without a flush and of one with: matrices of 4 MB, of which this rank has 2 MB each."""
    mesh = init_device_mesh("cpu", (world,))
    tensors = {
        f"w{i}": distribute_tensor(gauss(side, side, seed=i), mesh, [Shard(0)], src_data_rank=None)
        for i in range(layers)
    }
    model = named(**tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    metrics = ["weight_spectral", "weight_rms_to_rms", "grad_rms"]
    found = []
    with Tracker(model, optimizer, schedule=lambda step: step == 2, metrics=metrics):
        for p in model.values():
            p.grad = p.detach().clone()
        for _ in range(2):
            with Alive() as alive:
                optimizer.step()
            found.append(alive.peak)
    return found[0], found[1]


def test_c148_no_matrix_is_gathered_to_be_measured() -> None:
    """20 matrices of 4 MB: little more than three of them on a logging step, where gathering takes 80 MB."""
    for off, on in run_forked(peak, 2, timeout=80):
        assert on > off, "nothing was seen"
        assert on - off < 14 * 2**20


def fails(rank: int, world: int) -> tuple[MemorySink, int, list[str]]:
    """A metric of the user that raises at step 3 for one layer on rank 1 alone."""
    mesh = init_device_mesh("cpu", (world,))
    pieces = {
        n: distribute_tensor(gauss(6, 4, seed=i), mesh, [Shard(0)], src_data_rank=None) for i, n in enumerate("ab")
    }
    model, sink, said = named(**pieces), MemorySink(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mark = float(local(model["b"]).detach().flatten()[0])

    def cubes(x: Tensor) -> Tensor:
        if (tracker.step, rank) == (2, 1) and float(x.flatten()[0]) == mark:  # while the third step is measured
            raise ZeroDivisionError("no cubes today")
        return x.abs().double().pow(3).sum()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("scion_telemetry").addHandler(Heard())
    metric = custom("cubes", cubes, finish=lambda total, numel: total ** (1 / 3), quantities=["weight"])
    with Tracker(model, optimizer, schedule=every(1), metrics=["rms", metric], sinks=[sink]) as tracker:
        for _ in range(5):
            for p in model.values():
                p.grad = p.detach().clone()
            optimizer.step()
        return sink, tracker.step, said


def test_c152_a_metric_that_fails_on_one_rank_stops_nothing() -> None:
    """Five steps on both ranks; that cell alone is blank; one warning with layer, metric and exception."""
    (sink, steps, quiet), (_, others, said) = run_forked(fails, 2, timeout=30)
    assert steps == others == 5
    found = rows(sink)
    for step in range(1, 6):
        for i, name in enumerate("ab"):
            full = gauss(6, 4, seed=i).double()
            row = found[step, name]
            assert row["weight_rms"] == pytest.approx(rms(full), rel=1e-7)
            assert row["grad_rms"] == pytest.approx(rms(full), rel=1e-7)
            if (step, name) == (3, "b"):
                assert "weight_cubes" not in row
            else:
                truth = float(full.abs().pow(3).sum()) ** (1 / 3)
                assert row["weight_cubes"] == pytest.approx(truth, rel=1e-7), (step, name)
    assert [m for m in quiet if "cubes" in m] == []
    (message,) = [m for m in said if "cubes" in m]
    for part in ("'cubes'", "'b'", "weight", "ZeroDivisionError", "no cubes today"):
        assert part in message


def test_c152_finishing_that_fails_leaves_other_metrics_alone() -> None:
    def broken(total: float, numel: int) -> float:
        raise ZeroDivisionError("never")

    model, sink = named(w=gauss(6, 4)), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metric = custom("odd", lambda x: x.sum(), finish=broken)
    with Tracker(model, optimizer, schedule=every(1), metrics=["rms", metric], sinks=[sink]):
        for step in (1, 2):
            set_grads(model, step)
            optimizer.step()
    assert sink.steps == [1, 2]
    assert sink.value(2, "w", "weight_rms") == pytest.approx(rms(gauss(6, 4)), rel=1e-7)


def in_inference_mode(rank: int, world: int, inside: bool) -> dict[tuple[int, str], Any]:
    """Six steps, every second of them in inference mode, with all metrics, a state and a verification on the way."""
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None

    def place(x: Tensor) -> Tensor:
        return x if mesh is None else distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

    model = named(a=place(gauss(150, 140)), b=place(gauss(7, seed=1)), c=place(gauss(9, 5, seed=2)))
    scope: Any = {"selection_scope": "global", "select_dim": "rows"}
    dion2 = Dion2([model["a"]], lr=0.1, fraction=0.3, **scope)
    adamw, sink = torch.optim.AdamW([model["b"], model["c"]], lr=0.1), MemorySink()
    metrics = {"full": 1, "weight_row_norms": 1}
    with Tracker(model, [dion2, adamw], schedule=every(1), metrics=metrics, sinks=[sink]) as tracker:
        for step in range(1, 7):
            for i, p in enumerate(model.values()):
                p.grad = place(gauss(*p.shape, seed=100 * step + i))
            with torch.inference_mode(inside and step % 2 == 0):  # the state of AdamW is made at the first step
                dion2.step()
                adamw.step()
                tracker.log(loss=torch.tensor(float(step)))
            if step == 3:
                tracker.state_dict()
                assert tracker.verify().largest_error <= 1e-7
    assert [s.value for s in sink.scalars if s.name == "loss"] == ([1, 2, 3, 4, 5, 6] if rank == 0 else [])
    return rows(sink)


@pytest.mark.parametrize("world", [1, 2])
def test_c155_steps_in_inference_mode(world: int) -> None:
    def both(rank: int, world: int) -> list[dict[tuple[int, str], Any]]:
        return [in_inference_mode(rank, world, inside) for inside in (False, True)]

    plain, found = both(0, 1) if world == 1 else run_forked(both, world, timeout=60)[0]
    assert len(plain) == 18
    assert set(found) == set(plain)
    for place, values in plain.items():
        assert dict(found[place]) == pytest.approx(dict(values), rel=1e-6), place
