"""What is measured where: the union of all ranks' parameters, agreed once, in one order.

Every rank describes its parameters; the descriptions are exchanged; every rank then derives the same plan from the same
data. Of ranks that hold the same piece one measures it, in turn, so that replicas share the work and no element is
counted twice. That the pieces of every parameter add up to the whole is checked here.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from scion_telemetry.metrics.pieces import MatrixShape
from scion_telemetry.optim.layout import Runs, length
from scion_telemetry.rows import ParamInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """What one rank knows of one of its parameters; travels between ranks.

    Args:
        info: What ``params.csv`` says of it.
        runs: For each dimension the global indices of this rank's piece.
        select_dim: -2 or -1 where the optimizer selects from it.
        shows_update: The optimizer shows its update.
        owner_shows: Some rank assembles the whole direction of its update.
        heads: Parts of its rows that are selected from each for itself.
        norm: The metric in which its rule measures a step; None where no single one fits.
        shared: Several ranks step it together.
        shows_gram: Some rank shows what Newton-Schulz knows of its momentum.
        digest: Of the bits of this rank's piece.
    """

    info: ParamInfo
    runs: tuple[Runs, ...]
    select_dim: int | None = None
    shows_update: bool = False
    owner_shows: bool = False
    heads: int = 1
    norm: str | None = None
    shared: bool = False
    shows_gram: bool = False
    digest: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One parameter, as all ranks agreed.

    Args:
        spec: As the first rank that holds it describes it.
        shape: The parameter as matrices.
        measurers: Ranks that measure a piece.
        cut: Dimensions along which pieces are cut.
        matrices_cut: No rank holds a whole matrix of it.
        shards: Slices of every piece along the dimension that is selected from; one entry where it is not cut, none
            where nothing is selected, or from heads each for itself.
        holders: Ranks that hold a piece.
        replicas_differ: Ranks that should hold the same piece held different numbers when the tracker attached.
    """

    spec: ParamSpec
    shape: MatrixShape
    measurers: tuple[int, ...]
    cut: frozenset[int]
    matrices_cut: bool
    shards: tuple[Runs, ...] = ()
    holders: int
    replicas_differ: bool

    @property
    def layout(self) -> str:
        """For people: ``whole``, ``replicated x2``, or as DTensor has it."""
        own = self.spec.info.layout
        return f"replicated x{self.holders}" if own == "whole" and self.holders > 1 else own


def agree(describe: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Exchange a description between all ranks; returns them by rank.

    Raises:
        Exception: Of this rank, when it failed to describe.
        ValueError: On all other ranks then; nobody is left waiting.
    """
    if group is None:
        return [describe()]
    mine: tuple[T | None, str | None]
    failure: Exception | None = None
    try:
        mine = (describe(), None)
    except Exception as error:  # of whatever kind: the other ranks are about to wait for this one
        failure, mine = error, (None, f"{type(error).__name__}: {error}")
    everybody: list[Any] = [None] * group.size()
    dist.all_gather_object(everybody, mine, group=group)
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(everybody):
        if message is not None:
            raise ValueError(f"rank {rank} failed: {message}")
    return [description for description, _ in everybody]


def make_plan(by_rank: Sequence[Sequence[ParamSpec]]) -> tuple[Planned, ...]:
    """The plan, from every rank's specs: in the order of the first rank, then of the next one that has more.

    Raises:
        ValueError: When ranks disagree about a parameter, or its pieces do not make up the whole.
    """
    holders: dict[str, list[tuple[int, ParamSpec]]] = {}
    for rank, specs in enumerate(by_rank):
        for spec in specs:
            holders.setdefault(spec.info.name, []).append((rank, spec))
    return tuple(_plan(name, found, turn) for turn, (name, found) in enumerate(holders.items()))


def require_equal(what: str, by_rank: Sequence[object]) -> None:
    """Refuse (ValueError, on all ranks) settings that differ between ranks."""
    for rank, value in enumerate(by_rank):
        if value != by_rank[0]:
            raise ValueError(f"{what} differs between ranks: rank 0 has {by_rank[0]!r}, rank {rank} has {value!r}")


def warn_of_different_replicas(plan: Sequence[Planned]) -> None:
    """Warn of parameters that look replicated and are not: one rank's numbers would be shown for all."""
    if names := [p.spec.info.name for p in plan if p.replicas_differ]:
        logger.warning(
            "%d of %d parameters, the first is %r, have the same name and shape on several ranks but different values, "
            "and one rank's are measured: name them differently where ranks hold different parts (experts, pipeline "
            "stages), shard with DTensor for tensor parallelism, or attach the tracker after replicas were made equal",
            len(names),
            len(plan),
            names[0],
        )


def _plan(name: str, found: Sequence[tuple[int, ParamSpec]], turn: int) -> Planned:
    first_rank, first = found[0]
    for rank, spec in found:
        for what in ("shape", "dtype", "role", "algorithm"):
            one, other = getattr(first.info, what), getattr(spec.info, what)
            if one != other:
                raise ValueError(
                    f"{what} of parameter {name!r} is {one!r} on rank {first_rank} and {other!r} on rank {rank}"
                )
    pieces: dict[tuple[Runs, ...], list[int]] = {}
    digests: dict[tuple[Runs, ...], set[int]] = {}
    for rank, spec in found:
        if math.prod(map(length, spec.runs)):
            pieces.setdefault(spec.runs, []).append(rank)
            digests.setdefault(spec.runs, set()).add(spec.digest)
    total = math.prod(first.info.shape)
    counted = sum(math.prod(map(length, runs)) for runs in pieces)
    if counted != total:
        raise ValueError(
            f"the pieces of parameter {name!r} on ranks {[rank for rank, _ in found]} hold {counted} elements, its "
            f"shape {first.info.shape} has {total}; give the tracker a process group that spans all of its pieces"
        )
    shape = MatrixShape.of(first.info.shape, first.info.role)
    cut = frozenset(d for runs in pieces for d, r in enumerate(runs) if length(r) != first.info.shape[d])
    along: set[Runs] = set()
    if first.select_dim is not None and first.heads == 1:
        along = {runs[first.select_dim] for runs in pieces}
    return Planned(
        spec=first,
        shape=shape,
        measurers=tuple(sorted(ranks[turn % len(ranks)] for ranks in pieces.values())),
        holders=sum(map(len, pieces.values())) or len(found),
        replicas_differ=any(len(seen) > 1 for seen in digests.values()),
        cut=cut,
        shards=tuple(sorted(along)),
        matrices_cut=bool(cut & ({1, 2} if shape.stacked else set(range(len(first.info.shape))))),
    )
