"""Every optimizer that steps is measured as what it is: one of torch, of somebody else, in a wrapper, or several."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tracked import gauss, named, observed, rms, rows, set_grads, weights

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2
from scion_telemetry.sinks import MemorySink

EXACT = 1e-9
SHOWN = 1e-7
"""Of updates that an optimizer does not show: differences that are kept in float32."""


class Mild(torch.optim.Optimizer):
    """Somebody's own: signs of an average, which it keeps as ``exp_avg`` beside a count."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    average = state.setdefault("exp_avg", torch.zeros_like(p))
                    state["count"] = state.get("count", 0) + 1
                    average.lerp_(p.grad, 0.1)
                    p.sub_(average.sign(), alpha=group["lr"])
        return loss


MADE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float, str | None]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), 0.95, "exp_avg"),
    "AdamW, fused": (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, fused=True), 0.95, "exp_avg"),
    "AdamW, lr in a tensor": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), weight_decay=0.5), 0.95, "exp_avg"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 1.0, None),
    "SGD, momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0, "momentum_buffer"),
    "Adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.1), 1.0, None),
    "Muon": (lambda p: torch.optim.Muon(p, lr=0.1, weight_decay=0.5), 0.95, "momentum_buffer"),
    "of somebody else": (lambda p: Mild(p, lr=0.1), 1.0, "exp_avg"),
}


@pytest.mark.parametrize(("make", "kept", "momentum"), MADE.values(), ids=MADE)
def test_one(make: Callable[[Any], torch.optim.Optimizer], kept: float, momentum: str | None) -> None:
    model = named(a=gauss(6, 4, seed=1), b=gauss(3, 5, seed=2))
    optimizer, sink = make(model.parameters()), MemorySink()
    expected: dict[tuple[int, str], dict[str, float]] = {}
    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for step in (1, 2, 3):
            set_grads(model, step)
            updates = observed(model, optimizer.step, kept)
            assert tracker.step == step
            for name, p in model.items():
                truth = {
                    "weight_rms": rms(p),
                    "update_rms": updates[name],
                    "grad_rms": rms(gauss(*p.shape, seed=1000 * step + "ab".index(name))),
                }
                if momentum is not None:
                    truth["momentum_rms"] = rms(optimizer.state[p][momentum])
                expected[step, name] = {**truth, "update_lr": 0.1}
    found = rows(sink)
    assert set(found) == set(expected)
    for place, truth in expected.items():
        shown = {name: found[place][name] for name in truth}
        assert shown == pytest.approx(truth, rel=1e-6), place
        assert ("momentum_rms" in found[place]) == (momentum is not None)
    assert sink.run is not None
    assert {p.algorithm for p in sink.run.params} == {type(optimizer).__name__}


# ---------------------------------------------------------------------- several


def two_kinds() -> tuple[nn.ParameterDict, torch.optim.Optimizer, torch.optim.Optimizer]:
    model = named(matrix=gauss(6, 4, seed=1), bias=gauss(4, seed=2))
    muon = torch.optim.Muon([model["matrix"]], lr=0.1, weight_decay=0.5)
    return model, muon, torch.optim.AdamW([model["bias"]], lr=0.01, weight_decay=0.0)


@pytest.mark.parametrize("order", ["as listed", "the other way"])
def test_muon_and_adamw_are_one_row_a_step(order: str) -> None:
    model, muon, adamw = two_kinds()
    sink = MemorySink()
    turn = (muon, adamw) if order == "as listed" else (adamw, muon)
    with Tracker(model, [muon, adamw], schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for step in (1, 2, 3):
            set_grads(model, step)
            before = weights(model)
            for optimizer in turn:
                optimizer.step()
            assert tracker.step == step
            tracker.flush()
            found = rows(sink)
            matrix = model["matrix"].detach().double() - 0.95 * before["matrix"]
            assert found[step, "matrix"]["update_rms"] == pytest.approx(rms(matrix), rel=SHOWN)
            assert found[step, "bias"]["update_rms"] == pytest.approx(
                rms(model["bias"].double() - before["bias"]), rel=SHOWN
            )
            assert (found[step, "matrix"]["update_lr"], found[step, "bias"]["update_lr"]) == (0.1, 0.01)
            assert found[step, "matrix"]["momentum_rms"] == pytest.approx(
                rms(muon.state[model["matrix"]]["momentum_buffer"]), rel=EXACT
            )
            assert found[step, "bias"]["momentum_rms"] == pytest.approx(
                rms(adamw.state[model["bias"]]["exp_avg"]), rel=EXACT
            )
    assert sink.steps == [1, 2, 3]
    assert sink.run is not None
    assert {p.name: p.algorithm for p in sink.run.params} == {"matrix": "Muon", "bias": "AdamW"}


def test_dion2_beside_adamw_shows_updates_of_one_and_keeps_copies_for_the_other() -> None:
    model, _, adamw = two_kinds()
    dion2, sink = Dion2([model["matrix"]], lr=0.1, fraction=0.5, weight_decay=0.0), MemorySink()
    with Tracker(model, [dion2, adamw], schedule=every(1), metrics=["norms", "selection"], sinks=[sink]) as tracker:
        for step in (1, 2):
            set_grads(model, step)
            before = weights(model)
            dion2.step()
            adamw.step()
            tracker.flush()
            for name, p in model.items():
                truth = rms(p.double() - before[name])
                assert rows(sink)[step, name]["update_rms"] == pytest.approx(truth, rel=1e-6)  # W is rounded
    assert [r.step for r in sink.selection] == [1, 2]


def test_one_that_steps_twice_as_often_makes_the_steps() -> None:
    """A A B A A B: four steps, in the second and fourth of which B takes part."""
    model, a, b = two_kinds()
    sink, seen = MemorySink(), {}
    with Tracker(model, [a, b], schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for step in (1, 2, 3, 4):
            set_grads(model, step)
            before = weights(model)
            for optimizer in (a, b) if step % 2 == 0 else (a,):
                optimizer.step()
            seen[step] = {n: rms(p.double() - (0.95 if n == "matrix" else 1.0) * before[n]) for n, p in model.items()}
    assert tracker.step == 4
    assert sink.steps == [1, 2, 3, 4]
    found = rows(sink)
    for step in seen:
        assert found[step, "matrix"]["update_rms"] == pytest.approx(seen[step]["matrix"], rel=SHOWN)
        bias = found.get((step, "bias"), {})
        if step % 2:
            assert not {"update_rms", "grad_rms"} & set(bias)
        else:
            assert bias["update_rms"] == pytest.approx(seen[step]["bias"], rel=SHOWN)


def test_one_that_raises_once_keeps_the_numbers_of_the_steps() -> None:
    model = named(matrix=gauss(6, 4, seed=1), bias=gauss(4, seed=2))
    first, second = torch.optim.SGD([model["matrix"]], lr=0.1), torch.optim.SGD([model["bias"]], lr=0.1)
    sink, right = MemorySink(), {}

    def broken() -> float:
        raise RuntimeError("the data ran out")

    with Tracker(model, [first, second], schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for step in (1, 2, 3, 4):
            set_grads(model, step)
            first.step()
            if step == 2:
                with pytest.raises(RuntimeError, match="the data ran out"):
                    second.step(broken)
            else:
                second.step()
            right[step] = 0.1 * rms(model["matrix"].grad)
        assert tracker.step == 4
    assert sink.steps == [1, 2, 3, 4]
    for step, truth in right.items():
        assert sink.value(step, "matrix", "update_rms") == pytest.approx(truth, rel=1e-6)
    assert "update_rms" not in rows(sink).get((2, "bias"), {})
    assert sink.value(3, "bias", "update_rms") == pytest.approx(0.1 * rms(gauss(4, seed=3001)), rel=1e-6)


@pytest.mark.parametrize("others_step", [False, True])
def test_the_first_one_raises_once(others_step: bool) -> None:
    """Whether the loop gives the step up or goes on with the second optimizer: later steps are as they should be."""
    model = named(matrix=gauss(6, 4, seed=1), bias=gauss(4, seed=2))
    first, second = torch.optim.SGD([model["matrix"]], lr=0.1), torch.optim.SGD([model["bias"]], lr=0.1)
    sink = MemorySink()

    def broken() -> float:
        raise RuntimeError("the data ran out")

    taken = 0
    with Tracker(model, [first, second], schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for turn in (1, 2, 3, 4):
            set_grads(model, turn)
            if turn == 2:
                with pytest.raises(RuntimeError, match="the data ran out"):
                    first.step(broken)
            else:
                first.step()
            if turn != 2 or others_step:
                second.step()
                taken += 1
        assert tracker.step == taken
    last = rows(sink)
    for i, name in enumerate(("matrix", "bias")):
        truth = 0.1 * rms(gauss(*model[name].shape, seed=4000 + i))
        assert last[taken, name]["update_rms"] == pytest.approx(truth, rel=1e-6)


def test_gradients_are_accumulated_for_several_and_measured_once() -> None:
    model, muon, adamw = two_kinds()
    sink = MemorySink()
    with Tracker(model, [muon, adamw], schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for micro in range(3):
            (model["matrix"] * gauss(6, 4, seed=micro)).sum().backward()
            (model["bias"] * gauss(4, seed=10 + micro)).sum().backward()
            assert tracker.step == 0
        muon.step()
        adamw.step()
    whole = {
        "matrix": sum((gauss(6, 4, seed=i).double() for i in range(3)), torch.zeros(6, 4, dtype=torch.float64)),
        "bias": sum((gauss(4, seed=10 + i).double() for i in range(3)), torch.zeros(4, dtype=torch.float64)),
    }
    assert sink.steps == [1]
    for name, truth in whole.items():
        assert sink.value(1, name, "grad_rms") == pytest.approx(rms(truth), rel=1e-6)


def test_closures_of_several() -> None:
    model, muon, adamw = two_kinds()
    sink = MemorySink()

    def closure() -> Tensor:
        set_grads(model, 7)
        return torch.tensor(2.5)

    with Tracker(model, [muon, adamw], schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        assert float(muon.step(closure)) == 2.5  # type: ignore[arg-type]
        assert float(adamw.step(closure=closure)) == 2.5  # type: ignore[arg-type]
        assert tracker.step == 1
    assert sink.value(1, "matrix", "grad_rms") == pytest.approx(rms(gauss(6, 4, seed=7000)), rel=SHOWN)
    assert sink.value(1, "bias", "grad_rms") == pytest.approx(rms(gauss(4, seed=7001)), rel=SHOWN)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda a, b, m: [], ValueError, "at least one optimizer, got an empty list"),
        (lambda a, b, m: [a, a], ValueError, "listed twice"),
        (lambda a, b, m: [a, torch.optim.SGD([m["matrix"]], lr=0.1)], ValueError, "stepped by two of the optimizers"),
        (lambda a, b, m: [a, "adam"], TypeError, "got str"),
        (lambda a, b, m: "adam", TypeError, "got str"),
        (lambda a, b, m: None, TypeError, "got NoneType"),
        (lambda a, b, m: [a, torch.optim.SGD([nn.Parameter(gauss(9))], lr=0.1)], ValueError, "the model does not have"),
    ],
)
def test_lists_that_are_refused(make: Any, error: type[Exception], message: str) -> None:
    model, a, b = two_kinds()
    with pytest.raises(error, match=message):
        Tracker(model, make(a, b, model))
    assert not a._optimizer_step_pre_hooks
