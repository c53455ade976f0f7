"""Trains a model under the tracker and computes every row again in float64 on gathered tensors."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from truth import layer_values, worst

from scion_telemetry import Tracker, every
from scion_telemetry.optim.groups import clean_name
from scion_telemetry.optim.layout import Layout, index_tensor, local
from scion_telemetry.rows import Batch, RunInfo
from scion_telemetry.sinks import MemorySink

STEPS = 3


class Net(nn.Module):
    """Matrices of 10, 7 and 3 rows: uneven on 2 ranks, and on 4 ranks one of them has a rank without rows."""

    def __init__(self, widths: tuple[int, int, int] = (10, 7, 3), seed: int = 0) -> None:
        super().__init__()
        a, b, c = widths
        self.embed = nn.Embedding(12, 6)
        self.up = nn.Linear(6, a)
        self.mid = nn.Linear(a, b, bias=False)
        self.narrow = nn.Linear(b, c, bias=False)
        self.norm = nn.RMSNorm(c)
        self.head = nn.Linear(c, 12, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.embed(tokens)))
        out: Tensor = self.head(self.norm(self.narrow(torch.tanh(self.mid(x)))))
        return out


class NoSink:
    """Keeps nothing."""

    def open(self, run: RunInfo) -> None: ...

    def write(self, batch: Batch) -> None: ...

    def close(self) -> None: ...


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 12, (8, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1].flatten(), tokens[:, 1:].flatten()


def backward(model: nn.Module, step: int, rank: int = 0) -> None:
    tokens, targets = batch(step, rank)
    nn.functional.cross_entropy(model(tokens), targets).backward()


def gathered(piece: Tensor, param: Tensor) -> Tensor:
    """The whole of which every rank has a piece, cut as the parameter is, in float64."""
    piece = piece.detach().double()
    if not isinstance(param, DTensor):
        return piece
    stride = torch.empty(param.shape, device="meta").stride()
    whole = DTensor.from_local(
        piece, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=stride
    )
    # full_tensor() fails where uneven pieces of one dimension lie on two mesh dimensions: put the pieces together.
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (piece, [Layout.of(whole).runs(d) for d in range(whole.ndim)]))
    full = torch.full(param.shape, torch.nan, dtype=torch.float64)
    for part, runs in everybody:
        full[torch.meshgrid(*map(index_tensor, runs), indexing="ij")] = part
    return full


def momentum_of(state: Mapping[str, Any]) -> Tensor | None:
    found = [state[k] for k in ("momentum", "momentum_buffer", "exp_avg") if isinstance(state.get(k), Tensor)]
    return found[0] if found else None


class Witness:
    """Keeps what an optimizer does, with hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.params: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        self.updates: dict[Tensor, Tensor] = {}
        self.chosen: dict[Tensor, Any] = {}
        optimizer.register_step_pre_hook(self.before)
        if hasattr(optimizer, "register_step_observer"):
            optimizer.register_step_observer(self.see)

    def before(self, *_: object) -> None:
        self.updates, self.chosen = {}, {}
        self.weights = {p: local(p).detach().double().clone() for p in self.params}

    def see(self, event: Any) -> None:
        for i, param in enumerate(event.params):
            update = torch.zeros(local(param).shape, dtype=torch.float64)
            direction = event.directions[i].double() * event.scale
            if event.selections:
                chosen = event.selections[i]
                index = chosen.indices.unsqueeze(-1 if chosen.dim == -2 else -2)
                spread = update.view(*direction.shape[:-2], *_shape_of(update, direction))
                spread.scatter_(chosen.dim, index.expand(direction.shape), direction)
                self.chosen[param] = (chosen.dim, chosen.scores.clone(), chosen.indices.clone())
            else:
                update += direction
            self.updates[param] = update

    def update(self, param: Tensor) -> Tensor | None:
        if param.grad is None:
            return None
        if param in self.updates:
            return self.updates[param]
        group = next(g for g in self.optimizer.param_groups if any(p is param for p in g["params"]))
        decoupled = isinstance(self.optimizer, torch.optim.AdamW) or group.get("algorithm") in ("adamw", "lion")
        kept = 1 - group["lr"] * group["weight_decay"] if decoupled else 1.0
        return local(param).detach().double() - kept * self.weights[param]


class SelectionTruth:
    """Brute force with Python's sets; keeps the history of every parameter."""

    def __init__(self) -> None:
        self.last: dict[str, list[int]] = {}
        self.before: dict[str, set[int]] = {}

    def values(self, name: str, scores: Tensor, selected: set[int], step: int) -> dict[str, float]:
        """``scores`` is ``[B, n]``, ``selected`` are positions in it when flat."""
        n, k = scores.numel(), len(selected)
        matrices = [sorted(row) for row in scores.tolist()]
        chosen = [sum(scores[b, i].item() for b, i in _places(selected, scores) if b == m) for m in range(len(scores))]

        def mean(values: Iterable[float]) -> float:
            return sum(values) / len(matrices)

        last = self.last.setdefault(name, [0] * n)
        for i in selected:
            last[i] = step
        ages = sorted(step - t for t in last)
        found = {
            "k": k,
            "fraction": k / n,
            "captured_mass": mean(part / sum(r) for part, r in zip(chosen, matrices, strict=True)),
            "gini": mean(
                sum((2 * i - len(r) - 1) * x for i, x in enumerate(r, 1)) / (len(r) * sum(r)) for r in matrices
            ),
            "participation_ratio": mean(sum(r) ** 2 / (len(r) * sum(x * x for x in r)) for r in matrices),
            "threshold": min(scores.flatten()[i].item() for i in selected),
            "age_p50": ages[math.ceil(n / 2) - 1],
            "age_p99": ages[math.ceil(0.99 * n) - 1],
            "age_max": ages[-1],
        }
        if name in self.before:
            found["churn"] = 1 - len(self.before[name] & selected) / len(self.before[name] | selected)
        self.before[name] = selected
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one run of a layout showed."""

    rows: int
    error: float
    collectives: int


def compare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Callable[[int], None],
    *,
    rank: int = 0,
    roles: Mapping[str, str] | None = None,
    steps: int = STEPS,
    group: Any = None,
) -> Found:
    """Train ``steps`` steps; every column of every row against float64 on the gathered tensors.

    Every rank takes part in gathering; rank 0 has the rows.
    """
    witness, sink, truths = Witness(optimizer), MemorySink(), SelectionTruth()
    names = {p: clean_name(n) for n, p in model.named_parameters()}
    error, rows, collectives = 0.0, 0, 0
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink], process_group=group) as tracker:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            train(step)
            optimizer.step()
            tracker.flush()
            collectives = tracker.last_flush.collectives if tracker.last_flush else 0
            for param in witness.params:
                name = names[param]
                whole, chosen = _gather(witness, optimizer, param)
                if rank:
                    continue
                role = (roles or {}).get(name, _role(name, param))
                (row,) = [r for r in sink.layers if (r.step, r.param) == (step, name)]
                error = max(error, worst(row.values, layer_values(whole, role)))
                found = [r for r in sink.selection if (r.step, r.param) == (step, name)]
                assert len(found) == (chosen is not None)
                if chosen is not None:
                    error = max(error, _selection_error(found[0].values, truths.values(name, *chosen, step)))
                rows += 1 + len(found)
    return Found(rows=rows, error=error, collectives=collectives)


def _gather(
    witness: Witness, optimizer: torch.optim.Optimizer, param: Tensor
) -> tuple[dict[str, Tensor], tuple[Tensor, set[int]] | None]:
    """The whole of every quantity, and of a selection the scores and the selected indices."""
    momentum = momentum_of(optimizer.state.get(param, {}))
    pieces = {
        "weight": local(param),
        "grad": None if param.grad is None else local(param.grad),
        "momentum": None if momentum is None else local(momentum),
        "update": witness.update(param),
    }
    whole = {q: gathered(piece, param) for q, piece in pieces.items() if piece is not None}
    if param not in witness.chosen:
        return whole, None
    dim, scores, indices = witness.chosen[param]
    flags = torch.zeros_like(scores).scatter_(-1, indices, 1.0)
    scores, flags = (_all_scores(t, dim, param) for t in (scores, flags))
    return whole, (scores, {i for i, flag in enumerate(flags.flatten().tolist()) if flag})


def _all_scores(scores: Tensor, dim: int, param: Tensor) -> Tensor:
    """``[B, n]`` of a rank's scores: written over all entries of its piece, gathered as the parameter is."""
    mine = local(param)
    height = mine.size(-2) // scores.size(0) if scores.ndim == 2 and mine.ndim == 2 else mine.size(-2)  # heads
    piece = scores.unsqueeze(-1 if dim == -2 else -2).expand(*scores.shape[:-1], height, mine.size(-1))
    heads = param.size(-2) // height if scores.ndim == 2 and param.ndim == 2 else 1
    whole = gathered(piece.reshape(mine.shape), param)
    if heads > 1:
        whole = whole.view(heads, -1, param.size(-1))
    whole = whole.select(-1 if dim == -2 else -2, 0)
    return whole if whole.ndim == 2 else whole.unsqueeze(0)


def _places(selected: set[int], scores: Tensor) -> list[tuple[int, int]]:
    return [divmod(i, scores.size(1)) for i in sorted(selected)]


def _shape_of(update: Tensor, direction: Tensor) -> tuple[int, int]:
    """Rows and columns of the matrices that a direction belongs to: of a stack of heads fewer rows."""
    stack = math.prod(direction.shape[:-2])
    return (math.prod(update.shape[:-1]) // stack if stack else 0), update.size(-1)


def _role(name: str, param: Tensor) -> str:
    return "vector" if param.ndim < 2 else "embedding" if "embed" in name else "hidden"


def _selection_error(row: Mapping[str, float], truth: Mapping[str, float]) -> float:
    assert set(row) == set(truth)
    return max(abs(row[name] - expected) / (abs(expected) or 1) for name, expected in truth.items())
