"""Where the piece of a parameter that this rank measures lies, worked out once."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from scion_telemetry.metrics.pieces import MatrixShape, Place
from scion_telemetry.optim.layout import Layout, split_rows
from scion_telemetry.plan import Planned


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """What is selected from a piece.

    Args:
        shape: The piece as it is selected from: ``[..., m, n]``, heads apart.
        dim: -2 for rows, -1 for columns.
        positions: Places of its slices among those of the whole parameter; None: they are all of them, in order.
    """

    shape: tuple[int, ...]
    dim: int
    positions: Tensor | None

    @property
    def count(self) -> int:
        """Slices here, of all matrices."""
        return prod(self.shape) // max(1, self.shape[-3 - self.dim])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mine:
    """A parameter of which this rank measures a piece.

    Args:
        number: Its number in the plan.
        param: The parameter.
        planned: What all ranks agreed.
        place: Where the piece lies.
        row_index: Positions of its rows among those of all matrices, ``[B·R]``.
        column_index: Of its columns.
        held: Matrices of a stack that the piece holds, with their positions in it.
        slices: What is selected from it here; None where nothing is.
        tells: The piece tells of its selection: of pieces of the same slices the first one does.
    """

    number: int
    param: Tensor
    planned: Planned
    place: Place
    row_index: Tensor
    column_index: Tensor
    held: Mapping[int, int]
    slices: Slices | None
    tells: bool

    @classmethod
    def of(cls, number: int, param: Tensor, planned: Planned) -> "Mine":
        """Read the place from the parameter."""
        layout, shape, device = Layout.of(param), planned.shape, param.device
        runs = layout.runs(0) if shape.stacked else ((0, 1),)
        place = Place.of(layout, shape, device=device)
        slices, tells = _slices(layout, place, planned, device)
        return cls(
            number=number,
            param=param,
            planned=planned,
            place=place,
            row_index=_index(place, -2, device),
            column_index=_index(place, -1, device),
            held={b: i for i, b in enumerate(b for start, stop in runs for b in range(start, stop))},
            slices=slices,
            tells=tells,
        )


def _index(place: Place, dim: int, device: torch.device) -> Tensor:
    index = place.vector_index(dim)
    if index is not None:
        return index
    return torch.arange(place.shape.batch * (place.shape.rows if dim == -2 else place.shape.columns), device=device)


def _slices(layout: Layout, place: Place, planned: Planned, device: torch.device) -> tuple[Slices | None, bool]:
    dim, heads = planned.spec.select_dim, planned.spec.heads
    if dim is None:
        return None, False
    seen = split_rows(layout, heads) if heads > 1 else layout
    among = Place.of(seen, MatrixShape.of(seen.shape, "hidden"), device=device) if heads > 1 else place
    other = len(seen.shape) - 3 - dim
    along = seen.runs(other)
    tells = bool(along) and along[0][0] == 0
    return Slices(shape=seen.local_shape, dim=dim, positions=among.vector_index(dim)), tells
