"""Notices that weights were changed by something other than the steps of their optimizers."""

from collections.abc import Iterable

from torch import Tensor

from scion_telemetry.optim.layout import local


class Watch:
    """Counts changes of weights in place, as autograd does, and looks where they lie.

    It costs a few microseconds a step. What bypasses autograd, ``weight.data.copy_(x)`` or numpy, is not noticed.

    Args:
        params: This rank's weights; none where nobody wants to know.
        moved: Whether they were changed before.
    """

    def __init__(self, params: Iterable[Tensor], *, moved: bool = False) -> None:
        self._params = [p for p in params if not p.is_inference()]  # others have no count
        self.moved = moved
        self._counted: list[Tensor] = []
        self._places: list[int] = []
        self._find()
        self._known = self._count()

    def look(self) -> None:
        """Before a step: have weights changed since the step before?"""
        self.moved |= self._count() != self._known

    def look_up(self) -> None:
        """Before a flush: do they lie where they lay?"""
        places = self._places
        self._find()
        self.moved |= places != self._places
        self._known = self._count()

    def rest(self) -> None:
        """After a step: what has changed until now is its work."""
        self._known = self._count()

    def _find(self) -> None:
        pieces = [local(p) for p in self._params]
        # What is written to a DTensor counts there, what is written to its piece, as optimizers do, counts here.
        self._counted = [*self._params, *(x for x, p in zip(pieces, self._params, strict=True) if x is not p)]
        self._places = [x.data_ptr() for x in pieces]

    def _count(self) -> int:
        return sum(x._version for x in self._counted)
