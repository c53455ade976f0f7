"""Trains a model under the tracker and computes every row again in float64 on gathered tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from selection_truth import SelectionTruth
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from truth import cosine, layer_values, maps, worst

from scion_telemetry import Tracker, every
from scion_telemetry.describe import facts
from scion_telemetry.optim.events import ObservableOptimizer
from scion_telemetry.optim.groups import clean_name, infer_roles
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

    def __init__(self, optimizer: torch.optim.Optimizer, roles: Mapping[Tensor, str]) -> None:
        self.optimizer = optimizer
        self.params: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        self.roles = roles
        self.updates: dict[Tensor, Tensor] = {}
        self.chosen: dict[Tensor, Any] = {}
        self.grams: set[Tensor] = set()
        optimizer.register_step_pre_hook(self.before)
        if hasattr(optimizer, "register_step_observer"):
            optimizer.register_step_observer(self.see)

    def before(self, *_: object) -> None:
        self.updates, self.chosen, self.grams = {}, {}, set()
        self.weights = {p: local(p).detach().double().clone() for p in self.params}

    def see(self, event: Any) -> None:
        self.grams |= {event.params[i] for i in event.grams}
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
        group = self.group(param)
        kept = 1 - group["lr"] * group["weight_decay"] if self.decoupled(group) else 1.0
        return local(param).detach().double() - kept * self.weights[param]

    def group(self, param: Tensor) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if any(p is param for p in g["params"]))

    def decoupled(self, group: Mapping[str, Any]) -> bool:
        return isinstance(self.optimizer, torch.optim.AdamW) or group.get("algorithm") in ("adamw", "lion")

    def length(self, param: Tensor) -> float | None:
        """The natural norm of an update, where its rule promises one."""
        group = self.group(param)
        if not isinstance(self.optimizer, ObservableOptimizer):
            return None
        found = self.optimizer.settings({**group, "params": [param], "role": group.get("role", self.roles[param])})
        return None if found.scale is None else found.lr * found.scale

    def settings(self, param: Tensor) -> tuple[float, str | None, float | None]:
        """Decay, natural norm and radius of a parameter, as its optimizer says."""
        group = self.group(param)
        if not isinstance(self.optimizer, ObservableOptimizer):
            return group["weight_decay"] if self.decoupled(group) else 0.0, None, None
        found = self.optimizer.settings({**group, "params": [param], "role": group.get("role", self.roles[param])})
        return found.decay, found.norm, found.radius


def settings_error(
    row: dict[str, float],
    truth: Mapping[str, float],
    witness: Witness,
    param: Tensor,
    before: Tensor | None,
    update: Tensor | None,
) -> float:
    """Takes the columns out of a row that four tensors do not tell, and compares them; the largest relative error."""
    decay, norm, radius = witness.settings(param)
    errors = [abs(row.pop("weight_decay") - decay)]
    assert row.pop("grad_missing") == 0
    if update is not None:
        assert row.pop("update_lr") == witness.group(param)["lr"]
    if radius is not None and norm is not None and f"weight_{norm}" in truth:
        got, expected = row.pop("weight_radius_share"), truth[f"weight_{norm}"] / radius
        of_sigma = norm in ("spectral", "rms_to_rms")
        assert expected * (0.99 if of_sigma else 1 - 1e-7) <= got <= expected * (1 + 1e-7), (norm, got, expected)
    if before is not None and update is not None and bool(before.square().sum() > 0):
        expected = cosine(update.flatten(), before.flatten())
        got = row.pop("update_previous_cosine")
        assert abs(got - expected) <= 1e-6 or (math.isnan(got) and math.isnan(expected)), (got, expected)
    return max(errors)


def newton_schulz(
    row: dict[str, float], whole: Mapping[str, Tensor], shows_gram: bool, role: str, length: float | None
) -> None:
    """Takes out what Newton-Schulz tells. Bounds of σ₁ are of bfloat16 products, of all or of the selected part."""
    if "update_polar_error" in row:
        assert length is not None
        got, expected = row.pop("update_polar_error"), polar_error(whole["update"] / length, role)
        assert got == pytest.approx(expected, rel=1e-3, nan_ok=True), (whole["update"].shape, got, expected)
    names = [f"momentum_{n}" for n in ("participation_rank", "gram_lower", "gram_upper")]
    found = [row.pop(name) for name in names if name in row]
    assert len(found) == 3 * shows_gram
    if found and all(map(math.isfinite, found)):
        rank, lower, upper = found
        assert 1 - 1e-2 <= rank <= min(maps(whole["momentum"], role).shape[-2:]) * (1 + 1e-2)
        assert lower <= upper * (1 + 1e-2)


def polar_error(update: Tensor, role: str) -> float:
    """‖UUᵀ - I‖_F / √k of U = update √(d_in / d_out), without rows and columns that were not selected."""
    worst_of = 0.0
    for x in maps(update, role):
        d_out, d_in = x.shape
        part = x[x.abs().sum(1) > 0][:, x.abs().sum(0) > 0] * math.sqrt(d_in / d_out)
        sigma = torch.linalg.svdvals(part)
        worst_of = max(worst_of, float((sigma.square() - 1).norm()) / math.sqrt(max(1, len(sigma))))
    return worst_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one run of a layout showed."""

    rows: int
    error: float
    collectives: int
    columns: frozenset[str] = frozenset()


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
    sink, truths = MemorySink(), SelectionTruth()
    witness = Witness(optimizer, infer_roles(model))
    before: dict[Tensor, Tensor] = {}
    shows: dict[Tensor, bool] = {}
    names = {p: clean_name(n) for n, p in model.named_parameters()}
    error, rows, collectives = 0.0, 0, 0
    columns: set[str] = set()
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
                shows[param] = shown_anywhere(param in witness.grams)
                if rank:
                    continue
                role = (roles or {}).get(name, _role(name, param))
                (row,) = [dict(r.values) for r in sink.layers if (r.step, r.param) == (step, name)]
                columns |= set(row)
                truth, update = layer_values(whole, role), whole.get("update")
                error = max(error, settings_error(row, truth, witness, param, before.get(param), update))
                if update is not None:
                    before[param] = update
                newton_schulz(row, whole, shows[param], role, witness.length(param))
                error = max(error, worst(row, truth))
                found = [r for r in sink.selection if (r.step, r.param) == (step, name)]
                assert len(found) == (chosen is not None)
                if chosen is not None:
                    of_shards(found[0].values, param, facts(optimizer, param).shared)
                    error = max(
                        error,
                        _selection_error(
                            found[0].values,
                            truths.values(name, *chosen, step, **slices(witness, param, whole, chosen[0])),
                        ),
                    )
                rows += 1 + len(found)
    return Found(rows=rows, error=error, collectives=collectives, columns=frozenset(columns))


def shown_anywhere(here: bool) -> bool:
    """Whether some rank shows a gram."""
    if not dist.is_initialized():
        return here
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, here)
    return any(everybody)


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


def _shape_of(update: Tensor, direction: Tensor) -> tuple[int, int]:
    """Rows and columns of the matrices that a direction belongs to: of a stack of heads fewer rows."""
    stack = math.prod(direction.shape[:-2])
    return (math.prod(update.shape[:-1]) // stack if stack else 0), update.size(-1)


def _role(name: str, param: Tensor) -> str:
    return "vector" if param.ndim < 2 else "embedding" if "embed" in name else "hidden"


OF_SHARDS = {"regret", "overlap", "imbalance", "rows_communicated"}
"""Columns that depend on where pieces lie."""


def of_shards(row: Mapping[str, float], param: Tensor, shared: bool) -> None:
    """Selected slices travel where ranks step a matrix together; shards are compared where it is cut."""
    first = 1 if param.ndim == 3 else 0
    cut = any(local(param).size(d) != param.size(d) for d in range(first, param.ndim))
    assert row["rows_communicated"] == row["k"] * shared
    assert not shared or dist.is_initialized()
    compared = OF_SHARDS & set(row) - {"rows_communicated"}
    assert len(compared) in (0, 3)
    assert cut or not compared
    if compared:
        assert 0 <= row["regret"] < 1
        assert 0 < row["overlap"] <= 1
        assert row["imbalance"] >= 0


def slices(witness: Witness, param: Tensor, whole: Mapping[str, Tensor], scores: Tensor) -> dict[str, Any]:
    """What else a selection is compared with: its options, and the slices of momentum and gradient."""
    group, dim = witness.group(param), witness.chosen[param][0]

    def cut(x: Tensor) -> Tensor:
        x = x.reshape(len(scores), -1, x.size(-1))
        return x if dim == -2 else x.mT

    momentum = cut(whole["momentum"])
    options = {name: float(group[name]) for name in ("fraction", "ef_decay")}
    return {**options, "length": momentum.size(-1), "momentum": momentum, "gradient": cut(whole["grad"])}


def _selection_error(row: Mapping[str, float], truth: Mapping[str, float]) -> float:
    assert set(truth) <= set(row) <= set(truth) | OF_SHARDS, set(truth) ^ set(row)
    errors = [0.0]
    for name, expected in truth.items():
        got = row[name]
        if math.isnan(expected):
            assert math.isnan(got), (name, got)
        elif name == "unselected_energy":  # the root of a difference
            assert abs(got - expected) <= 1e-4, (name, got, expected)
        elif name.startswith("grad_") or name == "ef_growth":  # L1 norms of the gradient's rows are float32
            assert abs(got - expected) <= 1e-6 * max(1.0, abs(expected)), (name, got, expected)
        else:
            errors.append(abs(got - expected) / (abs(expected) or 1))
    return max(errors)
