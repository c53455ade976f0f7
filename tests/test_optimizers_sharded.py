"""Real FSDP2, HSDP and DDP training on gloo ranks equals one process on the averaged gradient, and all ranks agree.

Wide and square matrices, and in Dion2 the global scope: a tall matrix selects columns when whole and rows when sharded.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from scion_telemetry.optim import Dion2, Orthogonalizer, Scion, group_params
from scion_telemetry.testing import run_forked, run_threads

EXACT = Orthogonalizer(name="svd", dtype=torch.float32)
BATCH, STEPS = 32, 5  # enough samples, and a tanh after every layer, for gradients of full rank: polar is unique
Weights = dict[str, Tensor]


class Net(nn.Module):
    """Uneven and empty shards on 4 ranks: (5, 8), (3, 5) and one row (1, 3); a convolution, biases, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.conv = nn.Conv2d(1, 6, 3, bias=False)
        self.mix = nn.Linear(12, 8)
        self.up = nn.Linear(8, 5)
        self.down = nn.Linear(5, 3, bias=False)
        self.square = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) / 3)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        pooled = self.conv(image).flatten(2).mean(-1)  # [batch, 6]
        x = torch.tanh(self.embed(tokens) + self.mix(torch.cat([pooled, pooled.square()], dim=-1)))
        return self.last(torch.tanh(self.square(torch.tanh(self.down(torch.tanh(self.up(x)))))))


def _batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 7, (BATCH,), generator=generator)
    image = torch.randn(BATCH, 1, 4, 4, generator=generator)
    return tokens, image, torch.randn(BATCH, 1, generator=generator)


def _scion(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    groups = group_params(model, roles={"conv": {"norm_kwargs": {"orthogonalizer": EXACT}}})
    return Scion(groups, lr=0.05, momentum=0.3, norm_kwargs={"orthogonalizer": EXACT}, **options)


def _dion2(model: nn.Module, process_group: Any = None) -> torch.optim.Optimizer:
    # (1, 3) is a vector to the default roles; as a matrix it must work as well.
    conv = {"norm_kwargs": {"orthogonalizer": EXACT}}
    groups = group_params(model, roles={"conv": conv}, overrides={"^last$": {"role": "hidden", "algorithm": "dion2"}})
    return Dion2(groups, process_group, lr=0.05, fraction=0.4, selection_scope="global", newton_schulz_func=EXACT)


OPTIMIZERS = [_scion, _dion2]
Make = Callable[..., torch.optim.Optimizer]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> Weights:
    for step in range(STEPS):
        tokens, image, target = _batch(step)
        optimizer.zero_grad()
        (model(tokens[part], image[part]) - target[part]).square().mean().backward()
        optimizer.step()
    named = {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in named.items()}


def _alone(make: Make) -> Weights:
    model = Net()
    return _train(model, make(model), slice(None))


def _part(rank: int, world: int) -> slice:
    return slice(rank * BATCH // world, (rank + 1) * BATCH // world)


def _assert_equal(results: list[Weights], expected: Weights) -> None:
    initial = dict(Net().named_parameters())
    for weights in results:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, results[0][name], atol=0, rtol=0, msg=f"ranks differ: {name}")
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert all((expected[n] - p.detach()).abs().max() > 1e-3 for n, p in initial.items())  # all of them were trained


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2(make: Make, world: int) -> None:
    def rank_function(rank: int, world: int) -> Weights:
        model = Net()
        mesh = init_device_mesh("cpu", (world,))
        for child in (model.up, model.down):
            fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _train(model, make(model), _part(rank, world))

    _assert_equal(run_forked(rank_function, world), _alone(make))


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_hsdp(make: Make) -> None:
    def rank_function(rank: int, world: int) -> Weights:
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        return _train(model, make(model), _part(rank, world))

    _assert_equal(run_forked(rank_function, 4), _alone(make))


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_ddp_with_and_without_sharing_the_work(make: Make, world: int, shared: bool) -> None:
    def rank_function(rank: int, world: int) -> Weights:
        model = DistributedDataParallel(Net())
        group = dist.group.WORLD if shared else None
        return _train(model, make(model, process_group=group), _part(rank, world))

    _assert_equal(run_forked(rank_function, world), _alone(make))


def test_sharded_and_plain_parameters_in_one_optimizer() -> None:
    """FSDP2 leaves an ignored module whole; its gradient is averaged by hand here."""

    def rank_function(rank: int, world: int) -> Weights:
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=set(model.square.parameters()))
        optimizer = _scion(model, process_group=dist.group.WORLD)
        for p in model.square.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG))
        return _train(model, optimizer, _part(rank, world))

    _assert_equal(run_forked(rank_function, 2), _alone(_scion))


def test_a_head_that_forward_never_uses_under_fsdp2() -> None:
    def rank_function(rank: int, world: int) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        for p in model.parameters():
            p.data.fill_(0.5)
        for child in model:
            fully_shard(child, mesh=init_device_mesh("cpu", (world,)))
        optimizer = Dion2(group_params(model), newton_schulz_func=EXACT)
        model[0](torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        used, unused = model[0].weight, model[1].weight
        assert isinstance(used, DTensor)
        assert isinstance(unused, DTensor)
        return used.detach().full_tensor(), unused.detach().full_tensor()

    for used, unused in run_forked(rank_function, 2):
        torch.testing.assert_close(unused, torch.full((3, 5), 0.5))
        assert (used != 0.5).any()


SHAPES = [(5, 3), (9, 6), (6, 9), (1, 4), (4, 1), (17, 8)]


def _sharded_step(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], world: int) -> list[list[Tensor]]:
    """Two steps on DTensors cut over threads; the full weights of every rank."""

    def rank_function(rank: int, world: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (world,))

        def place(full: Tensor) -> Tensor:
            return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) if world > 1 else full.clone()

        return _two_steps(make, place)

    if world == 1:
        return [_two_steps(make, lambda full: full.clone())]
    return run_threads(rank_function, world)


def _two_steps(make: Any, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    params = [nn.Parameter(place(_gauss(s, i))) for i, s in enumerate(SHAPES)]
    vector = nn.Parameter(place(_gauss((5,), 50)))
    optimizer = make(params, vector)
    for step in range(2):
        for i, p in enumerate([*params, vector]):
            p.grad = place(_gauss(tuple(p.shape), 100 + 10 * step + i))
        optimizer.step()
    done = [p.detach() for p in [*params, vector]]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in done]


def _gauss(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(
    ("norm", "kwargs"),
    [
        ("Spectral", {"orthogonalizer": EXACT}),
        ("Sign", {}),
        ("Sign", {"normalized": False}),
        ("RowNorm", {}),
        ("RowNorm", {"transpose": True}),
        ("ColNorm", {}),
        ("ColNorm", {"transpose": True}),
        ("ColNorm", {"transpose": True, "normalized": True}),
    ],
)
def test_every_norm_on_row_shards(norm: str, kwargs: dict[str, Any], world: int) -> None:
    def make(params: list[nn.Parameter], vector: nn.Parameter) -> Scion:
        own = norm if norm == "Sign" else "BiasRMS"
        vectors = {"params": [vector], "norm": own, "norm_kwargs": kwargs if norm == "Sign" else {}}
        return Scion([{"params": params, "norm_kwargs": kwargs}, vectors], lr=0.1, momentum=0.5, norm=norm)

    (expected,) = _sharded_step(make, 1)
    for weights in _sharded_step(make, world):
        for actual, weight in zip(weights, expected, strict=True):
            torch.testing.assert_close(actual, weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_elementwise_rules_on_row_shards(algorithm: str) -> None:
    def make(params: list[nn.Parameter], vector: nn.Parameter) -> Dion2:
        return Dion2([{"params": [*params, vector], "algorithm": algorithm}], lr=0.1)

    (expected,) = _sharded_step(make, 1)
    for weights in _sharded_step(make, 4):
        for actual, weight in zip(weights, expected, strict=True):
            torch.testing.assert_close(actual, weight, atol=1e-6, rtol=0)
