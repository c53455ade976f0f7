"""The sink that prints one compact line a batch."""

import math

from rich.console import Console

from scion_telemetry.rows import Batch, RunInfo


class ConsoleSink:
    """Prints a line: step, latest scalars, the layer whose update is largest beside its weight, non-finite values.

        step 120  train_loss 3.21  update/weight 0.0123 layers.3.attn.wq

    Args:
        every: Print one batch in so many, beginning with the first. Scalars and the number of non-finite values of
            the batches between are not lost: they stand in the next line.
        console: A ``rich.console.Console``; by default one on standard output.
    """

    def __init__(self, *, every: int = 1, console: Console | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int):
            raise TypeError(f"every must be an int, got {every!r}")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every!r}")
        self._every = every
        self._console = console
        self._seen = 0
        self._scalars: dict[str, float] = {}
        self._nonfinite = 0

    def open(self, run: RunInfo) -> None:
        """Start the console and say what is tracked."""
        self._console = self._console or Console()
        self._say(f"tracking {len(run.params)} parameters, {run.schedule}, {run.world_size} rank(s)")

    def write(self, batch: Batch) -> None:
        """Print the line of ``batch`` when it is its turn."""
        if not (batch.layers or batch.selection or batch.scalars):
            return
        self._scalars |= {scalar.name: scalar.value for scalar in batch.scalars}
        self._nonfinite += _count_nonfinite(batch)
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        parts = [f"step {batch.step}", *(f"{name} {value:.4g}" for name, value in self._scalars.items())]
        parts += _largest_update(batch)
        if self._nonfinite:
            parts.append(f"non-finite values {self._nonfinite}")
        self._say("  ".join(parts))
        self._nonfinite = 0

    def close(self) -> None:
        """Nothing is held back."""

    def _say(self, line: str) -> None:
        assert self._console is not None, "write before open"
        # Names such as layers[0] are no markup, and a long line is the terminal's to wrap.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _count_nonfinite(batch: Batch) -> int:
    """How many values of ``batch`` are NaN or infinite."""
    values = [value for row in (*batch.layers, *batch.selection) for value in row.values.values()]
    values += [scalar.value for scalar in batch.scalars]
    return sum(not math.isfinite(value) for value in values)


def _largest_update(batch: Batch) -> list[str]:
    ratios = {
        row.param: row.values["update_weight_ratio"] for row in batch.layers if "update_weight_ratio" in row.values
    }
    finite = {param: ratio for param, ratio in ratios.items() if not math.isnan(ratio)}
    if not finite:
        return []
    worst = max(finite, key=lambda param: finite[param])
    return [f"update/weight {finite[worst]:.3g} {worst}"]
