"""What a metric is: partial results that merge over ranks, and a finishing formula over all parameters at once.

A partial result is a vector of numbers of a local piece, added (SUM) or compared (MAX) over ranks at its place in the
whole. Merged, it lies in one array for all parameters: a formula is a few numpy calls, whatever the number of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from scion_telemetry.metrics.pieces import MatrixShape

Array: TypeAlias = npt.NDArray[Any]

QUANTITIES = ("weight", "grad", "momentum", "update")


class Merge(StrEnum):
    """How partial results of several ranks become one."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """A kind of partial result.

    Args:
        name: Its name.
        merge: How ranks' results merge.
        size: Numbers it takes for a parameter of a shape; for a selection, of a vector of n scores.
        measure: From a local piece ``[B, R, C]`` to one number, for metrics of the user's own; None for built-in ones.
    """

    name: str
    merge: Merge = Merge.SUM
    size: Callable[[MatrixShape], int] = lambda shape: 1
    measure: Callable[[Tensor], Tensor | float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The shapes of P parameters as arrays ``[P]``; see ``MatrixShape``. ``measurers``: ranks that measure a piece."""

    numel: Array
    batch: Array
    rows: Array
    columns: Array
    d_out: Array
    d_in: Array
    vector: Array
    transposed: Array
    measurers: Array

    @classmethod
    def of(cls, shapes: Sequence[MatrixShape], measurers: Sequence[int] | None = None) -> "Shapes":
        """Collect them."""
        fields = ("numel", "batch", "rows", "columns", "d_out", "d_in", "vector", "transposed")
        found = {name: np.array([getattr(s, name) for s in shapes]) for name in fields}
        return cls(**found, measurers=np.array([1] * len(shapes) if measurers is None else measurers))


Block: TypeAlias = tuple[Array, Array]
"""Numbers of all parameters one after another, and P + 1 offsets."""


class Measured:
    """Merged partial results of all parameters, as finishing formulas read them: float64 arrays ``[P]`` on the host.

    Args:
        shapes: The parameters.
        block: ``block(quantity, partial)``: merged numbers and offsets; None where that was not measured.
        norms: Name of the metric that is the natural norm of each parameter, None where there is none.
    """

    def __init__(
        self,
        shapes: Shapes,
        block: Callable[[str, str], Block | None],
        norms: Sequence[str | None] = (),
    ) -> None:
        self.shapes = shapes
        self.norms = np.array([n or "" for n in norms])
        self._block = block
        self._known: dict[tuple[str, ...], Array] = {}
        self.errors: dict[tuple[str, str, int], Exception] = {}

    def cached(self, key: tuple[str, ...], make: Callable[[], Array]) -> Array:
        """What several columns share is computed once."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def parts(self, quantity: str, partial: str) -> list[Array]:
        """The numbers of every parameter, empty where there are none."""
        found = self._block(quantity, partial)
        if found is None:
            return [np.zeros(0)] * len(self.shapes.numel)
        values, offsets = found
        return [values[a:b] for a, b in pairwise(offsets)]

    def merged(self, quantity: str, partial: str, how: np.ufunc = np.add) -> Array:
        """The numbers of every parameter, added or compared; NaN where there are none."""
        key = (quantity, partial, how.__name__)
        return self.cached(key, lambda: _reduce(self._block(quantity, partial), len(self.shapes.numel), how))

    def pieces(self, quantity: str) -> Array:
        """Pieces that were measured; 0: nobody had the quantity."""
        return np.nan_to_num(self.merged(quantity, "pieces"))

    def frobenius(self, quantity: str) -> Array:
        """√Σ x²."""
        return self.cached((quantity, "frobenius"), lambda: np.sqrt(self.merged(quantity, "squares")))

    def longest(self, quantity: str, side: str) -> Array:
        """Largest L2 norm of the rows or columns of the map ``[d_out, d_in]``; of a vector, the largest entry."""
        other = {"row_squares": "column_squares", "column_squares": "row_squares"}[side]
        own, turned = (self.merged(quantity, s, np.maximum) for s in (side, other))
        rows = self.merged(quantity, "row_squares", np.maximum)
        shapes = self.shapes
        return np.sqrt(np.where(shapes.vector, rows, np.where(shapes.transposed, turned, own)))

    def sigma(self, quantity: str, partial: str = "sigma") -> Array:
        """σ₁ or its bound, the largest of stacked matrices; max |entry| of a vector, which is a diagonal.

        Every matrix is measured by ``sigma_ranks`` ranks; NaN where some matrix was measured by none.
        """

        def make() -> Array:
            values, ranks = self._block(quantity, partial), self._block(quantity, "sigma_ranks")
            count = len(self.shapes.numel)
            if values is None or ranks is None:
                found = np.full(count, np.nan)
            else:
                with np.errstate(divide="ignore", invalid="ignore"):
                    found = _reduce((values[0] / ranks[0], values[1]), count, np.maximum)
            if not self.shapes.vector.any():
                return found
            return np.where(self.shapes.vector, self.longest(quantity, "row_squares"), found)

        return self.cached((quantity, partial, "sigma"), make)

    def has_sigma(self, quantity: str) -> Array:
        """Where σ₁ is known: all matrices of the parameter were measured, or it is a vector."""
        ranks = self.merged(quantity, "sigma_ranks", np.minimum)
        return self.shapes.vector | (ranks > 0)


def _reduce(block: Block | None, count: int, how: np.ufunc) -> Array:
    found = np.full(count, np.nan)
    if block is not None:
        values, offsets = block
        there = offsets[1:] > offsets[:-1]
        if there.any():  # reduceat would show the next parameter's first number for an empty one
            found[there] = how.reduceat(values, offsets[:-1][there])
    return found


Finish: TypeAlias = Callable[[Measured, str], Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One column a quantity.

    Args:
        name: ``rms``; the column is ``weight_rms``.
        quantities: Those it exists for.
        needs: Partial results of its own quantity.
        also: Partial results of other quantities, as (quantity, partial).
        finish: From merged partial results and the quantity to a number for every parameter.
        present: Where there is such a number; None: wherever the quantities were measured.
        total: From merged partial results, the quantity and a mask of parameters to the number of them all together;
            None where that means nothing.
        unit: Unit, "1" for a ratio.
        formula: For people.
        source: Where the definition comes from.
        own: Partial results of the user's own metric, beside the built-in ones.
    """

    name: str
    quantities: tuple[str, ...] = QUANTITIES
    needs: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()
    finish: Finish
    present: Callable[[Measured, str], Array] | None = None
    total: Callable[[Measured, str, Array], float] | None = None
    unit: str
    formula: str
    source: str
    own: tuple[Partial, ...] = ()

    def where(self, measured: Measured, quantity: str) -> Array:
        """Where there is a number to show."""
        there = measured.pieces(quantity) > 0 if self.needs else np.ones(len(measured.shapes.numel), dtype=bool)
        for other, _ in self.also:
            there = there & (measured.pieces(other) > 0)
        return there if self.present is None else there & self.present(measured, quantity)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramMetric:
    """A histogram a quantity: ``values`` gives every parameter's values, of which bins are counted."""

    name: str
    quantities: tuple[str, ...] = QUANTITIES
    needs: tuple[str, ...]
    values: Callable[[Measured, str], list[Array]]
    unit: str
    formula: str
    source: str


def _check_custom(name: object, measure: object, finish: object, merge: object, quantities: Sequence[str]) -> None:
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the name of a metric must be letters, digits and underscores, got {name!r}")
    if merge not in list(Merge):
        raise ValueError(f"merge must be 'sum' or 'max', got {merge!r}")
    if isinstance(quantities, str) or not quantities or (unknown := set(quantities) - set(QUANTITIES)):
        found = quantities if isinstance(quantities, str) or not quantities else sorted(unknown)
        raise ValueError(f"quantities must be a list of {', '.join(QUANTITIES)}, got {found!r}")
    if not callable(measure) or not (finish is None or callable(finish)):
        raise TypeError(f"measure and finish of metric {name!r} must be functions, got {measure!r} and {finish!r}")


def custom(
    name: str,
    measure: Callable[[Tensor], Tensor | float],
    *,
    finish: Callable[[float, int], float] | None = None,
    merge: str = "sum",
    quantities: Sequence[str] = QUANTITIES,
    unit: str = "1",
    formula: str = "",
    source: str = "user",
) -> Metric:
    """A metric of your own: one number of a local piece, merged over pieces, and what becomes of it.

        cubes = custom("l3", lambda x: x.abs().pow(3).sum(), finish=lambda total, numel: total ** (1 / 3))
        Tracker(model, optimizer, metrics=["basic", cubes])

    Where ``measure`` or ``finish`` raises, the cell stays empty and one warning says why; training goes on.

    Args:
        name: Of the metric; columns are ``weight_l3``, ``grad_l3``, …
        measure: From a local piece ``[B, R, C]`` (its rank's part of B matrices; a vector is ``[1, n, 1]``) to one
            number, a tensor or a float. Pieces may be empty. It must not change the piece.
        finish: From the merged number and the number of entries of the whole parameter to the value; None: as it is.
        merge: ``sum`` adds the pieces' numbers, ``max`` takes the largest.
        quantities: Of weight, grad, momentum and update, those to measure.
        unit: For people.
        formula: For people.
        source: For people.

    Raises:
        ValueError: For a name that is no identifier, an unknown ``merge`` or quantity.
        TypeError: For functions that cannot be called.
    """
    _check_custom(name, measure, finish, merge, quantities)
    partial = Partial(name=f"custom.{name}", merge=Merge(merge), measure=measure)
    failed = Partial(name=f"custom.{name}.failed")
    broken = Partial(name=f"custom.{name}.nan")  # MAX may lose a NaN on its way

    def value(m: Measured, quantity: str) -> Array:
        merged = np.where(m.merged(quantity, broken.name) > 0, np.nan, m.merged(quantity, partial.name))
        if finish is None:
            return merged
        found = np.full(len(merged), np.nan)
        for n in np.flatnonzero(m.pieces(quantity) > 0):
            try:
                found[n] = finish(float(merged[n]), int(m.shapes.numel[n]))
            except Exception as error:  # of whatever kind: one cell stays empty, and the finisher says why
                m.errors[(name, quantity, int(n))] = error
        return found

    def present(m: Measured, quantity: str) -> Array:
        there: Array = np.asarray(m.merged(quantity, failed.name) == 0)
        there[[n for metric, q, n in m.errors if (metric, q) == (name, quantity)]] = False
        return there

    return Metric(
        name=name,
        quantities=tuple(q for q in QUANTITIES if q in quantities),
        needs=(partial.name, failed.name, broken.name),
        finish=value,
        present=present,
        unit=unit,
        formula=formula or f"{name} of the user",
        source=source,
        own=(partial, failed, broken),
    )
