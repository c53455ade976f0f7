"""Settings of the demo. Imports no torch, so that a wrong value is refused at once."""

import math
from dataclasses import dataclass
from pathlib import Path

OPTIMIZERS = ("dion2", "scion")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """What to train and where to write.

    Args:
        out: Run directory; must not hold a run yet.
        steps: Optimizer steps, >= 1.
        optimizer: ``dion2`` (hidden matrices by Dion2, the rest by Scion's geometries) or ``scion`` everywhere.
        fraction: Dion2's share of rows, in (0, 1].
        lr: Learning rate, > 0.
        seed: Of weights and batches, >= 0.
        every: Measure every so many steps, >= 1.
        nproc: Processes; 1 trains without a process group.
        batch: Sequences a step, over all processes; a multiple of nproc.
        wandb: Log to Weights & Biases too.
        verify: Hold the tracker's numbers against gathered matrices after the last step.

    Raises:
        ValueError: For a value out of range, or an ``out`` that holds a run.
    """

    out: Path
    steps: int = 80
    optimizer: str = "dion2"
    fraction: float = 0.25
    lr: float = 0.05
    seed: int = 0
    every: int = 5
    nproc: int = 2
    batch: int = 32
    wandb: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("seed", 0), ("every", 1), ("nproc", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {getattr(self, name)!r}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction!r}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be a finite number > 0, got {self.lr!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.batch % self.nproc:
            raise ValueError(f"batch must be a multiple of nproc ({self.nproc}), got {self.batch!r}")
        if (self.out / "run.json").exists():
            raise ValueError(f"{self.out} already holds a run; choose another --out, or remove it")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file; --out must be a directory that is new or holds no run")
