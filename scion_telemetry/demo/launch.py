"""Start the demo's processes, show their progress, and end them safely."""

import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from scion_telemetry.demo import train
from scion_telemetry.demo.config import DemoConfig

_TIMEOUT = timedelta(seconds=120)

_WRONG = "wrong"
"""File by which rank 0 tells the launcher that the verification found something."""


def launch(config: DemoConfig) -> bool:
    """Run the demo on ``config.nproc`` processes of this machine; returns when all have ended well.

    Returns:
        Whether the tracker's numbers hold; True where ``config.verify`` is off.

    Raises:
        RuntimeError: When a process fails, with its error; the others are stopped.
    """
    if config.nproc == 1:
        return _show(config)
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _rank, args=(config, folder), nprocs=config.nproc, start_method="spawn"
            )
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RuntimeError(f"a process of the demo failed: {error}") from error
        return not Path(folder, _WRONG).exists()


def _rank(rank: int, config: DemoConfig, folder: str) -> None:
    # A shell starts its background jobs deaf to SIGINT, by which torch ends this process when the launcher dies.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=config.nproc,
        timeout=_TIMEOUT,
    )
    if rank == 0:
        if not _show(config):
            Path(folder, _WRONG).touch()
    else:
        train.train(config, lambda progress: None)
    dist.barrier()
    dist.destroy_process_group()
    # A gloo worker thread may race with the dying interpreter and abort it: leave without tearing it down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _show(config: DemoConfig) -> bool:
    console = Console()
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  val {task.fields[val]}  {task.fields[speed]} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=config.steps, loss="-", val="-", speed="-")
        return train.train(config, lambda progress: _advance(bar, task, progress))


def _advance(bar: Progress, task: TaskID, progress: train.Progress) -> None:
    fields: dict[str, Any] = {}
    if progress.loss is not None:
        fields["loss"] = f"{progress.loss:.3f}"
    if progress.tokens_per_second is not None:
        fields["speed"] = f"{progress.tokens_per_second:,.0f}"
    if progress.val_loss is not None:
        fields["val"] = f"{progress.val_loss:.3f}"
    if progress.verification is not None:
        bar.console.print(progress.verification, markup=False, highlight=False, soft_wrap=True)
    bar.update(task, completed=progress.step, **fields)
