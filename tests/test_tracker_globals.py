"""Global settings of torch, and what a tracker makes of them: nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from parity import Net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Scion, group_params
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked


class Scoped:
    """Global settings under which a row must be the same."""

    @staticmethod
    @contextmanager
    def default_dtype(dtype: torch.dtype) -> Iterator[None]:
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    @staticmethod
    @contextmanager
    def deterministic() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


SCOPES: dict[str, Callable[[], Any]] = {
    "float64": lambda: Scoped.default_dtype(torch.float64),
    "bfloat16": lambda: Scoped.default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "deterministic": Scoped.deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def rows_within(scope: Callable[[], Any], rank: int, world: int) -> list[Any]:
    model = Net((150, 140, 3))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), MemorySink()
    for p in model.parameters():
        p.grad = p.detach().clone()
    tracker = Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink])
    flags = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    with scope():
        inside = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
        optimizer.step()
        tracker.log(a=1.0)
        optimizer.step()
        assert inside == (
            *(torch.get_default_dtype(), torch.is_grad_enabled()),
            torch.are_deterministic_algorithms_enabled(),
        )
    tracker.close()
    assert flags == (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return sink.layers if rank == 0 else []


def _same(plain: list[Any], scoped: list[Any]) -> None:
    assert [(r.step, r.param) for r in plain] == [(r.step, r.param) for r in scoped]
    for a, b in zip(plain, scoped, strict=True):
        assert b.values == pytest.approx(a.values, rel=1e-6)


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
def test_global_settings_do_not_leak_in(scope: Callable[[], Any]) -> None:
    _same(rows_within(nullcontext, 0, 1), rows_within(scope, 0, 1))


@pytest.mark.parametrize("name", ["float64", "meta"])
def test_global_settings_do_not_leak_in_on_two_ranks(name: str) -> None:
    both = run_forked(lambda r, w: [rows_within(s, r, w) for s in (nullcontext, SCOPES[name])], 2, timeout=30)
    _same(*both[0])


def test_attach_and_step_inside_a_device_context() -> None:
    model = Net()
    optimizer, sink = Scion(group_params(model), lr=0.02), MemorySink()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.device("meta"), Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        optimizer.step()
    assert sink.value(1, "up", "weight_rms") == pytest.approx(
        float(model.up.weight.detach().double().square().mean().sqrt()), rel=1e-12
    )
