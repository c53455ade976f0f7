"""Every column of every row, in every layout, against float64 on gathered tensors."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Found, Net, backward, compare
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from scion_telemetry.optim import Dion2, Scion, group_params
from scion_telemetry.testing import run_forked, run_threads

EXACT = 1e-7
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines that are shown after the tests of this file, whatever is captured."""
    lines: list[str] = []
    yield lines
    plugins = request.config.pluginmanager
    reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    if reporter is not None and capture is not None and lines:
        head = f"{'layout':34} {'optimizer':13} {'ranks':>5} {'rows':>5} {'error':>9} {'collectives':>12}"
        with capture.global_and_fixture_disabled():
            for line in ["", "largest relative error against float64 on gathered tensors", head, *lines]:
                reporter.write_line(line)


def note(table: list[str], layout: str, optimizer: str, ranks: int, found: Found) -> None:
    table.append(f"{layout:34} {optimizer:13} {ranks:5d} {found.rows:5d} {found.error:9.1e} {found.collectives:12d}")
    assert found.rows > 0
    assert found.error <= EXACT


# ---------------------------------------------------------------------- optimizers


def dion2(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return Dion2(group_params(model), lr=0.02, **{"fraction": 0.3, **options})


def dion2_global(model: nn.Module) -> torch.optim.Optimizer:
    return dion2(model, selection_scope="global")


def dion2_with_adamw(model: nn.Module) -> torch.optim.Optimizer:
    adamw = {"algorithm": "adamw", "weight_decay": 0.1}
    roles = dict.fromkeys(("vector", "embedding", "head"), adamw)
    groups = [{"params": g["params"], "role": g["role"], **roles.get(g["role"], {})} for g in group_params(model)]
    return Dion2(groups, lr=0.02, fraction=0.5)


def scion(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return Scion(group_params(model), lr=0.02, momentum=0.1, **options)


def dion2_heads(model: nn.Module) -> torch.optim.Optimizer:
    return Dion2(group_params(model, overrides={r"^up$": {"num_heads": 2}}), lr=0.02, fraction=0.5)


def by_kind(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """Matrices and experts by the optimizer's own rule, everything else by Scion's geometries."""
    groups: dict[str, list[Any]] = {}
    for name, p in model.named_parameters():
        role = "vector" if p.ndim < 2 else "expert" if p.ndim == 3 else "hidden"
        role = {"conv": "conv", "line": "conv", "embe": "embedding"}.get(name[:4], role)
        groups.setdefault(role, []).append((name, p))
    other = {} if kind is Scion else {"algorithm": "scion"}
    own = {role: other if role in ("conv", "vector") else {} for role in groups}
    return kind([{"params": ps, "role": role, **own[role]} for role, ps in groups.items()], lr=0.02, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)


OPTIMIZERS = {
    "Dion2": dion2,
    "Dion2 global": dion2_global,
    "Dion2 + AdamW": dion2_with_adamw,
    "Dion2 heads": dion2_heads,
    "Dion2 rows": lambda model: by_kind(model, Dion2, fraction=0.4, select_dim="rows"),
    "Dion2 columns": lambda model: by_kind(model, Dion2, fraction=0.4, select_dim="cols"),
    "Scion": scion,
    "Scion by kind": lambda model: by_kind(model, Scion, momentum=0.1),
    "AdamW": adamw,
    "SGD": sgd,
}


# ---------------------------------------------------------------------- layouts that the optimizers step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process(name: str, table: list[str]) -> None:
    model = Net()
    note(table, "one process", name, 1, compare(model, OPTIMIZERS[name](model), lambda s: backward(model, s)))


def test_one_process_with_large_matrices(table: list[str]) -> None:
    model = Net((150, 140, 130))
    note(table, "one process, 150x140", "Dion2", 1, compare(model, dion2(model), lambda s: backward(model, s)))


def sharded(model: Net, mesh: Any = None) -> Net:
    kwargs = {} if mesh is None else {"mesh": mesh}
    for layer in (model.up, model.mid):
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    return model


def fsdp(rank: int, world: int, make: OptimizerOf, widths: tuple[int, int, int] = (10, 7, 3)) -> Found:
    model = sharded(Net(widths), init_device_mesh("cpu", (world,)))
    return compare(model, make(model), lambda s: backward(model, s, rank), rank=rank)


@pytest.mark.parametrize(
    ("name", "world"),
    [("Dion2", 2), ("Scion", 2), ("AdamW", 2), ("Dion2", 4), ("Dion2 global", 4), ("Dion2 + AdamW", 4), ("Scion", 4)],
)
def test_fsdp2(name: str, world: int, table: list[str]) -> None:
    found = run_forked(lambda r, w: fsdp(r, w, OPTIMIZERS[name]), world, timeout=30)
    note(table, "FSDP2, uneven and empty shards", name, world, found[0])


def test_fsdp2_in_threads(table: list[str]) -> None:
    found = run_threads(lambda r, w: fsdp(r, w, dion2), 2, timeout=30)
    note(table, "FSDP2, threads", "Dion2", 2, found[0])


@pytest.mark.parametrize("name", ["Dion2", "Scion"])
def test_fsdp2_with_large_matrices(name: str, table: list[str]) -> None:
    found = run_forked(lambda r, w: fsdp(r, w, OPTIMIZERS[name], (150, 140, 130)), 2, timeout=30)
    note(table, "FSDP2, 150x140", name, 2, found[0])


def hsdp(rank: int, world: int, make: OptimizerOf) -> Found:
    model = sharded(Net(), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    return compare(model, make(model), lambda s: backward(model, s, rank), rank=rank)


@pytest.mark.parametrize("name", ["Dion2", "AdamW"])
def test_hsdp(name: str, table: list[str]) -> None:
    note(table, "HSDP 2x2", name, 4, run_forked(lambda r, w: hsdp(r, w, OPTIMIZERS[name]), 4, timeout=30)[0])


def replicated(rank: int, world: int, make: OptimizerOf) -> Found:
    model = Net()
    return compare(model, make(model), lambda s: backward(model, s), rank=rank)


@pytest.mark.parametrize(("name", "world"), [("Dion2", 2), ("AdamW", 4)])
def test_plain_replicas(name: str, world: int, table: list[str]) -> None:
    found = run_forked(lambda r, w: replicated(r, w, OPTIMIZERS[name]), world, timeout=30)
    note(table, "plain replicas", name, world, found[0])


def ddp(rank: int, world: int, make: OptimizerOf) -> Found:
    model = DistributedDataParallel(Net())
    return compare(model, make(model), lambda s: backward(model, s, rank), rank=rank)


SHARED: dict[str, OptimizerOf] = {
    "Dion2": lambda m: dion2(m, distributed_mesh=dist.group.WORLD),
    "Scion": lambda m: scion(m, process_group=dist.group.WORLD),
}


@pytest.mark.parametrize(("name", "world"), [("Scion", 2), ("Dion2", 4)])
def test_ddp_that_shares_the_work(name: str, world: int, table: list[str]) -> None:
    found = run_forked(lambda r, w: ddp(r, w, SHARED[name]), world, timeout=30)
    note(table, "DDP, work shared", name, world, found[0])


# ---------------------------------------------------------------------- matrices cut along both sides


TENSOR_PARALLEL = {"up": ColwiseParallel(), "mid": RowwiseParallel()}


def tensor_parallel(rank: int, world: int, make: OptimizerOf) -> Found:
    model = Net((8, 7, 3))
    parallelize_module(model, init_device_mesh("cpu", (world,)), TENSOR_PARALLEL)
    return compare(model, make(model), lambda s: backward(model, s), rank=rank)


@pytest.mark.parametrize(("name", "world"), [("AdamW", 2), ("SGD", 4), ("Scion", 2), ("Dion2", 4), ("Dion2 heads", 2)])
def test_tensor_parallel(name: str, world: int, table: list[str]) -> None:
    found = run_forked(lambda r, w: tensor_parallel(r, w, OPTIMIZERS[name]), world, timeout=30)
    note(table, "TP, column- and row-wise", name, world, found[0])


def two_dimensional(rank: int, world: int, make: OptimizerOf) -> Found:
    model = Net((8, 7, 3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    fully_shard(model, mesh=mesh["dp"])
    assert any("StridedShard" in str(p.placements) for p in model.parameters())  # type: ignore[attr-defined]
    return compare(model, make(model), lambda s: backward(model, s, rank // 2), rank=rank)


@pytest.mark.parametrize("name", ["AdamW", "Scion", "Dion2", "Dion2 global"])
def test_fsdp2_over_tensor_parallel(name: str, table: list[str]) -> None:
    found = run_forked(lambda r, w: two_dimensional(r, w, OPTIMIZERS[name]), 4, timeout=30)
    note(table, "FSDP2 over TP 2x2", name, 4, found[0])


PLACED: dict[str, tuple[tuple[int, ...], str, list[Any], list[Any]]] = {
    # shape, role, placements on a mesh of 4, and on a mesh of 2x2
    "rows": ((10, 7), "hidden", [Shard(0)], [Shard(0), Replicate()]),
    "columns": ((5, 9), "hidden", [Shard(1)], [Replicate(), Shard(1)]),
    "twice": ((11, 6), "hidden", [Shard(0)], [Shard(0), Shard(0)]),
    "blocks": ((9, 7), "hidden", [Shard(1)], [Shard(0), Shard(1)]),
    "blocks_turned": ((9, 7), "hidden", [Shard(1)], [Shard(1), Shard(0)]),
    "embed_rows": ((13, 4), "embedding", [Shard(0)], [Shard(0), Replicate()]),
    "embed_columns": ((13, 4), "embedding", [Shard(1)], [Replicate(), Shard(1)]),
    "experts": ((5, 4, 3), "expert", [Shard(0)], [Shard(0), Shard(0)]),
    "experts_rows": ((2, 5, 3), "expert", [Shard(1)], [Shard(0), Shard(1)]),
    "experts_columns": ((2, 5, 3), "expert", [Shard(2)], [Shard(0), Shard(2)]),
    "experts_blocks": ((2, 5, 3), "expert", [Shard(2)], [Shard(1), Shard(2)]),
    "one_expert": ((1, 5, 3), "expert", [Shard(1)], [Shard(1), Shard(2)]),
    "vector": ((5,), "vector", [Shard(0)], [Replicate(), Shard(0)]),
    "whole": ((4, 3), "hidden", [Replicate()], [Replicate(), Replicate()]),
}


class Placed(nn.Module):
    """Parameters of every shape and placement; a list, so that names sort nothing."""

    def __init__(self, mesh: Any, column: int, *, kernels_cut: bool) -> None:
        super().__init__()
        self.mesh = mesh
        self.conv = nn.Conv2d(5, 6, 3, bias=False)
        self.line = nn.Conv1d(1, 6, 3, bias=False)
        self.placements = {name: spec[column] for name, spec in PLACED.items()}
        self.placements["conv"] = [Shard(1)] if mesh.ndim == 1 else [Shard(0), Shard(1)]
        second = Shard(2) if kernels_cut else Replicate()
        self.placements["line"] = [Shard(0)] if mesh.ndim == 1 else [second, Shard(0)]
        for name, (shape, *_) in PLACED.items():
            self.register_parameter(name, nn.Parameter(self.place(name, torch.Size(shape), 0)))
        for name in ("conv", "line"):
            layer = getattr(self, name)
            layer.weight = nn.Parameter(self.place(name, layer.weight.shape, 0))

    def place(self, name: str, shape: torch.Size, step: int) -> torch.Tensor:
        seed = 1000 * step + sum(map(ord, name))
        full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return distribute_tensor(full, self.mesh, self.placements[name])

    def backward(self, step: int) -> None:
        for name, p in self.named_parameters():
            p.grad = self.place(name.removesuffix(".weight"), p.shape, step)


def placed(rank: int, world: int, shape: tuple[int, ...], name: str) -> Found:
    make = OPTIMIZERS[name]
    model = Placed(init_device_mesh("cpu", shape), 1 + len(shape), kernels_cut=name in ("AdamW", "SGD"))
    roles = {name: spec[1] for name, spec in PLACED.items()} | {"conv": "conv", "line": "conv"}
    return compare(model, make(model), model.backward, rank=rank, roles=roles, steps=2)


SPECTRAL = ("Scion by kind", "Dion2 rows", "Dion2 columns")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("AdamW", (4,)),
        ("SGD", (2, 2)),
        ("SGD", (2,)),
        *((name, shape) for name in SPECTRAL for shape in ((4,), (2, 2))),
    ],
    ids=str,
)
def test_every_placement(name: str, shape: tuple[int, ...], table: list[str]) -> None:
    world = math.prod(shape)
    found = run_forked(lambda r, w: placed(r, w, shape, name), world, timeout=60)
    note(table, f"columns, blocks, experts, {shape}", name, world, found[0])
