"""Offline wandb runs read back through wandb's own command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

OWN_KEYS = ("_runtime", "_step", "_timestamp")


def settings() -> Any:
    """Settings that keep a test quiet and its files small."""
    import wandb

    return wandb.Settings(console="off", x_disable_stats=True, silent=True)


class Stored:
    """What an offline run directory holds."""

    def __init__(self, folder: Path) -> None:
        command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(folder)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.records: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]

    def _all(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record.get("type") == kind]

    @property
    def history(self) -> list[dict[str, Any]]:
        """Logged rows, with ``_step`` and without the other keys that wandb adds."""
        return [
            {k: v for k, v in row["item"].items() if k not in OWN_KEYS or k == "_step"} for row in self._all("history")
        ]

    def series(self, key: str) -> list[tuple[int, Any]]:
        """(row number, value) of every row that holds ``key``."""
        return [(row["_step"], row[key]) for row in self.history if key in row]

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The ``define_metric`` calls by name or glob."""
        return {metric.get("name") or metric["glob_name"]: metric for metric in self._all("metric")}

    @property
    def run(self) -> dict[str, Any]:
        """The run record: project, group, config, ..."""
        return self._all("run")[0]

    @property
    def config(self) -> dict[str, Any]:
        """The config that the run started with."""
        config: dict[str, Any] = dict(self.run["config"]["update"])
        return config


def offline_runs(folder: Path) -> list[Path]:
    """The offline run directories below ``folder``, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def only_run(folder: Path) -> Stored:
    """The one offline run below ``folder``."""
    (run,) = offline_runs(folder)
    return Stored(run)
