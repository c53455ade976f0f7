"""The sink that keeps everything in memory: for tests and notebooks."""

from scion_telemetry.rows import Batch, Chosen, Histogram, Row, RunInfo, Scalar, Slice


class MemorySink:
    """Keeps what the tracker sends, in lists.

    Attributes:
        run: The facts of the run, with the parameters that came last; ``None`` before ``open``.
        batches: Every batch, in order of arrival.
        closed: Whether ``close`` was called.
    """

    def __init__(self) -> None:
        self.run: RunInfo | None = None
        self.batches: list[Batch] = []
        self.closed = False

    def open(self, run: RunInfo) -> None:
        """Keep the facts of the run."""
        self.run = run

    def extend(self, run: RunInfo) -> None:
        """Keep the facts of the run with its new parameters."""
        self.run = run

    def write(self, batch: Batch) -> None:
        """Keep the batch."""
        self.batches.append(batch)

    def close(self) -> None:
        """Remember that the run is over."""
        self.closed = True

    @property
    def steps(self) -> list[int]:
        """Steps of the batches that hold rows, ascending."""
        return [batch.step for batch in self.batches if batch.layers or batch.selection]

    @property
    def layers(self) -> list[Row]:
        """The layer rows of all batches."""
        return [row for batch in self.batches for row in batch.layers]

    @property
    def selection(self) -> list[Row]:
        """The selection rows of all batches."""
        return [row for batch in self.batches for row in batch.selection]

    @property
    def scalars(self) -> list[Scalar]:
        """The scalars of all batches."""
        return [scalar for batch in self.batches for scalar in batch.scalars]

    @property
    def histograms(self) -> list[Histogram]:
        """The histograms of all batches."""
        return [histogram for batch in self.batches for histogram in batch.histograms]

    @property
    def slices(self) -> list[Slice]:
        """The slices of all batches."""
        return [part for batch in self.batches for part in batch.slices]

    @property
    def selected(self) -> list[Chosen]:
        """What was selected, of all batches."""
        return [chosen for batch in self.batches for chosen in batch.selected]

    def value(self, step: int, param: str, column: str) -> float:
        """One measured number, of a layer row or else of a selection row.

        Raises:
            KeyError: It was not measured.
        """
        for row in (*self.layers, *self.selection):
            if row.step == step and row.param == param and column in row.values:
                return row.values[column]
        raise KeyError(f"no {column!r} of {param!r} at step {step!r}; steps with rows: {self.steps!r}")
