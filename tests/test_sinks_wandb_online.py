"""WandbSink online, against a server on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

from wandb_stub import API_KEY, wandb_server

CODE = """
import sys
sys.path.insert(0, {tests!r})
from sample_run import *
from wandb_files import settings
from scion_telemetry.sinks import WandbSink
sink = WandbSink(project="scion", group="g", settings=settings(), dir={folder!r})
sink.open(run_info(histograms=HISTOGRAMS))
for step in range(1, 4):
    loss = Scalar(step=step, name="train_loss", value=1 / step)
    sink.write(Batch(step=step, layers=batch(step).layers, scalars=(loss,), histograms=(histogram(step, NAMES[1]),)))
sink.close()
"""


def test_online_run(tmp_path: Path) -> None:
    with wandb_server() as server:
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        env |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": API_KEY, "HOME": str(tmp_path)}
        env |= {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path)}
        code = CODE.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
        command = [sys.executable, "-c", code]
        root = Path(__file__).parents[1]
        child = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr
    upserts = [v for name, v in zip(server.operations, server.variables, strict=True) if name == "UpsertBucket"]
    assert upserts[0]["project"] == "scion"
    assert upserts[0]["groupName"] == "g"
    config = json.loads(upserts[0]["config"])
    assert config["seed"]["value"] == 0
    assert config["telemetry"]["value"]["params"]["count"] == 4
    assert [row["telemetry/step"] for row in server.rows] == [1, 2, 3]
    assert [row["scalars/train_loss"] for row in server.rows] == [1.0, 0.5, 1 / 3]
    histograms = [row["weight_row_norms/layers.2.attn.wq"] for row in server.rows]
    assert [(value["_type"], value["values"]) for value in histograms] == [
        ("histogram", [1, 0, 0, 0, step]) for step in (1, 2, 3)
    ]
