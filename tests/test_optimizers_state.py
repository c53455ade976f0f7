"""Scion and Dion2: copies, checkpoints, dtypes, and that nothing of the user's is modified or aliased."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from small_training import MAKERS, Make, assert_same, both, one_param, scion, small_model, train
from torch import Tensor, nn

from scion_telemetry.optim import Dion2, Scion, ScionLight, group_params


def _through_torch(x: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@both
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), _through_torch])
def test_a_copy_steps_as_the_original_and_is_not_observed(make: Make, clone: Any) -> None:
    model = small_model()
    optimizer: Any = make(group_params(model))
    seen: list[Any] = []
    optimizer.register_step_observer(lambda event: seen.append(event.algorithm))
    train(model, optimizer, range(2))
    other_model, other = clone((model, optimizer))
    count = len(seen)
    copied = train(other_model, other, range(2, 4))
    assert len(seen) == count
    for a, b in zip(copied, train(model, optimizer, range(2, 4)), strict=True):
        assert_same(a, b)
    assert len(seen) > count
    other.add_param_group({"params": [("late", one_param())]})
    other.register_step_observer(lambda event: None).remove()


@both
def test_a_state_dict_resumes_exactly_also_through_a_file_of_weights_only(make: Make) -> None:
    model = small_model()
    optimizer = make(group_params(model))
    train(model, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    resumed = small_model(seed=5)
    resumed.load_state_dict(saved["model"])
    other = make(group_params(resumed), lr=123.0)
    other.load_state_dict(saved["optimizer"])
    for a, b in zip(train(resumed, other, range(3, 6)), train(model, optimizer, range(3, 6)), strict=True):
        assert_same(a, b)


@both
def test_state_keeps_the_dtype_it_was_saved_in(make: Make) -> None:
    """A momentum of another dtype than its parameter loses nothing on loading, both ways, and the next step works."""
    for here, there in [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]:
        saver, loader = one_param(dtype=here), one_param(dtype=there)
        source, target = make([saver]), make([loader])
        source.step()
        target.load_state_dict(source.state_dict())
        (buffer,) = target.state[loader].values()
        assert buffer.dtype == here
        torch.testing.assert_close(buffer, next(iter(source.state[saver].values())), atol=0, rtol=0)
        before = loader.detach().clone()
        target.step()
        assert next(iter(target.state[loader].values())).dtype == here
        assert (loader != before).any()


def test_adamw_counts_on_after_loading() -> None:
    def make(param: nn.Parameter) -> Dion2:
        return Dion2([{"params": [param], "algorithm": "adamw"}])

    first, second = one_param((5,), torch.bfloat16), one_param((5,), torch.bfloat16)
    source, target = make(first), make(second)
    source.state[first]["step"].fill_(300.0)
    source.step()
    target.load_state_dict(source.state_dict())
    target.step()
    assert target.state[second]["step"].item() == 302
    assert target.state[second]["step"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8, 8), (4, 8), (8, 4), (1, 8)])
@both
def test_momentum_is_the_formula_and_gradients_are_untouched(make: Make, shape: Any, dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    gradient = (7 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    param.grad = gradient.clone()
    optimizer = make([param], momentum=0.05) if make is scion else make([param], ef_decay=1.0)
    optimizer.step()
    (buffer,) = optimizer.state[param].values()
    expected = (0.05 if make is scion else 1.0) * gradient
    assert buffer.dtype == param.dtype == dtype
    torch.testing.assert_close(buffer, expected.to(dtype), rtol=1e-2, atol=1e-3)
    assert_same(param.grad, gradient)


@pytest.mark.parametrize("norm", ["Auto", "RowNorm", "Sign", "BiasRMS", "ColNorm"])
def test_without_momentum_the_gradient_itself_is_used_and_left_alone(norm: str) -> None:
    param = one_param(dtype=torch.bfloat16)
    kept = None if param.grad is None else param.grad.clone()
    optimizer = Scion([param], lr=0.1, momentum=1.0, norm=norm)
    assert not optimizer.state[param]
    optimizer.step()
    assert_same(param.grad, kept)


@both
def test_an_orthogonaliser_that_works_in_place_spoils_neither_state_nor_gradient(make: Make) -> None:
    """The published Newton-Schulz codes divide their bfloat16 input in place."""

    def in_place(input: Tensor, /, epsilon: float) -> Tensor:
        x = input.bfloat16()
        x /= x.norm() + epsilon
        return x

    param = one_param((8, 8), torch.bfloat16)
    gradient = param.grad.clone() if param.grad is not None else None
    if make is scion:
        optimizer = make([param], momentum=1.0, norm_kwargs={"orthogonalizer": in_place})
    else:
        optimizer = make([param], fraction=1.0, ef_decay=1.0, newton_schulz_func=in_place)
    optimizer.step()
    assert_same(param.grad, gradient)
    for buffer in optimizer.state[param].values():
        assert_same(buffer, gradient)


@both
def test_gradients_of_another_dtype(make: Make) -> None:
    """Reduced in float32 for a bfloat16 weight, as mixed precision does it."""
    param = nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    param.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    make([param]).step()
    assert param.dtype == torch.bfloat16
    assert param.any()


@both
def test_sparse_gradients_are_refused_by_name(make: Make) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of a parameter of shape \(10, 4\) is sparse.*sparse=False"):
        make(embedding.parameters()).step()


def test_a_nan_gradient_shows_and_spoils_no_other_matrix() -> None:
    for make in MAKERS:
        params = [one_param(), one_param()]
        assert params[0].grad is not None
        params[0].grad[0, 0] = float("nan")
        make(params).step()
        assert params[0].isnan().any()
        assert params[1].isfinite().all()


@both
def test_default_dtype_and_inference_mode_do_not_leak_in(make: Make) -> None:
    normal, other = one_param(), one_param()
    make([normal]).step()
    torch.set_default_dtype(torch.float64)
    try:
        make([other]).step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(normal, other)


@both
def test_matrices_without_entries(make: Make) -> None:
    for shape in [(0, 5), (5, 0)]:
        param = nn.Parameter(torch.zeros(shape))
        param.grad = torch.zeros(shape)
        make([param, one_param()]).step()


@both
def test_a_checkpoint_that_lacks_an_option_loads_with_its_default(make: Make) -> None:
    param = one_param()
    optimizer = make([param])
    saved = copy.deepcopy(optimizer.state_dict())
    for option in [k for k in saved["param_groups"][0] if k not in ("params", "lr")]:
        del saved["param_groups"][0][option]
    other = make([one_param()])
    other.load_state_dict(saved)
    other.step()
    optimizer.step()
    assert_same(other.param_groups[0]["params"][0], param)


@both
def test_loading_keeps_observers(make: Make) -> None:
    optimizer: Any = make([one_param()])
    seen: list[str] = []
    optimizer.register_step_observer(lambda event: seen.append(event.algorithm))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert len(seen) == 1


def test_a_checkpoint_brings_its_heads_and_its_rule() -> None:
    """Loaded options win, and what they say of the matrices is stepped: not what the optimizer was made with."""
    for saver, loader in [({"num_heads": 2}, {}), ({}, {"num_heads": 2}), ({}, {"algorithm": "adamw"})]:
        first, second = one_param((8, 4)), one_param((8, 4))
        source, target = Dion2([{"params": [first], **saver}]), Dion2([{"params": [second], **loader}])
        source.step()
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        with torch.no_grad():
            second.copy_(first)
        source.step()
        target.step()
        assert_same(second, first)
        assert target.facts(second) == source.facts(first)


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_moments_and_gradients_of_another_dtype_than_the_parameter(algorithm: str, cautious: bool) -> None:
    options = {"algorithm": algorithm, "cautious_wd": cautious, "lr": 0.1}
    weights = {}
    for here, there in [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]:
        saver, loader = one_param(dtype=here), one_param(dtype=there)
        source, target = Dion2([{"params": [saver], **options}]), Dion2([{"params": [loader], **options}])
        source.step()
        target.load_state_dict(source.state_dict())
        source.step()
        target.step()
        assert target.state[loader]["momentum"].dtype == here
        torch.testing.assert_close(
            target.state[loader]["momentum"], source.state[saver]["momentum"], rtol=0.02, atol=0.02
        )
        weights[here] = loader.detach().float() - one_param(dtype=there).detach().float()
    # Either one has moved once, by its second step.
    torch.testing.assert_close(weights[torch.float32], weights[torch.bfloat16], rtol=0.1, atol=0.02)
    param = one_param(dtype=torch.bfloat16)
    param.grad = None
    param.grad_dtype = torch.float32
    param.grad = one_param().grad
    before = param.detach().clone()
    Dion2([{"params": [param], **options}]).step()
    assert (param != before).any()
    assert param.isfinite().all()


def test_gradients_of_a_scion_light_load_in_the_dtype_of_the_parameter() -> None:
    source, loader = ScionLight([one_param()], momentum=0.1), one_param(dtype=torch.bfloat16)
    source.step()
    target = ScionLight([loader], momentum=0.1)
    target.load_state_dict(source.state_dict())
    saved = source.param_groups[0]["params"][0].grad
    assert loader.grad is not None
    assert_same(loader.grad, saved.bfloat16())
    target.step()


def test_initial_weights_of_matrices_without_entries() -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(0, 5), (5, 0), (2, 3, 0, 1), (4, 4)]]
    alone = nn.Parameter(torch.zeros(4, 4))
    Scion(params).init()
    Scion([*params[:3], alone]).init()
    assert params[3].any()
    assert_same(params[3], alone)
