"""The sheet of one flush on one rank, and how numbers of many parameters get to their places in it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scion_telemetry.describe import Setting
from scion_telemetry.metrics import norms
from scion_telemetry.metrics.catalogue import SIGMA
from scion_telemetry.metrics.choice import GRADIENT, SELECTION, Choice
from scion_telemetry.metrics.declare import Merge, Partial
from scion_telemetry.metrics.pieces import MatrixShape
from scion_telemetry.optim.events import Selection
from scion_telemetry.places import Mine
from scion_telemetry.plan import Planned
from scion_telemetry.reduce import Buffers, Kind, Schema

logger = logging.getLogger(__name__)

SLICES = ("selection", "slices")
GRADIENT_SCORES = ("selection", "gradient")
_SELECTION = (
    Partial(name="slices", size=lambda s: s.batch * s.rows),
    Partial(name="kept"),
    Partial(name="window", merge=Merge.MAX),
    Partial(name="fraction", merge=Merge.MAX),
    Partial(name="ef_decay", merge=Merge.MAX),
)
_GRADIENT = Partial(name="gradient", size=lambda s: s.batch * s.rows)
_NORMS = frozenset((*norms.WHOLE, *norms.VECTORS))
_OF_MATRICES = frozenset((*SIGMA, "coherence", "polar", "gram_rank", "gram_lower", "gram_upper"))
_INDEX = {"row_squares": "row_index", "column_squares": "column_index"}
_MOST = 1000
"""Cached places: gradients that come and go make an entry for every set of parameters."""

Settings = Mapping[Tensor, Setting]
Index = Mapping[int, Tensor | None]


def selection_shape(shape: MatrixShape, dim: int, heads: int = 1) -> MatrixShape:
    """The scores of a selection as a shape: for every matrix or head m (``dim=-2``) or n (``dim=-1``) scores."""
    rows = shape.rows // heads if dim == -2 else shape.columns
    return MatrixShape(batch=shape.batch * heads, rows=rows, columns=1)


def selected_shapes(plan: Sequence[Planned]) -> list[MatrixShape | None]:
    """Shapes of all selections; None where nothing is selected from."""
    return [
        None if p.spec.select_dim is None else selection_shape(p.shape, p.spec.select_dim, p.spec.heads) for p in plan
    ]


def make_schema(plan: Sequence[Planned], choice: Choice) -> Schema:
    """The buffers' layout: by quantity and partial result, then by parameter; selections last."""

    def kinds() -> Iterator[tuple[str, Partial, list[MatrixShape | None]]]:
        for quantity, partials in choice.partials.items():
            for partial in partials:
                matrices = partial.name in _OF_MATRICES
                yield quantity, partial, [None if matrices and p.shape.vector else p.shape for p in plan]
        if SELECTION in choice.extras and any(selections := selected_shapes(plan)):
            for partial in (*_SELECTION, *((_GRADIENT,) if GRADIENT in choice.extras else ())):
                yield "selection", partial, selections

    return Schema.of(kinds())


@dataclass(slots=True, kw_only=True)
class Flush:
    """What one flush has measured so far on this rank.

    Args:
        step: Its step.
        window: Steps since the flush before.
        choice: What is measured.
        buffers: Where to.
        settings: What the optimizers' groups say of the step.
        moved: Something other than steps has changed this rank's weights since σ₁ of weights was measured.
        pieces: ``[B, R, C]`` of matrices that no rank has whole, by quantity and number.
        snapshots: Weights before the step, of updates that are not shown.
        chosen: What was selected from parameters that this rank measures.
    """

    step: int
    window: int = 1
    choice: Choice
    buffers: Buffers
    settings: Settings
    moved: bool = False
    pieces: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    snapshots: dict[Tensor, Tensor] = field(default_factory=dict)
    chosen: dict[Tensor, Selection] = field(default_factory=dict)


class Sheet:
    """Writes numbers of several parameters into the buffers of a flush.

    Args:
        mine: What this rank measures, by number.
        device: Of the parameters.
    """

    def __init__(self, mine: Mapping[int, Mine], device: torch.device) -> None:
        self._mine = mine
        self._device = device
        self._places: dict[tuple[object, ...], Tensor] = {}
        self._warned: set[str] = set()

    def norms(
        self,
        flush: Flush,
        quantity: str,
        mine: Sequence[Mine],
        pieces: Sequence[Tensor],
        *,
        scale: float = 1.0,
        index: Mapping[str, Index] | None = None,
        everywhere: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Norms and counts of pieces ``[B, R, C]``, the user's own metrics, and what the settings say.

        Args:
            flush: Where to.
            quantity: What they are pieces of.
            mine: Whose.
            pieces: One of each.
            scale: Factor on the entries; a negative one matters to the user's own metrics alone.
            index: Where rows or columns go, by partial result, if not to those of the whole piece.
            everywhere: The whole piece of one of them, where pieces are the selected part.
        """
        numbers, index = [m.number for m in mine], index or {}
        wanted = flush.choice.names(quantity)
        for name, values in norms.measure(pieces, wanted & _NORMS, abs(scale)).items():
            self.put(flush, (quantity, name), numbers, values, index.get(name))
        if "elements" in wanted:
            counts = torch.tensor([float(x.numel()) for x in pieces], dtype=torch.float64, device=self._device)
            self.put(flush, (quantity, "elements"), numbers, counts)
        self.settings(flush, quantity, mine, ("lr", "decay", "radius"))
        self._custom(flush, quantity, mine, everywhere or pieces.__getitem__, scale)

    def put(self, flush: Flush, kind: Kind, numbers: Sequence[int], values: Tensor, index: Index | None = None) -> None:
        """Merge numbers of several parameters, one after another; nothing where the flush does not want them.

        Args:
            flush: Where to.
            kind: Quantity and partial result.
            numbers: The parameters.
            values: Their numbers.
            index: Where those of a parameter go among its own; None: where the rows or columns of its piece lie.
        """
        if kind not in flush.buffers:
            return
        schema = flush.buffers.schema
        if index is not None and kind not in (SLICES, GRADIENT_SCORES):
            positions = self._positions(schema, kind, numbers, index)
        else:  # the same at every flush
            key = (schema, kind, *numbers)
            if key not in self._places:
                if len(self._places) > _MOST:
                    self._places.clear()
                self._places[key] = self._positions(schema, kind, numbers, index)
            positions = self._places[key]
        flush.buffers.put(kind, positions, values.reshape(-1).double())

    def _positions(self, schema: Schema, kind: Kind, numbers: Sequence[int], index: Index | None) -> Tensor:
        starts = [schema.span(kind, n) for n in numbers]
        if kind not in (SLICES, GRADIENT_SCORES) and kind[1] not in _INDEX:
            return torch.tensor([start for start, _ in starts], device=self._device)
        places = []
        for n, (start, end) in zip(numbers, starts, strict=True):
            own = index[n] if index is not None else getattr(self._mine[n], _INDEX[kind[1]])
            places.append(torch.arange(start, end, device=self._device) if own is None else own + start)
        return torch.cat(places)

    def settings(self, flush: Flush, quantity: str, mine: Sequence[Mine], names: Sequence[str]) -> None:
        """What the settings of parameters say, where it is wanted."""
        for name in names:
            if (quantity, name) in flush.buffers:
                values = [getattr(flush.settings[m.param], name) for m in mine]
                known = [-torch.inf if v is None else v for v in values]
                tensor = torch.tensor(known, dtype=torch.float64, device=self._device)
                self.put(flush, (quantity, name), [m.number for m in mine], tensor)

    def _custom(
        self, flush: Flush, quantity: str, mine: Sequence[Mine], piece: Callable[[int], Tensor], scale: float
    ) -> None:
        """The user's own metrics: one that fails leaves its cell empty, and says so once."""
        for partial in flush.choice.partials.get(quantity, ()):
            if partial.measure is None:
                continue
            for i, m in enumerate(mine):
                try:
                    x = piece(i)
                    # Not in the few digits of a half-precision direction: the weight gets its update with more.
                    found = partial.measure(x if scale == 1 else _wide(x) * scale)
                    value = torch.as_tensor(found, dtype=torch.float64, device=self._device)
                    if value.numel() != 1:
                        raise ValueError(f"measure must return one number, got a tensor of shape {tuple(value.shape)}")
                    value = value.reshape(1)
                except Exception as error:  # of whatever kind: a statistic must not stop training
                    self._warn(partial.name, quantity, m, error)
                    one = torch.ones(1, dtype=torch.float64, device=self._device)
                    self.put(flush, (quantity, f"{partial.name}.failed"), [m.number], one)
                else:
                    self.put(flush, (quantity, partial.name), [m.number], value)
                    self.put(flush, (quantity, f"{partial.name}.nan"), [m.number], value.isnan())

    def _warn(self, name: str, quantity: str, mine: Mine, error: Exception) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "metric %r failed for the %s of %r and is left out there: %s: %s",
                name.removeprefix("custom."),
                quantity,
                mine.planned.spec.info.name,
                type(error).__name__,
                error,
            )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
