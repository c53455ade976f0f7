"""Weights that something other than a step has changed: σ₁ starts anew, on all ranks together."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from tracked import gauss, named, rows

from scion_telemetry import Tracker, every
from scion_telemetry.optim.layout import local
from scion_telemetry.sinks import MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(60)

SHAPES = {"wide": (150, 260), "tall": (300, 140)}
REPLACED = 4
Trained = tuple[MemorySink, list[int]]


def weight(name: str, seed: int) -> Tensor:
    return gauss(*SHAPES[name], seed=seed)  # noise: a start that knows nothing is as far off as can be


def trained(place: Callable[[Tensor], Tensor], only_on: int | None = None, rank: int = 0) -> Trained:
    """σ₁ and collectives at every step of SGD that hardly moves; before one step the weights are replaced in place."""
    model = named(**{name: place(weight(name, 0)) for name in SHAPES})
    optimizer, sink, counts = torch.optim.SGD(model.parameters(), lr=1e-6), MemorySink(), []
    with Tracker(model, optimizer, schedule=every(1), metrics=["weight_spectral"], sinks=[sink]) as tracker:
        for step in range(1, 7):
            if step == REPLACED and only_on in (None, rank):
                with torch.no_grad():
                    for name, p in model.items():
                        local(p).copy_(local(place(weight(name, 1))))
            for name, p in model.items():
                p.grad = place(weight(name, step))
            optimizer.step()
            assert tracker.last_flush is not None
            counts.append(tracker.last_flush.collectives)
    return sink, counts


def normalised(rank: int, world: int) -> tuple[MemorySink, list[int]]:
    """Rows of weights are made one long after every step, as some trainings do."""
    mesh = init_device_mesh("cpu", (world,))

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)

    model = named(w=distribute_tensor(unit(weight("wide", 0)), mesh, [Shard(0)], src_data_rank=None))
    optimizer, sink, counts = torch.optim.SGD(model.parameters(), lr=1e-3), MemorySink(), []
    with Tracker(model, optimizer, schedule=every(1), metrics=["weight_spectral"], sinks=[sink]) as tracker:
        for step in range(1, 7):
            model["w"].grad = distribute_tensor(weight("wide", step), mesh, [Shard(0)], src_data_rank=None)
            optimizer.step()
            truth = torch.linalg.svdvals(model["w"].full_tensor().detach().double())[0]
            tracker.log(truth=truth)
            with torch.no_grad():
                local(model["w"]).copy_(unit(local(model["w"])))
            assert tracker.last_flush is not None
            counts.append(tracker.last_flush.collectives)
    return sink, counts


Change = Callable[[nn.ParameterDict, dict[str, Tensor]], object]


def by_parts(model: nn.ParameterDict, new: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.items():
            local(p).copy_(local(new[name]))


def by_whole(model: nn.ParameterDict, new: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.items():
            p.copy_(new[name])


def by_state(model: nn.ParameterDict, new: dict[str, Tensor]) -> None:
    model.load_state_dict(new)


def elsewhere(model: nn.ParameterDict, new: dict[str, Tensor]) -> None:
    for name, p in model.items():
        p.data = new[name].clone()


CHANGES: dict[str, Change] = {f.__name__: f for f in (by_parts, by_whole, by_state, elsewhere)}


def errors(
    change: Callable[[int], object],
    model: nn.ParameterDict,
    optimizers: Sequence[torch.optim.Optimizer],
    place: Callable[[Tensor], Tensor] = lambda x: x,
    **options: Any,
) -> dict[int, float]:
    """Largest relative error of σ₁ by step, of a training that calls ``change(step)`` before each step."""
    sink, truths = MemorySink(), {}
    metrics = options.pop("metrics", ["weight_spectral"])
    with Tracker(model, list(optimizers), schedule=every(1), metrics=metrics, sinks=[sink], **options) as tracker:
        for step in range(1, 13):
            change(step)
            for p in model.values():
                p.grad = place(gauss(*p.shape, seed=step))
            for optimizer in optimizers:
                optimizer.step()
            for name, p in model.items():
                full = p.full_tensor() if isinstance(p, DTensor) else p
                truths[step, name] = float(torch.linalg.svdvals(full.detach().double())[0])
            tracker.flush()
    found: dict[int, float] = {}
    for (step, name), row in rows(sink).items():
        if "weight_spectral" in row:
            found[step] = max(found.get(step, 0.0), abs(row["weight_spectral"] / truths[step, name] - 1))
    return found


def noise(place: Callable[[Tensor], Tensor] = lambda x: x, seed: int = 0) -> dict[str, Tensor]:
    return {name: place(weight(name, seed)) for name in SHAPES}


@pytest.mark.parametrize("way", CHANGES)
def test_every_way_to_replace_weights_of_one_process(way: str) -> None:
    model = named(**noise())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    found = errors(lambda step: step == REPLACED and CHANGES[way](model, noise(seed=1)), model, [optimizer])
    assert max(found.values()) <= 0.01, found


@pytest.mark.parametrize("way", ["by_parts", "by_whole", "by_state"])
def test_every_way_to_replace_weights_in_pieces(way: str) -> None:
    def run(rank: int, world: int) -> dict[int, float]:
        mesh = init_device_mesh("cpu", (world,))

        def place(x: Tensor) -> Tensor:
            return distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

        model = named(**noise(place))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        return errors(lambda step: step == REPLACED and CHANGES[way](model, noise(place, 1)), model, [optimizer], place)

    found = run_forked(run, 2, timeout=50)[0]
    assert max(found.values()) <= 0.01, found


def test_replaced_together_with_parameters_that_come() -> None:
    model = named(**noise())
    optimizer = torch.optim.SGD([model["wide"]], lr=1e-6)

    def change(step: int) -> None:
        if step == REPLACED:
            by_whole(model, noise(seed=1))
            optimizer.add_param_group({"params": [model["tall"]]})

    found = errors(change, model, [optimizer])
    assert max(found.values()) <= 0.01, found


@pytest.mark.parametrize("when", ["before both", "between"])
def test_replaced_beside_several_optimizers(when: str) -> None:
    """Also where one of them steps every other time only, so that rounds end when the next one begins."""
    model = named(**noise())
    first, second = (torch.optim.SGD([p], lr=1e-6) for p in model.values())

    def change(step: int) -> None:
        if step == REPLACED and when == "before both":
            by_whole(model, noise(seed=1))

    step_second = second.step
    calls = [0]

    def rarely(*args: Any) -> None:
        calls[0] += 1
        if when == "between" and calls[0] == REPLACED:
            by_whole(model, noise(seed=1))
        if when == "between" or calls[0] % 2:
            step_second(*args)

    second.step = rarely  # type: ignore[method-assign]
    found = errors(change, model, [first, second])
    late = {step for step, error in found.items() if error > 0.01}
    # A change between two steps of a round comes after the first weight was measured: it is told of as it was.
    assert late <= ({REPLACED} if when == "between" else set()), found


@pytest.mark.parametrize("steps", [{7}, {6, 7}, {7, 8, 9}])
def test_replaced_between_flushes_that_measure_no_sigma(steps: set[int]) -> None:
    model = named(**noise())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def change(step: int) -> None:
        if step in steps:
            by_whole(model, noise(seed=step))

    found = errors(change, model, [optimizer], metrics={"weight_rms": 1, "weight_spectral": 5})
    assert list(found) == [1, 6, 11]
    assert max(found.values()) <= 0.01, found


def test_verify_starts_anew_too() -> None:
    model = named(**noise())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Tracker(model, optimizer, schedule=every(1), metrics=["weight_spectral"]) as tracker:
        for _ in range(3):
            optimizer.step()
        by_whole(model, noise(seed=1))
        found = tracker.verify()
    assert found.ok, found


def check(sink: MemorySink) -> None:
    for (step, name), row in rows(sink).items():
        truth = float(torch.linalg.svdvals(weight(name, int(step >= REPLACED)).double())[0])
        assert row["weight_spectral"] == pytest.approx(truth, rel=0.01), (step, name)


def test_whole_weights() -> None:
    check(trained(lambda x: x)[0])


def in_rows(rank: int, world: int, only_on: int | None = None) -> Trained:
    mesh = init_device_mesh("cpu", (world,))
    return trained(lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None), only_on, rank)


def test_weights_in_pieces_and_no_collective_more_at_other_flushes() -> None:
    (sink, counts), (_, others) = run_forked(in_rows, 2, timeout=50)
    check(sink)
    assert counts == others == [10, 4, 4, 10, 4, 4]


def test_a_change_on_one_rank_alone_is_one_on_all() -> None:
    """Half of a matrix is another one: nobody waits for a collective that the others do not make."""
    found = run_forked(lambda r, w: in_rows(r, w, only_on=1)[1], 2, timeout=50)
    assert found[0] == found[1] == [10, 4, 4, 10, 4, 4]


def test_a_change_after_every_step_is_a_habit_and_costs_no_cold_start_each_time() -> None:
    (sink, counts), (_, others) = run_forked(normalised, 2, timeout=50)
    assert counts == others == [10, 10, 10, 6, 6, 6]  # cold; told twice, and cold; warm, with all steps
    truths = {s.step: s.value for s in sink.scalars if s.name == "truth"}
    assert len(truths) == 6
    for (step, _), row in rows(sink).items():
        assert row["weight_spectral"] == pytest.approx(truths[step], rel=0.01)


def test_a_resumed_run_knows_the_habit() -> None:
    def values(stop: int | None) -> list[float]:
        model, sink, options = named(**noise()), MemorySink(), {"schedule": every(1), "metrics": ["weight_spectral"]}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        tracker = Tracker(model, optimizer, sinks=[sink], **options)  # type: ignore[arg-type]
        for step in range(1, 10):
            for name, p in model.items():
                p.grad = weight(name, step)
            optimizer.step()
            with torch.no_grad():
                for p in model.values():
                    p.div_(p.norm(dim=1, keepdim=True))
            if step == stop:
                state = tracker.state_dict()
                tracker.close()
                tracker = Tracker(model, optimizer, sinks=[sink], resume=state, **options)  # type: ignore[arg-type]
        tracker.close()
        return [row["weight_spectral"] for row in rows(sink).values()]

    assert values(None) == values(5)
