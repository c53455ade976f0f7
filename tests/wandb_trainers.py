"""Trainers of many habits that log to a wandb run, and a model of what wandb does with their steps."""

import random
from collections.abc import Callable
from typing import Any


class ModelRun:
    """What wandb does with steps: one open row, a counter that only moves forward, lower steps dropped."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: dict[int, dict[str, Any]] = {}
        self.dropped: list[dict[str, Any]] = []
        self.overwritten: list[str] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.step:
            self.dropped.append(data)
            return
        self.step = self.step if step is None else step
        row = self.rows.setdefault(self.step, {})
        self.overwritten += row.keys() & data.keys()
        row |= data
        if commit or (step is None and commit is None):
            self.step += 1

    def series(self, key: str) -> list[tuple[int, Any]]:
        return [(step, row[key]) for step, row in sorted(self.rows.items()) if key in row]


def with_step(run: Any, s: int) -> None:
    if s % 10 == 0:
        run.log({"loss": s + 0.5}, step=s)


def with_step_from_one(run: Any, s: int) -> None:
    if (s + 1) % 10 == 0:
        run.log({"loss": s + 0.5}, step=s + 1)


def twice_with_step(run: Any, s: int) -> None:
    run.log({"loss": s + 0.5}, step=s)
    if s % 10 == 0:
        run.log({"val": s + 0.25}, step=s)


def bare_each(run: Any, s: int) -> None:
    run.log({"loss": s + 0.5})


def bare_every_ten(run: Any, s: int) -> None:
    if s % 10 == 0:
        run.log({"loss": s + 0.5})


def epochs(run: Any, s: int) -> None:
    if s % 10 == 9:
        run.log({"loss": s + 0.5}, step=s // 10)


TRAINERS = [with_step, with_step_from_one, twice_with_step, bare_each, bare_every_ten, epochs]


def train(run: Any, trainer: Callable[[Any, int], None], put: Callable[[int], None], steps: int, every: int) -> None:
    """``steps`` steps: first the telemetry of the step, when it is due, and then the trainer's own log."""
    for s in range(steps):
        if (s + 1) % every == 0 or s == 0:
            put(s + 1)
        trainer(run, s)


def alone(trainer: Callable[[Any, int], None], steps: int) -> list[tuple[int, Any]]:
    run = ModelRun()
    train(run, trainer, lambda step: None, steps, 1)
    return run.series("loss")


class RandomTrainer:
    """Logs every so many steps, bare or with a step that counts steps, micro-steps or epochs."""

    def __init__(self, chance: random.Random) -> None:
        self.every, self.first = chance.choice([1, 2, 3, 7, 10, 25, 60]), chance.choice([0, 1])
        self.scale = chance.choice([None, 1.0, 1.0, 4.0, 1 / 10, 1 / 3])
        self.twice = chance.random() < 0.3
        self.commit = None if self.twice else chance.choice([None, None, True])
        self.done = -1

    def __call__(self, run: Any, s: int) -> None:
        if (s + self.first) % self.every:
            return
        if self.scale is None:
            run.log({"loss": float(s)})
            return
        step = int((s + self.first) * self.scale)
        if step > self.done:
            run.log({"loss": float(s)}, step=step, commit=self.commit)
        if self.twice:  # something else for the same row, maybe much later
            run.log({f"val{s}": float(s)}, step=step)
        self.done = step
