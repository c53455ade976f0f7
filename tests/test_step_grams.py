"""What Newton-Schulz tells of the momentum, against singular values in float64."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from scion_telemetry.optim import Dion2, Dion3, Gram, Orthogonalizer, Scion, StepEvent, orthogonalize, scion
from scion_telemetry.optim.orthogonalize import COEFFICIENTS
from scion_telemetry.testing import run_threads

FINE = Orthogonalizer(name="dion_ns5", dtype=torch.float64)
ENTRIES = ("frobenius", "trace2", "trace3", "trace4")


def _gauss(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _with_values(values: Tensor, columns: int) -> Tensor:
    """A matrix of given singular values."""
    left = torch.linalg.qr(_gauss(len(values), len(values), seed=1)).Q
    right = torch.linalg.qr(_gauss(columns, len(values), seed=2)).Q
    return left @ torch.diag(values) @ right.mT


def _truth(matrix: Tensor) -> dict[str, Tensor]:
    squares = torch.linalg.svdvals(matrix.double()).square()
    shares = squares / squares.sum(-1, keepdim=True)
    traces = {f"trace{k}": shares.pow(k).sum(-1) for k in (2, 3, 4)}
    return {"frobenius": squares.sum(-1).sqrt(), **traces}


def _compare(gram: Gram, matrix: Tensor, *, rtol: float, fused: bool = False) -> None:
    expected = _truth(matrix)
    for entry in ENTRIES:
        value = getattr(gram, entry)
        if fused and entry in ("trace3", "trace4"):  # A² is only there as b A + c A A
            assert value is None
            continue
        assert value.shape == matrix.shape[:-2], entry
        torch.testing.assert_close(value.double(), expected[entry], rtol=rtol, atol=0, msg=lambda m, e=entry: e + m)


def _seen(name: str, x: Tensor, dtype: torch.dtype, epsilon: float = 1e-7) -> Gram:
    """What is shown, once and without changing a bit of the result."""
    shown: list[Gram] = []
    function = Orthogonalizer(name=name, dtype=dtype)
    result = function(x, epsilon=epsilon, show=shown.append)
    torch.testing.assert_close(result, function(x, epsilon=epsilon), rtol=0, atol=0, equal_nan=True)
    (gram,) = shown
    return gram


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16), (1, 5), (1, 1), (3, 6, 9), (2, 3, 9, 6)])
def test_traces_are_those_of_the_singular_values(name: str, shape: tuple[int, ...]) -> None:
    x = 7 * _gauss(*shape)
    fused = COEFFICIENTS[name].fused
    _compare(_seen(name, x, torch.float64), x, rtol=1e-7, fused=fused)
    _compare(_seen(name, x, torch.float32), x, rtol=2e-5, fused=fused)
    assert _seen(name, x, torch.float32).trace2.dtype == torch.float32


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("epsilon", [1e-7, 3.0, 1e6])
def test_what_the_iteration_divides_by_does_not_matter(name: str, epsilon: float) -> None:
    for scale in (1e-3, 1e3):
        x = scale * _gauss(6, 9)
        _compare(_seen(name, x, torch.float64, epsilon), x, rtol=1e-7, fused=COEFFICIENTS[name].fused)


SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": torch.ones_like,
    "power law": lambda i: i**-0.5,
    "steep": lambda i: i**-2,
    "spikes": lambda i: torch.where(i <= 3, 16.0, 1.0).double(),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("columns", [128, 384])
def test_half_precision_loses_less_than_one_percent(name: str, spectrum: str, columns: int) -> None:
    values = SPECTRA[spectrum](torch.arange(1.0, 129.0, dtype=torch.float64))
    x = _with_values(values, columns)
    gram, fused = _seen(name, x, torch.bfloat16), COEFFICIENTS[name].fused
    _compare(gram, x, rtol=1e-2, fused=fused)
    assert gram.trace2.dtype == torch.float32
    if fused:
        return
    assert gram.trace3 is not None
    assert gram.trace4 is not None
    largest = (values.max() / values.square().sum().sqrt()).item()
    low, high = (gram.trace4 / gram.trace3).sqrt().item(), gram.trace4.item() ** 0.125
    assert low * 0.99 <= largest <= high * 1.01
    assert high / low < 2.2


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_zeros_have_no_traces_and_spoil_no_other(name: str) -> None:
    batch = torch.stack([torch.zeros(6, 4, dtype=torch.float64), _gauss(6, 4)])
    gram = _seen(name, batch, torch.float64)
    assert gram.frobenius[0] == 0
    assert gram.trace2[0].isnan()
    torch.testing.assert_close(gram.trace2[1:], _truth(batch[1:])["trace2"])


def test_svd_shows_nothing() -> None:
    shown: list[Gram] = []
    Orthogonalizer(name="svd")(_gauss(4, 4), show=shown.append)
    assert not shown


# ---------------------------------------------------------------------- optimizers


def _scion(params: list[Any], **options: Any) -> Scion:
    kwargs = options.pop("norm_kwargs", {"orthogonalizer": FINE})
    return Scion(params, lr=0.1, scale=3.0, norm_kwargs=kwargs, **options)


def _dion2(params: list[Any], **options: Any) -> Dion2:
    group = options.pop("process_group", None)
    options = {"newton_schulz_func": FINE, "fraction": 0.5, "selection_scope": "global", "select_dim": "rows"} | options
    return Dion2(params, group, lr=0.1, **options)


def _selected(g: Tensor) -> Tensor:
    """Half of the rows, those that are largest in L1 norm."""
    index = g.abs().sum(-1).topk(math.ceil(g.size(-2) / 2)).indices.sort().values
    return g.gather(-2, index.unsqueeze(-1).expand(*index.shape, g.size(-1)))


def _step(make: Any, grads: Sequence[Tensor], place: Callable[[Tensor], Tensor], **options: Any) -> dict[int, Gram]:
    """What one step shows, by the number of the parameter; facts and owners agree with it."""
    params = [nn.Parameter(place(torch.zeros_like(g))) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = place(g.clone())
    optimizer = make(params, **options)
    found: dict[int, Gram] = {}

    def observer(event: StepEvent) -> None:
        for i, gram in event.grams.items():
            number = next(n for n, p in enumerate(params) if p is event.params[i])
            assert number not in found
            assert i in event.owned
            found[number] = gram

    optimizer.register_step_observer(observer)
    optimizer.step()
    for number, p in enumerate(params):
        assert optimizer.facts(p).shows_gram or number not in found
    return found


SHAPES = [(6, 8), (6, 8), (8, 5), (4, 4)]
GRADS = [_gauss(*s, seed=i) for i, s in enumerate(SHAPES)]
MAKERS: list[tuple[Any, Callable[[Tensor], Tensor]]] = [(_scion, lambda g: g), (_dion2, _selected)]


@pytest.mark.parametrize(("make", "part"), MAKERS)
def test_alone(make: Any, part: Callable[[Tensor], Tensor]) -> None:
    found = _step(make, GRADS, lambda x: x)
    assert sorted(found) == [0, 1, 2, 3]
    for i, gram in found.items():
        _compare(gram, part(GRADS[i]), rtol=1e-6)


@pytest.mark.parametrize(("make", "part"), MAKERS)
def test_in_one_batch_as_on_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, make: Any, part: Callable[[Tensor], Tensor]
) -> None:
    for module in (orthogonalize, scion):
        monkeypatch.setattr(module, "one_by_one", lambda x: False)
    stacks = [_gauss(3, 6, 8, seed=s) for s in (5, 6)]
    for grads, options in ((GRADS, {}), (stacks, {"norm": "Spectral"} if make is _scion else {})):
        found = _step(make, grads, lambda x: x, **options)
        assert sorted(found) == list(range(len(grads)))
        for i, gram in found.items():
            _compare(gram, part(grads[i]), rtol=1e-6)


@pytest.mark.parametrize(("make", "part"), MAKERS)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), None], ids=str)
def test_one_of_two_ranks_shows_each(make: Any, part: Callable[[Tensor], Tensor], placement: Placement | None) -> None:
    def rank_function(rank: int, world: int) -> dict[int, Gram]:
        if placement is None:
            return _step(make, GRADS, lambda x: x, process_group=dist.group.WORLD)
        mesh = init_device_mesh("cpu", (world,))
        return _step(make, GRADS, lambda x: distribute_tensor(x, mesh, [placement], src_data_rank=None))

    per_rank = run_threads(rank_function, 2)
    assert all(per_rank), "both ranks work"
    for i, grad in enumerate(GRADS):
        (gram,) = [found[i] for found in per_rank if i in found]
        _compare(gram, part(grad), rtol=1e-6)


@pytest.mark.parametrize(("make", "part"), MAKERS)
def test_stacks_have_one_entry_a_matrix_also_over_ranks(make: Any, part: Callable[[Tensor], Tensor]) -> None:
    stack = _gauss(3, 6, 8)
    options = {"norm": "Spectral"} if make is _scion else {}
    _compare(_step(make, [stack], lambda x: x, **options)[0], part(stack), rtol=1e-6)

    def rank_function(rank: int, world: int) -> Gram:
        mesh = init_device_mesh("cpu", (world,))
        place = lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)  # noqa: E731
        return _step(make, [stack], place, **options)[0]

    for gram, local in zip(run_threads(rank_function, 2), [stack[:2], stack[2:]], strict=True):
        _compare(gram, part(local), rtol=1e-6)


def test_heads_and_convolutions() -> None:
    _compare(
        _step(_dion2, [_gauss(12, 5)], lambda x: x, num_heads=3)[0], _selected(_gauss(12, 5).view(3, 4, 5)), rtol=1e-6
    )
    kernel = _gauss(4, 3, 2, 2)
    _compare(_step(_scion, [kernel], lambda x: x)[0], kernel.flatten(1), rtol=1e-6)


def test_the_momentum_is_meant_and_not_the_gradient() -> None:
    param, grads, seen = nn.Parameter(torch.zeros(5, 7).double()), [_gauss(5, 7, seed=s) for s in (1, 2)], list[Gram]()
    optimizer = _scion([param], momentum=0.25)
    optimizer.register_step_observer(lambda event: seen.append(event.grams[0]))
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    _compare(seen[1], 0.75 * 0.25 * grads[0] + 0.25 * grads[1], rtol=1e-6)


def _plain(input: Tensor, /, epsilon: float) -> Tensor:
    return input / (input.norm() + epsilon)


@pytest.mark.parametrize("func", [_plain, "svd"])
def test_functions_that_tell_nothing_work_as_they_did(func: Any) -> None:
    assert not _step(_dion2, GRADS, lambda x: x, newton_schulz_func=func)
    assert not _step(_scion, GRADS, lambda x: x, norm_kwargs={"orthogonalizer": func})
    assert not _step(_scion, GRADS, lambda x: x, norm="Sign", norm_kwargs={})


def test_facts_say_who_shows() -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(4))
    for optimizer in (Scion([matrix, vector]), Dion3([matrix, {"params": [vector], "algorithm": "adamw"}][:1])):
        assert optimizer.facts(matrix).shows_gram
    assert not Scion([matrix, vector]).facts(vector).shows_gram
    assert not Scion([matrix], norm="RowNorm").facts(matrix).shows_gram
    assert not Dion2([{"params": [matrix], "algorithm": "adamw"}]).facts(matrix).shows_gram
    assert not _dion2([matrix], newton_schulz_func=_plain).facts(matrix).shows_gram
    assert not _scion([matrix], norm_kwargs={"orthogonalizer": "svd"}).facts(matrix).shows_gram


@pytest.mark.parametrize("make", [_scion, _dion2])
def test_nothing_is_computed_unless_somebody_looks(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    calls, looks = list[int](), [False]
    original = orthogonalize.gram_of
    monkeypatch.setattr(orthogonalize, "gram_of", lambda *a: (calls.append(1), original(*a))[1])
    param = nn.Parameter(torch.zeros(4, 6).double())
    param.grad = _gauss(4, 6)
    optimizer = make([param])
    optimizer.step()
    shown: list[int] = []
    handle = optimizer.register_step_observer(lambda event: shown.append(len(event.grams)), grams=lambda: looks[0])
    optimizer.step()
    assert (len(calls), shown) == (0, [0])
    looks[0] = True
    optimizer.step()
    assert (len(calls), shown) == (1, [0, 1])
    handle.remove()
    optimizer.step()
    assert len(calls) == 1
    optimizer.register_step_observer(lambda event: None)
    optimizer.step()
    assert len(calls) == 2


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_looking_changes_no_weight(name: str) -> None:
    runs = []
    for looked_at in (False, True):
        params = [nn.Parameter(_gauss(*s, seed=i).float()) for i, s in enumerate(SHAPES)]
        optimizers = [
            Scion(params[:2], lr=0.1, momentum=0.5, norm_kwargs={"orthogonalizer": name}),
            Dion2(params[2:], fraction=0.5, newton_schulz_func=name),
        ]
        for optimizer in optimizers:
            if looked_at:
                optimizer.register_step_observer(lambda event: None)
            for step in range(3):
                for i, p in enumerate(params):
                    p.grad = _gauss(*SHAPES[i], seed=10 * step + i).float()
                optimizer.step()
        runs.append([p.detach() for p in params])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
