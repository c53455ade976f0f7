"""Distributed checkpoints of torch: saved on 2 ranks with uneven and empty shards, continued on 1, 2 and 4."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_training import assert_same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scion_telemetry.optim import Dion2, Dion3, Orthogonalizer, Scion, ScionLight, group_params
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(60)
EXACT = Orthogonalizer(name="svd", dtype=torch.float32)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Rows 5, 3 and 1: on 4 ranks some hold nothing."""
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.Linear(3, 1))
    for i, p in enumerate(model.parameters()):
        p.data.copy_(_gauss(p.shape, i))
    return model.to(dtype)


def _gauss(shape: Any, seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def scion(model: nn.Module) -> Scion:
    return Scion(group_params(model), lr=0.1, momentum=0.3, norm_kwargs={"orthogonalizer": EXACT})


def scion_by_name(model: nn.Module) -> Scion:
    hidden = {"norm_kwargs": {"orthogonalizer": "svd/5/float32"}}
    return Scion(group_params(model, roles={"hidden": hidden}), lr=0.1, momentum=0.3, nesterov=True)


def scion_light(model: nn.Module) -> ScionLight:
    return ScionLight(group_params(model), lr=0.1, momentum=0.3, norm_kwargs={"orthogonalizer": EXACT})


def mixed(model: nn.Module) -> Scion:
    """No momentum, hence no state, in one of the groups."""
    return Scion(group_params(model, roles={"vector": {"momentum": 0.5}}), norm_kwargs={"orthogonalizer": EXACT})


def dion2(model: nn.Module, **options: Any) -> Dion2:
    options = {"newton_schulz_func": EXACT, "selection_scope": "global", "select_dim": "rows", **options}
    return Dion2(group_params(model), lr=0.1, fraction=0.4, **options)


def dion2_by_name(model: nn.Module) -> Dion2:
    groups = group_params(model, roles={"vector": {"algorithm": "adamw"}})
    return Dion2(groups, fraction=0.4, newton_schulz_func="svd/5/float32", selection_scope="global", select_dim="rows")


def dion3(model: nn.Module) -> Dion3:
    return Dion3(group_params(model), lr=0.1, fraction=0.4, newton_schulz_func=EXACT)


def whole(model: nn.Module) -> nn.Module:
    return model


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def hybrid(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()})


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(model.parameters()):
            full = _gauss(p.shape, 100 + 10 * step + i).to(p.dtype)
            if isinstance(p, DTensor):
                full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
            light = isinstance(optimizer, ScionLight) and p.grad is not None
            p.grad = p.grad + full if light else full
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def _states(model: nn.Module, optimizer: torch.optim.Optimizer, how: StateDictOptions) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=how),
    }


def save(
    folder: Path,
    world: int,
    make: Make,
    *,
    place: Callable[[nn.Module], nn.Module] = sharded,
    steps: int = 3,
    **how: bool,
) -> list[Tensor]:
    """Train, save, train on; the weights at the end."""

    def rank_function(rank: int, world: int) -> list[Tensor]:
        model = place(net())
        optimizer = make(model)
        advance(model, optimizer, range(steps))
        dcp.save(_states(model, optimizer, StateDictOptions(**how)), checkpoint_id=folder)
        advance(model, optimizer, range(steps, steps + 3))
        return weights(model)

    return run_forked(rank_function, world)[0]


def resume(
    folder: Path,
    world: int,
    make: Make,
    *,
    place: Callable[[nn.Module], nn.Module] = sharded,
    steps: int = 3,
    **how: bool,
) -> list[Tensor]:
    """Load into a fresh model and optimizer, train on; the weights at the end."""

    def rank_function(rank: int, world: int) -> list[Tensor]:
        model = place(nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.Linear(3, 1)))
        optimizer = make(model)
        for group in optimizer.param_groups:
            group["lr"] = 99.0
        options = StateDictOptions(**how)
        states = _states(model, optimizer, options)
        dcp.load(states, checkpoint_id=folder)
        set_model_state_dict(model, states["model"])
        set_optimizer_state_dict(model, optimizer, states["optimizer"], options=options)
        advance(model, optimizer, range(steps, steps + 3))
        return weights(model)

    results = run_forked(rank_function, world)
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))
    return results[0]


def assert_equal(found: list[Tensor], expected: list[Tensor], atol: float) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("make", "flat"),
    [
        *((make, False) for make in (scion, scion_by_name, scion_light, mixed, dion2, dion2_by_name)),
        *((make, True) for make in (scion_light, mixed, dion2_by_name)),
    ],
)
def test_saved_on_2_ranks_and_continued_on_2_4_and_1(make: Make, flat: bool, tmp_path: Path) -> None:
    expected = save(tmp_path, 2, make, flatten_optimizer_state_dict=flat)
    assert_equal(resume(tmp_path, 2, make, flatten_optimizer_state_dict=flat), expected, 0)
    assert_equal(resume(tmp_path, 4, make, flatten_optimizer_state_dict=flat), expected, 1e-6)
    assert_equal(resume(tmp_path, 1, make, place=whole, flatten_optimizer_state_dict=flat), expected, 1e-6)


@pytest.mark.parametrize("make", [scion_light, dion3])
def test_saved_before_the_first_step(make: Make, tmp_path: Path) -> None:
    expected = save(tmp_path, 2, make, steps=0)
    assert_equal(resume(tmp_path, 2, make, steps=0), expected, 0)


@pytest.mark.parametrize("flat", [False, True])
def test_dion3_keeps_its_rows_of_variance(flat: bool, tmp_path: Path) -> None:
    """Its rescaling depends on the shards, so on as many ranks; the variance moves to any number of them."""
    expected = save(tmp_path, 2, dion3, flatten_optimizer_state_dict=flat)
    assert_equal(resume(tmp_path, 2, dion3, flatten_optimizer_state_dict=flat), expected, 0)

    def variance(place: Callable[[nn.Module], nn.Module]) -> Callable[[int, int], Any]:
        def rank_function(rank: int, world: int) -> list[Tensor]:
            model = place(net())
            optimizer = dion3(model)
            states = _states(model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))
            dcp.load(states, checkpoint_id=tmp_path)
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            set_optimizer_state_dict(model, optimizer, states["optimizer"], options=options)
            found = [s["variance"] for s in optimizer.state.values() if "variance" in s]
            return [v.full_tensor() if isinstance(v, DTensor) else v for v in found]

        return rank_function

    (one,), four = run_forked(variance(whole), 1), run_forked(variance(sharded), 4)
    assert [tuple(v.shape) for v in one] == [(5, 1), (3, 1)]
    assert all((v > 0).any() for v in one)
    assert_same(four, [one] * 4)


@pytest.mark.parametrize("make", [scion, dion2])
def test_hsdp_and_tensor_parallel(make: Make, tmp_path: Path) -> None:
    for name, place, world in [("hsdp", hybrid, 4), ("tp", tensor_parallel, 2)]:
        expected = save(tmp_path / name, world, make, place=place)
        assert_equal(resume(tmp_path / name, world, make, place=place), expected, 0)
        assert_equal(resume(tmp_path / name, 2, make), expected, 1e-6)


def test_full_state_dicts_hold_plain_values(tmp_path: Path) -> None:
    """Full state dicts refuse objects, and files read with weights_only too."""

    def rank_function(rank: int, world: int) -> None:
        how = StateDictOptions(full_state_dict=True)
        for make in (scion, scion_light, mixed, dion2, dion3):
            model = sharded(net())
            optimizer = make(model)
            advance(model, optimizer, range(2))
            saved = get_optimizer_state_dict(model, optimizer, options=how)
            buffer = io.BytesIO()
            torch.save(saved, buffer)
            saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
            other_model = sharded(net())
            other = make(other_model)
            set_model_state_dict(other_model, get_model_state_dict(model))
            set_optimizer_state_dict(other_model, other, saved, options=how)
            advance(model, optimizer, range(2, 4))
            advance(other_model, other, range(2, 4))
            assert_same(weights(other_model), weights(model))

    run_forked(rank_function, 2)


def test_keys_are_equal_on_all_ranks_and_at_any_time(tmp_path: Path) -> None:
    """C98: before the first step, and after one in which rank 1 had no gradient for a plain parameter."""

    def rank_function(rank: int, world: int) -> list[dict[str, list[str]]]:
        found = []
        for make in (scion, scion_light, dion2, dion3):
            model = net()
            optimizer = make(model)
            for part in ("before", "after"):
                state = get_optimizer_state_dict(model, optimizer)
                found.append({name: sorted(entries) for name, entries in state["state"].items()})
                dcp.save({"o": state}, checkpoint_id=tmp_path / make.__name__ / part)
                dcp.load({"o": state}, checkpoint_id=tmp_path / make.__name__ / part)
                set_optimizer_state_dict(model, optimizer, state)
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                if rank == 1:
                    model[1].weight.grad = None
                optimizer.step()
        return found

    first, second = run_forked(rank_function, 2)
    assert first == second
    assert all(before == after for before, after in zip(first[::2], first[1::2], strict=True))
    assert all(all(keys for keys in state.values()) for state in first)


@pytest.mark.parametrize(
    ("weight", "momentum"), [(torch.bfloat16, "float32"), (torch.float32, "bfloat16")], ids=["wider", "narrower"]
)
def test_the_dtype_and_value_of_the_momentum_survive(weight: torch.dtype, momentum: str, tmp_path: Path) -> None:
    """C100: 1.0009765625 is no bfloat16."""
    value = 1.0009765625 if momentum == "float32" else 1.0078125

    def rank_function(rank: int, world: int) -> None:
        source, target = sharded(net(weight)), sharded(net(weight))
        first, second = (dion2(m, momentum_dtype=momentum) for m in (source, target))
        for p in source.parameters():
            if "momentum" in first.state[p]:
                first.state[p]["momentum"].to_local().fill_(value)
        dcp.save({"o": get_optimizer_state_dict(source, first)}, checkpoint_id=tmp_path)
        loaded = {"o": get_optimizer_state_dict(target, second)}
        dcp.load(loaded, checkpoint_id=tmp_path)
        set_optimizer_state_dict(target, second, loaded["o"])
        for p in target.parameters():
            if p.ndim == 2 and "momentum" in second.state[p]:
                buffer = second.state[p]["momentum"].full_tensor()
                assert buffer.dtype == getattr(torch, momentum)
                assert (buffer.double() == value).all()
        advance(target, second, range(1))
        assert all(w.dtype == weight for w in weights(target))

    run_forked(rank_function, 2)
