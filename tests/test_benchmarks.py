"""The benchmarks run, and print what they promise; what they print is nobody's business but the reader's."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_benchmark_of_the_optimizers_prints_its_table() -> None:
    script = ROOT / "tests" / "benchmarks" / "optim.py"
    command = [sys.executable, str(script), "--quick", "--layers", "1", "--width", "16", "--repeats", "1"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert done.returncode == 0, done.stderr
    cells = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in done.stdout.splitlines()
    }
    heads = cells["optimizer"]
    assert len(heads) == 7
    row = {name: dict(zip(heads, values, strict=True)) for name, values in cells.items()}
    assert row["step / Muon"]["torch.optim.Muon"] == "1.00"
    # What is counted, and not timed, is known beforehand.
    assert [row["all_to_all, 4 ranks"][f"Dion2, {f}"] for f in ("1", "0.5", "0.25")] == ["1", "0.5", "0.25"]
    assert set(row["bytes, 1 rank"].values()) == {"", "0"}
    assert row["predicted"]["Dion2, 0.5"] == "0.23"
