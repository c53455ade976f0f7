"""Selections as they come back from the reducer: by shape, and summed over a run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from scion_telemetry.metrics.declare import Array
from scion_telemetry.metrics.selection import Selected
from scion_telemetry.plan import Planned
from scion_telemetry.reduce import HostBuffers
from scion_telemetry.rows import Slice
from scion_telemetry.selected import shift, unpack
from scion_telemetry.sheet import GRADIENT_SCORES, SLICES, selected_shapes

COLUMNS = ("selected", "steps", "score", "score_all")
"""Of ``slices``: times selected and steps of the run, mean score at the flushes that found the slice selected, and at
all flushes."""


class Selections:
    """Reads selections out of merged buffers, those of one shape together.

    Args:
        plan: What was measured.
    """

    def __init__(self, plan: Sequence[Planned]) -> None:
        self._alike: dict[tuple[Any, ...], list[int]] = {}
        self._plan = plan
        for n, shape in enumerate(selected_shapes(plan)):
            if shape is not None and shape.batch * shape.rows:
                self._alike.setdefault((shape.batch, shape.rows, _length(plan[n]), plan[n].shards), []).append(n)

    def read(self, host: HostBuffers) -> Iterator[tuple[list[int], Selected]]:
        """Numbers of parameters of one shape, and their selections."""
        for (batch, size, length, shards), numbers in self._alike.items():
            packed = _stack(host, SLICES, numbers, (batch, size))
            if packed is None:
                continue
            slices = unpack(packed)
            windows = np.nan_to_num(_one(host, ("selection", "window"), numbers), nan=1.0).astype(int)
            shifts = np.array([shift(int(w)) for w in windows])[:, None, None]
            yield (
                numbers,
                Selected(
                    scores=slices.scores,
                    selected=slices.selected,
                    before=slices.before,
                    ages=slices.ages,
                    counts=np.minimum(slices.counts << shifts, windows[:, None, None]),
                    window=windows,
                    length=length,
                    fraction=_one(host, ("selection", "fraction"), numbers),
                    ef_decay=_one(host, ("selection", "ef_decay"), numbers),
                    energy=_one(host, ("momentum", "squares"), numbers) if host.has(("momentum", "squares")) else None,
                    kept=_one(host, ("selection", "kept"), numbers),
                    travels=np.array([float(self._plan[n].spec.shared) for n in numbers]),
                    gradient=_stack(host, GRADIENT_SCORES, numbers, (batch, size)),
                    shards=tuple(_indices(runs) for runs in shards),
                ),
            )


class Tally:
    """What happened to every slice over a run, as far as flushes told.

    Args:
        plan: What is measured.
    """

    def __init__(self, plan: Sequence[Planned]) -> None:
        self._names = [p.spec.info.name for p in plan]
        self._known: dict[str, Array] = {}
        self._steps: dict[str, int] = {}
        self._flushes: dict[str, int] = {}

    def add(self, numbers: Sequence[int], selected: Selected) -> None:
        """Add a flush: times selected; flushes that found it selected, and its scores at these and at all."""
        here = selected.selected
        table = np.stack([selected.counts, here, np.where(here, selected.scores, 0.0), selected.scores], axis=-1)
        for g, n in enumerate(numbers):
            if here[g].any():
                name = self._names[n]
                known = self._known.get(name)
                if known is None or known.shape != table[g].shape:  # resumed with other rows to select from
                    known, self._steps[name], self._flushes[name] = np.zeros_like(table[g]), 0, 0
                self._known[name] = known + table[g]
                self._steps[name] += int(selected.window[g])
                self._flushes[name] += 1

    def slices(self) -> tuple[Slice, ...]:
        """Every slice of the run."""
        found: list[Slice] = []
        for name, table in self._known.items():
            steps, flushes = float(self._steps[name]), self._flushes[name]
            for matrix, rows in enumerate(table.tolist()):
                for index, (times, seen, score, everywhere) in enumerate(rows):
                    values = {"selected": times, "steps": steps, "score_all": everywhere / flushes}
                    if seen:
                        values["score"] = score / seen
                    found.append(Slice(param=name, matrix=matrix, index=index, values=values))
        return tuple(found)

    def state(self) -> dict[str, Any]:
        """To go on from."""
        known = {name: torch.from_numpy(table.copy()) for name, table in self._known.items()}
        return {"known": known, "steps": dict(self._steps), "flushes": dict(self._flushes)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another tally had."""
        self._known = {name: table.numpy().copy() for name, table in state["known"].items()}
        self._steps, self._flushes = dict(state["steps"]), dict(state["flushes"])


def _length(planned: Planned) -> int:
    """Entries of a slice."""
    rows = planned.shape.rows // planned.spec.heads
    return planned.shape.columns if planned.spec.select_dim == -2 else rows


def _stack(host: HostBuffers, kind: tuple[str, str], numbers: Sequence[int], shape: tuple[int, int]) -> Array | None:
    block = host.block(kind)
    if block is None:
        return None
    values, offsets = block
    return np.stack([values[offsets[n] : offsets[n + 1]].reshape(shape) for n in numbers])


def _one(host: HostBuffers, kind: tuple[str, str], numbers: Sequence[int]) -> Array:
    """One number of each parameter; NaN where it was not measured."""
    block = host.block(kind)
    if block is None:
        return np.full(len(numbers), np.nan)
    values, offsets = block
    found = np.array([values[offsets[n]] for n in numbers])
    return np.where(np.isneginf(found), np.nan, found)


def _indices(runs: Sequence[tuple[int, int]]) -> Array:
    return np.concatenate([np.arange(start, stop) for start, stop in runs])
