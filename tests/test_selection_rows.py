"""selected.csv: which rows were selected at each flush, against the momentum followed in Python's lists."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tracked import gauss, named

from scion_telemetry import Tracker, at, every, load_run
from scion_telemetry.optim import Dion2
from scion_telemetry.rows import Batch
from scion_telemetry.sinks import CsvSink, MemorySink
from scion_telemetry.store import Run
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(60)

SHAPES = {"wide": (10, 4), "experts": (4, 6, 5), "square": (7, 7)}
FRACTION, EF_DECAY = 0.3, 0.9
Chosen = dict[tuple[int, str, int], set[int]]


def gradient(name: str, step: int) -> Tensor:
    shape, seed = SHAPES[name], 100 * step + list(SHAPES).index(name)
    return gauss(*shape, seed=seed) * gauss(shape[-2], 1, seed=seed // 4).exp()


class Training:
    """Gradients of the number of the step alone; over ranks rows (and experts) or columns are cut."""

    def __init__(self, select: str = "rows", rank: int = 0, world: int = 1, cut: int = 0) -> None:
        self.mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
        self.cut = cut
        self.model = named(**{name: self.place(torch.ones(shape)) for name, shape in SHAPES.items()})
        options: dict[str, Any] = {"selection_scope": "global", "select_dim": select, "ef_decay": EF_DECAY}
        self.optimizer = Dion2(list(self.model.items()), fraction=FRACTION, **options)

    def place(self, x: Tensor) -> Tensor:
        return x if self.mesh is None else distribute_tensor(x, self.mesh, [Shard(self.cut)], src_data_rank=None)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for name, p in self.model.items():
                p.grad = self.place(gradient(name, step))
            self.optimizer.step()

    def tracker(self, schedule: Any, *sinks: Any, metrics: Any, **options: Any) -> Tracker:
        return Tracker(self.model, self.optimizer, schedule=schedule, sinks=sinks, metrics=metrics, **options)


def followed(flushes: list[int], select: str = "rows") -> Chosen:
    """The largest by L1 norm of the momentum at every flush; what is selected decays."""
    found: Chosen = {}
    for name, shape in SHAPES.items():
        momentum = torch.zeros(shape[0] if len(shape) == 3 else 1, *shape[-2:])
        for step in range(1, flushes[-1] + 1):
            momentum += gradient(name, step).view_as(momentum)
            for b, matrix in enumerate(momentum):
                lines = matrix if select == "rows" else matrix.T
                scores = [sum(abs(x) for x in line) for line in lines.double().tolist()]
                k = math.ceil(FRACTION * len(scores))
                chosen = sorted(range(len(scores)), key=lambda i, scores=scores: -scores[i])[:k]  # type: ignore[misc]
                for i in chosen:
                    lines[i] *= EF_DECAY
                if step in flushes:
                    found[step, name, b] = set(chosen)
    return found


def read(run: Run) -> Chosen:
    """Decoded bit by bit, the first in the highest."""
    found: Chosen = {}
    cells = run.selected.astype({"param": str}).to_numpy(dtype=object).tolist()
    for step, param, matrix, count, rows in cells:
        key = step, param, matrix
        assert key not in found
        bits = "".join(f"{byte:08b}" for byte in rows)
        assert len(bits) == 8 * math.ceil(count / 8)
        found[key] = {i for i, bit in enumerate(bits) if bit == "1"}
    return found


METRICS = ["norms", "selection_rows"]


@pytest.mark.parametrize("select", ["rows", "cols"])
def test_masks_are_the_largest_of_the_momentum(select: str, tmp_path: Path) -> None:
    training = Training(select)
    with training.tracker(every(3), CsvSink(tmp_path / "run"), metrics=METRICS):
        training.steps(1, 10)
    run = load_run(tmp_path / "run")
    truth = followed([1, 3, 6, 9], select)
    assert read(run) == truth
    assert run.info["selection_rows"] is True
    sizes = {name: shape[-2] if select == "rows" else shape[-1] for name, shape in SHAPES.items()}
    counts = run.selected[["param", "count"]].drop_duplicates().astype({"param": str}).to_numpy(dtype=object).tolist()
    assert dict(counts) == sizes
    flags = run.raster("experts", 2)
    assert flags.index.tolist() == [1, 3, 6, 9]
    assert flags.index.name == "step"
    assert list(map(int, flags.columns)) == list(range(sizes["experts"]))
    assert flags.dtypes.unique().tolist() == [np.dtype(bool)]
    for step, row in zip(flags.index.tolist(), flags.to_numpy().tolist(), strict=True):
        assert {i for i, flag in enumerate(row) if flag} == truth[step, "experts", 2]
    k = run.selection.set_index(["step", "param"])["k"]
    assert all(run.raster("wide").loc[step].sum() == k[step, "wide"] for step in (1, 3, 6, 9))


@pytest.mark.parametrize(("world", "select", "cut"), [(2, "rows", 0), (4, "rows", 0), (3, "cols", 0), (2, "cols", 1)])
def test_ranks_with_uneven_pieces_tell_the_same(world: int, select: str, cut: int, tmp_path: Path) -> None:
    """On four ranks the ten rows are 3, 3, 3 and 1, and the seven 2, 2, 2 and 1."""

    def run(rank: int, world: int) -> None:
        training = Training(select, rank, world, cut)
        with training.tracker(every(3), CsvSink(tmp_path / "run"), metrics=METRICS):
            training.steps(1, 7)

    run_forked(run, world, timeout=50)
    assert read(load_run(tmp_path / "run")) == followed([1, 3, 6], select)


def test_heads_select_each_for_itself() -> None:
    model = named(w=torch.ones(12, 5))
    optimizer, sink = Dion2(model.parameters(), fraction=0.3, num_heads=3, select_dim="rows"), MemorySink()
    with Tracker(model, optimizer, schedule=at(1), metrics=METRICS, sinks=[sink]):
        model["w"].grad = (g := gauss(12, 5, seed=3))
        optimizer.step()
    scores = g.view(3, 4, 5).abs().sum(-1)
    assert [(c.matrix, c.count, c.rows) for c in sink.selected] == [
        (head, 4, np.packbits([i in scores[head].topk(2).indices for i in range(4)]).tobytes()) for head in range(3)
    ]


# ---------------------------------------------------------------------- when


def told(metrics: Any, schedule: Callable[[int], bool]) -> MemorySink:
    training, sink = Training(), MemorySink()
    with training.tracker(schedule, sink, metrics=metrics):
        training.steps(1, 12)
    return sink


def steps(items: Any) -> list[int]:
    return sorted({item.step for item in items})


def test_rows_have_a_cadence_of_their_own() -> None:
    sink = told({"norms": 1, "selection_rows": 3}, every(2, first=False))
    assert (steps(sink.layers), steps(sink.selection), steps(sink.selected)) == ([2, 4, 6, 8, 10, 12], [2, 8], [2, 8])
    sink = told({"selection": 1, "selection_rows": 2, "selection_frequencies": 3}, every(2, first=False))
    assert (steps(sink.selection), steps(sink.selected)) == ([2, 4, 6, 8, 10, 12], [2, 6, 10])
    assert steps(sink.histograms) == [2, 8]
    truth = followed([2, 6, 10])
    assert [(c.step, c.param, c.matrix) for c in sink.selected] == sorted(truth, key=lambda key: key[0])


@pytest.mark.parametrize("metrics", ["basic", "full", ["selection", "selection_gradient", "selection_frequencies"]])
def test_without_being_asked_for_nothing_is_kept(metrics: Any, tmp_path: Path) -> None:
    training, sink = Training(), MemorySink()
    with training.tracker(every(2), CsvSink(tmp_path / "run"), sink, metrics=metrics):
        training.steps(1, 4)
    assert sink.selection
    assert not sink.selected
    assert sink.run is not None
    assert not sink.run.selection_rows
    assert not (tmp_path / "run" / "selected.csv").exists()
    assert load_run(tmp_path / "run").selected.empty


def test_nothing_that_selects_means_no_table(tmp_path: Path) -> None:
    model = named(w=torch.ones(3, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracker(model, sgd, schedule=every(1), metrics=METRICS, sinks=[CsvSink(tmp_path / "run")]):
        model["w"].grad = torch.ones(3, 2)
        sgd.step()
    assert load_run(tmp_path / "run").info["selection_rows"] is False
    assert not (tmp_path / "run" / "selected.csv").exists()


def test_it_costs_no_byte_and_no_collective() -> None:
    def cost(metrics: list[str]) -> list[tuple[int, str, float]]:
        def run(rank: int, world: int) -> Any:
            training, sink = Training("rows", rank, world), MemorySink()
            with training.tracker(every(2), sink, metrics=metrics):
                training.steps(1, 6)
            names = ("telemetry_bytes", "telemetry_collectives")
            return [(s.step, s.name, s.value) for s in sink.scalars if s.name in names]

        return run_forked(run, 2, timeout=50)[0]  # type: ignore[no-any-return]

    with_rows = cost(["selection", "selection_rows"])
    assert len(with_rows) == 8
    assert all(value > 0 for _, _, value in with_rows)
    assert with_rows == cost(["selection"])


def test_a_foreign_sink_that_knows_nothing_of_it_goes_on() -> None:
    class Rows:
        def __init__(self) -> None:
            self.found: list[Batch] = []

        def open(self, run: object) -> None: ...

        def write(self, batch: Batch) -> None:
            self.found.append(Batch(step=batch.step, layers=batch.layers))

        def close(self) -> None: ...

    sink, training = Rows(), Training()
    with training.tracker(every(2), sink, metrics=METRICS):
        training.steps(1, 4)
    assert [b.step for b in sink.found if b.layers] == [1, 2, 4]
    assert all(b.selected == () for b in sink.found)


# ---------------------------------------------------------------------- resumed, grown


def part(path: Path, first: int, last: int, state: Any, select: str = "rows") -> Any:
    """Steps of a run; those before ``first`` stand for the optimizer's own checkpoint."""
    training = Training(select)
    training.steps(1, first - 1)
    sink = CsvSink(path, resume=state is not None)
    with training.tracker(every(3), sink, metrics=METRICS, resume=state) as tracker:
        training.steps(first, last)
        return tracker.state_dict()


def test_resumed_at_a_checkpoint_what_came_after_it_is_told_once(tmp_path: Path) -> None:
    """The run went on to step 13 and was taken up again from the checkpoint of step 7."""
    path = tmp_path / "run"
    state = part(path, 1, 7, None)
    part(path, 8, 13, state)
    assert read(load_run(path)) == followed([1, 3, 6, 9, 12])
    part(path, 8, 10, state)
    assert read(load_run(path)) == followed([1, 3, 6, 9])
    part(tmp_path / "straight", 1, 10, None)
    assert (path / "selected.csv").read_bytes() == (tmp_path / "straight" / "selected.csv").read_bytes()


def test_a_raster_goes_back_to_where_another_number_was_selected_from(tmp_path: Path) -> None:
    path = tmp_path / "run"
    state = part(path, 1, 7, None)
    part(path, 8, 13, state, "cols")
    run = load_run(path)
    assert run.raster("wide").shape == (2, 4)
    assert run.raster("wide").index.tolist() == [9, 12]
    assert run.raster("square").index.tolist() == [1, 3, 6, 9, 12]


def test_the_first_matrix_that_is_selected_from_comes_late(tmp_path: Path) -> None:
    """Tables of selections begin then, histograms and slices too, and what the run says of itself."""
    model = named(bias=gauss(4), matrix=gauss(6, 4))
    optimizer = Dion2([{"params": [model["bias"]], "algorithm": "adamw"}], lr=0.05, fraction=0.5, select_dim="rows")
    metrics = ["norms", "selection_frequencies", "selection_rows"]
    with Tracker(model, optimizer, schedule=every(1), metrics=metrics, sinks=[CsvSink(tmp_path / "run")]):
        for step in (1, 2, 3, 4):
            if step == 3:
                optimizer.add_param_group({"params": [model["matrix"]]})
            for p in model.values():
                p.grad = gauss(*p.shape, seed=step)
            optimizer.step()
    run = load_run(tmp_path / "run")
    assert run.layers["step"].tolist() == [1, 2, 3, 3, 4, 4]
    assert run.info["selection_rows"] is True
    assert run.info["histograms"] == ["selection_frequencies"]
    chosen = run.selection["step"].tolist()
    assert chosen
    assert run.selected["step"].tolist() == chosen
    assert sorted(run.histograms["step"].unique()) == chosen
    assert run.raster("matrix").sum(axis=1).tolist() == [3] * len(chosen)
    assert len(run.slices) == 6
