"""What a tracker costs: collectives, numbers read back by the host, memory."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parity import Net, NoSink, backward
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scion_telemetry import Tracker, every
from scion_telemetry.metrics import norms
from scion_telemetry.optim import Dion2, group_params
from scion_telemetry.testing import run_forked


class Counting(TorchDispatchMode):
    """Counts collectives, and numbers read back by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.reads = 0
        self.kinds: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in str(func):
            self.collectives += 1
            self.kinds.add(func.overloadpacket.__name__)
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_step(optimizer: torch.optim.Optimizer) -> Iterator[Counting]:
    counting = Counting()
    with counting:
        optimizer.step()
    yield counting


def collectives(rank: int, world: int, layers: int, metrics: str | list[str], grads: bool = True) -> list[int]:
    """Collectives of steps 1 to 7 with a schedule of every third step; parameters in rows, SGD talks to nobody."""
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(
        nn.Parameter(distribute_tensor(torch.randn(70, 80, generator=generator), mesh, [Shard(0)]))
        for _ in range(layers)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found, kinds = [], set[str]()
    with Tracker(model, optimizer, schedule=every(3, first=False), metrics=metrics) as tracker:
        for _ in range(7):
            for p in model:
                p.grad = p.detach().clone() if grads else None
            with counted_step(optimizer) as counting:
                pass
            found.append(counting.collectives)
            kinds = counting.kinds or kinds
            tracker.log(loss=1.0)
        assert kinds == {"allreduce_"}, "nothing is gathered"
        assert tracker.last_flush is not None
        assert tracker.last_flush.collectives == found[-2]
    return found


@pytest.mark.parametrize(
    ("metrics", "first", "warm"), [("norms", 2, 2), (["weight_spectral"], 2 + 8, 2 + 3), ("full", 2 + 8, 2 + 4)]
)
def test_collectives_do_not_grow_with_layers_and_are_none_off_schedule(
    metrics: str | list[str], first: int, warm: int
) -> None:
    few = run_forked(lambda r, w: collectives(r, w, 5, metrics), 2, timeout=30)
    many = run_forked(lambda r, w: collectives(r, w, 50, metrics), 2, timeout=30)
    for found in (*few, *many):
        assert found == few[0]
    off = [found for step, found in enumerate(few[0], 1) if step % 3]
    assert off == [0] * 5
    agreement = few[0][2] - first  # once: which names are logged
    assert 0 <= agreement <= 2
    assert few[0][5] == warm


def reads(layers: int, on: bool) -> int:
    model = nn.ModuleList(nn.Linear(4, 5) for _ in range(layers))
    optimizer = Dion2(group_params(model), lr=0.1, fraction=0.5)
    with Tracker(model, optimizer, schedule=lambda step: step < 3 or on, metrics="full"):
        for _ in range(2):
            _set_grads(model)
            optimizer.step()
        with counted_step(optimizer) as counting:
            pass
    bare = Dion2(group_params(model), lr=0.1, fraction=0.5)
    _set_grads(model)
    with counted_step(bare) as own:
        pass
    return counting.reads - own.reads


def _set_grads(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def test_the_host_reads_nothing_off_schedule_and_on_it_no_more_for_more_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on an accelerator: on a CPU a look at a number costs nothing and saves a pass over the data.
    monkeypatch.setattr(norms, "free_to_read", lambda number: False)
    assert reads(20, on=False) == 0
    assert reads(20, on=True) == reads(60, on=True) <= 3


def test_memory_does_not_grow() -> None:
    model = Net()
    optimizer = Dion2(group_params(model), lr=0.02, fraction=0.3)
    live = Counter[int]()
    with Tracker(model, optimizer, schedule=every(7), metrics="full", sinks=[NoSink()]) as tracker:
        for step in range(1, 501):
            optimizer.zero_grad()
            backward(model, step)
            loss = model.embed.weight.square().sum()  # a tensor with a graph
            optimizer.step()
            tracker.log(loss=loss)
            del loss
            if step in (98, 497):
                tracker.flush()
                gc.collect()
                live[step] = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        assert all(not v.requires_grad for _, _, v in tracker._scalars._pending if isinstance(v, Tensor))
    assert live[497] - live[98] <= 5
