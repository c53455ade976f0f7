"""Selections as they come back from the reducer: by shape, and summed over a run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

COLUMNS = ("selected", "steps", "score", "score_all", "selected_late", "steps_late", "score_all_late")
"""Of ``slices``: times selected and steps of the run, mean score at the flushes that found the slice selected, and at
all flushes; then the same of the later part of the run, 50 to 65 % of it or, with few flushes, more; left out where no
flush lies in the first half."""

_APART = math.sqrt(2)
"""Ratio of the steps of two marks. The latest in the first half is then past .35 of the run."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """Sums up to a flush.

    Args:
        steps: Counted up to it.
        flushes: That found anything selected.
        sums: Times selected and sum of the scores ``[matrices, n, 2]``.
    """

    steps: int
    flushes: int
    sums: Array


class Tally:
    """What happened to every slice over a run, as far as flushes told, and over its later part.

    Growth of a row drifts, so its later part says more of what comes. How long a run will be is not known before its
    end: sums are marked at steps that grow by √2, and of the marks in the first half only the latest is kept, so that
    there are three at most.

    Args:
        plan: What is measured.
    """

    def __init__(self, plan: Sequence[Planned]) -> None:
        self._names = [p.spec.info.name for p in plan]
        self._known: dict[str, Array] = {}
        self._steps: dict[str, int] = {}
        self._flushes: dict[str, int] = {}
        self._marks: dict[str, list[_Mark]] = {}

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
                    self._marks[name] = []
                self._known[name] = known + table[g]
                self._steps[name] += int(selected.window[g])
                self._flushes[name] += 1
                self._mark(name)

    def _mark(self, name: str) -> None:
        steps, marks = self._steps[name], self._marks.setdefault(name, [])
        if not marks or steps >= _APART * marks[-1].steps:
            sums = self._known[name][..., [0, 3]]
            marks.append(_Mark(steps=steps, flushes=self._flushes[name], sums=sums))
        # A run only gets longer: of the marks in its first half the latest stands before the later part.
        del marks[: max(0, sum(2 * m.steps <= steps for m in marks) - 1)]

    def slices(self) -> tuple[Slice, ...]:
        """Every slice of the run."""
        found: list[Slice] = []
        for name, table in self._known.items():
            steps, flushes = float(self._steps[name]), self._flushes[name]
            late = self._late(name)
            counted = None if late is None else late.sums.tolist()
            for matrix, rows in enumerate(table.tolist()):
                for index, (times, seen, score, everywhere) in enumerate(rows):
                    values = {"selected": times, "steps": steps, "score_all": everywhere / flushes}
                    if seen:
                        values["score"] = score / seen
                    if late is not None and counted is not None:
                        chosen, total = counted[matrix][index]
                        told = {"selected_late": chosen, "score_all_late": total / late.flushes}
                        values |= {**told, "steps_late": float(late.steps)}
                    found.append(Slice(param=name, matrix=matrix, index=index, values=values))
        return tuple(found)

    def _late(self, name: str) -> _Mark | None:
        """What was summed since the latest mark in the first half; None where there is none."""
        steps, flushes = self._steps[name], self._flushes[name]
        first = [m for m in self._marks.get(name, ()) if 2 * m.steps <= steps]
        if not first:
            return None
        sums = self._known[name][..., [0, 3]] - first[-1].sums
        return _Mark(steps=steps - first[-1].steps, flushes=flushes - first[-1].flushes, sums=sums)

    def state(self) -> dict[str, Any]:
        """To go on from."""
        known = {name: torch.from_numpy(table.copy()) for name, table in self._known.items()}
        marks = {
            name: {
                "steps": [m.steps for m in found],
                "flushes": [m.flushes for m in found],
                "sums": torch.from_numpy(np.stack([m.sums for m in found])),
            }
            for name, found in self._marks.items()
            if found
        }
        return {"known": known, "steps": dict(self._steps), "flushes": dict(self._flushes), "marks": marks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another tally had; one that knew no marks has none before where it goes on."""
        self._known = {name: table.numpy().copy() for name, table in state["known"].items()}
        self._steps, self._flushes = dict(state["steps"]), dict(state["flushes"])
        self._marks = {
            name: [
                _Mark(steps=steps, flushes=flushes, sums=sums)
                for steps, flushes, sums in zip(
                    found["steps"], found["flushes"], found["sums"].numpy().copy(), strict=True
                )
            ]
            for name, found in state.get("marks", {}).items()
        }


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
