"""What a tracker costs, as ratios that were measured side by side in one run; asserts no time.

python tests/benchmarks/telemetry.py [--quick] [--only overhead|peers|sigma|growth] [--repeats 8]

overhead  a GPT of 10 M parameters with a tracker, as a share of the same loop without
peers     the same metrics computed as others do
sigma     σ₁ of all weights, against the singular values of gathered weights
growth    with layers, rows and columns, and ranks

Every process has one thread. Variants take turns within a repeat, and a ratio is the median of the ratios of single
repeats, so that the drift of a shared machine cancels. ``--quick`` runs everything in tiny sizes: to see that it runs.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import growth
import overhead
import peers
import singular
import torch
import torch.distributed.fsdp
import torch.distributed.tensor  # before any fork
import typer
from measuring import table

from scion_telemetry.demo.model import GPTConfig

FULL = GPTConfig(vocab=256, width=320, layers=8, heads=5, hidden=1280, context=256)
TINY = GPTConfig(vocab=32, width=16, layers=1, heads=2, hidden=32, context=8)
SECTIONS = ("overhead", "peers", "sigma", "growth")


def show_overhead(quick: bool, repeats: int) -> None:
    batches = ((1, 4), (2, 4)) if quick else ((1, 4), (2, 4), (2, 16))
    rows, remarks = overhead.section(TINY if quick else FULL, batches, repeats)
    typer.echo(table(rows))
    typer.echo("\n" + "\n".join(f"- {remark}" for remark in remarks if remark))


def show_peers(quick: bool, repeats: int) -> None:
    blocks = 1 if quick else 6
    for width in (16,) if quick else (64, 512):  # where calls take the time, and where memory does
        for what, rows in peers.section(width, blocks, repeats):
            typer.echo(f"{what}\n\n{table(rows)}\n")
    typer.echo(peers.watched_by_wandb(16 if quick else 512, blocks, repeats))


def show_sigma(quick: bool, repeats: int) -> None:
    width, blocks = (16, 1) if quick else (512, 6)
    typer.echo(table(singular.section(width, blocks, min(repeats, 3))))


def show_growth(quick: bool, repeats: int) -> None:
    typer.echo(table(growth.with_layers((10, 30) if quick else (10, 30, 100, 300, 1000), repeats)))
    typer.echo("\n" + table(growth.with_size((16, 32, 64) if quick else (256, 512, 1024, 2048))))
    typer.echo("\n" + table(growth.with_ranks((2, 8) if quick else (2, 8, 32, 128, 512, 1024))))


def main(only: str = "", quick: bool = False, repeats: int = 8) -> None:
    """Print the tables."""
    if only and only not in SECTIONS:
        raise typer.BadParameter(f"--only takes one of {', '.join(SECTIONS)}, got {only!r}")
    torch.set_num_threads(1)
    show = {"overhead": show_overhead, "peers": show_peers, "sigma": show_sigma, "growth": show_growth}
    for name in [only] if only else SECTIONS:
        typer.echo(f"## {name}\n")
        show[name](quick, repeats)
        typer.echo("")


if __name__ == "__main__":
    typer.run(main)
