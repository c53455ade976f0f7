"""ConsoleSink: one line a batch."""

import io
import math
from typing import Any

import pytest
from rich.console import Console
from sample_run import NAMES, batch, histogram, one_row, run_info, slices

from scion_telemetry.rows import Batch, Row, Scalar
from scion_telemetry.sinks import ConsoleSink


def printed(*batches: Batch, width: int = 60, **options: Any) -> list[str]:
    out = io.StringIO()
    sink = ConsoleSink(console=Console(file=out, width=width), **options)
    sink.open(run_info())
    for item in batches:
        sink.write(item)
    sink.close()
    return out.getvalue().splitlines()


def ratios(step: int, *values: float) -> Batch:
    rows = zip(NAMES, values, strict=False)
    return Batch(
        step=step,
        layers=tuple(Row(step=step, param=name, values={"update_weight_ratio": value}) for name, value in rows),
    )


def test_line() -> None:
    loss = Scalar(step=9, name="train_loss", value=3.14159265)
    rows = ratios(10, 0.001, 0.0123456, 0.002)
    lines = printed(Batch(step=10, layers=rows.layers, scalars=(loss,)))
    assert lines == [
        "tracking 4 parameters, every(1), 1 rank(s)",
        "step 10  train_loss 3.142  update/weight 0.0123 layers.2.attn.wq",
    ]


def test_nonfinite_values_are_counted_and_nan_is_not_the_largest() -> None:
    values = {"weight_rms": math.nan, "weight_rms_to_rms": math.inf, "update_weight_ratio": 0.5}
    assert printed(one_row(3, values))[1] == "step 3  update/weight 0.5 embed  non-finite values 2"
    assert printed(ratios(4, 0.25, math.nan))[1] == "step 4  update/weight 0.25 embed  non-finite values 1"
    assert printed(ratios(5, math.nan))[1] == "step 5  non-finite values 1"
    assert printed(ratios(6, 0.25, math.inf))[1] == "step 6  update/weight inf layers.2.attn.wq  non-finite values 1"


def test_every_prints_the_first_and_loses_neither_scalars_nor_findings() -> None:
    batches = [
        Batch(step=1, scalars=(Scalar(step=1, name="a", value=1.0),)),
        Batch(step=2, scalars=(Scalar(step=2, name="b", value=2.0),)),
        ratios(3, math.nan),
        Batch(step=4, scalars=(Scalar(step=4, name="a", value=4.0),)),
        Batch(step=5, scalars=(Scalar(step=5, name="a", value=5.0),)),
    ]
    assert printed(*batches, every=3)[1:] == ["step 1  a 1", "step 4  a 4  b 2  non-finite values 1"]


def test_an_empty_batch_prints_nothing() -> None:
    assert len(printed(Batch(step=1))) == 1
    assert len(printed(Batch(step=1, histograms=(histogram(1),), slices=slices(1)))) == 1


def test_long_lines_stay_whole_and_names_are_no_markup() -> None:
    name = "[red]layers[0]" + "x" * 200
    rows = (Row(step=1, param=name, values={"update_weight_ratio": 0.5}),)
    assert printed(Batch(step=1, layers=rows), width=20)[1] == f"step 1  update/weight 0.5 {name}"


def test_default_console_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.open(run_info())
    sink.write(batch(7))
    assert capsys.readouterr().out.splitlines()[1].startswith("step 7  update/weight")


def test_every_is_checked() -> None:
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        ConsoleSink(every=0)
    with pytest.raises(TypeError, match=r"every must be an int, got 1\.5"):
        ConsoleSink(every=1.5)  # type: ignore[arg-type]
