"""What a tracker must not do: change training, or stay behind."""

from collections.abc import Callable, Mapping

import pytest
import torch
from parity import Net, NoSink, backward
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2, Scion, group_params
from scion_telemetry.optim.layout import local
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Dion2": lambda m: Dion2(group_params(m), lr=0.02, fraction=0.3),
    "Scion": lambda m: Scion(group_params(m), lr=0.02, momentum=0.1),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


# ---------------------------------------------------------------------- training is the same


def trained(rank: int, world: int, name: str, tracked: bool) -> list[Tensor]:
    model = Net()
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = OPTIMIZERS[name](model)
    state = torch.get_rng_state()
    tracker = Tracker(model, optimizer, schedule=every(2), metrics="full", sinks=[NoSink()]) if tracked else None
    for step in range(1, 6):
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()
    if tracker is not None:
        tracker.close()
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    found = [local(p).detach().clone() for p in model.parameters()]
    found += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
    states = [optimizer.state[p] for p in model.parameters()]
    return found + [local(v).clone() for state in states for v in state.values() if isinstance(v, Tensor)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_bit_identical(name: str) -> None:
    for a, b in zip(trained(0, 1, name, True), trained(0, 1, name, False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_bit_identical_on_two_ranks(name: str) -> None:
    both = run_forked(lambda r, w: [trained(r, w, name, t) for t in (True, False)], 2, timeout=30)
    for with_tracker, without in both:
        for a, b in zip(with_tracker, without, strict=True):
            assert torch.equal(a, b)


# ---------------------------------------------------------------------- attach, detach


def hooks(optimizer: torch.optim.Optimizer) -> int:
    own = len(getattr(optimizer, "_observers", ()))
    return own + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_are_gone_after_close_detach_and_an_exception(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    with Tracker(model, optimizer):
        assert hooks(optimizer) >= 2
    assert hooks(optimizer) == 0
    tracker = Tracker(model, optimizer)
    tracker.detach()
    tracker.detach()
    assert hooks(optimizer) == 0
    tracker.close()
    tracker.close()
    with pytest.raises(KeyError, match="the user's"), Tracker(model, optimizer):
        raise KeyError("the user's")
    assert hooks(optimizer) == 0


def test_two_trackers_on_one_optimizer_are_two_trackers() -> None:
    model = Net()
    optimizer, sinks = OPTIMIZERS["Dion2"](model), (MemorySink(), MemorySink())
    with (
        Tracker(model, optimizer, schedule=every(1), sinks=[sinks[0]]),
        Tracker(model, optimizer, schedule=every(2, first=False), metrics=["norms", "selection"], sinks=[sinks[1]]),
    ):
        for step in range(1, 5):
            backward(model, step)
            optimizer.step()
    assert sinks[0].steps == [1, 2, 3, 4]
    assert sinks[1].steps == [2, 4]
    assert sinks[0].value(4, "up", "weight_rms") == sinks[1].value(4, "up", "weight_rms")
    one, two = (sink.selection[-1] for sink in sinks)
    assert (one.step, one.param) == (two.step, two.param)
    assert (one.values["window"], two.values["window"]) == (1, 2)
    counted = {"coverage", "starved", "always", "window"}  # over the steps since each one's own last flush

    def of_the_step(values: Mapping[str, float]) -> dict[str, float]:
        of_window = {n for n in values if n in counted or n.startswith("frequency")}
        return {
            n: v for n, v in values.items() if n not in of_window and not n.startswith("grad_") and n != "ef_growth"
        }

    assert of_the_step(one.values) == of_the_step(two.values)


def test_attached_late_and_detached_early() -> None:
    model = Net()
    optimizer, sink = OPTIMIZERS["AdamW"](model), MemorySink()
    steps = iter(range(1, 100))

    def step() -> None:
        backward(model, next(steps))
        optimizer.step()

    step()
    tracker = Tracker(model, optimizer, schedule=every(1), sinks=[sink], start_step=1)
    step()
    step()
    tracker.detach()
    step()
    tracker.close()
    assert sink.steps == [2, 3]
    assert sink.run is not None
    assert sink.run.start_step == 1
