"""Which fraction does Dion2 need? The advice of ``scion-telemetry``, held against real training.

    python examples/tune_fraction.py train --out runs/tune          # call again to resume
    python examples/tune_fraction.py report --out runs/tune         # tables and figures, in seconds
    python examples/tune_fraction.py train --out runs/try --quick   # the same in seconds, to see that it works

Every run has its own run directory below ``--out``. One that has finished is skipped, an unfinished one is redone.
What came out is told in ``tune_fraction.md``.
"""

import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tune_fraction_record import Recorder, Shadow

from scion_telemetry import testing
from scion_telemetry.analysis.theory import matched_ef
from scion_telemetry.demo.data import Corpus, batches, load_corpus, validation_batches
from scion_telemetry.demo.model import GPT, GPTConfig
from scion_telemetry.demo.train import ROLES
from scion_telemetry.optim import Dion2, group_params
from scion_telemetry.optim.events import register_step_observer
from scion_telemetry.schedule import every
from scion_telemetry.sinks import CsvSink
from scion_telemetry.tracker import Tracker

FRACTIONS = (1.0, 0.5, 0.25, 0.125, 0.0625)
SEEDS = (0, 1, 2)
LR = 0.05
"""Of the demo, the same at every fraction. The update has √fraction times the Frobenius norm: hence the grid."""
LR_GRID = (0.1, 0.025, 0.0125)
LOW_LR = 0.025
"""At which the decay of the momentum that keeps its horizon at 20 steps is tried."""
WORLDS = (2, 4)
OTHER_DATA = 100
"""Seed of another order of the data: what two runs differ in that differ in nothing that advice could know."""
WIDTHS = (96, 512)
"""Of the square matrices whose step is timed: those of the demo, and larger ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training.

    Args:
        fraction: Share of the rows that Dion2 selects.
        seed: Of the weights, and of the data unless ``data_seed`` says otherwise.
        lr: Learning rate, constant and then falling linearly to a tenth over the second half.
        world: Ranks that hold a shard each (FSDP2).
        scope: Of the selection.
        data_seed: Of the order of the data.
        ef_decay: What a selected row of the momentum keeps; None: .95, the default of Dion2.
        steps: Optimizer steps.
        batch: Sequences a step, over all ranks.
        context: Bytes of a sequence.
        every: Measure every so many steps.
    """

    fraction: float
    seed: int = 0
    lr: float = LR
    world: int = 1
    scope: str = "local"
    data_seed: int | None = None
    ef_decay: float | None = None
    steps: int = 1000
    batch: int = 16
    context: int = 64
    every: int = 10

    @property
    def name(self) -> str:
        """Its run directory."""
        name = f"fraction{self.fraction:g}-seed{self.seed}"
        name += f"-lr{self.lr:g}" if self.lr != LR else ""
        name += f"-ef{self.ef_decay:g}" if self.ef_decay is not None else ""
        name += f"-ranks{self.world}-{self.scope}" if self.world > 1 else ""
        return name + (f"-data{self.data_seed}" if self.data_seed is not None else "")

    @property
    def shadows(self) -> tuple[float, ...]:
        """Fractions that are tried on the gradients of this run."""
        return FRACTIONS[1:] if self.name == f"fraction0.25-seed{self.seed}" else ()


def plan(*, quick: bool) -> list[Case]:
    """All trainings, the most important ones first."""
    if quick:
        small = Case(fraction=1.0, steps=12, batch=4, context=32, every=2)
        quarter = replace(small, fraction=0.25)
        return [small, quarter, *(replace(quarter, world=2, scope=scope) for scope in ("local", "global"))]
    cases = [Case(fraction=f, seed=s) for s in SEEDS for f in FRACTIONS]
    cases += [Case(fraction=0.25, world=w, scope=scope) for w in WORLDS for scope in ("local", "global")]
    cases += [Case(fraction=f, data_seed=OTHER_DATA) for f in (0.25, 0.125)]
    cases += [Case(fraction=f, lr=lr) for lr in LR_GRID for f in FRACTIONS]
    return cases + [Case(fraction=f, lr=LOW_LR, ef_decay=matched_ef(f)) for f in (0.5, 0.25, 0.125)]


# ---------------------------------------------------------------------- one training


def make_optimizer(case: Case, model: nn.Module) -> Dion2:
    """That of the demo, with rows everywhere: ``auto`` would select columns of tall matrices where they are whole."""
    groups = group_params(model, roles=ROLES)
    options = {"selection_scope": case.scope, "select_dim": "rows", "momentum": 0.1}
    options |= {} if case.ef_decay is None else {"ef_decay": case.ef_decay}
    return Dion2(groups, lr=case.lr, fraction=case.fraction, **options)  # type: ignore[arg-type]


def make_model(case: Case) -> GPT:
    """The demo's model, sharded where there are ranks."""
    model = GPT(GPTConfig(context=case.context), seed=case.seed)
    if case.world > 1:
        mesh = init_device_mesh("cpu", (case.world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(case: Case, path: Path, rank: int = 0) -> float:
    """Train on this rank into a run directory; returns the last validation loss."""
    torch.set_num_threads(1)
    corpus, model = load_corpus(), make_model(case)
    optimizer = make_optimizer(case, model)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, 1.9 - 1.8 * s / case.steps))
    names: dict[Tensor, str] = {p: name.removesuffix(".weight") for name, p in model.named_parameters()}
    recorder = Recorder(names, case.every)
    shadows = {f: Shadow(optimizer, names, f, case.every) for f in case.shadows}
    if case.world == 1:
        register_step_observer(optimizer, recorder)
    source = draw(case, corpus, rank)
    loss = float("nan")
    with Tracker(
        model,
        optimizer,
        schedule=every(case.every),
        metrics=["norms", "selection_gradient"],
        sinks=[CsvSink(path)],
        run={**{k: v for k, v in asdict(case).items() if v is not None}, "data": corpus.fingerprint},
    ) as tracker:
        for step in range(1, case.steps + 1):
            step_once(model, optimizer, next(source), tracker, list(shadows.values()))
            decay.step()
            if step % (10 * case.every) == 0 or step == case.steps:
                loss = validate(case, model, corpus, rank)
                tracker.log(val_loss=loss)
    if case.world == 1:
        recorder.save(path / "dynamics.npz")
    for fraction, shadow in shadows.items():
        shadow.recorder.save(path / f"shadow{fraction:g}.npz")
    return loss


def step_once(
    model: GPT, optimizer: Dion2, batch: tuple[Tensor, Tensor], tracker: Tracker, shadows: list[Shadow]
) -> None:
    """One step, with its times in milliseconds."""
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model.loss(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    middle = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    for shadow in shadows:
        shadow.step()
    tracker.log(train_loss=loss, gradient_ms=1e3 * (middle - start), optimizer_ms=1e3 * (end - middle))


def draw(case: Case, corpus: Corpus, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of this rank; together the ranks see what one would."""
    seed = case.seed if case.data_seed is None else case.data_seed
    size = case.batch // case.world
    return batches(corpus.train, batch=size, context=case.context, rank=rank, world=case.world, seed=seed)


@torch.no_grad()
def validate(case: Case, model: GPT, corpus: Corpus, rank: int) -> float:
    """Mean loss in nats a byte over 32,768 bytes of held-out text, the same for every run."""
    fixed = validation_batches(
        corpus.validation, batch=32, context=case.context, count=1024 // case.context, rank=rank, world=case.world
    )
    mean = torch.stack([model.loss(inputs, targets) for inputs, targets in fixed]).mean()
    if case.world > 1:
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return float(mean)


def run(case: Case, out: Path) -> str:
    """Train one case from its beginning; returns what to say about it."""
    path, start, cpu = out / case.name, time.perf_counter(), time.process_time()
    shutil.rmtree(path, ignore_errors=True)
    if case.world == 1:
        loss = train(case, path)
    else:
        loss = testing.run_forked(partial(_rank, case, path), case.world, timeout=3600.0)[0]
    spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    (path / "done.json").write_text(json.dumps({"val_loss": loss, **spent}) + "\n")
    return f"{case.name}: validation loss {loss:.4f}, {time.perf_counter() - start:.0f} s"


def _rank(case: Case, path: Path, rank: int, _world: int) -> float:
    return train(case, path, rank)


# ---------------------------------------------------------------------- what a step costs


def cost(out: Path, *, quick: bool) -> str:
    """Time the optimizer at all fractions in turns, and count what it sends; into ``cost.json``."""
    fractions, rounds, widths = (FRACTIONS[::2], 3, WIDTHS[:1]) if quick else (FRACTIONS, 60, WIDTHS)
    torch.set_num_threads(1)
    times = {str(width): _times(width, fractions, rounds) for width in widths}
    sent = {
        str(world): [testing.run_forked(partial(_bytes, f), world, timeout=600.0) for f in fractions]
        for world in (WORLDS[:1] if quick else WORLDS)
    }
    found = {"fractions": fractions, "optimizer_ms": times, "bytes_by_rank": sent}
    (out / "cost.json").write_text(json.dumps(found, indent=1) + "\n")
    return "cost: measured"


def _times(width: int, fractions: tuple[float, ...], rounds: int) -> list[float]:
    """Least milliseconds of a step of four square matrices at every fraction, which take turns."""
    generator = torch.Generator().manual_seed(0)
    optimizers = []
    for fraction in fractions:
        weights = [nn.Parameter(torch.randn(width, width, generator=generator)) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.randn(width, width, generator=generator)
        optimizers.append(Dion2(weights, lr=LR, fraction=fraction, select_dim="rows"))
    spent = np.zeros((rounds, len(fractions)))
    for turn in spent:
        for place, optimizer in enumerate(optimizers):
            start = time.perf_counter()
            optimizer.step()
            turn[place] = 1e3 * (time.perf_counter() - start)
    return [float(x) for x in spent.min(axis=0)]  # what others compute only ever adds


def _bytes(fraction: float, rank: int, world: int) -> int:
    """Bytes that leave this rank in one step of the demo's matrices; what it sends to itself does not."""
    case = Case(fraction=fraction, world=world)
    corpus, model = load_corpus(), make_model(case)
    optimizer, sent = make_optimizer(case, model), [0]
    model.loss(*next(draw(case, corpus, rank))).backward()  # type: ignore[no-untyped-call]
    original = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, arriving: Any, leaving: Any, **more: Any) -> Any:
        sent[0] += (sum(leaving) - leaving[dist.get_rank(more.get("group"))]) * given.element_size()
        return original(output, given, arriving, leaving, **more)

    dist.all_to_all_single = counted  # type: ignore[assignment]  # this process ends with the count
    optimizer.step()
    return sent[0]


# ---------------------------------------------------------------------- commands

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Out = Annotated[Path, typer.Option(help="Folder of the run directories.")]


@app.command("train")
def train_all(
    out: Out = Path("runs/tune"),
    quick: Annotated[bool, typer.Option(help="2 fractions, 1 seed, 12 steps.")] = False,
    jobs: Annotated[int, typer.Option(help="Trainings at a time, each on one thread.")] = 2,
) -> None:
    """Train what is not trained yet."""
    out.mkdir(parents=True, exist_ok=True)
    tasks = [partial(run, case, out) for case in plan(quick=quick) if not (out / case.name / "done.json").exists()]
    tasks += [] if (out / "cost.json").exists() else [partial(cost, out, quick=quick)]
    typer.echo(f"{len(tasks)} to do")
    if jobs == 1:
        for task in tasks:
            typer.echo(task())
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for finished in as_completed([pool.submit(task) for task in tasks]):
            typer.echo(finished.result())


@app.command()
def report(
    out: Out = Path("runs/tune"),
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures; OUT/figures by default.")] = None,
) -> None:
    """Write the tables (OUT/tables.md, OUT/tables.json) and draw the figures."""
    import tune_fraction_report  # draws with matplotlib, which training does not need

    typer.echo(tune_fraction_report.report(out, out / "figures" if figures is None else figures))


if __name__ == "__main__":
    app()
