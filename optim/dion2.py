"""Dion2: orthonormalise only the rows or columns of the momentum that are largest in L1 norm (arXiv 2512.16928)."""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .algorithm import Work, add_all_, scale_all_
from .base import SpectralOptimizer
from .events import Gram, ParamFacts, Selection, StepEvent, StepSettings
from .grid import Dims, Grid
from .layout import Layout, split_rows
from .options import BETAS, NOT_NEGATIVE, POSITIVE, UNIT_INTERVAL, Check, check_options, one_of
from .orthogonalize import NewtonSchulzFunc, input_dtype, make_orthogonalizer, orthogonalize_all, shows_gram
from .scalar import AdamWAlgorithm, LionAlgorithm
from .scion import ScionAlgorithm
from .selection import l1_scores, put_, selected_count, selection_dim, take, top_k
from .settings import dion2_settings
from .transport import hollow

_FLOATS = {str(d).removeprefix("torch."): d for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


class Dion2Algorithm:
    """The rule of Dion2; ``algorithm="dion2"`` in a parameter group."""

    name = "dion2"
    own: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = {
        "lr": 0.01,
        "fraction": 0.25,
        "ef_decay": 0.95,
        "weight_decay": 0.01,
        "epsilon": 1e-8,
        "adjust_lr": "spectral_norm",
        "selection_scope": "local",
        "newton_schulz_func": "polar_express",
        "select_dim": "auto",
        "decay_on": "all",
        "momentum_dtype": None,
        "num_heads": None,
    }
    checks: Mapping[str, Check] = {
        "lr": NOT_NEGATIVE,
        "fraction": UNIT_INTERVAL,
        "ef_decay": (lambda v: 0 <= v <= 1, "in [0, 1]"),
        "weight_decay": NOT_NEGATIVE,
        "epsilon": POSITIVE,
        "adjust_lr": one_of("spectral_norm", "rms_norm", None),
        "selection_scope": one_of("local", "global"),
        "select_dim": one_of("auto", "rows", "cols"),
        "decay_on": one_of("all", "selected"),
        "momentum_dtype": one_of(*_FLOATS, None),
        "num_heads": (lambda v: v is None or (type(v) is int and v > 0), "None or a whole number > 0"),
    }

    def prepare(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """The momentum, of the parameter's placement and of its dtype or the one that was asked for."""
        if param.ndim not in (2, 3):
            raise ValueError(
                f"Dion2 steps matrices [d_out, d_in] and stacks of them, got shape {tuple(param.shape)}; give its "
                "group algorithm='adamw', 'lion' or 'scion' (group_params does)"
            )
        layout, _ = self.view(param, options)
        _refuse_cut_stack(layout, options)
        make_orthogonalizer(options["newton_schulz_func"])
        return {"momentum": torch.zeros_like(param, dtype=_FLOATS.get(options["momentum_dtype"], param.dtype))}

    def view(self, param: Tensor, options: Mapping[str, Any]) -> tuple[Layout, Dims]:
        """A matrix, a stack of them, or the heads of an attention matrix ``[heads·h, d]`` as a stack."""
        layout = Layout.of(param)
        if options["num_heads"] is not None:
            if param.ndim != 2:
                raise ValueError(f"num_heads splits a matrix [heads·h, d], got shape {tuple(param.shape)}")
            layout = split_rows(layout, options["num_heads"])
        return layout, Dims.of(len(layout.shape), stacked=len(layout.shape) == 3)

    def facts(self, param: Tensor, grid: Grid, options: Mapping[str, Any]) -> ParamFacts:
        """Shows every update and selection; an owner assembles every direction."""
        layout = grid.layouts[grid.rank]
        return ParamFacts(
            algorithm=self.name,
            shows_update=True,
            select_dim=_select_dim(layout, options["select_dim"]),
            owner_shows=len(layout.shape) == 2,
            heads=options["num_heads"] or 1,
            shows_gram=shows_gram(make_orthogonalizer(options["newton_schulz_func"])),
        )

    def settings(self, options: Mapping[str, Any]) -> StepSettings:
        """Steps of spectral length, as ``adjust_lr`` has it."""
        return dion2_settings(options)

    def step(self, work: Work) -> Iterator[None]:
        """Accumulate, select, orthonormalise, decay, move."""
        options, lr = work.options, float(work.options["lr"])
        _refuse_late_heads(work)
        _refuse_cut_stack(work.layout, options)
        momenta = work.buffers("momentum")
        add_all_(momenta, [g.to(m.dtype) for g, m in zip(work.grads, momenta, strict=True)])
        dim = _select_dim(work.layout, options["select_dim"])
        along = len(work.layout.shape) + dim
        scores, indices, counts = yield from _select(work, momenta, dim)
        func = make_orthogonalizer(options["newton_schulz_func"])
        picked = [take(m, i, dim).to(input_dtype(func)) for m, i in zip(momenta, indices, strict=True)]
        for m, i in zip(momenta, indices, strict=True):
            put_(m, i, dim, take(m, i, dim) * options["ef_decay"])
        like = hollow(picked)
        whole = yield from work.exchange.gather(picked, along, counts)
        grams: dict[int, Gram] = {}
        shown = grams if work.grams else None
        owned = orthogonalize_all(func, whole, float(options["epsilon"]), like[0].dtype, shown)
        leaving = owned if work.notify is None else dict(owned)
        directions = yield from work.exchange.scatter(leaving, like, along, counts)
        directions = self._normalize(work, directions, indices)
        scale = -lr * lr_factor(options["adjust_lr"], *work.layout.shape[-2:])
        if work.notify is not None:
            selections = tuple(Selection(dim=dim, scores=s, indices=i) for s, i in zip(scores, indices, strict=True))
            event = StepEvent(
                algorithm=self.name,
                params=work.params,
                lr=lr,
                scale=scale,
                directions=directions,
                selections=selections,
                owned=owned,
                grams=grams,
            )
            work.notify(event)
        decay = 1 - lr * float(options["weight_decay"])
        everywhere = options["decay_on"] == "all"
        if everywhere:
            scale_all_(work.weights, decay)
        for w, i, u in zip(work.weights, indices, directions, strict=True):
            chosen = take(w, i, dim) if everywhere else take(w, i, dim) * decay
            put_(w, i, dim, chosen.add_(u.to(w.dtype), alpha=scale))

    def _normalize(self, work: Work, directions: tuple[Tensor, ...], indices: list[Tensor]) -> tuple[Tensor, ...]:
        """What else happens to the orthonormal directions: nothing."""
        return directions


class Dion2(SpectralOptimizer):
    """Dion2. The top-k is by **L1 norm** of the momentum's rows or columns.

        M <- M + G,   U = orth(M[K]),   M[K] <- ef_decay M[K],   W <- (1 - lr wd) W,   W[K] <- W[K] - lr_adj U

    K are the k = max(1, ⌈fraction n⌉) rows or columns of M with the largest L1 norm. Argument names and
    defaults are those of microsoft/dion.

    Args:
        params: Parameters, named parameters or groups (see ``group_params``). A group's ``algorithm`` is dion2, adamw,
            lion or scion.
        distributed_mesh: Ranks that hold replicas of the plain parameters and share the work on them (DDP): a 1-D
            mesh or a process group. Sharded parameters bring their own mesh.
        lr: Learning rate, >= 0.
        fraction: Share of rows or columns to select, in (0, 1]. A scheduler may change it per group.
        ef_decay: Decay of the selected momentum, in [0, 1].
        betas: Of AdamW and Lion groups.
        weight_decay: Decoupled, >= 0.
        epsilon: Added to denominators.
        adjust_lr: ``spectral_norm``: lr √(d_out/d_in); ``rms_norm``: 0.2 lr √max(d_out, d_in); None: lr.
        newton_schulz_func: Name in ``orthogonalize.NAMES`` or ``func(input, epsilon)``.
        selection_scope: ``local``: every shard selects from its own rows; ``global``: from the whole matrix.
        select_dim: ``rows`` or ``cols``, the same under every layout (with the global scope so is the trajectory);
            ``auto``: the sharded dimension or else the shorter one, rows on a tie, as microsoft/dion has it.
        decay_on: Weight decay on ``all`` rows or on the ``selected`` ones (microsoft/dion issue 120: the rest is
            decayed every step though it moves in a fraction of them).
        momentum_dtype: Of the momentum, as dtype or name; None: that of the parameter.
        num_heads: The rows of every matrix are so many heads, each selected from and orthonormalised for itself. Fixed
            when a group is added.
        momentum: Of Scion groups: one minus β, in (0, 1].
        agree_on_gradients: Where ranks may lack different gradients, agree on them in every step.

    Raises:
        ValueError: For a value out of range or a parameter that cannot be stepped.

    Source: arXiv 2512.16928; microsoft/dion.
    """

    def __init__(
        self,
        params: Iterable[Any],
        distributed_mesh: DeviceMesh | dist.ProcessGroup | None = None,
        lr: float = 0.01,
        fraction: float = 0.25,
        ef_decay: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        adjust_lr: str | None = "spectral_norm",
        newton_schulz_func: str | NewtonSchulzFunc = "polar_express",
        selection_scope: str = "local",
        *,
        select_dim: str = "auto",
        decay_on: str = "all",
        momentum_dtype: torch.dtype | str | None = None,
        num_heads: int | None = None,
        momentum: float = 0.05,
        agree_on_gradients: bool = False,
    ) -> None:
        check_options({"betas": betas}, {"betas": BETAS})  # also where no group of this optimizer takes them
        defaults = {
            "algorithm": "dion2",
            "lr": lr,
            "fraction": fraction,
            "ef_decay": ef_decay,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "epsilon": epsilon,
            "adjust_lr": adjust_lr,
            "newton_schulz_func": newton_schulz_func,
            "selection_scope": selection_scope,
            "select_dim": select_dim,
            "decay_on": decay_on,
            "momentum_dtype": _name(momentum_dtype),
            "num_heads": num_heads,
            "momentum": momentum,
        }
        algorithms = (self._rule(), AdamWAlgorithm(), LionAlgorithm(), ScionAlgorithm())
        super().__init__(
            params,
            defaults,
            algorithms=algorithms,
            process_group=replicas(distributed_mesh),
            agree_on_gradients=agree_on_gradients,
        )

    def _rule(self) -> Dion2Algorithm:
        return Dion2Algorithm()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ``momentum_dtype`` may be a dtype or its name."""
        if "momentum_dtype" in param_group:
            param_group = {**param_group, "momentum_dtype": _name(param_group["momentum_dtype"])}
        super().add_param_group(param_group)


def replicas(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The process group of a 1-D mesh, or the one given."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"distributed_mesh must be one-dimensional, got {mesh}; pass one of its dimensions")
        return mesh.get_group()
    return mesh


def lr_factor(adjust_lr: str | None, d_out: int, d_in: int) -> float:
    """Factor of the learning rate by the shape of the whole matrix: √(d_out/d_in), 0.2 √max(d_out, d_in), or 1."""
    if adjust_lr == "spectral_norm":
        return math.sqrt(d_out / d_in)
    return 0.2 * math.sqrt(max(d_out, d_in)) if adjust_lr == "rms_norm" else 1.0


def _refuse_cut_stack(layout: Layout, options: Mapping[str, Any]) -> None:
    along = len(layout.shape) + _select_dim(layout, options["select_dim"])
    if len(layout.shape) == 3 and options["selection_scope"] == "global" and along in layout.sharded_dims:
        raise ValueError(
            f"a stack of matrices in the layout ({layout.describe()}) would have another number of selected slices "
            "for every matrix on every rank; give its group selection_scope='local'"
        )


def _refuse_late_heads(work: Work) -> None:
    shape, heads = work.layout.shape, work.options["num_heads"]
    placed = shape[0] if len(shape) > work.params[0].ndim else None
    if heads != placed:
        raise ValueError(f"num_heads is fixed when a group is added: it was {placed!r}, got {heads!r}")


def _select_dim(layout: Layout, choice: str) -> int:
    if choice != "auto":
        return -2 if choice == "rows" else -1
    rows, columns = layout.shape[-2:]
    ndim = len(layout.shape)
    return selection_dim(
        rows, columns, rows_cut=ndim - 2 in layout.sharded_dims, columns_cut=ndim - 1 in layout.sharded_dims
    )


def _select(
    work: Work, momenta: Sequence[Tensor], dim: int
) -> Generator[None, None, tuple[list[Tensor], list[Tensor], list[list[int]]]]:
    """Scores of this rank's slices, indices of the selected ones, and how many every block has, for every matrix."""
    grid, fraction = work.exchange.grid, work.options["fraction"]
    along, other = len(work.layout.shape) + dim, len(work.layout.shape) - 3 - dim
    everywhere = work.options["selection_scope"] == "global" and grid.cut(along)
    scores = [l1_scores(m, dim) for m in momenta]
    table: Tensor | None = None
    if everywhere or grid.cut(other):
        table = yield from work.exchange.add_up(scores, along)
        scores = list(table.index_select(-1, grid.index(along, table.device)))
    sizes = grid.sizes(along)
    if everywhere:
        assert table is not None
        chosen = top_k(table, selected_count(fraction, table.size(-1)))
        marked = torch.zeros_like(table, dtype=torch.bool).scatter_(-1, chosen, True)
        indices = [m[grid.index(along, m.device)].nonzero().flatten() for m in marked]
        return scores, indices, _counts(grid, along, marked)
    # k comes from the largest shard, so that every rank agrees on it (microsoft/dion).
    k = selected_count(fraction, max(sizes))
    return scores, [top_k(s, k) for s in scores], [[min(k, size) for size in sizes]] * len(scores)


def _counts(grid: Grid, along: int, marked: Tensor) -> list[list[int]]:
    """How many marked slices every block along a dimension has; ``marked`` is ``[N, n]``."""
    block = torch.empty(marked.size(-1), dtype=torch.int64, device=marked.device)
    for layout, number in zip(grid.layouts, grid.numbers(along), strict=True):
        for start, stop in layout.runs(along):
            block[start:stop] = number
    counts = torch.zeros(marked.size(0), grid.blocks_along(along), dtype=torch.int64, device=marked.device)
    counts.index_add_(1, block, marked.long())
    found: list[list[int]] = counts.tolist()
    return found


def _name(dtype: torch.dtype | str | None) -> str | None:
    # Options are plain values, so that checkpoints and run.json can hold them.
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
