"""What optimizers show while they step: exactly the update they apply, and nothing at all when nobody observes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from scion_telemetry.optim import Dion2, Orthogonalizer, Scion, StepEvent, dion2, register_step_observer, scion
from scion_telemetry.testing import run_threads

SHAPES = [(5, 7), (5, 7), (8, 3), (1, 4), (4, 4)]
LR = 0.1
EXACT = Orthogonalizer(name="svd", dtype=torch.float32)


def _gauss(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _scion(params: list[Any], **options: Any) -> Scion:
    rest = {"params": params[:1], "norm": "Sign", "unconstrained": True}
    return Scion([{"params": params[1:]}, rest], lr=LR, momentum=0.5, scale=3.0, **options)


def _dion2(params: list[Any], **options: Any) -> Dion2:
    group = options.pop("process_group", None)
    return Dion2(params, group, lr=LR, weight_decay=0.5, fraction=0.5, selection_scope="global", **options)


BOTH: list[Callable[..., Any]] = [_scion, _dion2]


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What was seen of one parameter in one step, on one rank."""

    update: Tensor
    direction: Tensor
    owned: Tensor | None
    lr: float
    before: Tensor


def _observe(optimizer: Any) -> dict[Tensor, Shown]:
    """The last update shown of every parameter, expanded to its local piece."""
    seen: dict[Tensor, Shown] = {}

    def observer(event: StepEvent) -> None:
        for i, param in enumerate(event.params):
            update = torch.zeros_like(_local(param.detach()))
            part = event.scale * event.directions[i].to(update.dtype)
            if event.selections:
                selection = event.selections[i]
                index = [slice(None)] * update.ndim
                index[selection.dim] = selection.indices  # type: ignore[call-overload]
                update[tuple(index)] = part
            else:
                update += part
            assert param not in seen, "one event a step and parameter"
            seen[param] = Shown(
                update=update,
                direction=event.directions[i].clone(),
                owned=event.owned[i].clone() if i in event.owned else None,
                lr=event.lr,
                before=_local(param.detach()).clone(),
            )

    optimizer.register_step_observer(observer)
    return seen


def _run(make: Any, place: Callable[[Tensor], Tensor], **options: Any) -> list[Shown]:
    """Two steps; what the second showed of every parameter, checked against what it did to the weight."""
    params = [nn.Parameter(place(_gauss(s, i))) for i, s in enumerate(SHAPES)]
    optimizer = make(params, **options)
    seen = _observe(optimizer)
    for step in range(2):
        seen.clear()
        before = [_local(p.detach()).clone() for p in params]
        for i, p in enumerate(params):
            p.grad = place(_gauss(SHAPES[i], 10 + 10 * step + i))
        optimizer.step()
    for p, old in zip(params, before, strict=True):
        group = next(g for g in optimizer.param_groups if any(p is q for q in g["params"]))
        decay = group["weight_decay"] if make is _dion2 else float(not group["unconstrained"])
        torch.testing.assert_close(seen[p].before, old, atol=0, rtol=0)  # shown before the weights change
        change = _local(p.detach()) - (1 - LR * decay) * old
        torch.testing.assert_close(seen[p].update, change, atol=1e-6, rtol=0)
        assert seen[p].lr == LR
    return [seen[p] for p in params]


def _check_owners(per_rank: list[list[Shown]], *, sharded: bool) -> None:
    """One rank owns each matrix, and has the whole of what the ranks together show."""
    for i in range(1, len(SHAPES)):  # the first may be stepped by signs, for which nobody needs the whole
        (owned,) = [r[i].owned for r in per_rank if r[i].owned is not None]
        whole = torch.cat([r[i].direction for r in per_rank]) if sharded else per_rank[0][i].direction
        torch.testing.assert_close(owned, whole, atol=0, rtol=0)


@pytest.mark.parametrize("make", BOTH)
def test_alone(make: Any) -> None:
    _check_owners([_run(make, lambda x: x.clone())], sharded=False)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("world", [2, 4])
def test_row_shards_even_uneven_and_empty(make: Any, world: int) -> None:
    def rank_function(rank: int, world: int) -> list[Shown]:
        mesh = init_device_mesh("cpu", (world,))
        return _run(make, lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None))

    _check_owners(run_threads(rank_function, world), sharded=True)


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "columns": ((4,), (Shard(1),)),
    "blocks": ((2, 2), (Shard(0), Shard(1))),
    "blocks, columns first": ((2, 2), (Shard(1), Shard(0))),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "HSDP of columns": ((2, 2), (Shard(1), Replicate())),
    "replicated": ((2,), (Replicate(),)),
}


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("select", ["rows", "cols"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(make: Any, select: str, name: str) -> None:
    """One rank in all owns a matrix, and what it owns is what the blocks of every replica show together."""
    sizes, placements = LAYOUTS[name]

    def rank_function(rank: int, world: int) -> list[Shown]:
        mesh = init_device_mesh("cpu", sizes)
        options = {} if make is _scion else {"select_dim": select}
        return _run(make, lambda x: distribute_tensor(x, mesh, placements, src_data_rank=None), **options)

    per_rank = run_threads(rank_function, math.prod(sizes), timeout=30)
    grid = torch.arange(math.prod(sizes)).view(sizes)
    copied = [i for i, p in enumerate(placements) if isinstance(p, Replicate)]
    for i in range(1, len(SHAPES)):
        (owned,) = [r[i].owned for r in per_rank if r[i].owned is not None]
        for ranks in grid.movedim(copied[0], 0) if copied else [grid]:  # of every replica
            shown = [per_rank[r][i].direction for r in ranks.flatten().tolist()]
            whole = _assembled(shown, [p.dim for p in placements if isinstance(p, Shard)], list(ranks.shape))
            torch.testing.assert_close(owned, whole, atol=0, rtol=0)


def _assembled(blocks: list[Tensor], dims: list[int], sizes: list[int]) -> Tensor:
    """Blocks in the order of their ranks to one matrix: the last mesh dimension first."""
    for dim, size in reversed(list(zip(dims, sizes, strict=False))):
        blocks = [torch.cat(blocks[i : i + size], dim) for i in range(0, len(blocks), size)]
    (whole,) = blocks
    return whole


@pytest.mark.parametrize("make", BOTH)
def test_replicas(make: Any) -> None:
    def rank_function(rank: int, world: int) -> list[Shown]:
        return _run(make, lambda x: x.clone(), process_group=dist.group.WORLD)

    _check_owners(run_threads(rank_function, 2), sharded=False)


def test_scores_are_those_of_the_momentum_before_it_decays() -> None:
    param = nn.Parameter(torch.zeros(5, 7))
    optimizer = Dion2([param], fraction=0.4, ef_decay=0.5)
    scores: list[Tensor] = []
    indices: list[list[int]] = []

    def observer(event: StepEvent) -> None:
        scores.append(event.selections[0].scores.clone())
        indices.append(event.selections[0].indices.tolist())

    optimizer.register_step_observer(observer)
    gradient = torch.arange(1.0, 36.0).view(5, 7)
    for _ in range(2):
        param.grad = gradient.clone()
        optimizer.step()
    rows = gradient.sum(1)
    torch.testing.assert_close(scores[0], rows)
    assert indices[0] == [3, 4]
    assert scores[0].dtype == torch.float32
    torch.testing.assert_close(scores[1], rows + torch.tensor([1, 1, 1, 0.5, 0.5]) * rows)


def test_update_and_decay_add_up() -> None:
    """W = 2, direction +1, lr 0.1, decay 0.1: -0.1 and -0.02 give 1.88."""
    param = nn.Parameter(torch.tensor([[2.0]]))
    optimizer = Dion2([param], lr=0.1, weight_decay=0.1, newton_schulz_func=EXACT)
    seen = _observe(optimizer)
    param.grad = torch.tensor([[7.0]])
    optimizer.step()
    assert seen[param].update.item() == pytest.approx(-0.1)
    assert param.item() == pytest.approx(1.88)


@pytest.mark.parametrize(("make", "module"), [(_scion, scion), (_dion2, dion2)])
def test_nothing_is_built_when_nobody_observes(monkeypatch: pytest.MonkeyPatch, make: Any, module: Any) -> None:
    def forbidden(**_: Any) -> None:
        raise AssertionError("built an event")

    monkeypatch.setattr(module, "StepEvent", forbidden)
    params = [nn.Parameter(_gauss(s, i)) for i, s in enumerate(SHAPES)]
    optimizer = make(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    handle = register_step_observer(optimizer, lambda event: None)
    with pytest.raises(AssertionError, match="built an event"):
        optimizer.step()
    handle.remove()
    optimizer.step()


@pytest.mark.parametrize("make", BOTH)
def test_observers_change_nothing_and_can_be_removed_one_by_one(make: Any) -> None:
    runs = []
    for observed in (False, True):
        params = [nn.Parameter(_gauss(s, i)) for i, s in enumerate(SHAPES)]
        optimizer = make(params)
        calls: list[str] = []
        if observed:
            first = register_step_observer(optimizer, lambda event, calls=calls: calls.append("first"))
            register_step_observer(optimizer, lambda event, calls=calls: calls.append("second"))
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = _gauss(SHAPES[i], 50 + 10 * step + i)
            optimizer.step()
            if observed and step == 0:
                assert calls[:2] == ["first", "second"]
                first.remove()
                first.remove()  # harmless
                calls.clear()
        if observed:
            assert set(calls) == {"second"}
        runs.append([p.detach() for p in params])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_facts_say_what_events_will_show() -> None:
    wide, tall, vector = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(4))
    optimizer = Dion2([{"params": [wide, tall]}, {"params": [vector], "algorithm": "adamw"}])
    facts = [optimizer.facts(p) for p in (wide, tall, vector)]
    assert [(f.algorithm, f.shows_update, f.select_dim) for f in facts] == [
        ("dion2", True, -2),
        ("dion2", True, -1),
        ("adamw", False, None),
    ]
    scion_optimizer = Scion([{"params": [wide]}, {"params": [tall], "norm": "Sign"}, {"params": [vector]}])
    facts = [scion_optimizer.facts(p) for p in (wide, tall, vector)]
    assert [(f.shows_update, f.select_dim, f.owner_shows) for f in facts] == [
        (True, None, True),
        (True, None, True),  # by nobody's help: every rank has the whole
        (True, None, False),  # no matrix
    ]
    with pytest.raises(ValueError, match=r"shape \(2,\) is not in this optimizer"):
        optimizer.facts(nn.Parameter(torch.ones(2)))
