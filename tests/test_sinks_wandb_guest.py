"""WandbSink in a run that a trainer logs to: neither side loses a row, and the trainer's x-axis stays its own.

The trainers are real wandb offline runs, and then, many at random, a model of wandb's step rules that is first held
against wandb itself.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sample_run import one_row, run_info
from wandb_files import Stored, settings
from wandb_trainers import TRAINERS, ModelRun, RandomTrainer, alone, train, twice_with_step, with_step

from scion_telemetry.rows import Batch, Scalar
from scion_telemetry.sinks import WandbSink
from scion_telemetry.sinks.wandb_guest import GuestRows

STEP = "telemetry/step"
KEY = "weight_rms/embed"


@contextmanager
def trainer_run(folder: Path) -> Iterator[Any]:
    import wandb

    run = wandb.init(project="trainer", mode="offline", dir=folder, settings=settings(), reinit="create_new")
    try:
        yield run
    finally:
        run.finish()


def stored(run: Any) -> Stored:
    return Stored(Path(run.settings.sync_dir))


def measured(step: int) -> Batch:
    return one_row(step, {"weight_rms": step + 0.125})


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_row_is_lost_with_any_trainer(tmp_path: Path, trainer: Callable[[Any, int], None], every: int) -> None:
    steps = 41
    with trainer_run(tmp_path) as run:
        sink = WandbSink(run=run)
        sink.open(run_info())
        train(run, trainer, lambda step: sink.write(measured(step)), steps, every)
        sink.close()
    result = stored(run)
    expected = [1, *range(every, steps + 1, every)] if every > 1 else list(range(1, steps + 1))
    rows = [row for row in result.history if KEY in row]
    assert [row[STEP] for row in rows] == expected
    assert [row[KEY] for row in rows] == [step + 0.125 for step in expected]
    # Every loss, and each at the x that it would have had without us.
    assert result.series("loss") == alone(trainer, steps)
    if trainer is twice_with_step:
        assert result.series("val") == [(s, s + 0.25) for s in range(0, steps, 10)]


def test_bare_trainer_and_telemetry_at_every_step(tmp_path: Path) -> None:  # C105
    with trainer_run(tmp_path) as run:
        sink = WandbSink(run=run)
        sink.open(run_info())
        for step in range(1, 6):
            sink.write(measured(step))
            run.log({"loss": float(step)})
        sink.close()
        assert run.step == 5
    assert stored(run).series("loss") == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0), (4, 5.0)]
    assert stored(run).series(STEP) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_rows_that_come_late_are_kept(tmp_path: Path) -> None:  # C104
    with trainer_run(tmp_path) as run:
        sink = WandbSink(run=run)
        sink.open(run_info())
        run.log({"loss": 1.0})
        run.log({"loss": 2.0})
        sink.write(measured(1))
        sink.write(measured(2))
        sink.write(measured(3))
        sink.close()
    assert stored(run).series("loss") == [(0, 1.0), (1, 2.0)]
    assert [step for _, step in stored(run).series(STEP)] == [1, 2, 3]


def test_the_given_run_goes_on_and_keeps_its_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with trainer_run(tmp_path) as run:
        sink = WandbSink(run=run)
        sink.open(run_info())
        sink.write(measured(1))
        sink.close()
        sink.close()
        run.log({"loss": 1.0})
        assert dict(run.config) == {}
    assert stored(run).series("loss") == [(0, 1.0)]
    assert stored(run).series(KEY) == [(0, 1.125)]
    assert stored(run).metrics["weight_rms/*"]["step_metric"] == STEP
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_batch_is_one_row_of_a_given_run(tmp_path: Path) -> None:
    scalars = tuple(Scalar(step=step, name="train_loss", value=float(step)) for step in (8, 9, 10))
    with trainer_run(tmp_path) as run:
        sink = WandbSink(run=run)
        sink.open(run_info())
        sink.write(Batch(step=10, layers=measured(10).layers, scalars=scalars))
        sink.write(Batch(step=20))
        sink.close()
    assert [{k: v for k, v in row.items() if k != "_step"} for row in stored(run).history] == [
        {STEP: 10, KEY: 10.125, "scalars/train_loss": 10.0, "telemetry/nonfinite": 0}
    ]


def test_a_disabled_run_keeps_nothing(tmp_path: Path) -> None:
    import wandb

    run = wandb.init(mode="disabled", dir=tmp_path)
    rows = GuestRows(run)
    for step in range(1, 4):
        rows.put(step, {STEP: step})
    assert not rows._held
    run.finish()


# --- the rule itself, against a model of wandb ----------------------------------------------------------------------


def test_the_model_does_what_wandb_does(tmp_path: Path) -> None:
    chance = random.Random(0)
    model = ModelRun()
    with trainer_run(tmp_path) as run:
        for i in range(300):
            step = chance.choice([None, None, max(0, model.step + chance.randint(-3, 4))])
            commit = chance.choice([None, None, False, True])
            data = {chance.choice("abc"): float(i)}
            for target in (model, run):
                target.log(data, step=step, commit=commit)
            assert run.step == model.step, i
    assert [(row.pop("_step"), row) for row in stored(run).history] == sorted(model.rows.items())
    assert model.dropped
    assert model.overwritten


@pytest.mark.parametrize("block", range(4))
def test_no_row_is_lost_with_random_trainers(block: int) -> None:
    for seed in range(block * 100, (block + 1) * 100):
        check_random_trainer(seed)


def check_random_trainer(seed: int) -> None:
    steps, every = 200, random.Random(seed).choice([1, 1, 2, 5, 10])
    lag = random.Random(seed + 1000).choice([0, 0, 1, 3])  # telemetry that arrives some steps after it was taken
    lonely, run = ModelRun(), ModelRun()
    train(lonely, RandomTrainer(random.Random(seed)), lambda step: None, steps, 1)
    rows = GuestRows(run)
    sent = []

    def put(now: int) -> None:
        if now > lag:
            sent.append(now - lag)
            rows.put(now - lag, {STEP: now - lag, KEY: 0.5})

    train(run, RandomTrainer(random.Random(seed)), put, steps, every)
    assert not run.dropped, seed
    trainers = {key for row in lonely.rows.values() for key in row}
    for key in trainers:
        assert [value for _, value in run.series(key)] == [value for _, value in lonely.series(key)], (seed, key)
    rows.flush()
    assert [step for _, step in run.series(STEP)] == sent, seed
    assert not run.dropped, seed
    assert not run.overwritten, seed


def test_a_trainer_that_keeps_up_gets_no_backlog() -> None:
    run = ModelRun()
    rows = GuestRows(run)
    waiting = []

    def put(step: int) -> None:
        rows.put(step, {STEP: step})
        waiting.append(len(rows._held))

    train(run, with_step, put, 400, 2)
    assert max(waiting) < 10
    assert waiting[-1] == 0


def test_a_trainer_that_never_logs_is_left_alone_until_the_end(caplog: pytest.LogCaptureFixture) -> None:
    run = ModelRun()
    rows = GuestRows(run)
    for step in range(1, 101):
        rows.put(step, {STEP: step})
    assert run.step == 0
    rows.flush()
    assert [step for _, step in run.series(STEP)] == list(range(1, 101))
    assert "the last 99 rows of telemetry: they stand at the steps up to 99" in caplog.text


@pytest.mark.parametrize("waits", [False, True])
def test_the_last_scalars_join_the_row_of_their_step(waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    run = ModelRun()
    rows = GuestRows(run)
    if waits:
        rows.put(1, {STEP: 1, KEY: 0.5})
    rows.put(2, {STEP: 2, KEY: 0.75, "telemetry/nonfinite": 1})
    rows.put(2, {STEP: 2, "scalars/loss": math.inf, "telemetry/nonfinite": 1})
    expected = {STEP: 2, KEY: 0.75, "scalars/loss": math.inf, "telemetry/nonfinite": 2}
    if waits:
        assert rows._held_values == len(expected)
        run.log({"loss": 1.0})
    rows.flush()
    run.log({"loss": 2.0}, step=run.step)  # the trainer's last word has a place still
    assert not run.dropped
    assert run.rows[run.step] == {**expected, "loss": 2.0}
    assert not caplog.records


def test_scalars_of_a_step_whose_row_is_closed_get_their_own() -> None:
    run = ModelRun()
    rows = GuestRows(run)
    rows.put(1, {STEP: 1, KEY: 0.5, "telemetry/nonfinite": 0})
    run.log({"loss": 1.0})
    rows.put(1, {STEP: 1, "scalars/loss": 1.0})
    assert run.rows == {
        0: {STEP: 1, KEY: 0.5, "telemetry/nonfinite": 0, "loss": 1.0},
        1: {STEP: 1, "scalars/loss": 1.0},
    }


def test_what_waits_is_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scion_telemetry.sinks.wandb_guest._MAX_HELD_VALUES", 10)
    run = ModelRun()
    rows = GuestRows(run)
    for step in range(1, 101):
        rows.put(step, {STEP: step, KEY: 0.5})
    rows.flush()
    assert [step for _, step in run.series(STEP)] == [1, 2, 3, 4, 5, 6]  # one at once and five that may wait
    assert sum("left out there" in record.getMessage() for record in caplog.records) == 1


def test_a_trainer_that_moves_on_between_look_and_log() -> None:
    """The trainer's thread logs while ours decides: the row that wandb drops then is placed again."""

    class Racing(ModelRun):
        race = False

        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            if self.race and STEP in data and step is not None:
                self.race = False
                super().log({"loss": 1.0}, step=step + 5)
            super().log(data, step=step, commit=commit)

    run = Racing()
    rows = GuestRows(run)
    train(run, with_step, lambda step: rows.put(step, {STEP: step}), 31, 2)
    run.race = True
    for step in range(32, 40, 2):
        rows.put(step, {STEP: step})
    assert not run.race
    assert [data[STEP] for data in run.dropped]
    rows.flush()
    assert [step for _, step in run.series(STEP)] == [1, *range(2, 40, 2)]
