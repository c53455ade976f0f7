"""Steps that come through something else: a wrapper, a gradient scaler, a compiler, a copy."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tracked import gauss, named, rms, rows, set_grads, weights

from scion_telemetry import Tracker, every, load_run
from scion_telemetry.optim import Dion2
from scion_telemetry.sinks import CsvSink, MemorySink

# ---------------------------------------------------------------------- a wrapper


class Accelerated(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate has it: its own hooks are never called."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.synced = True

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure) if self.synced else None


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrapper_is_seen_through(depth: int) -> None:
    model, sink = named(w=gauss(6, 4)), MemorySink()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer: Any = inner
    for _ in range(depth):
        outer = Accelerated(outer)
    with Tracker(model, outer, schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for turn in range(1, 5):
            set_grads(model, turn)
            outer.synced = turn % 2 == 0
            outer.step()
            assert tracker.step == turn // 2
        assert tracker.step == 2
    assert sink.steps == [1, 2]
    assert sink.value(2, "w", "grad_rms") == pytest.approx(rms(gauss(6, 4, seed=4000)), rel=1e-9)
    assert sink.value(2, "w", "momentum_rms") == pytest.approx(
        rms(inner.state[model["w"]]["momentum_buffer"]), rel=1e-9
    )
    assert not inner._optimizer_step_pre_hooks


# ---------------------------------------------------------------------- a gradient scaler

SCALED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Dion2": lambda p: Dion2(p, lr=0.1, fraction=0.5, weight_decay=0.0),
}
FACTOR = 1024.0


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled first"])
@pytest.mark.parametrize("name", SCALED)
def test_a_scaler_leaves_true_gradients_and_skipped_steps_count_for_nothing(name: str, unscale: bool) -> None:
    """Four turns, the second of which meets an infinite gradient: three steps, and gradients as without a scaler."""
    model, sink = named(w=gauss(6, 4)), MemorySink()
    optimizer, scaler = SCALED[name](model.parameters()), torch.amp.GradScaler("cpu", init_scale=FACTOR)
    kept = 0.95 if name.startswith("AdamW") else 1.0
    truth = []
    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for turn in range(4):
            optimizer.zero_grad()
            grad = gauss(6, 4, seed=turn)
            if turn == 1:
                grad[2, 1] = torch.inf
            scaler.scale((model["w"] * grad).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            before = weights(model)["w"]
            scaler.step(optimizer)
            scaler.update()
            if turn == 1:
                assert torch.equal(model["w"].double(), before), "the step was not skipped"
                assert tracker.step == 1
            else:
                truth.append((rms(grad), rms(model["w"].double() - kept * before)))
    assert sink.steps == [1, 2, 3]
    for step, (grad_rms, update_rms) in enumerate(truth, 1):
        assert sink.value(step, "w", "grad_rms") == pytest.approx(grad_rms, rel=1e-6)
        assert sink.value(step, "w", "update_rms") == pytest.approx(update_rms, rel=1e-6)
        assert sink.value(step, "w", "weight_nonfinite") == 0


def test_a_scaler_that_skips_one_of_two_optimizers() -> None:
    model, sink = named(a=gauss(6, 4), b=gauss(4)), MemorySink()
    one = torch.optim.AdamW([model["a"]], lr=0.1, fused=True)
    two = torch.optim.SGD([model["b"]], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=FACTOR)
    with Tracker(model, [one, two], schedule=every(1), metrics="norms", sinks=[sink]) as tracker:
        for turn in range(3):
            grads = {"a": gauss(6, 4, seed=turn), "b": gauss(4, seed=10 + turn)}
            if turn == 1:
                grads["a"][0, 0] = torch.inf
            for name, p in model.items():
                p.grad = None
                scaler.scale((p * grads[name]).sum()).backward()
            scaler.step(one)
            scaler.step(two)
            scaler.update()
        assert tracker.step == 3
    found = rows(sink)
    assert sink.value(2, "b", "grad_rms") == pytest.approx(rms(gauss(4, seed=11)), rel=1e-6)
    assert "update_rms" not in found.get((2, "a"), {})
    assert sink.value(3, "a", "grad_rms") == pytest.approx(rms(gauss(6, 4, seed=2)), rel=1e-6)


# ---------------------------------------------------------------------- a compiler


@pytest.mark.parametrize("several", [False, True])
def test_a_compiled_step_method_is_measured(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C95: telemetry at every second of six steps gives three rows, those of a step that is not compiled."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)

    def run(compiled: bool, tracked: bool = True) -> tuple[list[Tensor], MemorySink]:
        torch._dynamo.reset()
        model, sink = named(a=gauss(6, 4), b=gauss(4)), MemorySink()
        if several:
            optimizers = [torch.optim.AdamW([model["a"]], lr=0.1), torch.optim.SGD([model["b"]], lr=0.1, momentum=0.9)]
        else:
            optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1)]
        steps = [torch.compile(o.step, backend="eager") if compiled else o.step for o in optimizers]
        schedule = every(2, first=False)
        tracker = Tracker(model, optimizers, schedule=schedule, metrics="norms", sinks=[sink]) if tracked else None
        for turn in range(1, 7):
            set_grads(model, turn)
            for step in steps:
                step()
        if tracker is not None:
            tracker.close()
        return [p.detach().clone() for p in model.parameters()], sink

    with warnings.catch_warnings(), torch._dynamo.config.patch(disable=False):
        warnings.simplefilter("ignore")  # torch's own
        bare, tracked, plain = run(True, False), run(True), run(False)
    assert tracked[1].steps == plain[1].steps == [2, 4, 6]
    for a, b, c in zip(bare[0], tracked[0], plain[0], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(b, c, atol=1e-4, rtol=0)  # a compiled AdamW rounds otherwise
    for place, values in rows(plain[1]).items():
        assert rows(tracked[1])[place] == pytest.approx(values, rel=1e-4), place


# ---------------------------------------------------------------------- a copy

COPIED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Dion2": lambda p: Dion2(p, lr=0.1, fraction=0.5),
}


def _deep(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model, optimizer))


def _pickled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return pickle.loads(pickle.dumps((model, optimizer)))


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [_deep, _pickled, _saved])
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_steps_alike_and_is_not_tracked(name: str, duplicate: Callable[..., Any], tmp_path: Path) -> None:
    """C84: with a file open, and without a word in it about what the copy does."""
    model = named(w=gauss(6, 4))
    optimizer = COPIED[name](model.parameters())
    with Tracker(model, optimizer, schedule=every(1), sinks=[CsvSink(tmp_path / "run")]) as tracker:
        for step in (1, 2):
            set_grads(model, step)
            optimizer.step()
        twin, twins = duplicate(model, optimizer)
        assert not twins._optimizer_step_pre_hooks
        assert not twins._optimizer_step_post_hooks
        set_grads(twin, 3)
        twins.step()
        tracker.flush()
        assert tracker.step == 2
        written = (tmp_path / "run" / "layers.csv").read_bytes()
        set_grads(model, 3)
        optimizer.step()
        assert torch.equal(model["w"], twin["w"])
    assert (tmp_path / "run" / "layers.csv").read_bytes().startswith(written)
    assert load_run(tmp_path / "run").layers["step"].tolist() == [1, 2, 3]


def test_tracking_a_copy_is_a_run_of_its_own() -> None:
    model, sinks = named(w=gauss(6, 4)), (MemorySink(), MemorySink())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Tracker(model, optimizer, schedule=every(1), metrics="norms", sinks=[sinks[0]]):
        set_grads(model, 1)
        optimizer.step()
        twin, twins = copy.deepcopy((model, optimizer))
        with Tracker(twin, twins, schedule=every(1), metrics="norms", sinks=[sinks[1]], start_step=1):
            set_grads(twin, 2)
            twins.step()
        set_grads(model, 2)
        optimizer.step()
    assert (sinks[0].steps, sinks[1].steps) == ([1, 2], [2])
    assert rows(sinks[1])[2, "w"] == pytest.approx(rows(sinks[0])[2, "w"], rel=1e-12)


# ---------------------------------------------------------------------- attached and detached


def test_attached_twice_for_two_steps_of_four(tmp_path: Path) -> None:
    """C96: each tracker has one row a step; weights are those of a run without; leaving twice is harmless."""

    def run(tracked: bool) -> tuple[Tensor, list[MemorySink]]:
        model, sinks = named(w=gauss(6, 4)), [MemorySink(), MemorySink()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        trackers = [Tracker(model, optimizer, schedule=every(1), sinks=[s]) for s in sinks] if tracked else []
        for step in range(1, 5):
            if step == 3:
                for tracker in trackers:
                    tracker.detach()
            set_grads(model, step)
            optimizer.step()
        for tracker in trackers:
            tracker.detach()
            tracker.close()
            tracker.close()
            assert tracker.step == 2
        assert not optimizer._optimizer_step_pre_hooks
        return model["w"].detach().clone(), sinks

    (bare, _), (tracked, sinks) = run(False), run(True)
    assert torch.equal(bare, tracked)
    assert [s.steps for s in sinks] == [[1, 2], [1, 2]]


def test_detached_in_the_middle_of_a_step_of_several() -> None:
    """The optimizer that stepped is told of at the close; nothing is lost and nothing counted twice."""
    model, sink = named(a=gauss(6, 4), b=gauss(4)), MemorySink()
    one, two = torch.optim.SGD([model["a"]], lr=0.1), torch.optim.SGD([model["b"]], lr=0.1)
    tracker = Tracker(model, [one, two], schedule=every(1), metrics="norms", sinks=[sink])
    set_grads(model, 1)
    one.step()
    tracker.detach()
    two.step()
    tracker.close()
    assert sink.steps == [1]
    assert sink.value(1, "a", "update_rms") == pytest.approx(0.1 * rms(gauss(6, 4, seed=1000)), rel=1e-6)
