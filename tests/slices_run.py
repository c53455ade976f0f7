"""A training of Dion2 whose every selection is known by following its momentum, and slices.csv against it."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tracked import gauss, named

from scion_telemetry import Tracker, load_run
from scion_telemetry.optim import Dion2

SHAPES = {"wide": (10, 4), "experts": (4, 6, 5), "square": (7, 7)}
FRACTION, EF_DECAY = 0.3, 0.9
Key = tuple[str, int, int]
LATE = ("selected_late", "steps_late", "score_all_late")


def gradient(name: str, step: int) -> Tensor:
    shape, seed = SHAPES[name], 100 * step + list(SHAPES).index(name)
    return gauss(*shape, seed=seed) * gauss(shape[-2], 1, seed=seed // 4).exp()


class Training:
    """Gradients of the number of the step alone; on several ranks rows, and experts, are apart."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
        self.model = named(**{name: self.place(torch.ones(shape)) for name, shape in SHAPES.items()})
        options: dict[str, Any] = {"selection_scope": "global", "select_dim": "rows", "ef_decay": EF_DECAY}
        self.optimizer = Dion2(list(self.model.items()), fraction=FRACTION, **options)

    def place(self, x: Tensor) -> Tensor:
        return x if self.mesh is None else distribute_tensor(x, self.mesh, [Shard(0)], src_data_rank=None)

    def steps(self, first: int, last: int) -> None:
        for self.now in range(first, last + 1):
            for name, p in self.model.items():
                p.grad = self.place(gradient(name, self.now))
            self.optimizer.step()

    def tracker(self, schedule: Callable[[int], bool], *sinks: Any, **options: Any) -> Tracker:
        return Tracker(self.model, self.optimizer, schedule=schedule, sinks=sinks, **options)


def counted(flushes: list[int]) -> dict[Key, dict[str, float]]:
    """The facts of every row, by following the momentum."""
    found: dict[Key, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        matrices, n = (shape[0] if len(shape) == 3 else 1), shape[-2]
        momentum = torch.zeros(matrices, n, shape[-1])
        times: Counter[tuple[int, int]] = Counter()
        here: dict[tuple[int, int], list[float]] = {(b, i): [] for b in range(matrices) for i in range(n)}
        everywhere: dict[tuple[int, int], list[float]] = {key: [] for key in here}
        early = turn(flushes)
        before: Counter[tuple[int, int]] = Counter()
        for step in range(1, flushes[-1] + 1):
            momentum += gradient(name, step).view_as(momentum)
            scores = momentum.double().abs().sum(-1).tolist()
            for b, r in enumerate(scores):
                chosen = sorted(range(n), key=lambda i, r=r: -r[i])[: math.ceil(FRACTION * n)]  # type: ignore[misc]
                times.update((b, i) for i in chosen)
                for i in chosen:
                    momentum[b, i] *= EF_DECAY
                for i in range(n) if step in flushes else ():
                    everywhere[b, i].append(r[i])
                    here[b, i] += [r[i]] if i in chosen else []
            if step == early:
                before.update(times)
        for (b, i), values in everywhere.items():
            found[name, b, i] = {
                "selected": times[b, i],
                "steps": flushes[-1],
                "score": sum(here[b, i]) / len(here[b, i]) if here[b, i] else math.nan,
                "score_all": sum(values) / len(values),
                **dict.fromkeys(LATE, math.nan),
            }
            if early:
                late = values[flushes.index(early) + 1 :]
                told = times[b, i] - before[b, i], flushes[-1] - early, sum(late) / len(late)
                found[name, b, i] |= dict(zip(LATE, told, strict=True))
    return found


def turn(flushes: list[int]) -> int | None:
    """After which flush the later part begins: of those that are √2 apart, the latest in the first half."""
    apart: list[int] = []
    for step in flushes:
        if not apart or step * step >= 2 * apart[-1] * apart[-1]:
            apart.append(step)
    return max((step for step in apart if 2 * step <= flushes[-1]), default=None)


def compare(path: Path, flushes: list[int]) -> None:
    table = load_run(path).slices
    assert list(table.columns) == ["param", "matrix", "index", "selected", "steps", "score", "score_all", *LATE]
    expected = counted(flushes)
    found = {(str(r.param), int(r.matrix), int(r.index)): r for r in table.itertuples(index=False)}
    assert len(found) == len(table)
    assert found.keys() == expected.keys()
    for key, facts in expected.items():
        for name, value in facts.items():
            got = getattr(found[key], name)
            exact = name.startswith(("selected", "steps")) and not math.isnan(value)
            assert got == value if exact else got == pytest.approx(value, rel=1e-6, nan_ok=True), (key, name)
    for name, shape in SHAPES.items():  # none is lost and none is counted twice
        rows = table[table["param"] == name]
        matrices = shape[0] if len(shape) == 3 else 1
        assert rows["selected"].sum() == math.ceil(FRACTION * shape[-2]) * matrices * flushes[-1]
