"""Dion2 in the global scope is one process, whatever the shape, fraction, dtype, layout and number of ranks.

Gradients are small integers and ef_decay is a half: momenta and scores are exact in every dtype and every order of
summation, so ties are ties everywhere, and the selection can be held to one that is computed with fractions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from scion_telemetry.optim import Dion2, Layout, Orthogonalizer, StepEvent
from scion_telemetry.optim.layout import index_tensor, local, take_piece
from scion_telemetry.testing import run_threads

pytestmark = pytest.mark.timeout(120)
# Continuous, unlike the exact factor: integer matrices are often not of full rank.
SMOOTH = Orthogonalizer(name="polar_express", dtype=torch.float64)
STEPS = 3
TOLERANCE = {
    torch.float32: {"atol": 1e-6, "rtol": 0.0},
    # One unit in the last place a step: torch rounds the ends of a bfloat16 tensor in other places than its middle.
    torch.bfloat16: {"atol": 3 * 2.0**-9, "rtol": 3 * 2.0**-8},
}
Selected = list[list[list[int]]]
"""Ascending global indices by step, matrix and member of the stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One drawn problem."""

    shape: tuple[int, ...]
    count: int
    thousandths: int
    dtype: torch.dtype
    select: str
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    seed: int

    @property
    def dim(self) -> int:
        return len(self.shape) - (2 if self.select == "rows" else 1)

    @property
    def k(self) -> int:
        return max(1, math.ceil(Fraction(self.thousandths, 1000) * self.shape[self.dim]))

    def gradients(self, step: int) -> list[Tensor]:
        """Integers in [-8, 8]; of few matrices, so few that ties are common."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        most = 1 + self.seed % 8
        return [
            torch.randint(-most, most + 1, self.shape, generator=generator).to(self.dtype) for _ in range(self.count)
        ]


@st.composite
def _cases(draw: Any, stacked: bool = False) -> Case:
    sizes = [draw(st.integers(1, 9)), draw(st.integers(1, 9))]
    select = draw(st.sampled_from(["rows", "cols"]))
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2)]))
    allowed = [Replicate(), Shard(0), Shard(1)]
    if stacked:
        sizes = [draw(st.integers(1, 5)), *sizes]
        allowed = [Replicate(), Shard(0), Shard(2 if select == "rows" else 1)]  # what is selected must be whole
    placements = tuple(draw(st.sampled_from(allowed)) for _ in mesh)
    if mesh == (2, 2) and not stacked and draw(st.booleans()):  # FSDP over tensor parallelism, evenly cut
        dim = draw(st.integers(0, 1))
        sizes[dim] = 4 * draw(st.integers(1, 3))
        placements = (_StridedShard(dim, split_factor=2), Shard(dim))
    return Case(
        shape=tuple(sizes),
        count=draw(st.integers(1, 4)),
        thousandths=draw(st.one_of(st.integers(1, 1000), st.sampled_from([1, 250, 500, 1000]))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        select=select,
        mesh=mesh,
        placements=placements,
        seed=draw(st.integers(0, 10_000)),
    )


def _train(case: Case, place: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Selected]:
    """Weights after three steps, and what this rank selected of its own rows or columns."""
    generator = torch.Generator().manual_seed(case.seed)
    start = [torch.randn(case.shape, generator=generator).to(case.dtype) for _ in range(case.count)]
    params = [nn.Parameter(place(w)) for w in start]
    optimizer = Dion2(
        params,
        lr=0.125,
        fraction=case.thousandths / 1000,
        ef_decay=0.5,
        weight_decay=0.1,
        newton_schulz_func=SMOOTH,
        selection_scope="global",
        select_dim=case.select,
    )
    mine = index_tensor(Layout.of(params[0]).runs(case.dim))
    found: Selected = []

    def observer(event: StepEvent) -> None:
        assert len(event.selections) == case.count  # all of one shape step together
        chosen = [mine[s.indices] for s in event.selections]
        found.append([row.tolist() for c in chosen for row in (c if c.ndim == 2 else [c])])

    optimizer.register_step_observer(observer)
    for step in range(STEPS):
        for param, gradient in zip(params, case.gradients(step), strict=True):
            param.grad = place(gradient)
        optimizer.step()
    return params, found


def _expected_selection(case: Case) -> Selected:
    """By the rule itself, in float64: largest L1 norm first, of equal ones the lower index."""
    momenta = [torch.zeros(case.shape, dtype=torch.float64) for _ in range(case.count)]
    found: Selected = []
    for step in range(STEPS):
        found.append([])
        for m, g in zip(momenta, case.gradients(step), strict=True):
            m += g.double()
            for matrix in m.view(-1, *case.shape[-2:]):
                lines = matrix if case.select == "rows" else matrix.mT  # a view
                norms = [sum(abs(x) for x in line) for line in lines.tolist()]
                chosen = sorted(sorted(range(len(norms)), key=lambda i, n=norms: (-n[i], i))[: case.k])
                found[-1].append(chosen)
                lines[chosen] *= 0.5
    return found


def _check(case: Case) -> None:
    weights, alone = _train(case, lambda full: full.clone())
    selection = _expected_selection(case)
    assert alone == selection
    assert all(len(chosen) == case.k for step in selection for chosen in step)

    def rank_function(rank: int, world: int) -> tuple[list[Tensor], Layout, Selected]:
        mesh = init_device_mesh("cpu", case.mesh)
        params, found = _train(case, lambda full: distribute_tensor(full, mesh, case.placements, src_data_rank=None))
        layout = Layout.of(params[0])
        return [local(p).detach() for p in params], layout, found

    results = run_threads(rank_function, math.prod(case.mesh), timeout=20)
    matrices = math.prod(case.shape[:-2])
    seen: dict[tuple[int, int], set[int]] = {}
    for pieces, layout, found in results:
        for piece, weight in zip(pieces, weights, strict=True):
            torch.testing.assert_close(piece, take_piece(weight.detach(), layout), **TOLERANCE[case.dtype])
        mine = set(index_tensor(layout.runs(case.dim)).tolist())
        members = index_tensor(layout.runs(0)).tolist() if len(case.shape) == 3 else [0]
        numbers = [i * matrices + e for i in range(case.count) for e in members]
        for step in range(STEPS):
            assert len(found[step]) == len(numbers)
            for number, chosen in zip(numbers, found[step], strict=True):
                assert sorted(chosen) == [i for i in selection[step][number] if i in mine]
                seen.setdefault((step, number), set()).update(chosen)
    assert len(seen) == STEPS * case.count * matrices
    assert all(len(chosen) == case.k for chosen in seen.values())  # realised by all ranks together


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(_cases())
def test_matrices(case: Case) -> None:
    _check(case)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(_cases(stacked=True))
def test_stacks(case: Case) -> None:
    _check(case)
