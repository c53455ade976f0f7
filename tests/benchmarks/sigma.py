"""How far σ₁ is off on the matrices of a real run, and what it costs beside an SVD and a Newton-Schulz.

python tests/benchmarks/sigma.py [--steps 500] [--width 320] [--layers 2] [--repeats 15] [--quick]

Trains the demo's model in one process. Every ``interval`` steps the matrices of each quantity are solved in two pieces
of rows, warm from the time before, and compared with a float64 SVD; updates are solved whole and cold, too. Costs are
ratios of times that were measured in turns, so that the drift of a shared machine cancels; asserts no time.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from torch import Tensor

from scion_telemetry.demo.config import DemoConfig
from scion_telemetry.demo.data import batches, load_corpus
from scion_telemetry.demo.model import GPT, GPTConfig
from scion_telemetry.demo.train import make_optimizer
from scion_telemetry.describe import find_momentum
from scion_telemetry.metrics import spectral
from scion_telemetry.metrics.spectral import Problem, Solved
from scion_telemetry.optim import make_orthogonalizer
from scion_telemetry.sigma import Memory

INTERVALS = (1, 10, 100)
MOST = 20
"""Flushes per interval whose truth is computed."""
SHAPES = ((320, 320), (768, 768), (3072, 768))
TOGETHER = 4
"""Matrices that are measured at once: small algebra is shared, as in a model with many layers."""


def solve_in_two(matrices: Sequence[Tensor], starts: Sequence[Tensor], steps: int, seed: int = 0) -> Solved:
    """σ₁ of matrices whose rows lie in two pieces, as two ranks find it."""
    count, ranks = len(matrices), 2
    problems = [
        Problem(piece=piece, place=None, rows=None, start=start, squares=spectral.sum_of_squares(w))
        for r in range(ranks)
        for w, start in zip(matrices, starts, strict=True)
        for piece in [torch.tensor_split(w, ranks)[r]]
    ]

    def total(flat: Tensor) -> Tensor:
        # Parts of equally large matrices lie together: of the first rank, then of the second.
        sizes: dict[torch.Size, int] = {}
        for p in problems:
            sizes[p.start.shape] = sizes.get(p.start.shape, 0) + p.start.numel()
        groups = torch.split_with_sizes(flat, list(sizes.values()))
        return torch.cat([g.view(ranks, -1).sum(dim=0).repeat(ranks) for g in groups])

    solved = spectral.solve(problems, steps=steps, total=total, generator=torch.Generator().manual_seed(seed))
    return Solved(
        lower=solved.lower[:count],
        upper=solved.upper[:count],
        second=solved.second[:count],
        starts=solved.starts[:count],
    )


@dataclass(slots=True)
class Followed:
    """One quantity that is solved every ``interval`` steps, as the tracker does it: weights from where they were.

    Args:
        quantity: Which one.
        interval: Optimizer steps between two.
        memory: First blocks of the next.
        errors: Relative errors by flush, the cold one first.
        outside: How often the truth lay outside the interval.
    """

    quantity: str
    interval: int
    memory: Memory = field(default_factory=lambda: Memory(torch.device("cpu")))
    errors: list[list[float]] = field(default_factory=list)
    outside: int = 0

    def take(self, step: int, matrices: Sequence[Tensor], truth: Callable[[], Sequence[float]]) -> None:
        if step % self.interval or len(self.errors) > MOST:
            return
        keys = [(self.quantity, i, 0) for i in range(len(matrices))]
        self.memory.begin(step)
        starts = [self.memory.start(key, w.size(1)) for key, w in zip(keys, matrices, strict=True)]
        steps = max(self.memory.number_of_steps(key, step) for key in keys)
        solved = solve_in_two(matrices, starts, steps, seed=step)
        self.memory.note(keys, solved.starts, step)
        self.note(solved.lower, solved.upper, truth())

    def note(self, lower: Tensor, upper: Tensor, truth: Sequence[float]) -> None:
        found = list(zip(lower.tolist(), upper.tolist(), truth, strict=True))
        self.errors.append([1 - low / t for low, _, t in found if t > 0])
        self.outside += sum(not low <= t * (1 + 1e-12) <= high * (1 + 2e-12) for low, high, t in found)

    def row(self, quantity: str, how: str) -> dict[str, str]:
        later = self.errors[1:]
        return {
            "quantity": quantity,
            "how": how,
            "flushes": str(len(self.errors)),
            "first, %": percent(self.errors[0]),
            "later, worst %": percent([e for errors in later for e in errors]),
            "after 3, worst %": percent([e for errors in self.errors[3:] for e in errors]),
            "later, median %": percent([median(errors) for errors in later]),
            "outside": str(self.outside),
        }


def percent(errors: Sequence[float]) -> str:
    return f"{100 * max(errors):.3f}" if errors else ""


def cold(w: Tensor, seed: int) -> Tensor:
    width = min(spectral.BLOCK, w.size(1))
    return spectral.random_start(w.size(1), width, torch.Generator().manual_seed(seed), w.device)


def accuracy(steps: int, width: int, layers: int) -> list[dict[str, str]]:
    """Train, and follow every quantity at every interval."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=width, layers=layers, heads=4, hidden=4 * width), seed=0)
    optimizer = make_optimizer(DemoConfig(out=Path("none"), optimizer="scion", lr=0.05), model)
    params = [p for p in model.parameters() if p.ndim == 2]
    source = batches(load_corpus().train, batch=8, context=128, seed=0)
    names = ("weight", "grad", "momentum", "update")
    followed = {(q, i): Followed(quantity=q, interval=i) for q in names for i in INTERVALS if i < steps}
    whole = Followed(quantity="update", interval=10)
    for step in range(1, steps + 1):
        inputs, targets = next(source)
        model.loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
        before = [p.detach().clone() for p in params]
        optimizer.step()
        found: dict[str, list[Tensor]] = {
            "weight": [p.detach() for p in params],
            "grad": [p.grad for p in params if p.grad is not None],
            "momentum": [m for p in params if (m := find_momentum(optimizer.state[p], p)) is not None],
            "update": [p.detach() - b for p, b in zip(params, before, strict=True)],
        }
        for quantity, matrices in found.items():
            truth = Truth(matrices)
            for (q, _), f in followed.items():
                if q == quantity:
                    f.take(step, matrices, truth)
            if quantity == "update" and step % whole.interval == 0 and len(whole.errors) <= MOST:
                seeds = [1000 * step + i for i in range(len(matrices))]
                lower, upper, _ = spectral.solve_whole(matrices, seeds=seeds, steps=spectral.UPDATE_STEPS)
                whole.note(lower, upper, truth())
        optimizer.zero_grad()
    rows = [f.row(q, f"pieces, every {i}") for (q, i), f in followed.items()]
    return [*rows, *([whole.row("update", "whole, cold")] if whole.errors else [])]


@dataclass(slots=True)
class Truth:
    """σ₁ by an SVD in float64, once and only where somebody asks."""

    matrices: Sequence[Tensor]
    known: list[float] | None = None

    def __call__(self) -> Sequence[float]:
        if self.known is None:
            self.known = [float(torch.linalg.svdvals(w.double())[0]) for w in self.matrices]
        return self.known


# ---------------------------------------------------------------------- costs


def costs(shape: tuple[int, int], repeats: int) -> list[dict[str, str]]:
    """Time of each way per matrix, over those of an SVD and of one bf16 Newton-Schulz."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) / shape[1] ** 0.5 for _ in range(TOGETHER)]
    newton_schulz = make_orthogonalizer("dion_ns5")
    starts = solve_in_two(matrices, [cold(w, i) for i, w in enumerate(matrices)], spectral.COLD_STEPS).starts
    squares = [spectral.sum_of_squares(w) for w in matrices]

    def pieces(steps: int) -> Callable[[], object]:
        def run() -> Solved:
            problems = [
                Problem(piece=w, place=None, rows=None, start=s, squares=q)
                for w, s, q in zip(matrices, starts, squares, strict=True)
            ]
            return spectral.solve(problems, steps=steps, total=lambda t: t, generator=generator)

        return run

    ways: dict[str, Callable[[], object]] = {
        **{f"warm, {k} steps": pieces(k) for k in (2, 3, spectral.WARM_STEPS)},
        "whole, cold": lambda: spectral.solve_whole(matrices, seeds=range(TOGETHER)),
        "whole, cold, update": lambda: spectral.solve_whole(
            matrices, seeds=range(TOGETHER), steps=spectral.UPDATE_STEPS
        ),
    }
    base: dict[str, Callable[[], object]] = {
        "svdvals": lambda: [torch.linalg.svdvals(w) for w in matrices],
        "Newton-Schulz": lambda: [newton_schulz(w, epsilon=1e-7) for w in matrices],
    }
    seconds = in_turns({**ways, **base}, repeats)

    def ratio(a: str, b: str) -> float:
        return median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))

    return [
        {
            "matrix": f"{shape[0]} x {shape[1]}",
            "way": way,
            "ms a matrix": f"{1e3 * median(seconds[way]) / TOGETHER:.2f}",
            "svdvals / this": f"{ratio('svdvals', way):.1f}",
            "this / Newton-Schulz, %": f"{100 * ratio(way, 'Newton-Schulz'):.1f}",
        }
        for way in ways
    ]


def in_turns(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every way, one after the other within a repeat; a first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in list(ways.items())[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(found: Sequence[Mapping[str, str]]) -> str:
    heads = list(found[0])
    lines = [heads, *([row[h] for h in heads] for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def main(steps: int = 500, width: int = 320, layers: int = 2, repeats: int = 15, quick: bool = False) -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    if quick:
        steps, width, layers, repeats = min(steps, 12), min(width, 64), 1, 2
    typer.echo(table(accuracy(steps, width, layers)))
    typer.echo()
    shapes = SHAPES[:1] if quick else SHAPES
    typer.echo(table([row for shape in shapes for row in costs(shape, repeats)]))


if __name__ == "__main__":
    typer.run(main)
