"""Every column of selections in every layout, against lists and sets with the shards there are."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from selection_brute import compare, count, follow, shard_truth, truth, with_scores
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from tracked import gauss, named

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2
from scion_telemetry.optim.events import StepEvent
from scion_telemetry.optim.layout import Layout, index_tensor
from scion_telemetry.rows import ParamInfo
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked, run_threads

pytestmark = pytest.mark.timeout(60)

SHAPES = {"even": (8, 6), "uneven": (17, 5), "few": (3, 7), "square": (9, 9), "experts": (4, 6, 5)}
STEPS, FLUSH, EF_DECAY = 6, 2, 0.9
ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()
Mesh = tuple[tuple[int, ...], tuple[Placement, ...]]
LAYOUTS: dict[str, Mesh] = {
    "rows over 2": ((2,), (ROWS,)),
    "rows over 4": ((4,), (ROWS,)),
    "columns over 2": ((2,), (COLUMNS,)),
    "columns over 4": ((4,), (COLUMNS,)),
    "HSDP": ((2, 2), (COPIES, ROWS)),
    "HSDP of columns, replicas last": ((2, 2), (COLUMNS, COPIES)),
    "rows and columns": ((2, 2), (ROWS, COLUMNS)),
    "columns and rows": ((2, 2), (COLUMNS, ROWS)),
    "rows twice": ((2, 2), (ROWS, ROWS)),
    "replicas on a mesh": ((4,), (COPIES,)),
}


def gradient(name: str, step: int) -> Tensor:
    """Rows and columns of very different sizes; towards the end more so."""
    shape = SHAPES[name]
    seed = 1000 * step + list(SHAPES).index(name)
    rows = torch.linspace(0, 1.5, shape[-2]).exp().unsqueeze(-1)
    return gauss(*shape, seed=seed) * rows * gauss(1, shape[-1], seed=seed // 3).exp()


@dataclass
class Seen:
    """What one rank saw."""

    rows: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)
    params: dict[str, ParamInfo] = field(default_factory=dict)
    # By parameter, of every step: where its slices lie, their scores, and which were selected.
    pieces: dict[str, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = field(default_factory=dict)
    moved: int = 0


def train(
    place: Callable[[Tensor], Tensor], options: dict[str, Any], group: dist.ProcessGroup | None = None
) -> tuple[nn.ParameterDict, Seen]:
    """Six steps under the tracker, with gradients that are known before."""
    model = named(**{name: place(torch.ones(shape)) for name, shape in SHAPES.items()})
    # The number of slices selected from a stack of cut matrices must not depend on the matrix.
    matrices = {"params": [(n, model[n]) for n in SHAPES if n != "experts"]}
    experts = {"params": [("experts", model["experts"])], "selection_scope": "local"}
    optimizer = Dion2([matrices, experts], group, ef_decay=EF_DECAY, **options)
    sink, seen = MemorySink(), Seen(pieces={name: [] for name in SHAPES})
    names = {p: name for name, p in model.items()}

    def see(event: StepEvent) -> None:
        for param, chosen in zip(event.params, event.selections, strict=True):
            layout = Layout.of(param)
            matrices = index_tensor(layout.runs(0)) if param.ndim == 3 else torch.arange(1)
            marked = torch.zeros_like(chosen.scores, dtype=torch.bool).scatter_(-1, chosen.indices, True)
            along = index_tensor(layout.runs(param.ndim + chosen.dim))
            seen.pieces[names[param]].append((matrices, along, chosen.scores.clone(), marked))

    optimizer.register_step_observer(see)
    metrics = ["basic", "selection_gradient"]
    with Tracker(model, optimizer, schedule=every(FLUSH, first=False), metrics=metrics, sinks=[sink]):
        for step in range(1, STEPS + 1):
            for name, p in model.items():
                p.grad = place(gradient(name, step))
            optimizer.step()
    seen.rows = {(r.step, r.param): dict(r.values) for r in sink.selection}
    seen.params = {} if sink.run is None else {p.name: p for p in sink.run.params}
    return model, seen


def on_mesh(mesh: Mesh, options: dict[str, Any]) -> list[Seen]:
    sizes, placements = mesh

    def run(rank: int, world: int) -> Seen:
        device_mesh = init_device_mesh("cpu", sizes)
        return train(lambda x: distribute_tensor(x, device_mesh, placements, src_data_rank=None), options)[1]

    return run_threads(run, math.prod(sizes), timeout=50)


def pieces_along(n: int, mesh: Mesh, dim: int) -> list[range]:
    """Indices of every piece that is not empty: ``torch.chunk``, once for each mesh dimension that cuts ``dim``."""
    found = [range(n)]
    for size, placement in zip(*mesh, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            found = [
                piece[a : a + -(-len(piece) // size)]
                for piece in found
                for a in range(0, len(piece), max(1, -(-len(piece) // size)))
            ]
    return [piece for piece in found if piece]


def whole(name: str, ranks: Sequence[Seen], step: int, by_rows: bool) -> tuple[Tensor, list[set[int]]]:
    """Scores ``[B, n]`` of all ranks, and what was selected."""
    shape = SHAPES[name]
    size = (shape[0] if len(shape) == 3 else 1, shape[-2] if by_rows else shape[-1])
    scores, marks = torch.full(size, math.nan), torch.zeros(size, dtype=torch.bool)
    for rank in ranks:
        matrices, along, here, marked = rank.pieces[name][step]
        if matrices.numel() and along.numel():
            place = (matrices.unsqueeze(-1), along)
            scores[place], marks[place] = here.reshape(len(matrices), -1), marked.reshape(len(matrices), -1)
    return scores, [set(row.nonzero().flatten().tolist()) for row in marks]


def check(ranks: Sequence[Seen], mesh: Mesh, options: dict[str, Any], *, travels: bool | None = None) -> None:
    by_rows, fraction = options["select_dim"] == "rows", options["fraction"]
    assert set(ranks[0].rows) == {(s, name) for s in range(FLUSH, STEPS + 1, FLUSH) for name in SHAPES}
    for name, shape in SHAPES.items():
        dim = len(shape) - (2 if by_rows else 1)
        shards = pieces_along(shape[dim], mesh, dim)
        alone = options["selection_scope"] == "local" or name == "experts"
        gradients = [gradient(name, step).reshape(-1, *shape[-2:]) for step in range(1, STEPS + 1)]
        gradients = [g if by_rows else g.mT.contiguous() for g in gradients]
        moments = follow(gradients, [fraction] * STEPS, EF_DECAY, shards if alone else None)
        for step, moment in enumerate(moments):
            scores, selected = whole(name, ranks, step, by_rows)
            assert selected == moment.selected, (name, step)
            moments[step] = with_scores(moment, scores)
        together = travels
        if together is None:  # a stack whose matrices are whole, each on one rank, stays where it is
            together = any(len(shape) == 2 or p != Shard(0) for p in mesh[1])
        for step in range(FLUSH, STEPS + 1, FLUSH):
            known = {"length": gradients[0].size(-1), "ef_decay": EF_DECAY, "shards": shards, "travels": together}
            compare(ranks[0].rows[step, name], truth(moments[:step], step - FLUSH, **known), (name, step))
        told = ranks[0].params[name].options
        assert told["selection"] == ("rows" if by_rows else "columns")
        assert told["shards"] == len(shards), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("select", ["rows", "cols"])
def test_every_column_in_every_layout(layout: str, scope: str, select: str) -> None:
    options = {"fraction": 0.35, "selection_scope": scope, "select_dim": select}
    check(on_mesh(LAYOUTS[layout], options), LAYOUTS[layout], options)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_replicas_that_share_the_work_and_those_that_do_not(world: int, shared: bool) -> None:
    options = {"fraction": 0.35, "selection_scope": "local", "select_dim": "rows"}

    def run(rank: int, world: int) -> Seen:
        return train(lambda x: x, options, dist.group.WORLD if shared else None)[1]

    check(run_threads(run, world, timeout=50), ((world,), (COPIES,)), options, travels=shared)


def fsdp(options: dict[str, Any], rank: int, world: int) -> Seen:
    """Real parameters of FSDP2, on real processes."""
    mesh = init_device_mesh("cpu", (world,))
    sharded = [nn.Parameter(torch.ones(shape)) for shape in SHAPES.values()]
    module = nn.ParameterList(sharded)
    fully_shard(module, mesh=mesh)
    ready = iter(list(module.parameters()))
    made: dict[int, Tensor] = {}

    def place(x: Tensor) -> Tensor:
        if len(made) < len(SHAPES):  # train() asks for the parameters first
            made[len(made)] = next(ready)
            return made[len(made) - 1].detach()
        return distribute_tensor(x, mesh, [ROWS], src_data_rank=None)

    return train(place, options)[1]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scope", ["local", "global"])
def test_every_column_under_fsdp_on_real_processes(world: int, scope: str) -> None:
    options = {"fraction": 0.35, "selection_scope": scope, "select_dim": "rows"}
    check(run_forked(lambda r, w: fsdp(options, r, w), world, timeout=50), ((world,), (ROWS,)), options)


# ---------------------------------------------------------------------- numbers that were promised


@pytest.mark.parametrize(("scope", "k"), [("local", 8), ("global", 6)])
def test_the_realised_k_of_seventeen_rows_on_four_ranks(scope: str, k: int) -> None:
    """ceil(.35 · 5) = 2 of 5, 5, 5 and 2 rows; ceil(.35 · 17) = 6 of all."""
    ranks = on_mesh(((4,), (ROWS,)), {"fraction": 0.35, "selection_scope": scope, "select_dim": "rows"})
    row = ranks[0].rows[STEPS, "uneven"]
    assert (row["k"], row["fraction"], row["rows_communicated"]) == (k, k / 17, k)
    scores, selected = whole("uneven", ranks, STEPS - 1, True)
    assert len(selected[0]) == k
    shards = [range(5), range(5, 10), range(10, 15), range(15, 17)]
    expected = shard_truth(scores[0].double().tolist(), shards, 0.35)
    assert expected["regret"] > 0
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, abs=1e-12)
    assert row["regret_at_4"] == pytest.approx(expected["regret"], abs=1e-12), "as if there were these shards"


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 1.0])
def test_a_global_selection_sends_the_ceiling_of_its_share_of_every_matrix(fraction: float) -> None:
    ranks = on_mesh(((4,), (ROWS,)), {"fraction": fraction, "selection_scope": "global", "select_dim": "rows"})
    matrices = [name for name in SHAPES if name != "experts"]
    sent = [ranks[0].rows[STEPS, name]["rows_communicated"] for name in matrices]
    assert sum(sent) == sum(count(fraction, SHAPES[name][0]) for name in matrices)
    assert ranks[0].rows[STEPS, "experts"]["rows_communicated"] == 0


MOVES: dict[str, tuple[Mesh, int]] = {
    # The mesh, and how often a selected slice that travels is sent: to its owner, and to every replica of its place.
    "rows over 2": (((2,), (ROWS,)), 2),
    "rows over 4": (((4,), (ROWS,)), 2),
    "columns over 4": (((4,), (COLUMNS,)), 2),
    "HSDP": (((2, 2), (COPIES, ROWS)), 3),
    "rows and columns": (((2, 2), (ROWS, COLUMNS)), 2),
    "replicas": (((4,), (COPIES,)), 4),
}


@pytest.mark.parametrize("layout", MOVES)
@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("select", ["rows", "cols"])
def test_communicated_rows_are_what_the_optimizer_moved(
    monkeypatch: pytest.MonkeyPatch, layout: str, scope: str, select: str
) -> None:
    sent: list[int] = []
    exchange: Callable[..., Any] = dist.all_to_all_single

    def exchanged(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(input.numel())
        return exchange(output, input, *args, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", exchanged)
    monkeypatch.setitem(globals(), "FLUSH", 1)
    mesh, times = MOVES[layout]
    ranks = on_mesh(mesh, {"fraction": 0.35, "selection_scope": scope, "select_dim": select})
    expected = 0.0
    for (_, name), row in ranks[0].rows.items():
        length = SHAPES[name][-1 if select == "rows" else -2]
        # Of experts over ranks what is replicated goes to the other replica, and there is nothing to gather.
        among = times - 1 if name == "experts" and ROWS in mesh[1] and COPIES in mesh[1] else times
        expected += among * row["rows_communicated"] * length
    assert len(ranks[0].rows) == STEPS * len(SHAPES)
    assert sum(sent) == expected > 0
