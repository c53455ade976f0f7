"""What an optimizer shows while it steps.

    optimizer.step()  ->  StepEvent per group of same-shaped parameters  ->  observer(event)

An event refers to tensors that exist anyway, and to a few numbers of what was orthonormalised; nothing is copied, and
nothing is built at all when nobody observes. The tensors are only valid during the call: an observer that needs a
number later computes it now.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

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
class Gram:
    """What Newton-Schulz knows of a matrix M: traces of powers of A = X Xᵀ, X = M/‖M‖_F, where tr A = 1.

    p = λ(A) are the squared singular values over their sum. The participation rank 1/Σp² is ``1 / trace2``,
    and σ₁(M)/‖M‖_F lies in [``sqrt(trace4 / trace3)``, ``trace4 ** (1/8)``]. Traces are NaN where M is zero.

    Every entry is a scalar, or ``[B]`` for a stack of matrices or heads: one for each that this rank has whole. They
    are float32 (float64 where the iteration computes so) and remain valid after the call.

    Args:
        frobenius: ‖M‖_F, of M as the function was given it.
        trace2: tr A², the sum of p².
        trace3: tr A³; None where A² is never formed by itself (``muon_ns5``).
        trace4: tr A⁴; None as for ``trace3``.
    """

    frobenius: Tensor
    trace2: Tensor
    trace3: Tensor | None
    trace4: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What a group's options say of its next step, in one language for all rules.

    Args:
        lr: Learning rate of the group.
        decay: λ, where the weight is multiplied by 1 - lr λ before the update is added; 0 without decay. Where only
            some entries decay (``cautious_wd``, ``decay_on="selected"``) it is the λ of those.
        norm: The metric in which one step has length ``lr * scale``: rms_to_rms, l1_to_rms, rms_to_inf, spectral, rms
            or max_abs. Those of operators are of the weight as the telemetry orients it: an embedding transposed. Exact
            but for what Newton-Schulz leaves of 1. None where no metric fits every parameter of the group.
        scale: That length over lr; None where ``norm`` is.
        radius: ``scale / decay``: a weight of smaller norm never leaves this ball, one pushed in a constant direction
            settles on its surface, a larger one shrinks to it. None where ``norm`` is, without decay, and where only
            some entries decay.
    """

    lr: float
    decay: float = 0.0
    norm: str | None = None
    scale: float | None = None
    radius: float | None = None


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
        grams: What orthonormalising them told of the momentum, or of its selected part, by index into ``params``; empty
            when no observer looks.
    """

    algorithm: str
    params: tuple[Tensor, ...]
    lr: float
    scale: float
    directions: tuple[Tensor, ...]
    selections: tuple[Selection, ...] = ()
    owned: Mapping[int, Tensor] = field(default_factory=dict)
    grams: Mapping[int, Gram] = field(default_factory=dict)


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
        shared: Whether several ranks step it together, and what is selected travels between them.
        shows_gram: Whether some rank shows a ``Gram`` of it at every step; of a stack, each rank those that it has.
    """

    algorithm: str
    shows_update: bool = False
    select_dim: int | None = None
    owner_shows: bool = False
    heads: int = 1
    options: tuple[str, ...] = ()
    shared: bool = False
    shows_gram: bool = False


Observer = Callable[[StepEvent], None]

Looks = Callable[[], bool]
"""Whether an observer looks at something in the step under way."""


def always() -> bool:
    """Yes."""
    return True


@runtime_checkable
class ObservableOptimizer(Protocol):
    """An optimizer that shows its steps."""

    def register_step_observer(self, observer: Observer, *, grams: Looks | None = None) -> RemovableHandle:
        """Call ``observer`` with every event; the handle removes it.

        Args:
            observer: Takes one event.
            grams: Asked within every step whether the observer looks at ``event.grams``, which are empty where none
                does; None: it always does.
        """

    def facts(self, param: Tensor) -> ParamFacts:
        """What events will show of ``param``."""

    def settings(self, group: Mapping[str, Any]) -> StepSettings:
        """What the options of a parameter group say of its next step."""


def register_step_observer(
    optimizer: ObservableOptimizer, observer: Observer, *, grams: Looks | None = None
) -> RemovableHandle:
    """Have ``observer`` called with every ``StepEvent`` of ``optimizer``; returns a handle with ``remove()``."""
    return optimizer.register_step_observer(observer, grams=grams)
