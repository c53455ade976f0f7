"""The demo's training: what a user's own loop looks like with a tracker in it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scion_telemetry.demo.config import DemoConfig
from scion_telemetry.demo.data import Corpus, batches, load_corpus, validation_batches
from scion_telemetry.demo.model import GPT, GPTConfig
from scion_telemetry.optim import Dion2, Scion, group_params
from scion_telemetry.rows import Sink
from scion_telemetry.schedule import every
from scion_telemetry.sinks import CsvSink, WandbSink
from scion_telemetry.tracker import Tracker

ROLES = {"head": {"scale": 4.0}, "vector": {"scale": 0.2}}
"""Length of the step relative to lr, in the natural norm of each role; the best of a small grid for this model."""

VALIDATION_BATCHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What the loop reports after a step: loss and validation loss are means over ranks where known.

    Args:
        step: Steps taken; 0 before the first.
        loss: Training loss on this rank; None before the first step.
        val_loss: Validation loss, when it was just computed.
        tokens_per_second: Over all ranks.
        verification: What the tracker says of itself after the last step, when it was asked; several lines.
    """

    step: int
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    verification: str | None = None


Report = Callable[[Progress], None]


def train(config: DemoConfig, report: Report) -> bool:
    """Train the demo model on this rank; inside an initialised process group it is sharded with FSDP2.

    Returns:
        Whether the tracker's numbers hold, the same on all ranks; True where ``verify`` was not asked for.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    corpus = load_corpus()
    model = GPT(GPTConfig(), seed=config.seed)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(config, model)
    # Constant, then linear to a tenth over the second half.
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, 1.9 - 1.8 * s / config.steps))
    context = model.config.context
    source = batches(
        corpus.train, batch=config.batch // world, context=context, rank=rank, world=world, seed=config.seed
    )
    clock = _Clock(config.batch * context)
    with Tracker(
        model,
        optimizer,
        schedule=every(config.every),
        metrics=["basic", "selection_gradient", "selection_frequencies", "selection_rows"],
        sinks=make_sinks(config),
        run=attributes(config, corpus, model),
    ) as tracker:
        report(Progress(step=0, val_loss=validate(model, corpus, tracker)))
        for _ in range(config.steps):
            inputs, targets = next(source)
            optimizer.zero_grad()
            loss = model.loss(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            decay.step()
            tracker.log(train_loss=loss, tokens_per_second=(speed := clock.lap()))
            last = tracker.step == config.steps
            val_loss = validate(model, corpus, tracker) if last or tracker.step % (4 * config.every) == 0 else None
            report(
                Progress(
                    step=tracker.step,
                    loss=float(loss.detach()),
                    val_loss=val_loss,
                    tokens_per_second=speed,
                )
            )
        if not config.verify:
            return True
        found = tracker.verify()
        report(Progress(step=tracker.step, verification=str(found)))
        return found.ok


def make_optimizer(config: DemoConfig, model: GPT) -> torch.optim.Optimizer:
    """Dion2 on the hidden matrices and Scion's geometries elsewhere, or Scion everywhere."""
    groups = group_params(model, roles=ROLES)
    if config.optimizer == "scion":
        return Scion(groups, lr=config.lr, momentum=0.1, unconstrained=True)
    return Dion2(groups, lr=config.lr, fraction=config.fraction, momentum=0.1)


def make_sinks(config: DemoConfig) -> list[Sink]:
    """The run directory, and Weights & Biases if asked for."""
    sinks: list[Sink] = [CsvSink(config.out)]
    if config.wandb:  # first: where wandb cannot start, no run directory is left that the next try would refuse
        sinks.insert(0, WandbSink(project="scion-telemetry-demo", name=config.out.name, dir=config.out))
    return sinks


def attributes(config: DemoConfig, corpus: Corpus, model: GPT) -> dict[str, str | int | float]:
    """What distinguishes this run from others."""
    return {
        "optimizer": config.optimizer,
        "fraction": config.fraction if config.optimizer == "dion2" else 1.0,
        "lr": config.lr,
        "seed": config.seed,
        "steps": config.steps,
        "batch": config.batch,
        "context": model.config.context,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": corpus.fingerprint,
    }


@torch.no_grad()
def validate(model: GPT, corpus: Corpus, tracker: Tracker) -> float:
    """Mean loss on held-out text over all ranks; logged too."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    count = max(world, VALIDATION_BATCHES // world * world)
    context = model.config.context
    fixed = validation_batches(corpus.validation, batch=16, context=context, count=count, rank=rank, world=world)
    losses: list[Tensor] = [model.loss(inputs, targets) for inputs, targets in fixed]
    mean = torch.stack(losses).mean()
    tracker.log(val_loss=mean)
    if world > 1:
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return float(mean)


class _Clock:
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Tokens per second since the lap before."""
        before, self._last = self._last, time.perf_counter()
        return self._tokens / max(self._last - before, 1e-9)
