"""Counted bytes of one Dion2 or Scion step: only what is selected travels, and nothing is padded."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from scion_telemetry.optim import Dion2, Scion
from scion_telemetry.testing import run_threads

Calls = list[tuple[int, int, int]]
"""(rank, elements sent, elements received) of every all-to-all."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen: Calls = []
    real: Callable[..., Any] = dist.all_to_all_single

    def counted(output: Tensor, input: Tensor, arriving: Any = None, leaving: Any = None, **kwargs: Any) -> Any:
        assert sum(leaving) == input.numel()
        assert sum(arriving) == output.numel()
        assert input.dtype == output.dtype == torch.bfloat16
        seen.append((dist.get_rank(), input.numel(), output.numel()))
        return real(output, input, arriving, leaving, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    return seen


def _total(calls: Calls) -> int:
    return sum(sent for _, sent, _ in calls)


def _rows(rows: int, world: int) -> list[int]:
    size = -(-rows // world)
    return [max(0, min(size, rows - size * r)) for r in range(world)]


def _step(world: int, shapes: list[tuple[int, int]], make: Callable[[list[nn.Parameter]], Any]) -> None:
    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        params = []
        for i, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(i)
            full = torch.randn(shape, generator=generator)
            p = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
            p.grad = distribute_tensor(full + 1, mesh, [Shard(0)], src_data_rank=None)
            params.append(p)
        make(params).step()

    run_threads(rank_function, world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5, 1.0])
def test_dion2_moves_only_the_selected_rows(calls: Calls, world: int, scope: str, fraction: float) -> None:
    shapes = [(40, 24)] * 5 + [(7, 16)] * 3 + [(3, 8)]
    _step(world, shapes, lambda p: Dion2(p, fraction=fraction, selection_scope=scope))
    expected = 0
    for rows, columns in shapes:
        k = max(1, math.ceil(round(fraction * (rows if scope == "global" else -(-rows // world)), 9)))
        selected = k if scope == "global" else sum(min(k, r) for r in _rows(rows, world))
        expected += 2 * selected * columns  # there and back
    assert _total(calls) == expected
    assert len(calls) == 2 * 3 * world  # two transfers a shape, whatever the number of matrices


@pytest.mark.parametrize("world", [2, 4])
def test_scion_moves_every_entry_twice_and_rowwise_norms_move_nothing(calls: Calls, world: int) -> None:
    shapes = [(5, 3), (5, 3), (8, 6), (1, 4)]
    norm_kwargs = {"orthogonalizer": "polar_express"}
    _step(world, shapes, lambda p: Scion(p, norm="Spectral", norm_kwargs=norm_kwargs))
    assert _total(calls) == 2 * sum(math.prod(s) for s in shapes)
    calls.clear()
    for norm, kwargs in [("Sign", {}), ("RowNorm", {}), ("ColNorm", {"transpose": True})]:
        _step(world, shapes, lambda p, norm=norm, kwargs=kwargs: Scion(p, norm=norm, norm_kwargs=kwargs))
    assert calls == []


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_send_every_result_to_all_and_nothing_else(calls: Calls, world: int) -> None:
    def rank_function(rank: int, world: int) -> None:
        params = [nn.Parameter(torch.ones(6, 4)) for _ in range(5)]
        for p in params:
            p.grad = torch.ones(6, 4)
        Dion2(params, dist.group.WORLD, fraction=0.5).step()

    run_threads(rank_function, world)
    selected = 2 * 6  # of a tall matrix, columns: 2 of 4
    assert _total(calls) == 5 * world * selected
    assert {received for _, _, received in calls} == {5 * selected}


@contextmanager
def _pretend(world: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=1, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def _meta(shape: tuple[int, int], mesh: DeviceMesh) -> nn.Parameter:
    rows = _rows(shape[0], mesh.size())[1]
    stride = (shape[1], 1)

    def piece() -> DTensor:
        empty = torch.empty(rows, shape[1], device="meta")
        return DTensor.from_local(empty, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    param = nn.Parameter(piece())
    param.grad = piece()
    return param


@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_bytes_of_a_large_model_fall_with_the_ranks(calls: Calls, world: int, fraction: float) -> None:
    """32 matrices 4096x4096: what one rank sends is fraction · 2 · its share, up to 1,024 ranks and 32 matrices."""
    shape, count = (4096, 4096), 32
    with _pretend(world) as mesh:
        Dion2([_meta(shape, mesh) for _ in range(count)], fraction=fraction).step()
    k = max(1, math.ceil(fraction * shape[0] / world))
    owned = count // world if world <= count else 1  # by rank 1: equal matrices go round the ranks
    to_owners = count * k * shape[1]
    to_owned = owned * world * k * shape[1]
    assert [c[1:] for c in calls] == [(to_owners, to_owned), (to_owned, to_owners)]


def test_replicas_go_on_sharing_the_work_after_loading(calls: Calls) -> None:
    def rank_function(rank: int, world: int) -> None:
        param = nn.Parameter(torch.ones(6, 4))
        param.grad = torch.ones(6, 4)
        optimizer = Dion2([param], dist.group.WORLD)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()

    run_threads(rank_function, 2)
    assert len(calls) == 2
