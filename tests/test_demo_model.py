import math
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import multi_threaded_pg

from scion_telemetry.demo.model import GPT, GPTConfig, rotate, rotation

Result = TypeVar("Result")
SMALL = GPTConfig(width=16, layers=2, heads=2, hidden=24, context=12)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def test_default_size_and_names() -> None:
    model = GPT(GPTConfig())
    assert 250_000 <= sum(p.numel() for p in model.parameters()) <= 350_000
    blocks = [
        f"blocks.{layer}.{name}.weight"
        for layer in range(3)
        for name in ("attn_norm", "attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp_norm", "mlp.up", "mlp.down")
    ]
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", *blocks, "norm.weight", "head.weight"]
    assert all(p.device.type == "cpu" and p.dtype is torch.float32 for p in model.parameters())


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    x = tokens(16, 128)
    with torch.no_grad():
        assert float(GPT(GPTConfig()).loss(x, x.flip(0))) == pytest.approx(math.log(256), abs=0.05)


def test_every_parameter_has_a_gradient_at_the_first_step() -> None:
    model = GPT(SMALL)
    model.loss(tokens(2, 12), tokens(2, 12, seed=1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_seed_decides_the_weights_and_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    first, second, other = GPT(SMALL, seed=1), GPT(SMALL, seed=1), GPT(SMALL, seed=2)
    assert torch.equal(before, torch.random.get_rng_state())
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (a.ndim == 1), name


def test_scales_of_the_initial_weights() -> None:
    model = GPT(GPTConfig())
    expected = {
        "embed.weight": 1.0,
        "blocks.1.attn.wq.weight": 96**-0.5,
        "blocks.1.attn.wo.weight": (6 * 96) ** -0.5,
        "blocks.1.mlp.up.weight": 96**-0.5,
        "blocks.1.mlp.down.weight": (6 * 288) ** -0.5,
        "head.weight": 0.1 * 96**-0.5,
    }
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, std in expected.items():
        # At least 9,216 normal draws: the sample's deviation is within 4 / sqrt(2 * 9216) = 3 % of the true one.
        assert float(weights[name].std()) == pytest.approx(std, rel=0.03), name
    assert torch.equal(weights["norm.weight"], torch.ones(96))


@pytest.mark.parametrize("changed", [0, 5, 11])
def test_a_token_changes_nothing_before_it(changed: int) -> None:
    model = GPT(SMALL)
    x = tokens(2, 12)
    with torch.no_grad():
        model.head.weight.mul_(10)
        before = model(x)
        x[:, changed] = (x[:, changed] + 1) % 256
        after = model(x)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).any(-1).all()


def test_rotation_turns_by_position_and_scores_see_distances_alone() -> None:
    turn = rotation(12, SMALL, device=torch.device("cpu"))
    q, k = (torch.randn(8, generator=torch.Generator().manual_seed(seed)).expand(1, 1, 12, 8) for seed in (0, 1))
    turned = rotate(q, turn)[0, 0]
    # Feature 1 and its partner 1 + 4 turn as one complex number with frequency 10000^(-1/4) = 0.1 per position.
    angle = torch.arange(12) * 0.1
    assert torch.allclose(turned[:, 1], q[0, 0, 0, 1] * angle.cos() - q[0, 0, 0, 5] * angle.sin(), atol=1e-6)
    assert torch.allclose(turned[:, 5], q[0, 0, 0, 1] * angle.sin() + q[0, 0, 0, 5] * angle.cos(), atol=1e-6)
    scores = turned @ rotate(k, turn)[0, 0].T
    for distance in range(1, 12):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(scores[0, 0], scores[1, 0], atol=1e-3)


def test_loss_is_the_mean_surprise_per_byte() -> None:
    model, x, y = GPT(SMALL), tokens(2, 12), tokens(2, 12, seed=1)
    with torch.no_grad():
        surprise = -model(x).double().log_softmax(-1).gather(-1, y[..., None])
        assert float(model.loss(x, y)) == pytest.approx(float(surprise.mean()), rel=1e-6)


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 12 tokens fit the context, got 13"):
        GPT(SMALL)(tokens(1, 13))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers must be positive, got 0"),
        ({"width": 100}, r"width must be a multiple of 2 \* heads = 8, got 100"),
    ],
)
def test_sizes_that_fit_no_model_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)


def shard(model: GPT, world: int) -> GPT:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def on_threads(world: int, run: Callable[[int], Result]) -> list[Result]:
    """``[run(0), run(1), ...]``, each on its own thread, over torch's in-process group; raises what a rank raised."""
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = run(rank)
        except BaseException as error:
            failures.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()
    multi_threaded_pg.ProcessLocalGroup.reset()
    try:
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_model_computes_what_the_whole_one_does(world: int) -> None:
    x, y = tokens(world * 2, 12), tokens(world * 2, 12, seed=1)
    whole = GPT(SMALL, seed=4)
    whole.loss(x, y).backward()
    with torch.no_grad():
        logits = whole(x)

    def run(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = shard(GPT(SMALL, seed=4), world)
        mine = slice(2 * rank, 2 * rank + 2)
        model.loss(x[mine], y[mine]).backward()
        grads = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            grads[name] = parameter.grad.full_tensor()
        with torch.no_grad():
            return model(x), grads

    for sharded, grads in on_threads(world, run):
        assert torch.allclose(sharded, logits, rtol=1e-6, atol=1e-7)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(grads[name], parameter.grad, rtol=1e-5, atol=1e-7), name
