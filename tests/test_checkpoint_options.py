"""State dicts of one process: plain options, functions, missing options and state, and that nothing is shared."""

import copy
import io

import pytest
import torch
from small_training import assert_same, one_param
from torch import Tensor

from scion_telemetry.optim import Dion2, Dion3, Orthogonalizer, Scion, ScionLight


def test_a_checkpoint_older_than_an_option_takes_that_of_the_optimizer() -> None:
    param, other = one_param((6, 4)), one_param((6, 4))
    saver, loader = Dion2([param], fraction=0.5), Dion2([other], fraction=0.25, select_dim="rows", decay_on="selected")
    saver.step()
    saved = copy.deepcopy(saver.state_dict())
    for option in ("select_dim", "decay_on", "momentum_dtype", "num_heads"):
        del saved["param_groups"][0][option]
    loader.load_state_dict(saved)
    group = loader.param_groups[0]
    assert (group["fraction"], group["select_dim"], group["decay_on"]) == (0.5, "rows", "selected")
    loader.step()


def test_the_options_of_another_norm_do_not_come_back_with_a_checkpoint() -> None:
    """torch's tools drop empty dicts: the group's own options are empty, those of the optimizer are not."""
    kwargs = {"orthogonalizer": "svd"}
    optimizer = Scion([{"params": [one_param()]}, {"params": [one_param()], "norm": "Sign"}], norm_kwargs=kwargs)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][1]["norm_kwargs"]
    optimizer.load_state_dict(saved)
    assert [g["norm_kwargs"] for g in optimizer.param_groups] == [kwargs, {}]
    optimizer.step()


def _halve(input: Tensor, /, epsilon: float) -> Tensor:
    return input / 2


def test_functions_are_saved_by_name_and_the_optimizer_keeps_its_own() -> None:
    param, other = one_param(), one_param()
    saver = Dion2([param], newton_schulz_func=_halve)
    buffer = io.BytesIO()
    torch.save(saver.state_dict(), buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert saved["param_groups"][0]["newton_schulz_func"] == "<_halve>"
    loader = Dion2([other], newton_schulz_func=_halve)
    loader.load_state_dict(saved)
    saver.step()
    loader.step()
    assert_same(other, param)
    stranger = Dion2([one_param()])
    with pytest.raises(ValueError, match="unknown orthogonaliser '<_halve>'"):
        stranger.load_state_dict(saved)
    inner = Scion([one_param()], norm_kwargs={"orthogonalizer": _halve})
    assert inner.state_dict()["param_groups"][0]["norm_kwargs"] == {"orthogonalizer": "<_halve>"}
    inner.load_state_dict(inner.state_dict())
    assert inner.param_groups[0]["norm_kwargs"] == {"orthogonalizer": _halve}


@pytest.mark.parametrize("steps", [5, 7])
def test_an_orthogonaliser_is_saved_as_text_and_restored_in_full(steps: int) -> None:
    chosen = Orthogonalizer(name="polar_express_disco", steps=steps, dtype=torch.float64)
    first, second, third = (one_param(dtype=torch.float64) for _ in range(3))
    source, target, third_optimizer = Dion2([first], newton_schulz_func=chosen), Dion2([second]), Dion2([third])
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["newton_schulz_func"] == f"polar_express_disco/{steps}/float64"
    for optimizer in (source, target, third_optimizer):
        optimizer.step()
    assert_same(second, first)
    assert (third != first).any()


@pytest.mark.parametrize("text", ["svd/5", "svd/5/floaty", "svd/x/float32", "svd/5/float32/1", "svd/5/nn"])
def test_a_malformed_orthogonaliser_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"written name or name/steps/dtype .*got 'svd"):
        Dion2([one_param()], newton_schulz_func=text)


def test_a_loaded_optimizer_shares_nothing_with_the_one_that_was_saved() -> None:
    for make in (
        lambda p: Scion([p], momentum=0.1),
        lambda p: ScionLight([p], momentum=0.1),
        lambda p: Dion2([p]),
        lambda p: Dion3([p]),
    ):
        first, second = one_param(), one_param()
        source, target = make(first), make(second)
        source.step()
        saved = source.state_dict()
        kept = copy.deepcopy(saved)
        target.load_state_dict(saved)
        second.grad = torch.ones_like(second)
        target.step()
        assert_same(source.state_dict()["state"], kept["state"])
        assert source.param_groups[0] is not target.param_groups[0]


def test_state_that_a_checkpoint_lacks_starts_anew() -> None:
    """A checkpoint of Dion2 continued with Dion3."""
    first, second = one_param(), one_param()
    source, target = Dion2([first]), Dion3([second])
    source.step()
    saved = source.state_dict()
    saved["param_groups"][0]["select_dim"] = "rows"
    target.load_state_dict(saved)
    assert_same(target.state[second]["momentum"], source.state[first]["momentum"])
    assert_same(target.state[second]["variance"], torch.zeros(4, 1))
    target.step()


def test_scion_light_without_a_gradient_is_left_without_one() -> None:
    used, unused = one_param(), one_param()
    unused.grad = None
    source = ScionLight([used, unused], momentum=0.5)
    source.step()
    first, second = one_param(), one_param()
    target = ScionLight([first, second], momentum=0.5)
    target.load_state_dict(source.state_dict())
    assert_same(first.grad, used.grad)
    assert second.grad is None
