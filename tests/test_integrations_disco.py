"""Norms on demand by disco's interface: keys, values against brute force on whole tensors, and what is not measured."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Net, backward, batch, gathered
from test_tracker_cost import counted_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from truth import layer_values

from scion_telemetry.integrations.disco import DEFAULT, NORMS, ArmedNorms
from scion_telemetry.optim import Scion, group_params
from scion_telemetry.optim.groups import clean_name, infer_roles
from scion_telemetry.testing import run_forked

Norms = dict[str, float]
DECAY, LR = 0.3, 0.05
TABLE = {
    "rms_to_rms": "rms_to_rms",
    "l1_to_rms": "l1_to_rms",
    "rms_to_inf": "rms_to_inf",
    "rms_to_l1": "rms_to_inf",
    "supremum": "max_abs",
    "frobenius_norm": "frobenius",
    "average_entry_size": "rms",
    "stable_rank": "stable_rank",
}


class Scaled(Net):
    """With a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.25]))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = super().forward(tokens) * self.gain
        return out


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=DECAY),
    "Scion": lambda m: Scion(group_params(m), lr=LR, unconstrained=True),
}


def trained(
    rank: int, world: int, name: str, norms: tuple[str, ...], armed: tuple[int, ...]
) -> tuple[list[Norms], list[Norms]]:
    """What was returned after each of four steps, and brute force for each."""
    model = Scaled()
    roles = {
        clean_name(n): role for n, p in model.named_parameters() for q, role in infer_roles(model).items() if q is p
    }
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = OPTIMIZERS[name](model)
    found, truth = [], []
    with ArmedNorms(model, optimizer, norms=None if norms == DEFAULT else norms) as watch:
        assert watch.get_norms_at_current_step() == {}
        for step in range(1, 5):
            optimizer.zero_grad()
            backward(model, step, rank)
            before = whole(model)
            if step in armed:
                watch.calculate_norm_at_next_step()
                assert watch.get_norms_at_current_step() == {}
            optimizer.step()
            found.append(watch.get_norms_at_current_step())
            truth.append(brute_force(before, whole(model), roles, norms, 1 - LR * DECAY if name == "AdamW" else 1.0))
    return found, truth


def whole(model: nn.Module) -> dict[str, Tensor]:
    def full(p: Tensor) -> Tensor:
        return gathered(p.to_local(), p).clone() if hasattr(p, "to_local") else p.detach().double().clone()

    return {clean_name(n): full(p) for n, p in model.named_parameters()}


def brute_force(
    before: dict[str, Tensor], after: dict[str, Tensor], roles: dict[str, str], norms: tuple[str, ...], kept: float
) -> Norms:
    expected: Norms = {}
    for name, weight in after.items():
        if weight.numel() == 1:
            expected[f"scalar_param_supremum/{name}"] = abs(float(weight))
            continue
        for prefix, x in (("track_update", weight - kept * before[name]), ("track_param", weight)):
            values = layer_values({"weight": x}, roles[name])
            for norm in norms:
                if (value := values.get(f"weight_{TABLE[norm]}")) is not None:
                    expected[f"{prefix}_{norm}/{name}"] = value
    return expected


def same(found: Norms, truth: Norms, shown: float) -> None:
    """``shown``: how far an update that an optimizer shows may be from the difference of float32 weights."""
    assert set(found) == set(truth)
    for key, expected in truth.items():
        tolerance = shown if key.startswith("track_update") else 1e-7
        if "stable_rank" in key:
            assert expected * (1 - tolerance) <= found[key] <= expected * (1.021 + tolerance), key
        elif "rms_to_rms" in key:
            assert expected * (0.99 - tolerance) <= found[key] <= expected * (1 + tolerance), key
        else:
            assert found[key] == pytest.approx(expected, rel=tolerance), key


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "shown"), [("AdamW", 1e-7), ("Scion", 1e-4)])
@pytest.mark.parametrize("norms", [DEFAULT, tuple(NORMS)], ids=["default", "all"])
def test_armed_steps_say_what_brute_force_says(name: str, shown: float, norms: tuple[str, ...], world: int) -> None:
    def run(rank: int, world: int) -> Any:
        return trained(rank, world, name, norms, armed=(1, 3))

    results = run_forked(run, world, timeout=30) if world > 1 else [run(0, 1)]
    found, truth = results[0]
    same(found[0], truth[0], shown)
    same(found[2], truth[2], shown)
    assert found[1] == found[0], "kept until another step is armed"
    assert found[3] == found[2] != found[0]
    assert len([k for k in found[0] if k.startswith("track_param_rms_to_inf/")]) == 7
    for others, _ in results[1:]:
        assert others == [{}] * 4


def test_the_names_are_those_of_the_table() -> None:
    assert dict(NORMS) == TABLE
    assert DEFAULT == ("rms_to_rms", "l1_to_rms", "rms_to_inf", "supremum")


def costs(rank: int, world: int) -> list[int]:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with ArmedNorms(model, optimizer) as watch:
        for step in range(1, 7):
            optimizer.zero_grad()
            backward(model, step)
            if step == 4:
                watch.calculate_norm_at_next_step()
            with counted_step(optimizer) as counting:
                pass
            found.append(counting.collectives)
    return found


def test_steps_that_are_not_armed_send_nothing() -> None:
    for found in run_forked(costs, 2, timeout=30):
        assert found[:3] + found[4:] == [0] * 5
        assert found[3] > 0


def test_steps_that_are_not_armed_keep_no_copies_of_weights() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies: list[int] = []
    with ArmedNorms(model, optimizer) as watch:
        # Registered after the tracker's own hook, which has made its copies by then.
        optimizer.register_step_pre_hook(lambda *_: copies.append(len(watch._tracker._snapshots)))
        for step in (1, 2, 3):
            optimizer.zero_grad()
            backward(model, step)
            if step == 2:
                watch.calculate_norm_at_next_step()
            optimizer.step()
    assert copies == [0, len(list(model.parameters())), 0]


def test_names_given_when_arming_stay_for_later_steps() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = []
    with ArmedNorms(model, optimizer, norms=["supremum", "rms_to_l1"]) as watch:
        for step, names in enumerate((None, ["rms_to_l1"], None, ["supremum"]), 1):
            optimizer.zero_grad()
            backward(model, step)
            watch.calculate_norm_at_next_step(names)
            optimizer.step()
            kinds.append({key.partition("/")[0] for key in watch.get_norms_at_current_step()})
    scalar = "scalar_param_supremum"
    one, other = ({f"track_{of}_{n}" for of in ("update", "param")} for n in ("rms_to_l1", "supremum"))
    assert kinds == [one | other | {scalar}, one | {scalar}, one | {scalar}, other | {scalar}]


def test_a_step_that_raised_is_not_yet_the_next_one() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = True

    def closure() -> float:
        if broken:
            raise KeyError("data")
        return 0.0

    with ArmedNorms(model, optimizer) as watch:
        backward(model, 1)
        watch.calculate_norm_at_next_step()
        with pytest.raises(KeyError, match="data"):
            optimizer.step(closure)
        assert watch.get_norms_at_current_step() == {}
        broken = False
        optimizer.step(closure)
        assert "track_update_supremum/mid" in watch.get_norms_at_current_step()


def test_weights_without_a_gradient_have_no_update() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ArmedNorms(model, optimizer) as watch:
        backward(model, 1)
        model.mid.weight.grad = None
        watch.calculate_norm_at_next_step()
        optimizer.step()
        found = watch.get_norms_at_current_step()
    assert found["track_param_supremum/mid"] == float(model.mid.weight.detach().abs().max())
    assert "track_update_supremum/mid" not in found
    assert "track_update_supremum/up" in found


def test_several_optimizers_and_a_group_of_its_own() -> None:
    def run(rank: int, world: int) -> Norms:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = Scaled()
        some, others = [model.mid.weight], [p for p in model.parameters() if p is not model.mid.weight]
        optimizers = [torch.optim.SGD(some, lr=0.1), torch.optim.AdamW(others)]
        with ArmedNorms(model, optimizers, process_group=halves[rank // 2]) as watch:
            backward(model, 1 + rank // 2)
            watch.calculate_norm_at_next_step()
            for optimizer in optimizers:
                optimizer.step()
            return watch.get_norms_at_current_step()

    first, second, third, fourth = run_forked(run, 4, timeout=30)
    assert (second, fourth) == ({}, {})
    assert set(first) == set(third)
    assert first["track_update_supremum/mid"] != third["track_update_supremum/mid"]


@pytest.mark.parametrize(
    ("norms", "error", "message"),
    [
        (["condition_number"], ValueError, "'condition_number' is not offered: it needs every singular value"),
        (["supremum", "effective_rank"], ValueError, "'effective_rank' is not offered.* full SVD"),
        (["spectral"], ValueError, "unknown norm 'spectral'; known are rms_to_rms, .*, stable_rank"),
        ("supremum", TypeError, "norms must be a list of names out of rms_to_rms.*, got 'supremum'"),
        ([], TypeError, r"must be a list of names .*, got \[\]"),
        (7, TypeError, "must be a list of names .*, got 7"),
    ],
)
def test_names_that_are_refused(norms: Any, error: type[Exception], message: str) -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        ArmedNorms(model, optimizer, norms=norms)
    with ArmedNorms(model, optimizer) as watch, pytest.raises(error, match=message):
        watch.calculate_norm_at_next_step(norms)


def test_a_norm_that_is_not_measured_says_where_to_name_it() -> None:
    model = Scaled()
    with (
        ArmedNorms(model, torch.optim.SGD(model.parameters(), lr=0.1), norms=["supremum"]) as watch,
        pytest.raises(ValueError, match=r"'l1_to_rms' is not measured here, .* norms=\['supremum', 'l1_to_rms'\]"),
    ):
        watch.calculate_norm_at_next_step(["supremum", "l1_to_rms"])


def test_closed_it_leaves_the_optimizer_alone_and_keeps_what_it_has() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    watch = ArmedNorms(model, optimizer)
    backward(model, 1)
    watch.calculate_norm_at_next_step()
    optimizer.step()
    watch.close()
    watch.close()
    assert [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)] == hooks
    assert watch.get_norms_at_current_step()["track_param_supremum/mid"] > 0
    with pytest.raises(RuntimeError, match="closed"):
        watch.calculate_norm_at_next_step()


def test_after_an_exception_no_rank_waits_for_another() -> None:
    def run(rank: int, world: int) -> str:
        model = Scaled()
        try:
            with ArmedNorms(model, torch.optim.SGD(model.parameters(), lr=0.1)):
                if rank == 1:
                    raise KeyError("data")
                assert batch(1)[0].numel()
                raise KeyError("more data")
        except KeyError as error:
            return str(error)

    assert run_forked(run, 2, timeout=20) == ["'more data'", "'data'"]
