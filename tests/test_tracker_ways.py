"""Ways to step: closures, accumulation, schedulers, decay, steps around steps, compiled steps, new parameters."""

import logging
import math
import warnings
from typing import Any

import pytest
import torch
from parity import Net, backward
from torch import Tensor, nn

from scion_telemetry import Tracker, at, every
from scion_telemetry.optim import Dion2, Scion, group_params
from scion_telemetry.sinks import MemorySink


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def columns(sink: MemorySink, step: int, param: str) -> set[str]:
    (row,) = [r for r in sink.layers if (r.step, r.param) == (step, param)]
    return {name.split("_")[0] for name in row.values}


def test_a_closure_is_one_step() -> None:
    model, sink, calls = Net(), MemorySink(), []
    optimizer = Scion(group_params(model), lr=0.01)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model, 1)
        calls.append(torch.is_grad_enabled())
        return 2.5

    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]) as tracker:
        assert optimizer.step(closure) == 2.5
        assert optimizer.step(closure=closure) == 2.5
        assert tracker.step == 2
    assert sink.steps == [1, 2]
    assert calls == [True, True]
    assert "grad" in columns(sink, 1, "up")


def test_lbfgs_calls_its_closure_often_and_is_one_step() -> None:
    model, sink = Net(), MemorySink()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        loss.backward()
        return loss

    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]):
        optimizer.step(closure)
    assert sink.steps == [1]
    assert sink.value(1, "up", "update_rms") > 0


def test_accumulated_gradients_are_measured_once_and_whole() -> None:
    model, sink = Net(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]):
        for micro in range(3):
            backward(model, micro)
        whole = float(model.up.weight.grad.double().square().mean().sqrt())  # type: ignore[union-attr]
        optimizer.step()
    assert sink.steps == [1]
    assert sink.value(1, "up", "grad_rms") == pytest.approx(whole, rel=1e-12)


def test_the_update_follows_the_learning_rate_of_its_own_step() -> None:
    """lr 0.1, 0.01, 0.001 by a scheduler: entries of a Sign update are ± lr / d_in, whatever comes next."""
    model, sink = nn.Linear(16, 4, bias=False), MemorySink()
    optimizer = Scion(model.parameters(), lr=1.0, norm="Sign", unconstrained=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 ** (step + 1))
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
        for _ in range(3):
            model.weight.grad = randn(4, 16)
            optimizer.step()
            scheduler.step()
    for step in (1, 2, 3):
        assert sink.value(step, "weight", "update_max_abs") == pytest.approx(0.1**step / 16, rel=1e-6)


def test_an_update_holds_the_rate_and_not_the_decay() -> None:
    """W = 2, direction 1, lr 0.1, decoupled decay 0.1: update 0.1, decay 0.02, W = 1.88."""
    for optimizer_class in (torch.optim.AdamW, Dion2):
        model = nn.ParameterDict({"w": nn.Parameter(torch.full((3,), 2.0))})
        adamw = {"params": [model["w"]], **({"algorithm": "adamw"} if optimizer_class is Dion2 else {})}
        optimizer, sink = optimizer_class([adamw], lr=0.1, weight_decay=0.1), MemorySink()  # type: ignore[operator]
        with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
            model["w"].grad = torch.ones(3)
            optimizer.step()
        assert sink.value(1, "w", "update_max_abs") == pytest.approx(0.1, rel=1e-6)
        assert sink.value(1, "w", "weight_max_abs") == pytest.approx(1.88, rel=1e-6)


DECAYING: dict[str, tuple[Any, bool]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), True),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5), False),
    "Adam, decoupled": (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True), True),
    "NAdam, decoupled": (lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True), True),
    "Muon": (lambda p: torch.optim.Muon(p, lr=0.1, weight_decay=0.5), True),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), False),
    "Lion": (
        lambda p: Dion2([{"params": [*p], "algorithm": "lion", "lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.9)}]),
        True,
    ),
}


@pytest.mark.parametrize(("make", "decoupled"), DECAYING.values(), ids=DECAYING)
def test_which_decay_is_part_of_the_update(make: Any, decoupled: bool) -> None:
    model, sink = nn.Linear(5, 4, bias=False), MemorySink()
    before = model.weight.detach().double()
    optimizer = make(model.parameters())
    with Tracker(model, optimizer, schedule=every(1), metrics="full", sinks=[sink]):
        model.weight.grad = randn(4, 5)
        optimizer.step()
    update = model.weight.detach().double() - (1 - 0.1 * 0.5 * decoupled) * before
    assert sink.value(1, "weight", "update_frobenius") == pytest.approx(float(update.norm()), rel=1e-7)


class Around(torch.optim.SGD):
    """A step around a step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_around_a_step_is_one_step() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # torch hooks the step of a class when it is first constructed
    model, sink = Net(), MemorySink()
    optimizer = Around(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]) as tracker:
        for step in range(1, 4):
            backward(model, step)
            optimizer.step()
            assert tracker.step == step
    assert sink.steps == [1, 2, 3]
    assert sink.value(3, "up", "update_rms") > 0


@pytest.mark.parametrize("late", [False, True])
def test_a_compiled_step_is_measured_and_compiled_no_more_than_without(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)

    def run(tracked: bool) -> tuple[list[Tensor], list[int], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, sink = Net(), MemorySink()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train() -> None:
            optimizer.step()

        compiled = torch.compile(train, backend="eager")
        tracker = None
        for step in range(1, 7):
            if tracked and step == 1 + late:
                schedule = every(2, first=False)
                tracker = Tracker(model, optimizer, schedule=schedule, sinks=[sink], start_step=step - 1)
            optimizer.zero_grad()
            backward(model, step)
            compiled()
        if tracker is not None:
            tracker.close()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return [p.detach().clone() for p in model.parameters()], sink.steps, graphs

    with warnings.catch_warnings(), torch._dynamo.config.patch(disable=False):
        warnings.simplefilter("ignore")  # torch's own, about its profiler
        bare, tracked = run(False), run(True)
    assert bare[2] > 0, "nothing was compiled"
    assert tracked[1] == [2, 4, 6]
    assert tracked[2] <= bare[2] + late
    for a, b in zip(bare[0], tracked[0], strict=True):
        assert torch.equal(a, b)


def test_a_step_that_raised_does_not_count() -> None:
    model, sink = Net(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def broken() -> float:
        raise RuntimeError("the data ran out")

    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]) as tracker:
        with pytest.raises(RuntimeError, match="the data ran out"):
            optimizer.step(broken)
        backward(model, 1)
        optimizer.step()
        assert tracker.step == 1
    assert sink.steps == [1]


def test_parameters_added_later_are_measured_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = Net(), MemorySink()
    rest = [p for name, p in model.named_parameters() if "head" not in name]
    optimizer = torch.optim.SGD(rest, lr=0.1)
    with Tracker(model, optimizer, schedule=at(1, 2, 3, 4), sinks=[sink]), caplog.at_level(logging.WARNING):
        assert sink.run is not None
        assert "head" not in {p.name for p in sink.run.params}
        for step in range(1, 5):
            if step == 3:
                optimizer.add_param_group({"params": [model.head.weight]})
            backward(model, step)
            optimizer.step()
            if step == 3:
                expected = float(model.head.weight.detach().double().square().mean().sqrt())
    assert not caplog.records
    assert sink.steps == [1, 2, 3, 4]
    assert [r.step for r in sink.layers if r.param == "head"] == [3, 4]
    assert [r.step for r in sink.layers if r.param == "up"] == [1, 2, 3, 4]
    assert sink.value(3, "head", "weight_rms") == pytest.approx(expected, rel=1e-7)
    assert [p.name for p in sink.run.params] == list(dict.fromkeys(r.param for r in sink.layers if r.step == 4))


def test_tied_weights_are_one_row_with_two_names() -> None:
    model, sink = nn.Module(), MemorySink()
    model.embed, model.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    model.out.weight = model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink]):
        model.embed.weight.grad = torch.full((10, 4), 3 / math.sqrt(40))
        optimizer.step()
    assert [r.param for r in sink.layers] == ["embed"]
    assert sink.run is not None
    assert sink.run.params[0].aliases == ("out",)
    assert sink.value(1, "embed", "grad_rms") * math.sqrt(40) == pytest.approx(3)
