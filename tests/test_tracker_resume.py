"""A run that stopped and went on, on any number of ranks, has the files of one that never stopped."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tracked import gauss, named, rows, set_grads

from scion_telemetry import Tracker, every, load_run
from scion_telemetry.optim import Dion2
from scion_telemetry.sinks import CsvSink, MemorySink
from scion_telemetry.testing import run_forked

pytestmark = pytest.mark.timeout(120)

SHAPES = {"wide": (10, 4), "tall": (7, 9), "experts": (4, 6, 5), "bias": (5,)}
METRICS: Mapping[str, int] = {"norms": 1, "selection": 1, "spectral": 3, "weight_row_norms": 2}
SAVED, LOST, END = 7, 9, 14
ESTIMATED = ("spectral", "rank", "sigma", "rms_to_rms", "coherence", "radius_share", "gram", "polar")
OWN = ("telemetry_ms", "telemetry_bytes", "telemetry_collectives", "steps_per_second")


class Training:
    """Gradients come from the number of the step alone, so any number of ranks can take up where others stopped."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
        full = {name: gauss(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
        self.model = named(**{name: self.place(x) for name, x in full.items()})
        matrices = {"params": [(n, self.model[n]) for n in ("wide", "tall", "experts")]}
        vectors = {"params": [("bias", self.model["bias"])], "algorithm": "adamw", "lr": 0.01}
        options: dict[str, Any] = {"selection_scope": "global", "select_dim": "rows"}
        self.optimizer = Dion2([matrices, vectors], lr=0.02, fraction=0.3, weight_decay=0.0, **options)

    def place(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return x
        return distribute_tensor(x, self.mesh, [Shard(0)], src_data_rank=None)

    def step(self, step: int) -> None:
        for i, (name, p) in enumerate(self.model.items()):
            grad = gauss(*SHAPES[name], seed=1000 * step + i)
            if grad.ndim > 1:
                grad *= gauss(grad.size(-2), 1, seed=17 * step + i).exp()  # so that rows come and go
            p.grad = self.place(grad)
        self.optimizer.step()

    def tracker(self, path: Path, *, again: bool = False, **options: Any) -> Tracker:
        sinks = [CsvSink(path, resume=again)]
        return Tracker(self.model, self.optimizer, schedule=every(2), metrics=METRICS, sinks=sinks, **options)

    def log(self, tracker: Tracker, step: int) -> None:
        tracker.log(loss=step / 10 + self.rank - (self.world - 1) / 2)  # the mean is step / 10
        if step in (3, SAVED):  # a name that is new between the last flush and the checkpoint
            tracker.log(**{f"note{step}": torch.tensor(float(step))})


def whole(path: Path, rank: int, world: int) -> None:
    """The run that never stops."""
    training = Training(rank, world)
    with training.tracker(path) as tracker:
        for step in range(1, END + 1):
            training.step(step)
            training.log(tracker, step)


def first_part(path: Path, rank: int, world: int) -> dict[str, Any]:
    """Saves after step 7, goes on, and is gone after step 9 without a word."""
    training = Training(rank, world)
    tracker = training.tracker(path)
    state: dict[str, Any] = {}
    for step in range(1, LOST + 1):
        training.step(step)
        training.log(tracker, step)
        if step == SAVED:
            state = tracker.state_dict()
    tracker.flush()
    return state


def second_part(path: Path, state: Mapping[str, Any], rank: int, world: int) -> None:
    training = Training(rank, world)
    for step in range(1, SAVED + 1):
        training.step(step)  # the optimizer's own checkpoint
    with training.tracker(path, again=True, resume=state) as tracker:
        assert tracker.step == SAVED
        for step in range(SAVED + 1, END + 1):
            training.step(step)
            training.log(tracker, step)


def on(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    if world == 1:
        return [function(*args, 0, 1)]
    return run_forked(lambda r, w: function(*args, r, w), world, timeout=50)


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, down to every tensor."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


def logged(path: Path) -> pd.DataFrame:
    """What the user logged, in order."""
    table = pd.read_csv(path / "scalars.csv")
    table = table[~table["name"].isin(OWN) & ~table["name"].str.contains("/total")]
    return table.sort_values(["step", "name"], ignore_index=True)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[dict[str, Any]]]:
    """On two ranks: the run that never stopped, the one that did, and its state on both."""
    folder = tmp_path_factory.mktemp("runs")
    on(2, whole, folder / "whole")
    return folder / "whole", folder / "stopped", on(2, first_part, folder / "stopped")


def copied(path: Path, to: Path) -> Path:
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_the_state_is_the_same_on_all_ranks_and_survives_a_file_of_weights_only(stopped: Any) -> None:
    _, _, states = stopped
    assert same(states[0], states[1])
    assert (states[0]["step"], states[0]["flushes"]) == (SAVED, 4)
    file = io.BytesIO()
    torch.save(states[0], file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), states[0])


def test_the_state_holds_the_step_of_the_last_selection_of_every_row(stopped: Any) -> None:
    """Against a log of one process that is not told of any tracker."""
    training = Training(0, 1)
    last = {name: torch.zeros(shape[:-1], dtype=torch.int32) for name, shape in SHAPES.items() if name != "bias"}
    now = 0

    def see(event: Any) -> None:
        for i, param in enumerate(event.params):
            if event.selections:
                name = next(n for n, p in training.model.items() if p is param)
                view = last[name].view(-1, last[name].size(-1))
                for matrix, chosen in enumerate(event.selections[i].indices.view(view.size(0), -1)):
                    view[matrix, chosen] = now

    training.optimizer.register_step_observer(see)
    for now in range(1, SAVED + 1):
        training.step(now)
    state = stopped[2][0]
    assert set(state["selections"]) == set(last)
    for name, truth in last.items():
        assert torch.equal(state["selections"][name]["last"], truth.flatten()), name
        assert state["selections"][name]["latest"] == SAVED


@pytest.mark.parametrize("world", [1, 2, 4])
def test_resumed_on_another_number_of_ranks(world: int, stopped: Any, tmp_path: Path) -> None:
    never, before, states = stopped
    path = copied(before, tmp_path / "run")
    assert load_run(path).layers["step"].max() == 8, "there is something to cut"
    on(world, second_part, path, states[0])
    pd.testing.assert_frame_equal(logged(path), logged(never), check_exact=world == 2, rtol=1e-12)
    one, other = load_run(never), load_run(path)
    assert list(one.layers.columns) == list(other.layers.columns)
    assert one.layers[["step", "param"]].equals(other.layers[["step", "param"]])
    assert one.layers["step"].unique().tolist() == [1, 2, 4, 6, 8, 10, 12, 14]
    assert one.layers.isna().equals(other.layers.isna()), "multiples of flushes are out of step"
    spectra = one.layers[one.layers["weight_spectral"].notna()]["step"].unique().tolist()
    assert spectra == [1, 6, 12]
    # How many shards there are is what these are about.
    own = [] if world == 2 else ["regret", "overlap", "imbalance", "rows_communicated"]
    selections = [run.selection.drop(columns=own) for run in (one, other)]
    pd.testing.assert_frame_equal(*selections, check_exact=False, rtol=1e-6)
    sigma = [c for c in one.layers if any(part in c for part in ESTIMATED)]
    exact = [c for c in one.layers if c not in sigma]
    pd.testing.assert_frame_equal(one.layers[exact], other.layers[exact], check_exact=world == 2, rtol=1e-5)
    pd.testing.assert_frame_equal(one.layers[sigma], other.layers[sigma], check_exact=world == 2, rtol=0.02)
    if world == 2:
        for name in ("layers.csv", "selection.csv", "histograms.csv", "params.csv"):
            assert (path / name).read_bytes() == (never / name).read_bytes(), name


def test_ages_and_churn_know_what_came_before(stopped: Any, tmp_path: Path) -> None:
    """Without the state the first ages after a resume cannot reach back, and churn has nothing to compare with."""
    never, before, _ = stopped
    path = copied(before, tmp_path / "run")
    training = Training(0, 1)
    for step in range(1, SAVED + 1):
        training.step(step)
    with training.tracker(path, again=True, start_step=SAVED):
        training.step(SAVED + 1)
    forgetful, right = (load_run(p).selection.query("step == 8") for p in (path, never))
    assert right["churn"].notna().all()
    assert forgetful["churn"].isna().all()
    assert (right["age_max"] > 1).any()
    assert (forgetful["age_max"] <= 1).all()


def test_taking_the_state_changes_nothing_and_repeats_no_scalar(tmp_path: Path) -> None:
    def run(path: Path, often: bool) -> None:
        training = Training(0, 1)
        with training.tracker(path) as tracker:
            for step in range(1, END + 1):
                training.step(step)
                training.log(tracker, step)
                if often:
                    tracker.state_dict()
                    assert step in logged(path)["step"].to_numpy(), "a checkpoint knows more than the files"

    run(tmp_path / "plain", often=False)
    run(tmp_path / "often", often=True)
    pd.testing.assert_frame_equal(logged(tmp_path / "plain"), logged(tmp_path / "often"))
    for name in ("layers.csv", "selection.csv"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "often" / name).read_bytes()


def test_a_state_of_before_the_first_step_is_a_fresh_start(tmp_path: Path) -> None:
    training = Training(0, 1)
    tracker = training.tracker(tmp_path / "never")
    state = tracker.state_dict()
    tracker.close()
    assert (state["step"], state["flushes"]) == (0, 0)
    found = []
    for options in ({}, {"resume": state}):
        again, sink = Training(0, 1), MemorySink()
        with Tracker(again.model, again.optimizer, schedule=every(1), sinks=[sink], **options):
            again.step(1)
            again.step(2)
        found.append((rows(sink), [r.values for r in sink.selection]))
    assert found[0] == found[1]


# ---------------------------------------------------------------------- what does not fit


def plain(**options: Any) -> Tracker:
    model = nn.Linear(3, 4)
    return Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def state_of(step: int = 0) -> dict[str, Any]:
    tracker = plain(start_step=step)
    state = tracker.state_dict()
    tracker.close()
    return state


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: "run/state.pt", TypeError, r"resume must be what Tracker.state_dict\(\) returned, got str"),
        (lambda s: {}, TypeError, "got dict"),
        (lambda s: {k: v for k, v in s.items() if k != "flushes"}, TypeError, "got dict"),
        (lambda s: {**s, "version": 99}, ValueError, "version 99, this tracker reads version 1"),
    ],
)
def test_what_is_no_state_is_refused(change: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plain(resume=change(state_of(3)))


def test_a_start_step_may_only_say_the_same() -> None:
    state = state_of(3)
    with pytest.raises(ValueError, match="start_step is 2, but resume is of step 3; leave start_step out"):
        plain(resume=state, start_step=2)
    for tracker in (plain(resume=state), plain(resume=state, start_step=3)):
        assert tracker.step == 3
        tracker.close()


def test_ranks_that_resume_from_different_steps_are_refused_everywhere() -> None:
    states = [state_of(3), state_of(4)]

    def run(rank: int, world: int) -> str:
        try:
            plain(resume=states[rank])
        except ValueError as error:
            return str(error)
        return "nothing"

    for message in run_forked(run, 2, timeout=20):
        assert message.startswith("the step to start from differs between ranks: rank 0 has (3, 0), rank 1 has (4, 0)")


def test_parameters_that_the_state_does_not_fit_start_anew(stopped: Any) -> None:
    """Another shape, and a name that it does not know: nothing was selected from them since the resume."""
    state = stopped[2][0]
    model = named(wide=gauss(12, 4), fresh=gauss(6, 3), tall=gauss(7, 9))
    optimizer, sink = Dion2(model.parameters(), lr=0.1, fraction=0.3, select_dim="rows"), MemorySink()
    with Tracker(model, optimizer, schedule=every(1), sinks=[sink], resume=state):
        set_grads(model, 1)
        optimizer.step()
    found = {r.param: r.values for r in sink.selection}
    assert all(r.step == SAVED + 1 for r in sink.selection)
    for name in ("wide", "fresh"):
        assert "churn" not in found[name]
        assert found[name]["age_max"] == 1
    assert "churn" in found["tall"]
    old = state["selections"]["tall"]["last"].tolist()
    assert found["tall"]["age_max"] in {SAVED + 1 - step for step in old}
    assert found["tall"]["age_max"] > 1
