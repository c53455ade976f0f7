"""A small transformer with every kind of parameter, its batches, and what ranks that train it in parallel must hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from scion_telemetry.optim import Dion2, Layout, Orthogonalizer, Scion, group_params
from scion_telemetry.optim.layout import Runs, local, take_piece

EXACT = Orthogonalizer(name="svd", dtype=torch.float32)
WORDS, WIDTH, HEAD, WIDER, EXPERTS = 12, 8, 2, 16, 4
BATCH, LENGTH, STEPS = 16, 6, 3
Make = Callable[..., torch.optim.Optimizer]


class Experts(nn.Module):
    """A mixture of all experts; those of this rank are added up over ``group``."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.inner = nn.Parameter(torch.empty(EXPERTS, 8, WIDTH))
        self.outer = nn.Parameter(torch.empty(EXPERTS, WIDTH, 8))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.router(x))  # the gradients of a softmax add up to zero: not of full rank
        inner, outer = local(self.inner), local(self.outer)
        if self.group is not None:
            x, gate = _Spread.apply(x, self.group), _Spread.apply(gate, self.group)
            gate = gate.chunk(self.group.size(), dim=-1)[self.group.rank()]
        hidden = torch.tanh(torch.einsum("btd,efd->btef", x, inner))
        y = torch.einsum("btef,edf,bte->btd", hidden, outer, gate)
        return y if self.group is None else _Join.apply(y, self.group)


class Lower(nn.Module):
    """Embedding and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (m(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = functional.softmax(q @ k.mT, dim=-1) @ v  # as many heads as this rank has
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.frozen(x)


class Upper(nn.Module):
    """A feed-forward part, perhaps experts, and the head; one layer is never used, and one is trained later."""

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)  # under a LayerNorm gradients would not be of full rank, and polar not unique
        self.up, self.down = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts() if experts else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x + self.down(torch.tanh(self.up(x))) + torch.tanh(self.late(x))
        x = x if self.experts is None else x + self.experts(x)
        return self.head(torch.tanh(x))


class Former(nn.Module):
    """Both parts, with the same weights in every process."""

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.lower, self.upper = Lower(), Upper(experts=experts)
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) / 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.upper(self.lower(tokens))


class _Spread(torch.autograd.Function):
    """The same input on every rank; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Join(torch.autograd.Function):
    """The sum over ranks; every rank has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def scion(groups: Any, process_group: dist.ProcessGroup | None = None) -> Scion:
    kwargs = {"orthogonalizer": EXACT}
    return Scion(groups, lr=0.05, momentum=0.3, norm_kwargs=kwargs, process_group=process_group)


def dion2(groups: Any, process_group: dist.ProcessGroup | None = None) -> Dion2:
    return Dion2(
        groups,
        process_group,
        lr=0.05,
        fraction=0.4,
        selection_scope="global",
        select_dim="rows",
        newton_schulz_func=EXACT,
    )


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one of several equal parts."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator).chunk(parts)[part]
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module, make: Make, process_group: dist.ProcessGroup | None = None) -> tuple[Any, Any]:
    """The optimizer, frozen parameters included, and the group that it is given after the first step."""
    groups = group_params(model)
    late: dict[str, Any] = {}
    for group in groups:
        if mine := [(n, p) for n, p in group["params"] if n.endswith("late")]:
            group["params"] = [(n, p) for n, p in group["params"] if not n.endswith("late")]
            late = {**group, "params": mine}
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    matrices = {"params": [x for x in frozen if x[1].ndim == 2]}
    vectors = {"params": [x for x in frozen if x[1].ndim < 2], "algorithm": "scion", "norm": "Sign"}
    return make([*groups, *([matrices, vectors] if frozen else [])], process_group), late


def train(
    model: nn.Module,
    make: Make,
    *,
    part: int = 0,
    parts: int = 1,
    process_group: dist.ProcessGroup | None = None,
    backward: Callable[[int], None] | None = None,
) -> None:
    """Three steps; ``backward(step)`` computes the gradients where one call of the model is not all."""
    optimizer, late = optimizer_of(model, make, process_group)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.zero_grad()
        if backward is None:
            tokens, targets = batch(step, part, parts)
            loss_of(model(tokens), targets).backward()
        else:
            backward(step)
        optimizer.step()
        if step == 0 and late:
            optimizer.add_param_group(late)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one rank holds of one parameter after training, and where it belongs."""

    tensor: Tensor
    layout: Layout

    @property
    def place(self) -> tuple[Runs, ...]:
        return tuple(self.layout.runs(d) for d in range(len(self.layout.shape)))


def pieces(model: nn.Module) -> dict[str, Piece]:
    """Of every parameter, without the mesh, which does not leave its process."""
    found = {}
    for name, p in model.named_parameters():
        layout = Layout.of(p)
        plain = Layout(shape=layout.shape, axes=layout.axes)
        found[name.removeprefix("module.")] = Piece(tensor=local(p).detach().clone(), layout=plain)
    return found


def alone(make: Make, *, experts: bool = False) -> dict[str, Tensor]:
    """What one process arrives at on the whole batches."""
    model = Former(experts=experts)
    train(model, make)
    return {n: p.detach() for n, p in model.named_parameters()}


def check(ranks: list[dict[str, Piece]], expected: Mapping[str, Tensor]) -> None:
    """Every piece is that of the one process to 1e-5, replicas agree bit for bit, and what should move did."""
    initial = {n: p.detach() for n, p in Former(experts=any("experts" in n for n in expected)).named_parameters()}
    assert {n for rank in ranks for n in rank} == set(expected)
    for name, right in expected.items():
        held: dict[tuple[Runs, ...], Tensor] = {}
        for piece in (rank[name] for rank in ranks if name in rank):
            torch.testing.assert_close(
                piece.tensor, take_piece(right, piece.layout), atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
            first = held.setdefault(piece.place, piece.tensor)
            assert torch.equal(first, piece.tensor), f"replicas of {name} differ"
        assert sum(p.numel() for p in held.values()) == right.numel()  # together they have the whole
        still = "frozen" in name or "unused" in name
        moved = (right - initial[name]).abs().max().item()
        assert moved == 0 if still else moved > 1e-3
