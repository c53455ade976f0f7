"""MemorySink, and the package that the sinks stand in."""

import subprocess
import sys
from pathlib import Path

import pytest
from sample_run import histogram, number, run_info, slices, write_run

from scion_telemetry.rows import Batch
from scion_telemetry.sinks import MemorySink


def test_memory_sink() -> None:
    sink = MemorySink()
    write_run(sink, range(1, 4))
    assert sink.run is not None
    assert (sink.run.schedule, sink.closed, sink.steps) == ("every(1)", True, [1, 2, 3])
    assert sink.value(2, "norm", "weight_rms") == number(2, "norm", "weight_rms")
    assert sink.value(3, "embed", "k") == number(3, "embed", "k")
    assert [scalar.value for scalar in sink.scalars] == [1.0, 0.5, 1 / 3]
    assert (len(sink.layers), len(sink.selection)) == (12, 9)
    with pytest.raises(KeyError, match="no 'k' of 'norm' at step 3"):
        sink.value(3, "norm", "k")


def test_memory_sink_keeps_histograms_slices_and_parameters_that_come_late() -> None:
    sink = MemorySink()
    sink.open(run_info(names=("embed",)))
    sink.write(Batch(step=1, histograms=(histogram(1),)))
    sink.write(Batch(step=2, histograms=(histogram(2),), slices=slices(2)))
    sink.extend(run_info(names=("embed", "norm")))
    assert sink.histograms == [histogram(1), histogram(2)]
    assert sink.slices == list(slices(2))
    assert sink.run is not None
    assert [param.name for param in sink.run.params] == ["embed", "norm"]


def test_importing_the_sinks_imports_no_vendor() -> None:
    code = """
import sys
import scion_telemetry.sinks as sinks
dir(sinks), sinks.CsvSink, sinks.MemorySink, sinks.WandbSink(project="p")
print(sorted({"wandb", "rich", "pandas", "torch", "numpy"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"


def test_unknown_sink_name() -> None:
    import scion_telemetry.sinks as sinks

    with pytest.raises(AttributeError, match="XmlSink"):
        sinks.XmlSink  # noqa: B018
