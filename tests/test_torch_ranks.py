"""Groups added late in every layout, gradients that some ranks lack, heads that shards cut."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_layouts import LAYOUTS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from scion_telemetry.optim import Dion2, Dion3, Layout, Orthogonalizer, Scion
from scion_telemetry.optim.layout import local, take_piece
from scion_telemetry.testing import run_forked, run_threads

pytestmark = pytest.mark.timeout(60)
EXACT = Orthogonalizer(name="svd", dtype=torch.float32)
Make = Callable[..., torch.optim.Optimizer]
Place = Callable[[Tensor], Tensor]


def scion(params: Any, **options: Any) -> torch.optim.Optimizer:
    return Scion(params, lr=0.1, momentum=0.3, norm="Spectral", norm_kwargs={"orthogonalizer": EXACT}, **options)


def dion2(params: Any, **options: Any) -> torch.optim.Optimizer:
    options = {"selection_scope": "global", "select_dim": "rows", **options}
    return Dion2(params, lr=0.1, fraction=0.4, newton_schulz_func=EXACT, **options)


def _gauss(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def _check(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for param, right in zip(found, expected, strict=True):
        torch.testing.assert_close(local(param).detach(), take_piece(right, Layout.of(param)), atol=1e-5, rtol=0)


def _late(make: Make, place: Place) -> list[nn.Parameter]:
    """Two steps, then another group, then two more."""
    first = [nn.Parameter(place(_gauss((6, 9), i))) for i in range(2)]
    late = [nn.Parameter(place(_gauss(shape, 10 + i))) for i, shape in enumerate([(6, 9), (5, 7)])]
    optimizer = make(first)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 0.05})
        for i, p in enumerate([*first, *late] if step >= 2 else first):
            p.grad = place(_gauss(p.shape, 100 * (step + 1) + i))
        optimizer.step()
    return [*first, *late]


@pytest.mark.parametrize("make", [scion, dion2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_added_late_in_every_layout(layout: str, make: Make) -> None:
    expected = [p.detach() for p in _late(make, lambda full: full)]
    sizes, placements = LAYOUTS[layout]

    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", sizes)
        _check(_late(make, lambda full: distribute_tensor(full, mesh, placements, src_data_rank=None)), expected)

    run_threads(rank_function, math.prod(sizes), timeout=20)


SHAPES = [(6, 9), (6, 9), (5, 8), (6, 9)]
"""The last one never has a gradient, the second lacks one on some rank, in the second of three steps."""


def _train(make: Make, lacks: Callable[[int], bool], place: Place, **options: Any) -> list[nn.Parameter]:
    params = [nn.Parameter(place(_gauss(s, i))) for i, s in enumerate(SHAPES)]
    optimizer = make(params, **options)
    for step in range(3):
        for i, p in enumerate(params[:-1]):
            missing = i == 1 and step == 1 and lacks(i)
            p.grad = None if missing else place(_gauss(p.shape, 100 * (step + 1) + i))
        optimizer.step()
    return params


def _zeroed_rows(make: Make, rows: range) -> list[Tensor]:
    """One process whose gradient is zero in the rows of the rank that lacks it."""
    params = [nn.Parameter(_gauss(s, i)) for i, s in enumerate(SHAPES)]
    optimizer = make(params)
    for step in range(3):
        for i, p in enumerate(params[:-1]):
            p.grad = _gauss(p.shape, 100 * (step + 1) + i)
            if i == 1 and step == 1:
                p.grad[rows.start : rows.stop] = 0
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("make", [scion, dion2])
@pytest.mark.parametrize("world", [2, 4])
def test_a_shard_without_a_gradient_has_a_gradient_of_zeros(world: int, make: Make) -> None:
    lacking, height = world - 2, -(-6 // world)
    expected = _zeroed_rows(make, range(lacking * height, (lacking + 1) * height))

    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))

        def place(full: Tensor) -> Tensor:
            return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)

        _check(_train(make, lambda _: rank == lacking, place, agree_on_gradients=True), expected)

    run_forked(rank_function, world, timeout=30)


@pytest.mark.parametrize("make", [scion, dion2])
@pytest.mark.parametrize("world", [2, 4])
def test_replicas_of_which_none_has_a_gradient_leave_the_parameter_alone(world: int, make: Make) -> None:
    """And where one replica lacks it, the others do not wait for it."""

    def rank_function(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
        shared = {"process_group": dist.group.WORLD} if make is scion else {"distributed_mesh": dist.group.WORLD}
        runs = [
            _train(make, lacks, lambda full: full, agree_on_gradients=True, **shared)
            for lacks in (lambda _: True, lambda _: rank == 0)
        ]
        return tuple([p.detach() for p in params] for params in runs)

    skipped = [p.detach() for p in _train(make, lambda _: True, lambda full: full)]
    results = run_forked(rank_function, world, timeout=30)
    for nobody, somebody in results:
        _check(nobody, skipped)
        _check([somebody[i] for i in (0, 2, 3)], [skipped[i] for i in (0, 2, 3)])
        torch.testing.assert_close(somebody[3], _gauss(SHAPES[3], 3), atol=0, rtol=0)


@pytest.mark.parametrize("make", [scion, dion2])
def test_the_agreement_costs_one_small_collective_a_step_and_none_without_it(make: Make) -> None:
    def rank_function(rank: int, world: int) -> list[int]:
        mesh, reduced = init_device_mesh("cpu", (world,)), dist.all_reduce
        counts = []
        for agree in (False, True):
            sizes: list[int] = []

            def counting(tensor: Tensor, *args: Any, sizes: list[int] = sizes, **kwargs: Any) -> Any:
                sizes.append(tensor.numel())
                return reduced(tensor, *args, **kwargs)

            dist.all_reduce = counting
            try:
                _train(
                    make,
                    lambda _: False,
                    lambda full: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
                    agree_on_gradients=agree,
                )
            finally:
                dist.all_reduce = reduced
            counts.append(sizes)
        without, with_it = counts
        return [len(without), len(with_it), with_it.count(len(SHAPES))]

    scores = 0 if make is scion else 6  # the scores of two shapes in three steps
    for without, with_it, small in run_forked(rank_function, 2, timeout=30):
        assert (without, with_it, small) == (scores, scores + 3, 3)


HEADS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (Shard(0),)),
    ((4,), (Shard(0),)),
    ((2,), (Shard(1),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
]


@pytest.mark.parametrize(
    ("make", "sizes", "placements"),
    [(make, *layout) for make in (Dion2, Dion3) for layout in HEADS if make is Dion2 or Shard(1) not in layout[1]],
)
def test_heads_in_every_layout_are_a_loop_over_them(
    make: Any, sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    options: dict[str, Any] = {"lr": 0.1, "fraction": 0.4, "newton_schulz_func": EXACT, "adjust_lr": None}
    if make is Dion2:
        options["select_dim"] = "rows"

    def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], cut: Callable[[Tensor], list[Tensor]]) -> Any:
        for step in range(3):
            for p, g in zip(params, cut(_gauss((12, 10), 10 + step)), strict=True):
                p.grad = g.clone()
            optimizer.step()
        return params

    parts = [nn.Parameter(c.clone()) for c in _gauss((12, 10), 0).chunk(4)]
    loop = run(make(parts, **options), parts, lambda full: list(full.chunk(4)))
    expected = torch.cat([p.detach() for p in loop])

    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", sizes)

        def place(full: Tensor) -> list[Tensor]:
            return [distribute_tensor(full, mesh, placements, src_data_rank=None)]

        joined = [nn.Parameter(place(_gauss((12, 10), 0))[0])]
        _check(run(make(joined, num_heads=4, **options), joined, place), [expected])

    run_threads(rank_function, math.prod(sizes), timeout=20)


@pytest.mark.parametrize(("rows", "heads", "world"), [(6, 2, 4), (12, 3, 2), (8, 2, 4), (10, 5, 4)])
def test_heads_that_a_shard_cuts_are_refused_on_every_rank(rows: int, heads: int, world: int) -> None:
    """Also on those whose own piece is whole heads, or empty: a rank that went on alone would wait for ever."""

    def rank_function(rank: int, world: int) -> str:
        mesh = init_device_mesh("cpu", (world,))
        param = nn.Parameter(distribute_tensor(torch.zeros(rows, 4), mesh, [Shard(0)], src_data_rank=None))
        with pytest.raises(ValueError, match=r"'wq': the layout .*cuts heads of") as caught:
            Dion2([("wq", param)], num_heads=heads)
        return str(caught.value)

    messages = run_threads(rank_function, world, timeout=20)
    assert len(set(messages)) == 1


def test_heads_need_a_matrix_and_rows_to_share() -> None:
    with pytest.raises(ValueError, match="10 rows are no multiple of 3 heads"):
        Dion2([nn.Parameter(torch.zeros(10, 4))], num_heads=3)
    with pytest.raises(ValueError, match=r"num_heads splits a matrix .*got shape \(2, 4, 4\)"):
        Dion2([nn.Parameter(torch.zeros(2, 4, 4))], num_heads=2)


def test_dion3_refuses_cut_rows() -> None:
    def rank_function(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        param = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)], src_data_rank=None))
        with pytest.raises(ValueError, match=r"'w': Dion3 normalises whole rows.*Shard\(1\) x2"):
            Dion3([("w", param)])

    run_threads(rank_function, 2, timeout=20)
