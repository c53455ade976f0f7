"""Every column of selections over runs of 30 steps on one process, against lists and sets."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from selected_data import selected
from selection_brute import COLUMNS, GRADIENT_SIDE, Moment, compare, follow, shard_truth, truth, with_scores
from torch import Tensor, nn
from tracked import gauss, named

from scion_telemetry import Tracker, every
from scion_telemetry.metrics.selection_columns import SELECTION_METRICS, finish_selection
from scion_telemetry.optim import Dion2, set_fraction
from scion_telemetry.optim.events import StepEvent
from scion_telemetry.sinks import MemorySink

STEPS = 30
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "wide": ((7, 11), {}),
    "tall": ((11, 6), {}),  # the shorter side: columns
    "rows": ((19, 4), {"select_dim": "rows"}),
    "columns": ((4, 13), {"select_dim": "cols"}),
    "experts": ((3, 8, 5), {"select_dim": "rows"}),
    "experts_columns": ((2, 5, 9), {"select_dim": "cols"}),
    "heads": ((12, 5), {"num_heads": 3, "select_dim": "rows"}),
    "heads_columns": ((12, 5), {"num_heads": 2, "select_dim": "cols"}),
}
BY_COLUMNS = {"tall", "columns", "experts_columns", "heads_columns"}


def slices_of(name: str, x: Tensor) -> Tensor:
    """``[B, n, length]``."""
    heads = CASES[name][1].get("num_heads")
    x = x.reshape(heads or (x.size(0) if x.ndim == 3 else 1), -1, x.size(-1))
    return x.mT.contiguous() if name in BY_COLUMNS else x


def gradient(name: str, step: int) -> Tensor:
    """Some slices are often large, some for a while."""
    shape = CASES[name][0]
    seed = 1000 * step + list(CASES).index(name)
    return gauss(*shape, seed=seed) * gauss(shape[-2], 1, seed=7).exp() * gauss(1, shape[-1], seed=seed // 5).exp()


class Run:
    """All cases at once."""

    def __init__(self, metrics: Sequence[str] = ("basic", "selection_gradient"), **options: Any) -> None:
        self.model = named(**{name: torch.ones(shape) for name, (shape, _) in CASES.items()})
        groups = [{"params": [(name, self.model[name])], **own} for name, (_, own) in CASES.items()]
        self.optimizer = Dion2(groups, **options)
        self.sink = MemorySink()
        self.names = {p: name for name, p in self.model.items()}
        self.seen: dict[str, list[Tensor]] = {name: [] for name in CASES}
        self.chosen: dict[str, list[list[set[int]]]] = {name: [] for name in CASES}
        self.metrics = list(metrics)
        self.optimizer.register_step_observer(self.see)

    def see(self, event: StepEvent) -> None:
        for param, selection in zip(event.params, event.selections, strict=True):
            n = selection.scores.size(-1)
            self.seen[self.names[param]].append(selection.scores.reshape(-1, n).clone())
            rows = selection.indices.reshape(-1, selection.indices.size(-1)).tolist()
            self.chosen[self.names[param]].append([set(row) for row in rows])

    def train(self, schedule: Callable[[int], bool], fractions: Sequence[float]) -> None:
        with Tracker(self.model, self.optimizer, schedule=schedule, metrics=self.metrics, sinks=[self.sink]):
            for step, fraction in enumerate(fractions, 1):
                set_fraction(self.optimizer, fraction)
                for name, p in self.model.items():
                    p.grad = gradient(name, step)
                self.optimizer.step()

    def check(self, flushes: Sequence[int], fractions: Sequence[float], ef_decay: float) -> None:
        rows = {(r.step, r.param): r.values for r in self.sink.selection}
        assert set(rows) == {(step, name) for step in flushes for name in CASES}
        for name in CASES:
            gradients = [slices_of(name, gradient(name, step)) for step in range(1, STEPS + 1)]
            moments: list[Moment] = follow(gradients, fractions, ef_decay)
            assert [m.selected for m in moments] == self.chosen[name], name
            moments = [with_scores(m, s) for m, s in zip(moments, self.seen[name], strict=True)]
            flushed = 0
            for step in flushes:
                expected = truth(moments[:step], flushed, length=gradients[0].size(-1), ef_decay=ef_decay)
                if "selection_gradient" not in self.metrics:
                    expected = {c: v for c, v in expected.items() if c not in GRADIENT_SIDE}
                compare(rows[step, name], expected, (step, name))
                flushed = step


def test_the_columns_are_those_of_the_contract() -> None:
    assert {metric.name for metric in SELECTION_METRICS} == COLUMNS
    assert len(SELECTION_METRICS) == len(COLUMNS), "each once"
    assert all(metric.formula and metric.unit for metric in SELECTION_METRICS)


@pytest.mark.parametrize("flush", [1, 3, 7])
@pytest.mark.parametrize(
    ("fraction", "ef_decay"), [(0.1, 0.95), (0.25, 0.95), (0.25, 0.5), (0.6, 0.9), (1.0, 0.95), (0.25, 1.0)]
)
def test_every_column_of_a_run(flush: int, fraction: float, ef_decay: float) -> None:
    run, fractions = Run(ef_decay=ef_decay), [fraction] * STEPS
    run.train(every(flush), fractions)
    run.check([step for step in range(1, STEPS + 1) if step == 1 or step % flush == 0], fractions, ef_decay)


def test_without_decay_of_what_is_selected_its_energy_is_not_known() -> None:
    run, fractions = Run(ef_decay=0.0), [0.25] * STEPS
    run.train(every(3, first=False), fractions)
    run.check(range(3, STEPS + 1, 3), fractions, 0.0)


def test_a_fraction_that_changes_during_the_run() -> None:
    fractions = [1.0] * 9 + [0.5] * 11 + [0.125] * 10
    run = Run(ef_decay=0.9)
    run.train(every(4, first=False), fractions)
    run.check(range(4, STEPS + 1, 4), fractions, 0.9)


def test_the_gradient_is_there_when_it_is_asked_for_alone() -> None:
    run, fractions = Run(metrics=["basic"], ef_decay=0.95), [0.25] * STEPS
    run.train(every(7), fractions)
    run.check([1, 7, 14, 21, 28], fractions, 0.95)


def test_a_thousand_rows_have_a_tail() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1030, 3))})
    optimizer, sink = Dion2(model.parameters(), fraction=0.25, ef_decay=0.9, select_dim="rows"), MemorySink()
    gradients = [gauss(1, 1030, 3, seed=i) * gauss(1, 1030, 1, seed=9).exp() for i in range(4)]
    seen: list[Tensor] = []
    optimizer.register_step_observer(lambda event: seen.append(event.selections[0].scores.clone()))
    metrics = ["basic", "selection_gradient"]
    with Tracker(model, optimizer, schedule=every(4, first=False), metrics=metrics, sinks=[sink]):
        for g in gradients:
            model["w"].grad = g[0].clone()
            optimizer.step()
    moments = [with_scores(m, s[None]) for m, s in zip(follow(gradients, [0.25] * 4, 0.9), seen, strict=True)]
    expected = truth(moments, 0, length=3, ef_decay=0.9)
    assert "hill" in expected
    compare(sink.selection[0].values, expected)


def test_ties_are_counted_beyond_the_selected_ones() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(6, 8))})
    optimizer, sink = Dion2(model.parameters(), fraction=0.5, ef_decay=0.5), MemorySink()
    sizes = torch.tensor([1.0, 2, 2, 2, 2, 3]).view(1, 6, 1).expand(1, 6, 8)
    with Tracker(model, optimizer, schedule=every(1), metrics=["basic", "selection_gradient"], sinks=[sink]):
        model["w"].grad = sizes[0].clone()
        optimizer.step()
    (moment,) = follow([sizes], [0.5], 0.5)
    assert moment.selected == [{1, 2, 5}]
    assert sink.selection[0].values["ties"] == 2
    compare(sink.selection[0].values, truth([moment], 0, length=8, ef_decay=0.5))


def test_a_parameter_without_gradient_at_a_flush_keeps_its_own_window() -> None:
    """Frequencies are shares: what was not shown at a flush is counted over its own steps at the next one."""
    model = named(a=torch.zeros(4, 8), b=torch.zeros(4, 8))
    optimizer, sink = Dion2(model.parameters(), fraction=0.25), MemorySink()
    with Tracker(model, optimizer, schedule=every(3, first=False), sinks=[sink]):
        for step in range(1, 7):
            for i, (name, p) in enumerate(model.items()):
                p.grad = None if name == "b" and step == 3 else gauss(4, 8, seed=10 * step + i) * torch.eye(4, 8) * 9
                if p.grad is not None:
                    p.grad[0] += 50.0  # its first row is the largest by far
            optimizer.step()
    rows = {(r.step, r.param): r.values for r in sink.selection}
    assert {key: v["window"] for key, v in rows.items()} == {(3, "a"): 3, (6, "a"): 3, (6, "b"): 6}
    assert [v["always"] for v in rows.values()] == [0.25, 0.25, 0], "the first row in 5 of 6 steps"
    assert {v["frequency_at_0.25"] for v in rows.values()} == {1}
    slices = [s.values for s in sink.slices if s.param == "b"]
    assert [v["selected"] for v in slices] == [5, 0, 0, 0]
    assert {v["steps"] for v in slices} == {6}


def test_of_equal_scores_the_first_are_the_largest_as_the_optimizer_has_it() -> None:
    """64 equal rows in four shards: each selects its first four, the whole its first sixteen."""
    scores, flags = torch.ones(1, 64), (torch.arange(64) % 16 < 4).unsqueeze(0)
    shards = tuple(np.arange(a, a + 16) for a in range(0, 64, 16))
    (row,) = finish_selection(selected(scores, flags, fraction=0.25, shards=shards))
    assert (row["regret"], row["overlap"], row["imbalance"]) == (0, 0.25, 3)
    assert row["ties"] == 48
    expected = shard_truth([1.0] * 64, [range(a, a + 16) for a in range(0, 64, 16)], 0.25)
    assert {name: row[name] for name in expected} == expected
