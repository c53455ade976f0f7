"""A check of the tracker by itself: reduced numbers against matrices that were gathered in float64."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scion_telemetry.collect import FLAGS, Collector, Find
from scion_telemetry.describe import Setting, piece_like
from scion_telemetry.metrics.choice import Choice, choose
from scion_telemetry.metrics.declare import Array, Measured, Metric, Shapes
from scion_telemetry.metrics.pieces import MatrixShape, as_matrices
from scion_telemetry.optim.layout import Layout, index_tensor, local, on_mesh
from scion_telemetry.plan import Planned
from scion_telemetry.reduce import Buffers
from scion_telemetry.sheet import Flush

QUANTITIES = ("weight", "grad", "momentum")
NORM_TOLERANCE = 1e-7
SIGMA_TOLERANCE = {"weight": 0.01, "grad": 0.05, "momentum": 0.05}
"""On matrices of real runs all are within 1 %; a gradient or momentum may be pure noise, which is up to 5 % low."""

_ELEMENTS = Metric(
    name="elements",
    quantities=("weight",),
    needs=("elements",),
    finish=lambda m, q: m.merged(q, "elements"),
    unit="entries",
    formula="entries that were measured",
    source="definition",
)
_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "frobenius": lambda x: x.square().sum().sqrt(),
    "max_abs": lambda x: x.abs().amax(),
    "nonfinite": lambda x: (~x.isfinite()).sum(),
    "row_magnitude": lambda x: x.square().sum(-1).sqrt().amax(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What ``Tracker.verify`` found; the same on all ranks.

    Args:
        params: Parameters that were gathered.
        numbers: Norms, maxima and counts that were compared.
        largest_error: Largest relative error among them.
        worst: Column and parameter of it.
        sigmas: Spectral norms that were compared.
        largest_sigma_error: Largest relative error of σ₁, which is estimated.
        loose: Columns and parameters whose σ₁ is more than 1 % off (of gradients and momenta, 5 %).
        outside: Columns and parameters whose true σ₁ lies outside the interval that was told.
        miscounted: Parameters of which more or fewer elements were counted than they have.
    """

    params: tuple[str, ...]
    numbers: int
    largest_error: float
    worst: str
    sigmas: int
    largest_sigma_error: float
    loose: tuple[str, ...]
    outside: tuple[str, ...]
    miscounted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Norms within 1e-7, σ₁ near the truth and its interval around it, every element counted once."""
        return self.largest_error <= NORM_TOLERANCE and not (self.loose or self.outside or self.miscounted)

    def __str__(self) -> str:
        lines = [
            f"{self.numbers} norms and counts of weights, gradients and momenta of {len(self.params)} parameters: "
            f"largest relative error {self.largest_error:.1e} ({self.worst or 'none'})",
            f"{self.sigmas} spectral norms: largest relative error {self.largest_sigma_error:.1e}, {len(self.loose)} "
            f"further off than promised, {len(self.outside)} outside their interval",
            "every element counted once"
            if not self.miscounted
            else f"elements miscounted in {', '.join(self.miscounted)}",
        ]
        return "\n".join(lines)


def verify(
    collector: Collector,
    plan: Sequence[Planned],
    momentum: Find,
    group: dist.ProcessGroup | None,
    *,
    params: int,
    step: int,
    moved: bool,
) -> Verification:
    """Measure what is there now, as a flush would, and compare; all ranks take part.

    Args:
        collector: Measures.
        plan: What it measures.
        momentum: The momentum of a parameter, None where there is none.
        group: Its ranks; None for one process.
        params: How many parameters to gather.
        step: Steps taken.
        moved: Something other than steps has changed this rank's weights.

    Raises:
        ValueError: Unless ``params`` is a whole number >= 1.
    """
    if isinstance(params, bool) or not isinstance(params, int) or params < 1:
        raise ValueError(f"params must be a whole number >= 1, got {params!r}")
    choice = _choice()
    measured = _measure(collector, plan, choice, momentum, step, moved)
    shown = {name: metric.finish(measured, q) for name, q, metric in choice.columns}
    there = {name: metric.where(measured, q) for name, q, metric in choice.columns}
    count = min(params, len(plan))
    numbers = sorted({round(i * (len(plan) - 1) / max(1, count - 1)) for i in range(count)})
    tally = _Tally()
    for number in numbers:
        for quantity in QUANTITIES:
            full = _gather(collector, plan[number], number, quantity, momentum, group)
            if full is not None:
                _compare(tally, plan[number], number, quantity, full, shown, there)
    sizes = shown["weight_elements"]
    return Verification(
        params=tuple(plan[n].spec.info.name for n in numbers),
        numbers=tally.numbers,
        largest_error=tally.error,
        worst=tally.worst,
        sigmas=tally.sigmas,
        largest_sigma_error=tally.sigma_error,
        loose=tuple(tally.loose),
        outside=tuple(tally.outside),
        miscounted=tuple(p.spec.info.name for p, n in zip(plan, sizes, strict=True) if n != p.shape.numel),
    )


@cache
def _choice() -> Choice:
    chosen = choose([f"{q}_{n}" for q in QUANTITIES for n in (*_NORMS, "spectral", "spectral_upper")])
    return Choice(columns=(*chosen.columns, ("weight_elements", "weight", _ELEMENTS)))


class _Tally:
    def __init__(self) -> None:
        self.numbers = self.sigmas = 0
        self.error = self.sigma_error = 0.0
        self.worst = ""
        self.loose: list[str] = []
        self.outside: list[str] = []

    def norm(self, name: str, shown: float, truth: float) -> None:
        self.numbers += 1
        error = _error(shown, truth)
        if error > self.error or not self.worst:
            self.error, self.worst = error, name

    def sigma(self, name: str, lower: float, upper: float, truth: float, tolerance: float) -> None:
        self.sigmas += 1
        error = _error(lower, truth)
        self.sigma_error = max(self.sigma_error, error)
        if error > tolerance:
            self.loose.append(name)
        # 1e-9: rounding of the reference itself.
        if not (lower <= truth * (1 + 1e-9) and truth <= upper * (1 + 1e-9)) and truth == truth:
            self.outside.append(name)


def _error(shown: float, truth: float) -> float:
    if shown == truth or (shown != shown and truth != truth):
        return 0.0
    error = abs(shown - truth) / abs(truth) if truth else float("inf")
    return error if error == error else float("inf")


def _measure(
    collector: Collector, plan: Sequence[Planned], choice: Choice, momentum: Find, step: int, moved: bool
) -> Measured:
    buffers = Buffers(collector.schema(choice), collector.device, flags=FLAGS)
    nothing = dict.fromkeys(collector.numbers, Setting(lr=0.0))
    flush = Flush(step=step, choice=choice, buffers=buffers, settings=nothing, moved=moved)
    with torch.no_grad():
        collector.measure(momentum, flush, collector.numbers)
        collector.reduce(flush)
    host = buffers.to_host()
    host.wait()
    shapes = Shapes.of([p.shape for p in plan], [len(p.measurers) for p in plan])
    return Measured(shapes, lambda q, p: host.block((q, p)), [p.spec.norm for p in plan])


def _gather(
    collector: Collector,
    planned: Planned,
    number: int,
    quantity: str,
    momentum: Find,
    group: dist.ProcessGroup | None,
) -> Tensor | None:
    """The whole tensor in float64, the mean over replicas; None where no rank has it."""
    shape = planned.spec.info.shape
    one = torch.ones((), dtype=torch.float64, device=collector.device)
    total = torch.zeros(2, *shape, dtype=torch.float64, device=collector.device)
    for param in (p for p, n in collector.numbers.items() if n == number and on_mesh(p)):
        found = {"weight": param, "grad": param.grad, "momentum": momentum(param)}[quantity]
        if found is not None:
            piece = local(param).detach() if quantity == "weight" else piece_like(found, param)
            layout = Layout.of(param)
            index = [index_tensor(layout.runs(d), device=collector.device) for d in range(len(shape))]
            place = tuple(torch.meshgrid(*index, indexing="ij")) if index else ()
            total[0].index_put_(place, piece.double()) if index else total[0].copy_(piece)
            total[1].index_put_(place, one) if index else total[1].fill_(1.0)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total[0] / total[1] if bool(total[1].any()) else None


def _compare(
    tally: _Tally,
    planned: Planned,
    number: int,
    quantity: str,
    full: Tensor,
    shown: dict[str, Array],
    there: dict[str, Array],
) -> None:
    matrices = as_matrices(full, planned.shape)
    for name, truth in _NORMS.items():
        column = f"{quantity}_{name}"
        if there[column][number]:
            value = float(shown[column][number])
            tally.norm(f"{column} of {planned.spec.info.name}", value, float(truth(matrices)))
    column = f"{quantity}_spectral"
    if there[column][number]:
        lower, upper = (float(shown[c][number]) for c in (column, f"{column}_upper"))
        true = float(np.max(list(_sigmas(matrices, planned.shape))))
        tally.sigma(f"{column} of {planned.spec.info.name}", lower, upper, true, SIGMA_TOLERANCE[quantity])


def _sigmas(matrices: Tensor, shape: MatrixShape) -> Iterator[float]:
    for x in matrices:
        if shape.vector:
            yield float(x.abs().amax())
        else:
            yield float(torch.linalg.svdvals(x)[0]) if bool(x.isfinite().all()) else math.nan
