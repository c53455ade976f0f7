"""Scion and Dion2 as torch optimizers: construction, options, groups, closures and schedulers."""

import copy
from typing import Any

import pytest
import torch
from small_training import EXACT, Make, assert_same, both, dion2, loss_of, one_param, scion, small_model, train
from torch import Tensor, nn

from scion_telemetry.optim import Dion2, Scion, group_params


@both
def test_state_is_complete_before_the_first_step_and_its_keys_never_change(make: Make) -> None:
    model = small_model()
    dead = nn.Parameter(torch.ones(3, 3))
    optimizer = make([*group_params(model), {"params": [("dead", dead)]}])
    keys = [sorted(optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]]
    assert all(keys)
    before = optimizer.state_dict()
    train(model, optimizer, range(2))
    assert [sorted(optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]] == keys
    assert optimizer.state_dict()["state"].keys() == before["state"].keys()


@both
def test_a_parameter_without_gradient_is_left_alone_decay_included(make: Make) -> None:
    model, dead = small_model(), nn.Parameter(torch.ones(3, 3))
    optimizer = make(
        [
            *group_params(model),
            {"params": [("dead", dead)], "weight_decay": 0.5} if make is dion2 else {"params": [("dead", dead)]},
        ]
    )
    train(model, optimizer, range(5))
    assert_same(dead.detach(), torch.ones(3, 3))
    assert not any(s.any() for s in optimizer.state[dead].values())
    optimizer.zero_grad()
    optimizer.step()  # nobody has a gradient


@both
def test_a_gradient_that_comes_and_goes(make: Make) -> None:
    """Missing gradients are skipped, not taken for zeros: the momentum neither decays nor moves the weight."""
    param = one_param()
    optimizer = make([param])
    optimizer.step()
    kept, state = param.detach().clone(), copy.deepcopy(dict(optimizer.state[param]))
    param.grad = None
    optimizer.step()
    assert_same(param.detach(), kept)
    assert_same(dict(optimizer.state[param]), state)


@both
def test_duplicates_are_refused(make: Make) -> None:
    """A tied weight listed under both of its names must not be stepped twice."""
    tied = nn.Parameter(torch.ones(10, 4))
    with pytest.raises(ValueError, match=r"'head' is the same tensor as 'embedding'.*once"):
        make([("embedding", tied), ("head", tied)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        make([{"params": [tied]}, {"params": [tied]}])


@both
@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.ones(2, 2, dtype=torch.complex64), "'w' has dtype torch.complex64.*dense real floating-point"),
        (torch.ones(2, 2).to_sparse(), "'w' has dtype .* layout torch.sparse_coo.*dense"),
    ],
)
def test_parameters_that_cannot_be_stepped_are_refused_by_name(make: Make, param: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([("w", nn.Parameter(param))])


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4, 5)])
def test_dion2_refuses_what_is_no_matrix_and_says_what_to_do(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'w': Dion2 steps matrices.*algorithm='adamw'"):
        Dion2([("w", nn.Parameter(torch.ones(shape)))])


BAD: list[tuple[Make, dict[str, Any], str]] = [
    (scion, {"lr": -1}, "lr must be a number >= 0, got -1"),
    (scion, {"lr": "0.1"}, "lr must be a number >= 0, got '0.1'"),
    (scion, {"lr": float("nan")}, "lr must be a number >= 0, got nan"),
    (scion, {"momentum": 0}, r"momentum must be in \(0, 1\], got 0"),
    (scion, {"momentum": 1.5}, "momentum must be"),
    (scion, {"scale": 0}, "scale must be a number > 0"),
    (scion, {"unconstrained": 1}, "unconstrained must be True or False, got 1"),
    (scion, {"norm": "Muon"}, "unknown norm 'Muon'"),
    (dion2, {"ef_decay": 1.1}, r"ef_decay must be in \[0, 1\]"),
    (dion2, {"weight_decay": -0.1}, "weight_decay must be"),
    (dion2, {"epsilon": 0}, "epsilon must be a number > 0"),
    (dion2, {"adjust_lr": "rms"}, "adjust_lr must be 'spectral_norm' or 'rms_norm' or None, got 'rms'"),
    (dion2, {"selection_scope": "all"}, "selection_scope must be 'local' or 'global'"),
    (dion2, {"newton_schulz_func": "ns"}, "unknown orthogonaliser 'ns'"),
]


@pytest.mark.parametrize(("make", "options", "message"), BAD)
def test_options_out_of_range_are_refused_at_construction(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(2, 2))], **options)


@both
def test_a_group_that_is_refused_leaves_no_trace(make: Make) -> None:
    optimizer = make([one_param()])
    before = copy.deepcopy(optimizer.state_dict())
    new = nn.Parameter(torch.ones(3, 3))
    for group in [
        {"params": [new], "fractoin": 0.5},
        {"params": [new], "algorithm": "sgd"},
        {"params": [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]},
        {"params": [new, new]},
        {"params": [new], ("newton_schulz_func" if make is dion2 else "norm_kwargs"): 3},
    ]:
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(group)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert len(optimizer.state) == 1
    optimizer.add_param_group({"params": [new]})
    new.grad = torch.ones(3, 3)
    optimizer.step()
    assert (new != 1).any()


@both
def test_frozen_parameters_and_empty_groups(make: Make) -> None:
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    trained = one_param()
    optimizer = make([{"params": [frozen]}, {"params": []}, {"params": [frozen.clone().detach(), trained]}])
    kept = trained.detach().clone()
    optimizer.step()
    assert_same(frozen, torch.ones(2, 2))
    assert (trained != kept).any()


@both
def test_options_of_the_caller_survive(make: Make) -> None:
    a, b = one_param(), one_param()
    extra = [{"weight_decay": 0.1}, {"weight_decay": 0.0}] if make is dion2 else [{"scale": 2.0}, {"scale": 1.0}]
    groups = [{"params": [a], "lr": 1e-3, **extra[0]}, {"params": [b], "lr": 1e-4, **extra[1]}]
    optimizer = make(groups, lr=5e-4)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 1e-4]
    key = next(iter(extra[0]))
    assert [g[key] for g in optimizer.param_groups] == [extra[0][key], extra[1][key]]
    assert groups[0].keys() == {"params", "lr", key}  # the caller's dictionaries are not written to


def test_groups_do_not_share_their_dictionaries_nor_the_options_of_another_norm() -> None:
    one, two = Scion([one_param()]), Scion([{"params": [one_param()]}, {"params": [one_param()]}])
    one.param_groups[0]["norm_kwargs"]["steps"] = 9
    two.param_groups[0]["norm_kwargs"]["steps"] = 7
    assert two.param_groups[1]["norm_kwargs"] == {}
    assert Scion([one_param()]).param_groups[0]["norm_kwargs"] == {}
    mixed = Scion([{"params": [one_param()]}, {"params": [one_param()], "norm": "Sign"}], norm_kwargs={"steps": 9})
    assert [g["norm_kwargs"] for g in mixed.param_groups] == [{"steps": 9}, {}]


@both
def test_closures_are_called_once_with_gradients(make: Make) -> None:
    model = small_model()
    optimizer = make(group_params(model))
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss.item()

    first = loss_of(model).item()
    assert optimizer.step(closure) == first
    assert optimizer.step(closure=closure) != first
    assert optimizer.step() is None
    assert calls == [True, True]


@both
def test_schedulers_reach_every_step(make: Make) -> None:
    param = one_param()
    plain = nn.Parameter(param.detach().clone())
    scheduled, stepped = make([param], lr=0.1), make([plain], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda t: 0.1**t)
    for t in range(3):
        scheduled.step()
        scheduler.step()
        stepped.param_groups[0]["lr"] = 0.1 * 0.1**t
        plain.grad = None if param.grad is None else param.grad.clone()
        stepped.step()
    torch.testing.assert_close(param, plain)


@both
def test_reduce_on_plateau_and_resumed_schedulers(make: Make) -> None:
    optimizer = make([one_param()], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 2.0, 3.0):
        optimizer.step()
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    resumed = make([{"params": [one_param()], "lr": 0.05, "initial_lr": 0.1}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(resumed, lambda t: 1 / (1 + t), last_epoch=0)
    assert scheduler.get_last_lr() == pytest.approx([0.05])


@both
def test_a_group_added_later_is_stepped_from_then_on(make: Make) -> None:
    model, late = small_model(), one_param()
    optimizer = make(group_params(model))
    train(model, optimizer, range(2))
    before = late.detach().clone()
    optimizer.add_param_group({"params": [("late", late)], "lr": 0.3})
    late.grad = torch.ones_like(late)
    optimizer.step()
    reference = nn.Parameter(before.clone())
    reference.grad = torch.ones_like(late)
    make([{"params": [reference], "lr": 0.3}]).step()
    assert_same(late, reference)


def test_group_values_may_change_between_steps() -> None:
    """Fraction, momentum, scale and orthogonaliser are read at every step."""
    param = one_param((8, 8))
    optimizer = Dion2([param], fraction=0.25, weight_decay=0.0)
    moved: list[int] = []
    for fraction in (0.25, 1, 1.0, 0.5):
        optimizer.param_groups[0]["fraction"] = fraction
        before = param.detach().clone()
        optimizer.step()
        moved.append(int((param != before).any(-1).sum()))
    assert moved == [2, 8, 8, 4]
    optimizer.param_groups[0]["fraction"] = 2
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 2"):
        optimizer.step()

    scion = Scion([param], lr=0.1, momentum=1.0, unconstrained=True, norm_kwargs={"orthogonalizer": EXACT})
    assert not scion.state[param]
    scion.step()
    scion.param_groups[0].update(momentum=0.5, scale=4.0)
    before = param.detach().clone()
    scion.step()
    assert_same(scion.state[param]["momentum_buffer"], 0.5 * param.grad)
    assert torch.linalg.matrix_norm(param.detach() - before, 2).item() == pytest.approx(0.4, rel=1e-4)


def test_the_integer_one_is_the_fraction_one() -> None:
    params = [one_param((6, 9)) for _ in range(2)]
    for p, fraction in zip(params, (1, 1.0), strict=True):
        Dion2([p], fraction=fraction).step()
    assert_same(params[0], params[1])
    tiny = one_param((6, 9))
    before = tiny.detach().clone()
    Dion2([tiny], fraction=1e-9, weight_decay=0.0).step()
    assert (tiny != before).any(-1).sum() == 1


@both
def test_lr_zero_moves_nothing(make: Make) -> None:
    param = one_param()
    before = param.detach().clone()
    make([param], lr=0.0).step()
    assert_same(param.detach(), before)


def test_constrained_scion_stays_in_its_ball() -> None:
    param = one_param((6, 6))
    optimizer = Scion([param], lr=0.3, scale=2.0, norm_kwargs={"orthogonalizer": EXACT})
    for t in range(40):
        param.grad = torch.randn(6, 6, generator=torch.Generator().manual_seed(t))
        optimizer.step()
    assert torch.linalg.matrix_norm(param.detach(), 2) <= 2.0 + 1e-4


def test_experts_are_stepped_one_by_one_by_both() -> None:
    """A stack of experts is a stack of matrices, for Scion's Auto too, and not one convolution."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)))

    for make in (
        lambda p: Scion(p, norm_kwargs={"orthogonalizer": EXACT}),
        lambda p: Dion2(p, newton_schulz_func=EXACT),
    ):
        model = Experts()
        gradient = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
        singles = [nn.Parameter(w.detach().clone()) for w in model.w1]
        model.w1.grad = gradient.clone()
        for p, g in zip(singles, gradient, strict=True):
            p.grad = g.clone()
        make(group_params(model)).step()
        make(singles).step()
        torch.testing.assert_close(model.w1.detach(), torch.stack([p.detach() for p in singles]), atol=1e-6, rtol=0)


@both
def test_parameters_on_several_kinds_of_device_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"several device types \['cpu', 'meta'\]"):
        make([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2, device="meta"))])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1),
        ("lr", float("nan")),
        ("epsilon", -1),
        ("ef_decay", 5),
        ("select_dim", "x"),
        ("selection_scope", "x"),
        ("num_heads", 2),
        ("num_heads", 3),
    ],
)
def test_group_values_that_become_wrong_are_refused_before_anything_moves(option: str, value: Any) -> None:
    param = one_param((8, 4))
    optimizer = Dion2([param])
    optimizer.step()
    optimizer.param_groups[0][option] = value
    weight, momentum = param.detach().clone(), optimizer.state[param]["momentum"].clone()
    with pytest.raises(ValueError, match=f"{option}.*got {value!r}"):
        optimizer.step()
    assert_same(param.detach(), weight)
    assert_same(optimizer.state[param]["momentum"], momentum)


@both
def test_a_parameter_that_the_optimizer_was_not_given_is_refused(make: Make) -> None:
    optimizer = make([one_param()])
    optimizer.param_groups[0]["params"][0] = one_param((5, 3))
    with pytest.raises(ValueError, match=r"shape \(5, 3\) was put into a group.*use add_param_group"):
        optimizer.step()
