"""What an optimizer shows while it steps.

    optimizer.step()  ->  StepEvent per group of same-shaped parameters  ->  observer(event)

An event refers to tensors that exist anyway; nothing is copied, and nothing is built at all when nobody observes.
The tensors are only valid during the call: an observer that needs a number later computes it now.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The selection of one parameter on this rank.

    Args:
        dim: -2 for rows, -1 for columns of ``[..., m, n]``.
        scores: L1 norm of every row or column that this rank holds, float32, before the selected ones decay.
        indices: Ascending indices into ``scores`` of the selected ones, int64.
    """

    dim: int
    scores: Tensor
    indices: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One step of N same-shaped parameters, shown just before the update is added to the weights.

    The update of parameter i (lr included, decoupled weight decay excluded) is ``scale * directions[i]``, on the
    selected rows or columns where there is a selection and on the whole local piece otherwise.

    Args:
        algorithm: ``scion`` or ``dion2``.
        params: The parameters.
        lr: Learning rate of this step.
        scale: Factor on the directions.
        directions: This rank's piece of each direction, or of its selected part.
        selections: One entry a parameter; empty where the algorithm does not select.
        owned: Whole directions that this rank has assembled, by index into ``params``.
    """

    algorithm: str
    params: tuple[Tensor, ...]
    lr: float
    scale: float
    directions: tuple[Tensor, ...]
    selections: tuple[Selection, ...] = ()
    owned: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamFacts:
    """What an optimizer will show of one parameter at every step.

    Args:
        algorithm: The rule that steps it.
        shows_update: Whether its update appears in events.
        select_dim: -2 or -1 where it is selected from, else None.
        owner_shows: Whether some rank assembles the whole direction.
        heads: Parts of the rows that are selected from each for itself.
        options: Names of the group's options that the rule reads.
    """

    algorithm: str
    shows_update: bool = False
    select_dim: int | None = None
    owner_shows: bool = False
    heads: int = 1
    options: tuple[str, ...] = ()


Observer = Callable[[StepEvent], None]


@runtime_checkable
class ObservableOptimizer(Protocol):
    """An optimizer that shows its steps."""

    def register_step_observer(self, observer: Observer) -> RemovableHandle:
        """Call ``observer`` with every event; the handle removes it."""

    def facts(self, param: Tensor) -> ParamFacts:
        """What events will show of ``param``."""


def register_step_observer(optimizer: ObservableOptimizer, observer: Observer) -> RemovableHandle:
    """Have ``observer`` called with every ``StepEvent`` of ``optimizer``; returns a handle with ``remove()``."""
    return optimizer.register_step_observer(observer)
