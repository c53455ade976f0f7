"""What the study of the fraction records beside the tracker: every selection, also at untrained fractions."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scion_telemetry.optim import Dion2
from scion_telemetry.optim.events import StepEvent


class Recorder:
    """Keeps what the tracker sums up: which rows were selected at every step, and their scores at every so many.

    Only for this study, which has to look at parts of a run; the tracker itself keeps two numbers a row.

    Args:
        names: Of the parameters.
        every: Keep scores at every so many steps.
    """

    def __init__(self, names: dict[Tensor, str], every: int) -> None:
        self._names, self._every = names, every
        self._chosen: dict[str, list[Tensor]] = {}
        self._scores: dict[str, list[Tensor]] = {}

    def __call__(self, event: StepEvent) -> None:
        """Take note of one event of an optimizer."""
        for parameter, selection in zip(event.params, event.selections, strict=False):
            self.note(parameter, selection.scores, selection.indices)

    def note(self, parameter: Tensor, scores: Tensor, indices: Tensor) -> None:
        """Take note of one selection."""
        chosen = self._chosen.setdefault(self._names[parameter], [])
        chosen.append(torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, indices, True))
        if len(chosen) % self._every == 0:
            self._scores.setdefault(self._names[parameter], []).append(scores.clone())

    def save(self, path: Path) -> None:
        """Write ``selected/NAME`` (bits, ``[steps, rows]``) and ``score/NAME`` (``[steps // every, rows]``)."""
        arrays = {f"selected/{n}": np.packbits(torch.stack(v).numpy(), axis=-1) for n, v in self._chosen.items()}
        arrays |= {f"score/{n}": torch.stack(v).numpy() for n, v in self._scores.items()}
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


class Shadow:
    """What another fraction would select from the same gradients: error feedback without its effect on training.

    A run at another fraction takes another path, so that it tells of the law and of the path at once. A shadow tells
    of the law alone.

    Args:
        optimizer: That of the run.
        names: Of its parameters.
        fraction: That of the shadow.
        every: Keep scores at every so many steps.
    """

    def __init__(self, optimizer: Dion2, names: dict[Tensor, str], fraction: float, every: int) -> None:
        self.recorder = Recorder(names, every)
        self._fraction, self._keep = fraction, optimizer.defaults["ef_decay"]
        self._momenta = {p: torch.zeros_like(p) for p in names if optimizer.facts(p).select_dim is not None}

    @torch.no_grad()
    def step(self) -> None:
        """Accumulate, select, and decay what was selected, as Dion2 does."""
        for parameter, momentum in self._momenta.items():
            assert parameter.grad is not None
            momentum += parameter.grad
            scores = momentum.abs().sum(1)
            chosen = scores.topk(math.ceil(self._fraction * len(scores))).indices
            self.recorder.note(parameter, scores, chosen)
            momentum[chosen] *= self._keep
