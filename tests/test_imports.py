import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from import_rules import PACKAGE, ROOT, imports, modules, violations

KNOWN = modules()
OFFLINE = ("rows", "words", "store", "plots")
"""What a machine without torch and wandb reads runs with."""

REPORT = """
import importlib, json, sys

hidden, names = json.loads(sys.argv[1])

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden by the test)", name=name)

sys.meta_path.insert(0, Hidden())
for name in names:
    importlib.import_module(name)
json.dump(sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names), sys.stdout)
"""
"""Imports modules where some packages are not installed, and prints the third-party packages that came along."""


def third_party(*names: str, hidden: tuple[str, ...] = (), path: Path = ROOT) -> set[str]:
    # -P keeps the folder of the caller off the path.
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{REPORT}"]
    done = subprocess.run([*command, json.dumps([hidden, names])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    # Start-up hooks of editable installs and coverage are loaded before the first line of ours.
    return {name for name in loaded if not name.startswith(("_", "site", "usercustomize"))}


@pytest.mark.parametrize("module", KNOWN)
def test_module_imports_only_what_its_place_allows(module: str) -> None:
    path = KNOWN[module]
    found = violations(module, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py", known=KNOWN)
    assert not found, "\n".join(found)


PLACES = (*OFFLINE, "tracker", "optim.layout", "optim.scion", "cli", "sinks.csv", "sigma", "finish", "reduce")
TREE = {f"{PACKAGE}.{name}": None for name in PLACES}


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("rows", "import numpy", "imports numpy"),
        ("optim.scion", "from scion_telemetry.optim.layout import Layout", "by its full name"),
        ("optim.scion", "from ..rows import Row", "imports scion_telemetry.rows"),
        ("optim.scion", "from .. import rows", "imports scion_telemetry.rows"),
        ("optim.scion", "import numpy", "imports numpy"),
        ("metrics.norms", "from scion_telemetry.optim.scion import Scion", "optim.scion, which is not"),
        ("metrics.norms", "import pandas", "imports pandas"),
        ("reduce", "def f():\n    import pandas", "imports pandas"),
        ("store", "import torch", "imports torch"),
        ("store", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", "imports torch"),
        ("plots", "from scion_telemetry import tracker", "imports scion_telemetry.tracker"),
        ("plots", "from scion_telemetry import Tracker", "imports scion_telemetry,"),
        ("analysis.advise", "import matplotlib.pyplot", "imports matplotlib.pyplot"),
        ("sinks.wandb", "import wandb", "at its top"),
        ("sinks.two", "def f():\n    import wandb, rich", "at most 1 per file"),
        ("sinks.csv", "import torch", "imports torch"),
        ("sinks.csv", "from scion_telemetry.tracker import Tracker", "tracker, which is not"),
        ("tracker", "import scion_telemetry.cli", "cli, which is not"),
        ("tracker", "from . import plots", "plots, which is not"),
        ("tracker", "import pandas", "imports pandas"),
        ("collect", "from scion_telemetry.optim.scion import Scion", "optim.scion, which is not"),
        ("collect", "from scion_telemetry.tracker import Tracker", "tracker, which is not"),
        ("verify", "from scion_telemetry import plots", "plots, which is not"),
        ("finish", "from scion_telemetry.store import load_run", "store, which is not"),
        ("setup", "import pandas", "imports pandas"),
        ("metrics.norms", "from scion_telemetry import sigma", "sigma, which is not"),
        ("metrics.norms", "from scion_telemetry.reduce import Buffers", "reduce, which is not"),
        ("reduce", "from scion_telemetry.finish import Finisher", "finish, which is not"),
        ("cli", "from scion_telemetry.finish import Finisher", "finish, which is not"),
        ("demo.train", "from scion_telemetry import sigma", "sigma, which is not"),
        ("testing", "from scion_telemetry import sigma", "sigma, which is not"),
        ("integrations.trainer", "from scion_telemetry import sigma", "sigma, which is not"),
        ("sinks.csv", "from scion_telemetry import sigma", "sigma, which is not"),
        ("writer", "from scion_telemetry.sinks import csv", "sinks.csv, which is not"),
        ("testing", "from scion_telemetry.demo import train", "demo, which is not"),
        ("dashboards.report", "from scion_telemetry.tracker import Tracker", "tracker, which is not"),
        ("demo.train", "from scion_telemetry.cli import app", "cli, which is not"),
        ("novelty", "", "has no rule"),
    ],
)
def test_the_walk_finds(module: str, source: str, message: str) -> None:
    found = violations(f"{PACKAGE}.{module}", source, is_package=False, known=TREE)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("optim.scion", "import math, torch.distributed\nfrom .layout import Layout\nfrom . import layout"),
        (
            "metrics.norms",
            "import torch\nfrom scion_telemetry.optim import layout\nfrom scion_telemetry.rows import key",
        ),
        ("sinks.wandb", "from scion_telemetry.rows import Row\ndef f():\n    import wandb"),
        ("plots", "from matplotlib.figure import Figure\nfrom scion_telemetry.store import Run"),
        ("finish", "import numpy\nfrom scion_telemetry import sigma\nfrom scion_telemetry.reduce import Buffers"),
        ("tracker", "from scion_telemetry.finish import Finisher\nfrom scion_telemetry import sigma"),
        ("tracker", "import torch\nfrom scion_telemetry.optim import layout\nfrom scion_telemetry.sinks import csv"),
        ("cli", "import typer\nfrom scion_telemetry.tracker import Tracker"),
    ],
)
def test_the_walk_allows(module: str, source: str) -> None:
    assert violations(f"{PACKAGE}.{module}", source, is_package=False, known=TREE) == []


def test_imports_of_types_and_functions_do_not_run_at_import() -> None:
    source = """
import a
if TYPE_CHECKING:
    import b
else:
    import c
class C:
    import d
    def f(self):
        import e
"""
    found = {item.target: item.at_import for item in imports(source, "m", is_package=False, known={})}
    assert found == {"a": True, "b": False, "c": True, "d": True, "e": False}


def test_importing_the_package_brings_nothing_else() -> None:
    assert third_party(PACKAGE, hidden=("torch", "pandas", "numpy", "wandb")) == {PACKAGE}


def test_rows_and_words_need_the_standard_library_alone() -> None:
    assert third_party(f"{PACKAGE}.rows", f"{PACKAGE}.words") == {PACKAGE}


def test_runs_are_read_and_drawn_without_torch_and_wandb() -> None:
    hidden = ("torch", "wandb", "wandb_workspaces", "typer", "rich")
    offline = [name for name in KNOWN if name.split(".")[1:2] and name.split(".")[1] in (*OFFLINE, "analysis")]
    assert {f"{PACKAGE}.{name}" for name in OFFLINE} <= set(offline)
    assert {"pandas", "matplotlib"} <= third_party(*offline, hidden=hidden)


def test_reading_a_run_does_not_load_matplotlib() -> None:
    assert "matplotlib" not in third_party(f"{PACKAGE}.store")


def test_sinks_and_dashboards_import_without_their_vendors() -> None:
    names = [name for name in KNOWN if name.split(".")[1:2] in (["sinks"], ["dashboards"])]
    assert names
    third_party(*names, hidden=("torch", "wandb", "wandb_workspaces"))


def test_optim_runs_where_it_is_copied_to(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "optim", tmp_path / "borrowed", ignore=shutil.ignore_patterns("__pycache__"))
    names = ["borrowed", *(f"borrowed.{path.stem}" for path in (tmp_path / "borrowed").glob("[!_]*.py"))]
    loaded = third_party(*names, hidden=(PACKAGE, "pandas", "matplotlib", "wandb"), path=tmp_path)
    assert {"borrowed", "torch"} <= loaded
