"""``Tracker.verify``: silent where the numbers are right, in every layout, and loud about every fault planted here."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_model import Former, batch, dion2, loss_of, optimizer_of, scion
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from tracked import gauss, named

from scion_telemetry import Tracker, every
from scion_telemetry import tracker as tracker_module
from scion_telemetry.metrics.declare import Measured
from scion_telemetry.optim.layout import local
from scion_telemetry.places import Mine
from scion_telemetry.reduce import Buffers
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked
from scion_telemetry.verify import Verification

pytestmark = pytest.mark.timeout(120)


# ---------------------------------------------------------------------- every layout


def shard(model: Former, mesh: DeviceMesh, along: int = 0) -> nn.Module:
    def place(p: nn.Parameter) -> Shard | None:
        return Shard(along) if along and p.ndim > along else None

    for part in (model.lower, model.upper):
        fully_shard(part, mesh=mesh, shard_placement_fn=place)
    return fully_shard(model, mesh=mesh, shard_placement_fn=place)


def split(model: Former, mesh: DeviceMesh) -> nn.Module:
    column, row = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model.lower, mesh, {"q": column, "k": column, "v": column, "o": row})
    parallelize_module(model.upper, mesh, {"up": column, "down": row})
    return model


def spread(model: Former, mesh: DeviceMesh) -> nn.Module:
    experts: Any = model.upper.experts
    experts.group = mesh.get_group()
    for name in ("inner", "outer"):
        full = getattr(experts, name).detach()
        setattr(experts, name, nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)))
    return model


def line(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def square(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))


def both(model: Former, mesh: DeviceMesh, along: int = 0) -> nn.Module:
    split(model, mesh["inner"])
    return shard(model, mesh["outer"], along)


LAYOUTS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "one process": (lambda w: Former(), (1,)),
    "DDP": (lambda w: DistributedDataParallel(Former(), find_unused_parameters=True), (2, 4)),
    "FSDP2 along rows": (lambda w: shard(Former(), line(w)), (2, 4)),
    "FSDP2 along columns": (lambda w: shard(Former(), line(w), 1), (2, 4)),
    "HSDP": (lambda w: shard(Former(), square(w)), (4,)),
    "TP": (lambda w: split(Former(), line(w)), (2, 4)),
    "FSDP2 + TP": (lambda w: both(Former(), square(w)), (4,)),
    "FSDP2 + TP, along columns": (lambda w: both(Former(), square(w), 1), (4,)),
    "experts": (lambda w: spread(Former(experts=True), line(w)), (2, 4)),
}


def trained(make_model: Callable[[int], nn.Module], make: Any, rank: int, world: int) -> list[Verification]:
    """Verified before the first step, and after two of them."""
    model = make_model(world)
    shared = dist.group.WORLD if world > 1 and not any(isinstance(p, DTensor) for p in model.parameters()) else None
    optimizer, late = optimizer_of(model, make, shared)
    optimizer.add_param_group(late)
    with Tracker(model, optimizer, schedule=every(2)) as tracker:
        found = [tracker.verify(params=100)]
        for step in (1, 2):
            optimizer.zero_grad()
            tokens, targets = batch(step)
            loss_of(model(tokens), targets).backward()
            optimizer.step()
        found.append(tracker.verify(params=100))
    return found


@pytest.mark.parametrize("make", [scion, dion2])
@pytest.mark.parametrize(("name", "world"), [(n, w) for n, (_, worlds) in LAYOUTS.items() for w in worlds])
def test_every_layout_is_right(name: str, world: int, make: Any) -> None:
    def run(rank: int, world: int) -> list[Verification]:
        return trained(LAYOUTS[name][0], make, rank, world)

    ranks = run_forked(run, world, timeout=60) if world > 1 else [run(0, 1)]
    assert all(found == ranks[0] for found in ranks)
    early, late = ranks[0]
    assert early.ok, str(early)
    assert late.ok, str(late)
    count = 15 if name != "experts" else 18
    assert len(early.params) == len(late.params) == count
    assert early.numbers >= 4 * count
    assert late.numbers >= early.numbers + 4 * (count - 4)  # gradients: not of what is frozen or never used
    assert late.sigmas > 12


def placed(
    rank: int, world: int, shape: tuple[int, ...], placements: list[Any], mesh_shape: tuple[int, ...]
) -> Verification:
    mesh = init_device_mesh("cpu", mesh_shape)
    tensors = {"w": gauss(*shape), "other": gauss(*shape, seed=1)}
    model = named(**{n: distribute_tensor(x, mesh, placements, src_data_rank=None) for n, x in tensors.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with Tracker(model, optimizer, schedule=every(1)) as tracker:
        for i, p in enumerate(model.values()):
            p.grad = distribute_tensor(gauss(*shape, seed=10 + i), mesh, placements, src_data_rank=None)
        optimizer.step()
        return tracker.verify()


@pytest.mark.parametrize(
    ("shape", "placements", "mesh"),
    [
        ((5, 3), [Shard(0)], (2,)),
        ((5, 3), [Shard(0)], (4,)),  # 2, 2, 1 and no rows
        ((3, 5), [Shard(1)], (4,)),
        ((1, 3), [Shard(0)], (2,)),
        ((1,), [Shard(0)], (4,)),
        ((), [Replicate()], (2,)),
        ((5, 3), [Replicate()], (4,)),
        ((5, 3), [Replicate(), Shard(0)], (2, 2)),
        ((5, 7), [Shard(0), Shard(1)], (2, 2)),
        ((5, 7), [Shard(1), Shard(0)], (2, 2)),
        ((3, 5, 4), [Shard(0)], (4,)),
        ((3, 5, 4), [Shard(1)], (2,)),
        ((3, 5, 4), [Shard(0), Shard(2)], (2, 2)),
        ((6, 2, 3, 3), [Shard(0)], (4,)),
        ((150, 140), [Shard(0), Shard(1)], (2, 2)),
    ],
    ids=str,
)
def test_uneven_empty_and_replicated_pieces_are_right(shape: Any, placements: Any, mesh: Any) -> None:
    world = mesh[0] * (mesh[1] if len(mesh) > 1 else 1)
    for found in run_forked(lambda r, w: placed(r, w, shape, placements, mesh), world, timeout=30):
        assert found.ok, str(found)
        assert found.numbers >= 2 * 3 * 3
        assert found.params == ("w", "other")


# ---------------------------------------------------------------------- planted faults

Plant = Callable[[pytest.MonkeyPatch, int], None]
Later = Callable[[nn.ParameterDict, int], None]


def faulty(plant: Plant | None, later: Later | None, rank: int, world: int) -> Verification:
    """Two matrices in pieces and one on all ranks, with a fault in the tracker or in what it measures."""
    mesh = line(world)
    model = named(
        cut=distribute_tensor(gauss(6, 4), mesh, [Shard(0)], src_data_rank=None),
        like=distribute_tensor(gauss(6, 4, seed=1) * 3, mesh, [Shard(0)], src_data_rank=None),
        kept=gauss(5, 3, seed=2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    patch = pytest.MonkeyPatch()  # of this process, which ends with the test
    if plant is not None:
        plant(patch, rank)
    with Tracker(model, optimizer, schedule=every(1)) as tracker:
        for p in model.values():
            p.grad = p.detach().clone()
        optimizer.step()
        if later is not None:
            later(model, rank)
        return tracker.verify()


def measurers(name: str, ranks: tuple[int, ...]) -> Plant:
    """Other ranks measure a parameter than should."""

    def plant(patch: pytest.MonkeyPatch, rank: int) -> None:
        right = tracker_module.make_plan

        def wrong(by_rank: Any) -> Any:
            changes = {name: {"measurers": ranks}}
            return tuple(dataclasses.replace(p, **changes.get(p.spec.info.name, {})) for p in right(by_rank))

        patch.setattr(tracker_module, "make_plan", wrong)

    return plant


def mine(change: Callable[[Mine, int], Mine]) -> Plant:
    """A piece lies elsewhere than it should."""

    def plant(patch: pytest.MonkeyPatch, rank: int) -> None:
        right = Mine.of
        patch.setattr(Mine, "of", lambda *args: change(right(*args), rank))

    return plant


def at_the_rows_of_rank_0(piece: Mine, rank: int) -> Mine:
    if piece.planned.spec.info.name != "cut":
        return piece
    return dataclasses.replace(piece, row_index=torch.arange(3))


def under_the_number_of_the_other(piece: Mine, rank: int) -> Mine:
    return dataclasses.replace(piece, number={0: 1, 1: 0}.get(piece.number, piece.number))


def rounded(patch: pytest.MonkeyPatch, rank: int) -> None:
    right = Buffers.put
    patch.setattr(
        Buffers, "put", lambda self, kind, places, values: right(self, kind, places, values.bfloat16().double())
    )


def replica(model: nn.ParameterDict, rank: int) -> None:
    with torch.no_grad():
        model["kept"][0, 0] += 1e-5 * rank


def replica_gradient(model: nn.ParameterDict, rank: int) -> None:
    grad = model["kept"].grad
    assert grad is not None
    grad[0, 0] += 1e-5 * rank


def infinity(model: nn.ParameterDict, rank: int) -> None:
    with torch.no_grad():
        local(model["cut"])[0, 0] = torch.inf if rank == 1 else 1.0


FAULTS: dict[str, tuple[Plant | None, Later | None, str, bool]] = {
    "wrong place": (mine(at_the_rows_of_rank_0), None, "row_magnitude of cut", False),
    "doubled piece": (measurers("kept", (0, 1)), None, "of kept", True),
    "lost piece": (measurers("cut", (0,)), None, "of cut", True),
    "swapped": (mine(under_the_number_of_the_other), None, "of (cut|like)", False),
    "replicas that differ": (None, replica, "weight_.* of kept", False),
    "gradients of replicas that differ": (None, replica_gradient, "grad_.* of kept", False),
    "rounded": (rounded, None, " of ", False),
    "an infinity that is lost": (measurers("cut", (0,)), infinity, "weight_.* of cut", True),
}


@pytest.mark.parametrize("later", [None, infinity], ids=["as it is", "with an infinity"])
def test_without_a_fault_nothing_is_found(later: Later | None) -> None:
    for found in run_forked(lambda r, w: faulty(None, later, r, w), 2, timeout=30):
        assert found.ok, str(found)


@pytest.mark.parametrize(("plant", "later", "where", "miscounts"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_on_all_ranks(
    plant: Plant | None, later: Later | None, where: str, miscounts: bool
) -> None:
    found = run_forked(lambda r, w: faulty(plant, later, r, w), 2, timeout=30)
    assert found[0] == found[1]
    assert not found[0].ok
    assert found[0].largest_error > 1e-7
    assert re.search(where, found[0].worst), str(found[0])
    assert bool(found[0].miscounted) == miscounts
    if miscounts:
        assert "elements miscounted in" in str(found[0])


def test_a_sigma_outside_of_its_interval_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = named(w=gauss(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1)) as tracker:
        assert tracker.verify().ok
        sigma = Measured.sigma
        monkeypatch.setattr(Measured, "sigma", lambda m, q, *partial: 1.005 * sigma(m, q, *partial))
        found = tracker.verify()
        assert not found.ok
        assert found.outside == ("weight_spectral of w",)
        assert found.largest_sigma_error == pytest.approx(0.005, rel=1e-3)
        assert not found.loose
        assert found.largest_error <= 1e-7


def test_a_sigma_that_is_further_off_than_promised_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % of weights, 5 % of gradients; the interval alone would not tell."""
    model = named(w=gauss(6, 4))
    model["w"].grad = gauss(6, 4, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sigma = Measured.sigma
    with Tracker(model, optimizer, schedule=every(1)) as tracker:
        for low, loose in ((0.98, ("weight_spectral of w",)), (0.94, ("weight_spectral of w", "grad_spectral of w"))):

            def planted(m: Measured, q: str, partial: str = "sigma", low: float = low) -> Any:
                return sigma(m, q, partial) * (low if partial == "sigma" else 1)

            monkeypatch.setattr(Measured, "sigma", planted)
            found = tracker.verify()
            assert not found.ok
            assert (found.loose, found.outside) == (loose, ())
            assert found.largest_sigma_error == pytest.approx(1 - low, rel=1e-3)


# ---------------------------------------------------------------------- what it leaves, and what it takes


def test_it_changes_neither_weights_nor_rows_nor_the_number_of_the_step() -> None:
    def run(verified: bool) -> tuple[Tensor, list[Any]]:
        model, sink = named(w=gauss(40, 30)), MemorySink()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
            for step in range(1, 4):
                model["w"].grad = gauss(40, 30, seed=step)
                optimizer.step()
                if verified:
                    assert tracker.verify().ok
                assert tracker.step == step
        return model["w"].detach().clone(), sink.layers

    (bare, plain), (checked, shown) = run(False), run(True)
    assert torch.equal(bare, checked)
    assert plain == shown


def test_a_sample_is_spread_over_the_model_and_counts_cover_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = named(**{f"w{i}": gauss(3, 2, seed=i) for i in range(10)})
    with Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1)) as tracker:
        assert tracker.verify(params=4).params == ("w0", "w3", "w6", "w9")
        assert tracker.verify(params=1).params == ("w0",)
        assert len(tracker.verify(params=99).params) == 10
    measurers("w5", ())(monkeypatch, 0)
    with Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1)) as tracker:
        found = tracker.verify(params=1)
        assert (found.ok, found.miscounted) == (False, ("w5",))


@pytest.mark.parametrize("params", [0, -1, True, 2.0, "all"])
def test_how_many_is_a_whole_number(params: Any) -> None:
    model = named(w=gauss(3, 2))
    tracker = Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with tracker, pytest.raises(ValueError, match=r"params must be a whole number >= 1"):
        tracker.verify(params=params)
