"""Norms on demand, by the interface of rakkit/disco's optimizers, for training loops that were written against it.

    norms = ArmedNorms(model, optimizer)          # any optimizer
    norms.calculate_norm_at_next_step()
    optimizer.step()
    norms.get_norms_at_current_step()             # {"track_param_rms_to_inf/output": 3.2, ...} on rank 0

What differs from there: values are floats and not tensors; an update is that of the whole step for experts too; stacked
experts have one key, of the largest among them; no matrix is gathered and none is rounded to bfloat16.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from scion_telemetry.rows import Batch, RunInfo
from scion_telemetry.tracker import Tracker

NORMS: Mapping[str, str] = {
    "rms_to_rms": "rms_to_rms",
    "l1_to_rms": "l1_to_rms",
    "rms_to_inf": "rms_to_inf",
    "rms_to_l1": "rms_to_inf",  # what the logs of the norm-transfer study call it
    "supremum": "max_abs",
    "frobenius_norm": "frobenius",
    "average_entry_size": "rms",
    "stable_rank": "stable_rank",
}
"""Names that a loop may ask for, and so the names in its keys; to the metric that each is."""

DEFAULT = ("rms_to_rms", "l1_to_rms", "rms_to_inf", "supremum")
"""What is measured where no names are given."""

_OF = {"track_update": "update", "track_param": "weight"}
_SPECTRA = ("condition_number", "effective_rank")


class ArmedNorms:
    """Norms of the updates and the weights of those steps that were asked for; any other step costs nothing.

    Keys are ``track_update_{norm}/{name}`` and ``track_param_{norm}/{name}``; parameters of one number have one alone,
    ``scalar_param_supremum/{name}``. The update holds the learning rate and no decoupled weight decay; the weight is
    that after the step. Embeddings count as their transpose, vectors as diagonal matrices. σ₁ in ``rms_to_rms`` is
    within 1 % from below, every other norm within 1e-7, under any sharding.

    On several ranks each one constructs it and arms the same steps. Parameters without a gradient have no update, and
    single numbers and vectors no ``stable_rank``: such keys are left out.

    Args:
        model: The model, sharded or wrapped as it will train.
        optimizer: Its optimizer, or a list of those that step its parameters.
        norms: Names out of ``NORMS``; None: ``DEFAULT``. These are measured at every armed step.
        process_group: Ranks that together hold the model; None: all.

    Raises:
        ValueError: For a name that is not offered; ``condition_number`` and ``effective_rank`` are none.
        TypeError: Where the names are no list.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        norms: Sequence[str] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._norms = _names(norms) or DEFAULT
        self._shown = self._norms
        self._when = _Armed()
        self._latest = _Latest()
        self._closed = False
        columns = {f"{quantity}_{NORMS[n]}": None for quantity in _OF.values() for n in self._norms}
        self._tracker = Tracker(
            model,
            optimizer,
            schedule=self._when,
            metrics=[*columns, "weight_max_abs"],
            sinks=[self._latest],
            process_group=process_group,
        )

    def calculate_norm_at_next_step(self, norms_to_log: Sequence[str] | None = None) -> None:
        """Measure at the next step, and forget the norms of the one before. Every rank calls it.

        A step that raises, or that a gradient scaler skips, is not yet the next one.

        Args:
            norms_to_log: Those of the norms to return, from now on; None: as before.

        Raises:
            ValueError: For a name that was not among ``norms``.
            TypeError: Where the names are no list.
            RuntimeError: After ``close``.
        """
        if self._closed:
            raise RuntimeError("the norms are closed; arm them inside the with block")
        shown = _names(norms_to_log) or self._shown
        if missing := [name for name in shown if name not in self._norms]:
            raise ValueError(
                f"{missing[0]!r} is not measured here, only {', '.join(self._norms)}; name it at construction: "
                f"ArmedNorms(..., norms={[*self._norms, missing[0]]!r})"
            )
        self._shown = shown
        self._when.step = self._tracker.step + 1

    def get_norms_at_current_step(self) -> dict[str, float]:
        """The norms of the step that was armed last, on rank 0 of the group; empty on others, and before that step.

        They are kept until another step is armed. It waits for the writer thread and for no other rank.
        """
        self._tracker.flush()
        batch = self._latest.batch
        return {} if batch is None or batch.step != self._when.step else dict(self._pairs(batch))

    def _pairs(self, batch: Batch) -> Iterator[tuple[str, float]]:
        for row in batch.layers:
            if row.param in self._latest.single:
                yield f"scalar_param_supremum/{row.param}", row.values["weight_max_abs"]
                continue
            for prefix, quantity in _OF.items():
                for name in self._shown:
                    if (value := row.values.get(f"{quantity}_{NORMS[name]}")) is not None:
                        yield f"{prefix}_{name}/{row.param}", value

    def close(self) -> None:
        """Take the hooks off the optimizer. Every rank calls it; twice is harmless."""
        self._closed = True
        self._tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._tracker.__exit__(kind, error, trace)  # which waits for no rank after an exception


class _Armed:
    """The schedule: one step, by its number, so that a step that is begun twice is armed twice."""

    step: int | None = None

    def __call__(self, step: int) -> bool:
        return step == self.step

    def __str__(self) -> str:
        return "when armed"


class _Latest:
    """The sink: keeps one batch."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.single: frozenset[str] = frozenset()

    def open(self, run: RunInfo) -> None:
        self.single = frozenset(p.name for p in run.params if prod(p.shape) == 1)

    def extend(self, run: RunInfo) -> None:
        self.open(run)

    def write(self, batch: Batch) -> None:
        if batch.layers:
            self.batch = batch

    def close(self) -> None:
        pass


def _names(names: Iterable[str] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise TypeError(f"norms must be a list of names out of {', '.join(NORMS)}, got {names!r}")
    for name in names:
        if name in _SPECTRA:
            raise ValueError(
                f"{name!r} is not offered: it needs every singular value, that is a full SVD of every matrix, which "
                f"is not to be had from pieces; leave it out and take from {', '.join(NORMS)}"
            )
        if name not in NORMS:
            raise ValueError(f"unknown norm {name!r}; known are {', '.join(NORMS)}")
    return tuple(dict.fromkeys(names))
