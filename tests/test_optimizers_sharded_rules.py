"""What only sharding shows: selection scopes, k, initial weights, parameters that are no matrices, checkpoints."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference_optimizers as ref
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scion_telemetry.optim import Dion2, Orthogonalizer, Scion, group_params
from scion_telemetry.testing import run_forked, run_threads

EXACT = Orthogonalizer(name="svd", dtype=torch.float64)


def _gauss(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _full(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach().clone()


def _dion2_on(world: int, shape: tuple[int, int], steps: int, **options: Any) -> list[tuple[Tensor, list[list[int]]]]:
    """Weights after ``steps`` and the local selections of every step, of every rank."""

    def rank_function(rank: int, size: int) -> tuple[Tensor, list[list[int]]]:
        mesh = init_device_mesh("cpu", (size,))

        def place(x: Tensor) -> Tensor:
            return distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) if size > 1 else x

        param = nn.Parameter(place(_gauss(shape, 0)))
        optimizer = Dion2([param], lr=0.1, newton_schulz_func=EXACT, **options)
        seen: list[list[int]] = []
        optimizer.register_step_observer(lambda event: seen.append(event.selections[0].indices.tolist()))
        for t in range(steps):
            param.grad = place(_gauss(shape, 1 + t))
            optimizer.step()
        return _full(param), seen

    return run_threads(rank_function, world)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_global_scope_selects_the_same_6_of_17_rows_on_any_number_of_ranks(world: int) -> None:
    shape, shard = (17, 24), -(-17 // world)
    (weight, rows), *_ = _dion2_on(1, shape, 4, fraction=0.35)
    results = _dion2_on(world, shape, 4, fraction=0.35, selection_scope="global")
    for t in range(4):
        selected = sorted(rank * shard + i for rank, (_, seen) in enumerate(results) for i in seen[t])
        assert selected == rows[t]
        assert len(selected) == 6
    for actual, _ in results:
        torch.testing.assert_close(actual, weight, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("rows", "counts"), [(17, [2, 2, 2, 2]), (5, [1, 1, 1, 0]), (16, [2, 2, 2, 2])])
def test_local_scope_selects_from_every_shard_and_nothing_from_an_empty_one(rows: int, counts: list[int]) -> None:
    """k = ⌈fraction · ⌈rows/world⌉⌉, the same on every rank, as in microsoft/dion; 17 rows are 5, 5, 5 and 2."""
    shape, steps = (rows, 3), 2
    results = _dion2_on(4, shape, steps, fraction=0.35 if rows == 17 else 0.25 if rows == 5 else 0.5)
    assert [[len(s) for s in seen] for _, seen in results] == [[c, c] for c in counts]
    oracle = ref.Dion2Reference(
        _gauss(shape, 0).numpy(),
        fraction=0.35 if rows == 17 else 0.25 if rows == 5 else 0.5,
        ef_decay=0.95,
        weight_decay=0.01,
        factor=math.sqrt(rows / 3),
    )
    oracle.rows_always, oracle.shards = True, 4
    for t in range(steps):
        oracle.step(_gauss(shape, 1 + t).numpy(), 0.1)
    for weight, _ in results:
        torch.testing.assert_close(weight, torch.from_numpy(oracle.w), atol=1e-10, rtol=0)


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("world", [2, 4])
def test_fraction_one_is_the_whole_matrix_in_either_scope(scope: str, world: int) -> None:
    (expected, _), *_ = _dion2_on(1, (5, 7), 3, fraction=1)
    for weight, _ in _dion2_on(world, (5, 7), 3, fraction=1.0, selection_scope=scope):
        torch.testing.assert_close(weight, expected, atol=1e-12, rtol=0)


class Zoo(nn.Module):
    """Parameters that are no plain matrices, some smaller than the number of ranks."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(5, 3, 4)
        self.conv2 = nn.Conv2d(2, 6, 3)
        self.layer_scale = nn.Parameter(torch.ones(6, 1, 1))
        self.token = nn.Parameter(torch.ones(1, 1, 6))
        self.scale = nn.Parameter(torch.ones(1))
        self.mlp = nn.Linear(4, 7)
        if experts:
            self.experts = nn.Parameter(torch.ones(3, 4, 5))


def _fill_(model: nn.Module, sharded: bool) -> None:
    for i, p in enumerate(model.parameters()):
        value = _gauss(tuple(p.shape), 10 + i).float()
        p.grad = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None) if sharded else value


def _scion(model: nn.Module) -> Scion:
    exact = {"norm_kwargs": {"orthogonalizer": EXACT}}
    return Scion(group_params(model, roles={"conv": exact, "hidden": exact, "expert": exact}), lr=0.1, momentum=0.5)


def _dion2(model: nn.Module) -> Dion2:
    exact = {"norm_kwargs": {"orthogonalizer": EXACT}}
    groups = group_params(model, roles={"conv": exact})
    return Dion2(groups, lr=0.1, fraction=0.5, selection_scope="global", select_dim="rows", newton_schulz_func=EXACT)


def _shard_(model: nn.Module, how: str, world: int, *, experts_along: int = 1) -> None:
    """Shard a model as FSDP2 does, with replicas, or along the second dimension of whatever has two."""
    if how == "columns":
        mesh = init_device_mesh("cpu", (world,))
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                where = [Shard(experts_along if name == "experts" else min(1, p.ndim - 1))]
                setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, where, src_data_rank=None)))
    elif how == "replicas":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


@pytest.mark.parametrize("make", [_scion, _dion2])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("how", "world"), [("rows", 2), ("rows", 4), ("replicas", 4), ("columns", 2), ("columns", 4)])
def test_convolutions_gains_tokens_and_stacks_however_they_are_cut(
    make: Callable[[nn.Module], torch.optim.Optimizer], experts: bool, how: str, world: int
) -> None:
    def train(model: nn.Module, sharded: bool) -> dict[str, Tensor]:
        optimizer = make(model)
        for _ in range(2):
            _fill_(model, sharded)
            optimizer.step()
        return {n: _full(p) for n, p in model.named_parameters()}

    torch.manual_seed(0)
    start = Zoo(experts).state_dict()

    def rank_function(rank: int, world: int) -> dict[str, Tensor]:
        model = Zoo(experts)
        model.load_state_dict(start)
        _shard_(model, how, world, experts_along=2 if make is _dion2 else 1)  # Dion2 selects rows: they must be whole
        return train(model, True)

    alone = Zoo(experts)
    alone.load_state_dict(start)
    expected = train(alone, False)
    for weights in run_threads(rank_function, world, timeout=30):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_dion2_refuses_stacks_that_are_cut_where_it_selects_from_all_ranks() -> None:
    """Every matrix of the stack would have another number of selected rows on every rank."""

    def rank_function(rank: int, world: int) -> None:
        model = Zoo(experts=True)
        _shard_(model, "columns", world)
        with pytest.raises(ValueError, match=r"'experts': a stack.*Shard\(1\) x2.*selection_scope='local'"):
            _dion2(model)
        groups = group_params(model, roles={"expert": {"selection_scope": "local"}})
        optimizer = Dion2(groups, selection_scope="global", select_dim="rows")
        for group in optimizer.param_groups:
            group.update({"selection_scope": "global"} if group["role"] == "expert" else {})
            for p in group["params"]:
                p.grad = torch.zeros_like(p, requires_grad=False)
        with pytest.raises(ValueError, match=r"a stack.*Shard\(1\) x2.*selection_scope='local'"):
            optimizer.step()

    run_threads(rank_function, 2, timeout=20)


def test_gradients_in_another_layout_are_refused() -> None:
    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None))
        optimizer = Scion([param])
        param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)], src_data_rank=None)
        with pytest.raises(ValueError, match=r"lies as \(Shard\(1\) x2\), its weight as \(Shard\(0\) x2\)"):
            optimizer.step()

    run_threads(rank_function, 2)


@pytest.mark.parametrize(("how", "world"), [("rows", 2), ("rows", 4), ("replicas", 4), ("columns", 2), ("columns", 4)])
def test_initial_weights_do_not_depend_on_the_ranks(how: str, world: int) -> None:
    def initial(model: nn.Module) -> dict[str, Tensor]:
        optimizer = Scion(group_params(model), scale=3.0)
        optimizer.init(seed=7)
        return {n: _full(p) for n, p in model.named_parameters()}

    def rank_function(rank: int, world: int) -> dict[str, Tensor]:
        model = Zoo()
        _shard_(model, how, world)
        return initial(model)

    expected = initial(Zoo())
    for weights in run_threads(rank_function, world):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], atol=0, rtol=0)
    matrix = expected["mlp.weight"]
    torch.testing.assert_close(torch.linalg.svdvals(matrix), torch.full((4,), 3 * math.sqrt(7 / 4)))
    other = nn.Linear(4, 7)
    Scion([other.weight]).init(seed=8)
    assert (other.weight - matrix / 3).abs().max() > 0.1


def test_initial_weights_of_dtypes_and_layers_differ() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)).bfloat16()
    Scion(group_params(model)).init()
    first, second = (p.detach() for p in model.parameters())
    assert first.dtype == torch.bfloat16
    assert (first - second).abs().max() > 0.1
    torch.testing.assert_close(torch.linalg.svdvals(first.float()), torch.ones(6), atol=2e-2, rtol=0)


def _named_scion(model: nn.Module) -> Scion:
    return Scion(group_params(model, roles={"hidden": {"norm_kwargs": {"orthogonalizer": "svd"}}}), momentum=0.5)


def _named_dion2(model: nn.Module) -> Dion2:
    return Dion2(group_params(model), fraction=0.5, selection_scope="global", newton_schulz_func="svd")


@pytest.mark.parametrize("make", [_named_scion, _named_dion2])
def test_a_full_state_dict_moves_between_numbers_of_ranks(make: Any) -> None:
    """torch's own state-dict tools: save on 2 ranks, load on 1; the next update is equal."""
    how = StateDictOptions(full_state_dict=True)

    def model_of() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        for i, p in enumerate(model.parameters()):
            p.data.copy_(_gauss(tuple(p.shape), i))
        return model

    def rank_function(rank: int, world: int) -> tuple[Any, Any, Any]:
        model = model_of()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = make(model)
        _fill_(model, True)
        optimizer.step()
        saved = get_optimizer_state_dict(model, optimizer, options=how)
        weights = {n: _full(p) for n, p in model.named_parameters()}
        _fill_(model, True)
        optimizer.step()
        return weights, saved, {n: _full(p) for n, p in model.named_parameters()}

    weights, saved, expected = run_forked(rank_function, 2)[0]
    model = model_of()
    model.load_state_dict(weights)
    optimizer = make(model)
    set_optimizer_state_dict(model, optimizer, saved, options=how)
    _fill_(model, False)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], atol=1e-6, rtol=0)


def test_state_keys_are_equal_on_all_ranks_also_where_a_gradient_was_missing() -> None:
    def rank_function(rank: int, world: int) -> list[Any]:
        shared, lonely = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
        optimizer = Dion2([shared, lonely])
        keys = [{k: sorted(v) for k, v in optimizer.state_dict()["state"].items()}]
        for p in (shared, lonely) if rank == 0 else (shared,):
            p.grad = torch.ones(3, 3)
        optimizer.step()
        return [*keys, {k: sorted(v) for k, v in optimizer.state_dict()["state"].items()}]

    results = run_threads(rank_function, 2)
    assert all(keys == {0: ["momentum"], 1: ["momentum"]} for result in results for keys in result)


def test_the_reference_shards_as_torch_does() -> None:
    for rows in range(1, 20):
        for world in (1, 2, 4, 7):
            chunks = [len(c) for c in torch.empty(rows, 1).chunk(world)]
            assert [len(r) for r in ref.row_groups(rows, world)] == chunks + [0] * (world - len(chunks))


def test_dion2_takes_a_mesh_or_a_process_group() -> None:
    """The names of microsoft/dion: distributed_mesh= shares the work of plain parameters, whichever is given."""

    def rank_function(rank: int, world: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (world,))
        results = []
        for shared in (None, mesh, mesh.get_group()):
            param = nn.Parameter(_gauss((4, 6), 0))
            param.grad = _gauss((4, 6), 1)
            Dion2([param], distributed_mesh=shared, newton_schulz_func=EXACT).step()
            results.append(param.detach())
        square = init_device_mesh("cpu", (1, world))
        with pytest.raises(ValueError, match="distributed_mesh must be one-dimensional"):
            Dion2([param], square)
        return results

    for results in run_threads(rank_function, 2):
        assert all(torch.equal(r, results[0]) for r in results)
