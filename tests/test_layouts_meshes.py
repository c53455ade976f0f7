"""Parameters on several meshes, on permuted ones and on parts of the ranks step as in one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from scion_telemetry.optim import Dion2, Layout, Orthogonalizer, Scion
from scion_telemetry.optim.layout import take_piece
from scion_telemetry.testing import run_forked, run_threads

pytestmark = pytest.mark.timeout(60)
EXACT = Orthogonalizer(name="svd", dtype=torch.float32)
PERMUTED: list[tuple[list[Any], tuple[Placement, ...]]] = [
    ([3, 1, 0, 2], (Shard(0),)),
    ([3, 1, 0, 2], (Shard(1),)),
    ([[3, 1], [2, 0]], (Shard(0), Shard(1))),
    ([[3, 1], [2, 0]], (Shard(1), Shard(0))),
    ([[3, 1], [2, 0]], (Replicate(), Shard(0))),
    ([[0, 2], [1, 3]], (Shard(0), Replicate())),
    ([[2, 0], [3, 1]], (_StridedShard(0, split_factor=2), Shard(0))),
]


def _dion2(params: list[Tensor]) -> torch.optim.Optimizer:
    return Dion2(params, lr=0.1, fraction=0.4, newton_schulz_func=EXACT, selection_scope="global", select_dim="rows")


def _scion(params: list[Tensor]) -> torch.optim.Optimizer:
    return Scion(params, lr=0.1, momentum=0.5, norm="Spectral", norm_kwargs={"orthogonalizer": EXACT})


def _train(make: Any, shapes: list[tuple[int, ...]], places: Sequence[Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(place(torch.randn(s, generator=generator))) for s, place in zip(shapes, places, strict=True)]
    optimizer = make(params)
    for _ in range(3):
        for param, shape, place in zip(params, shapes, places, strict=True):
            param.grad = place(torch.randn(shape, generator=generator))
        optimizer.step()
    return [p.detach() for p in params]


def _check_trained(expected: list[Tensor], found: list[Tensor]) -> None:
    for right, param in zip(expected, found, strict=True):
        piece = param.to_local()
        torch.testing.assert_close(piece, take_piece(right, Layout.of(param)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [_scion, _dion2])
@pytest.mark.parametrize(("ranks", "placements"), PERMUTED)
def test_ranks_in_any_order_on_the_mesh_step_alike(make: Any, ranks: list[Any], placements: Any) -> None:
    shapes = [(8, 12)] * 3 + [(12, 8)] * 2
    expected = _train(make, list(shapes), [lambda full: full] * len(shapes))

    def rank_function(rank: int, world: int) -> None:
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        places = [lambda full: distribute_tensor(full, mesh, placements, src_data_rank=None)] * len(shapes)
        _check_trained(expected, _train(make, list(shapes), places))

    run_threads(rank_function, 4, timeout=20)


@pytest.mark.parametrize("make", [_scion, _dion2])
def test_parameters_of_one_shape_on_several_meshes_keep_apart(make: Any) -> None:
    """Equal shapes and placements on other ranks: along either axis of a mesh, over all of it, over a permuted one."""
    shapes = [(6, 8)] * 8
    expected = _train(make, list(shapes), [lambda full: full] * len(shapes))

    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        other = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
        where: list[tuple[DeviceMesh, list[Placement]]] = [
            (mesh["a"], [Shard(0)]),
            (mesh["b"], [Shard(0)]),
            (mesh, [Shard(0), Shard(1)]),
            (other, [Shard(0), Shard(1)]),
        ]
        places = [
            lambda full, m=m, p=p: distribute_tensor(full, m, p, src_data_rank=None) for m, p in where for _ in range(2)
        ]
        _check_trained(expected, _train(make, list(shapes), places))

    run_threads(rank_function, 4, timeout=20)


@pytest.mark.parametrize("make", [_scion, _dion2])
def test_a_rank_outside_of_a_mesh_has_no_part_in_its_parameters(make: Any) -> None:
    shapes = [(6, 8)] * 2
    expected = _train(make, list(shapes), [lambda full: full] * len(shapes))

    def rank_function(rank: int, world: int) -> None:
        inner, every = DeviceMesh("cpu", torch.tensor([2, 0])), init_device_mesh("cpu", (world,))
        places = [lambda full, m=m: distribute_tensor(full, m, [Shard(0)], src_data_rank=None) for m in (inner, every)]
        found = _train(make, list(shapes), places)
        if inner.get_coordinate() is None:
            assert found[0].to_local().numel() == 0
            found, right = found[1:], expected[1:]
        else:
            right = expected
        _check_trained(right, found)

    run_threads(rank_function, 3, timeout=20)


def test_ranks_that_share_some_parameters_may_have_others() -> None:
    """Rank 0 shares parameters with rank 1 and others with rank 2, in any order: real ranks, where sizes must agree."""
    shapes = [(4 + i, 6) for i in range(7)]
    expected = _train(_scion, list(shapes), [lambda full: full] * len(shapes))

    def rank_function(rank: int, world: int) -> None:
        first, second = (DeviceMesh("cpu", torch.tensor([0, other])) for other in (1, 2))
        meshes = [first, second, second, second, first, first, first]
        places = [lambda full, m=m: distribute_tensor(full, m, [Shard(0)], src_data_rank=None) for m in meshes]
        found = _train(_scion, list(shapes), places)
        mine = [i for i, mesh in enumerate(meshes) if mesh.get_coordinate() is not None]
        assert len(mine) == (7, 4, 3)[rank]
        _check_trained([expected[i] for i in mine], [found[i] for i in mine])

    run_forked(rank_function, 3, timeout=20)


def test_a_rank_outside_of_the_mesh_goes_along() -> None:
    def run(rank: int, world: int) -> Tensor:
        mesh = DeviceMesh("cpu", [0, 1])
        param = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]))
        optimizer = Scion([param], momentum=0.1)
        optimizer.init()
        drawn = param.to_local().detach().clone()
        param.grad = param.detach().clone() if rank < 2 else None
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return drawn

    whole = nn.Parameter(torch.zeros(6, 4))
    Scion([whole]).init()
    *pieces, outside = run_threads(run, 3, timeout=20)
    torch.testing.assert_close(torch.cat(pieces), whole.detach(), rtol=0, atol=0)
    assert not outside.numel()


@pytest.mark.parametrize("agree", [False, True])
def test_meshes_in_a_circle_whose_parameters_every_rank_lists_otherwise(agree: bool) -> None:
    """Ranks that each begin with another one would wait for one another, all around."""

    def run(rank: int, world: int) -> Tensor:
        meshes = {pair: DeviceMesh("cpu", list(pair)) for pair in [(0, 1), (0, 2), (1, 2)]}
        params = {
            pair: nn.Parameter(distribute_tensor(torch.eye(4, 3), mesh, [Shard(0)])) for pair, mesh in meshes.items()
        }
        begin = [(0, 1), (1, 2), (0, 2)][rank]
        mine = sorted((p for p in params if rank in p), key=lambda pair: pair != begin)
        optimizer = Dion2([(str(p), params[p]) for p in mine], agree_on_gradients=agree, newton_schulz_func=EXACT)
        for pair in mine:
            params[pair].grad = params[pair].detach().clone()
        optimizer.step()
        return torch.stack([params[p].full_tensor().detach() for p in sorted(mine)])

    for found in run_threads(run, 3, timeout=20):
        assert (found != torch.eye(4, 3)).any()
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_sharded_rule_from_a_checkpoint_gathers_what_it_needs() -> None:
    """An optimizer made for AdamW, which shares nothing, becomes the Dion2 that was saved."""

    def run(rank: int, world: int) -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (world,))

        def param() -> nn.Parameter:
            made = nn.Parameter(distribute_tensor(torch.eye(6, 4), mesh, [Shard(0)]))
            made.grad = distribute_tensor(torch.arange(24.0).view(6, 4).sin(), mesh, [Shard(0)])
            return made

        first, second = param(), param()
        source = Dion2([first], fraction=0.5, newton_schulz_func="svd/5/float32")
        target = Dion2([{"params": [second], "algorithm": "adamw"}])
        target.load_state_dict(source.state_dict())
        source.step()
        target.step()
        return first.to_local().detach(), second.to_local().detach()

    for first, second in run_threads(run, 2, timeout=20):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_gradient_that_is_agreed_on_has_the_dtype_of_the_others() -> None:
    """Parameters step together by the dtype of their gradients, which a rank that lacks one has to know."""

    def run(rank: int, world: int) -> Tensor:
        mesh = init_device_mesh("cpu", (world,))
        params = []
        for _ in range(2):
            param = nn.Parameter(distribute_tensor(torch.eye(6, 4, dtype=torch.bfloat16), mesh, [Shard(0)]))
            param.grad_dtype = torch.float32
            params.append(param)
        optimizer = Dion2(params, fraction=1.0, newton_schulz_func=EXACT, agree_on_gradients=True)
        for param in params[rank:]:
            param.grad = distribute_tensor(torch.eye(6, 4), mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
        return torch.stack([param.full_tensor().detach() for param in params])

    for found in run_threads(run, 2, timeout=20):
        assert (found[0] != torch.eye(6, 4)).any()
        assert (found[1] != torch.eye(6, 4)).any()
