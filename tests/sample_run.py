"""A small run to feed sinks and the reader with."""

import math
from collections.abc import Mapping
from typing import Any

from scion_telemetry.rows import Batch, Chosen, Histogram, ParamInfo, Row, RunInfo, Scalar, Sink, Slice, Value

NAMES = ("embed", "layers.2.attn.wq", "layers.10.attn.wq", "norm")
LAYER_COLUMNS = ("weight_rms", "weight_rms_to_rms", "update_weight_ratio")
SELECTION_COLUMNS = ("k", "captured_mass")
HISTOGRAMS = ("weight_row_norms", "selection_frequencies")
SLICE_COLUMNS = ("selected", "steps", "score")


def param(name: str, role: str = "hidden", shape: tuple[int, ...] = (320, 1280), **options: Value) -> ParamInfo:
    return ParamInfo(
        name=name, role=role, shape=shape, dtype="float32", layout="whole", algorithm="dion2", options=options
    )


def run_info(
    *,
    names: tuple[str, ...] = NAMES,
    layer_columns: tuple[str, ...] = LAYER_COLUMNS,
    selection_columns: tuple[str, ...] = SELECTION_COLUMNS,
    attributes: Mapping[str, Any] | None = None,
    start_step: int = 0,
    params: tuple[ParamInfo, ...] | None = None,
    histograms: tuple[str, ...] = (),
    slice_columns: tuple[str, ...] = (),
    selection_rows: bool = False,
) -> RunInfo:
    return RunInfo(
        attributes={"seed": 0} if attributes is None else attributes,
        params=params or tuple(param(name) for name in names),
        layer_columns=layer_columns,
        selection_columns=selection_columns,
        units=dict.fromkeys(layer_columns, "1"),
        schedule="every(1)",
        world_size=1,
        start_step=start_step,
        versions={"torch": "2.13.0"},
        histograms=histograms,
        slice_columns=slice_columns,
        selection_rows=selection_rows,
    )


def number(step: int, param: str, column: str) -> float:
    """A different float32-exact number in (0, 1) for every cell, so that a swap of any two is seen."""
    index = (step * 31 + NAMES.index(param)) * 31 + (*LAYER_COLUMNS, *SELECTION_COLUMNS).index(column)
    return (index % 65521) / 65536 + 2.0**-17


def rows(step: int, columns: tuple[str, ...], names: tuple[str, ...] = NAMES) -> tuple[Row, ...]:
    return tuple(
        Row(step=step, param=name, values={column: number(step, name, column) for column in columns}) for name in names
    )


def batch(step: int, *scalars: Scalar) -> Batch:
    """All cells of a step filled by ``number``."""
    return Batch(
        step=step, layers=rows(step, LAYER_COLUMNS), selection=rows(step, SELECTION_COLUMNS, NAMES[:3]), scalars=scalars
    )


def one_row(step: int, values: Mapping[str, float], name: str = NAMES[0]) -> Batch:
    return Batch(step=step, layers=(Row(step=step, param=name, values=values),))


def write_run(sink: Sink, steps: range, info: RunInfo | None = None) -> None:
    """A whole run with a loss of ``1 / step`` at every step."""
    sink.open(info or run_info())
    for step in steps:
        sink.write(batch(step, Scalar(step=step, name="train_loss", value=1 / step)))
    sink.close()


def histogram(step: int, param: str = NAMES[0], name: str = HISTOGRAMS[0]) -> Histogram:
    """Three zeros, one value in [1/2, 2**-3/4), ``step`` in [1, 2**1/4), and one that is not finite."""
    return Histogram(
        step=step,
        param=param,
        name=name,
        log2=(-math.inf, -1.0, 0.0, math.nan),
        count=(3.0, 1.0, float(step), 1.0),
        mass=(0.0, 0.5, 1.125 * step, math.inf),
    )


def slices(steps: int) -> tuple[Slice, ...]:
    """Two rows of one parameter after ``steps`` steps: one was selected every time, the other never."""
    always = {"selected": float(steps), "steps": float(steps), "score": 0.75}
    return (
        Slice(param=NAMES[1], matrix=0, index=0, values=always),
        Slice(param=NAMES[1], matrix=2, index=319, values={"selected": 0.0, "steps": float(steps)}),
    )


def chosen(step: int, param: str = NAMES[1], matrix: int = 0) -> Chosen:
    """Of ten rows those whose number has a bit in common with ``step``."""
    bits = "".join("01"[bool(row & step)] for row in range(10)) + "000000"
    return Chosen(step=step, param=param, matrix=matrix, count=10, rows=int(bits, 2).to_bytes(2, "big"))
