"""What a torch optimizer owes to torch's tools: scalers, schedulers, hooks, compiled models, groups that change."""

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import EXACT, Make, assert_same, both, loss_of, one_param, small_model, train
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from scion_telemetry.optim import Dion2, Dion3, Scion, ScionLight, group_params

pytestmark = pytest.mark.timeout(60)

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "scion": lambda p: Scion(p, lr=0.1, momentum=0.3, norm_kwargs={"orthogonalizer": EXACT}),
    "scion_light": lambda p: ScionLight(p, lr=0.1, momentum=0.3, norm_kwargs={"orthogonalizer": EXACT}),
    "dion2": lambda p: Dion2(p, lr=0.1, fraction=0.5, newton_schulz_func=EXACT),
    "dion3": lambda p: Dion3(p, lr=0.1, fraction=0.5, newton_schulz_func=EXACT),
    "adamw": lambda p: Dion2([{"params": p, "algorithm": "adamw"}]),
    "lion": lambda p: Dion2([{"params": p, "algorithm": "lion"}]),
}
every = pytest.mark.parametrize("rule", RULES)


def _state(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict()["state"])


@pytest.mark.parametrize("rule", [r for r in RULES if r != "scion_light"])
def test_a_gradient_scaler_skips_a_step_with_an_infinite_gradient_and_is_exact_else(rule: str) -> None:
    scaled, plain = one_param(), one_param()
    optimizer, reference = RULES[rule]([scaled]), RULES[rule]([plain])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        before, state = scaled.detach().clone(), _state(optimizer)
        optimizer.zero_grad()
        scaler.scale((scaled * gradient).sum() * (torch.inf if step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert_same(scaled.detach(), before)
            assert_same(_state(optimizer), state)
            continue
        plain.grad = gradient.clone()
        reference.step()
        assert_same(scaled, plain)
    assert scaler.get_scale() == 2.0**9


@every
def test_accumulated_and_clipped_gradients_are_what_is_stepped_with(rule: str) -> None:
    param, reference = one_param(), one_param()
    gradients = [torch.randn(4, 6, generator=torch.Generator().manual_seed(s)) for s in range(2)]
    param.grad = None
    for g in gradients:
        (param * g).sum().backward()
    norm = nn.utils.clip_grad_norm_([param], 0.5)
    reference.grad = (gradients[0] + gradients[1]) * (0.5 / (norm + 1e-6))
    for p in (param, reference):
        RULES[rule]([p]).step()
    torch.testing.assert_close(param, reference, atol=1e-6, rtol=0)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.5, total_iters=2),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.25, total_iters=3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=8),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.5),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, total_iters=2), schedulers.ExponentialLR(o, 0.9)]
    ),
}


def _scion_sign(param: Tensor) -> Scion:
    return Scion([param], lr=0.1, norm="Sign", unconstrained=True)


def _dion2_whole(param: Tensor) -> Dion2:
    return Dion2([param], lr=0.1, fraction=1.0, ef_decay=0.0, weight_decay=0.0, newton_schulz_func=EXACT)


@pytest.mark.parametrize("make", [_scion_sign, _dion2_whole])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_sets_the_length_of_every_step(name: str, make: Any) -> None:
    """With a constant gradient and no memory every step is the learning rate times the first direction."""
    param, simple = one_param(dtype=torch.float64), nn.Parameter(torch.zeros(1))
    simple.grad = torch.zeros(1)
    unit = one_param(dtype=torch.float64)
    start = unit.detach().clone()
    once = make(unit)
    once.param_groups[0]["lr"] = 1.0
    once.step()
    direction = start - unit.detach()
    optimizer, sgd = make(param), torch.optim.SGD([simple], lr=0.1)
    ours, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](sgd)
    rates = []
    for _ in range(6):
        before = param.detach().clone()
        optimizer.step()
        sgd.step()
        rates.append(sgd.param_groups[0]["lr"])
        torch.testing.assert_close(before - param.detach(), rates[-1] * direction, atol=1e-6, rtol=1e-5)
        ours.step()
        theirs.step()
    assert len(set(rates)) > 1


@pytest.mark.parametrize("rule", ["scion", "scion_light", "dion2", "dion3"])
def test_cycling_the_momentum_is_refused_by_torch(rule: str) -> None:
    """Scion's momentum is one minus β: a cycle would run the wrong way."""
    for cycle in (
        lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=8),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1),
    ):
        optimizer = RULES[rule]([one_param()])
        before = dict(optimizer.param_groups[0])
        with pytest.raises(ValueError, match="optimizer must support momentum"):
            cycle(optimizer)
        assert {k: optimizer.param_groups[0][k] for k in ("momentum", "betas", "ef_decay") if k in before} == {
            k: before[k] for k in ("momentum", "betas", "ef_decay") if k in before
        }


def test_a_fraction_that_is_scheduled_every_step() -> None:
    param = one_param((10, 12))
    optimizer = Dion2([param], weight_decay=0.0)
    counts = []
    for step in range(10):
        optimizer.param_groups[0]["fraction"] = (step + 1) / 10
        before = param.detach().clone()
        optimizer.step()
        counts.append(int((param != before).any(-1).sum()))
    assert counts == list(range(1, 11))


COMPILED = """
import torch
from small_training import EXACT, loss_of, small_model
from scion_telemetry.optim import Dion2, Scion, group_params
from torch._dynamo.testing import CompileCounter

for make in (
    lambda m: Scion(group_params(m), lr=0.1, momentum=0.3, norm_kwargs={"orthogonalizer": EXACT}),
    lambda m: Dion2(group_params(m), lr=0.1, fraction=0.5, newton_schulz_func=EXACT),
):
    found = []
    for compiled in (False, True):
        counter, model = CompileCounter(), small_model()
        run = torch.compile(model, backend=counter) if compiled else model
        optimizer = make(run)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(run, step).backward()
            optimizer.step()
        assert counter.frame_count == int(compiled), counter.frame_count
        found.append([p.detach() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
print("equal")
"""


def test_a_compiled_model_is_stepped_alike_and_compiled_once() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([os.path.dirname(here), here])
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "0", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], check=False, env=environment, capture_output=True, text=True, timeout=50
    )
    assert done.stdout.split() == ["equal"], done.stderr


@both
def test_hooks_of_steps_and_checkpoints(make: Make) -> None:
    param = one_param()
    optimizer = make([param])
    seen: list[str] = []
    before = param.detach().clone()

    def pre(*_: Any) -> None:
        assert_same(param.detach(), before)
        seen.append("pre")

    def post(*_: Any) -> None:
        assert (param != before).any()
        seen.append("post")

    handles = [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["pre", "post"]

    def other_lr(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**g, "lr": 0.875} for g in state["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(other_lr)
    optimizer.register_state_dict_post_hook(lambda _, state: state.update(note="kept"))
    saved = optimizer.state_dict()
    assert saved["note"] == "kept"
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.875


@every
def test_gradients_that_are_zeroed_in_place_are_zeros_and_make_no_nan(rule: str) -> None:
    zeroed, explicit = one_param(), one_param()
    first, second = RULES[rule]([zeroed]), RULES[rule]([explicit])
    for optimizer in (first, second):
        optimizer.step()
    for _ in range(3):
        first.zero_grad(set_to_none=False)
        explicit.grad = torch.zeros_like(explicit)
        first.step()
        second.step()
        assert zeroed.isfinite().all()
        assert_same(zeroed, explicit)
    fresh = one_param()
    fresh.grad = torch.zeros_like(fresh)
    optimizer = RULES[rule]([{"params": [fresh], "lr": 0.5}] if rule not in ("adamw", "lion") else [fresh])
    optimizer.step()
    assert fresh.isfinite().all()


def _storages(tensors: list[Tensor]) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in tensors if t.numel()]


@every
def test_nothing_of_the_caller_is_shared(rule: str) -> None:
    params = [one_param(), one_param((3, 3))]
    optimizer = RULES[rule](params)
    for _ in range(2):
        optimizer.step()
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        grads = [p.grad for p in params if p.grad is not None]
        storages = _storages([*params, *grads, *state])
        assert len(set(storages)) == len(storages)
        before = _state(optimizer) if rule != "scion_light" else None
        for p in params:
            assert p.grad is not None
            p.grad.mul_(2.0)
        if before is not None:
            assert_same(_state(optimizer), before)


def test_options_given_in_a_group_are_copied() -> None:
    kwargs: dict[str, Any] = {"steps": 5}
    group = {"params": [one_param()], "norm_kwargs": kwargs}
    optimizer = Scion([group])
    kwargs["steps"] = 1
    saved = optimizer.state_dict()
    saved["param_groups"][0]["norm_kwargs"]["steps"] = 2
    assert optimizer.param_groups[0]["norm_kwargs"] == {"steps": 5}


@both
def test_memory_does_not_grow_over_50_steps(make: Make) -> None:
    model = small_model()
    optimizer = make(group_params(model))

    def live() -> tuple[int, int, int]:
        gc.collect()
        state = [v for s in optimizer.state.values() for v in s.values()]
        tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        return len(state), sum(v.numel() * v.element_size() for v in state), len(tensors)

    train(model, optimizer, range(2))
    first = live()
    train(model, optimizer, range(50))
    states, size, tensors = live()
    assert (states, size) == first[:2]
    assert tensors <= first[2]  # what other tests left behind may go meanwhile


@both
def test_a_loss_that_is_trained_under_all_of_it_falls(make: Make) -> None:
    model = small_model()
    optimizer = make(group_params(model), lr=0.03)
    schedule = schedulers.OneCycleLR(optimizer, 0.03, total_steps=60, cycle_momentum=False)
    start = loss_of(model).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert loss_of(model).item() < start / 2
