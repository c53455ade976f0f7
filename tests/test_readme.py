"""The README says nothing that its code and commands do not do."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from make_readme import OPTIM_README, README, with_tables
from torch import Tensor, nn
from typer.testing import CliRunner

from scion_telemetry import load_run
from scion_telemetry.cli import app

TEXT = README.read_text(encoding="utf-8")
OPTIM = OPTIM_README.read_text(encoding="utf-8")


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"the README has no example {name!r}"
    return found[1]


class Regression(nn.Module):
    """A model that returns its loss, as the one in the README does."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 12, bias=False)
        self.out = nn.Linear(12, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(batch))).square().mean()


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    names = {"model": Regression(), "loader": torch.randn(12, 16, 8), "fully_shard": lambda model: model}
    exec(compile(example("training"), "README.md", "exec"), names)
    return tmp_path


def test_the_training_example_trains_and_writes_a_run(trained: Path) -> None:
    run = load_run(trained / "runs" / "a")
    assert run.steps == [1, 10]
    assert run.scalars["loss"].notna().sum() == 12
    assert set(run.params["role"]) == {"hidden", "head", "vector"} or "hidden" in set(run.params["role"])
    assert list(trained.glob("wandb/offline-run-*"))


def test_the_reading_example_reads_it(trained: Path) -> None:
    names: dict[str, object] = {}
    exec(compile(example("reading"), "README.md", "exec"), names)
    for column in re.findall(r"# one row per .*?: ([\w, ]+), \.\.\.", example("reading")):
        tables = [names["run"].layers, names["run"].selection, names["run"].scalars]  # type: ignore[attr-defined]
        assert any(set(column.split(", ")) <= set(table.columns) for table in tables), column


def test_the_commands_work(trained: Path) -> None:
    commands = re.findall(r"^scion-telemetry (.*?)(?: +#.*)?$", TEXT, re.MULTILINE)
    assert {c.split()[0] for c in commands} == {"show", "plot", "dashboard", "advise", "calibrate"}
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        if command.startswith("advise"):  # the run of the example is too short, and it says so
            assert result.exit_code != 0
            assert "at least" in f"{result.output}{result.exception}"
        else:
            assert result.exit_code == 0, result.output
    assert (trained / "workspace.json").stat().st_size > 1000
    assert (trained / "runs" / "a" / "figures" / "overview.png").stat().st_size > 1000


def test_the_metric_tables_are_those_of_the_catalogue() -> None:
    assert with_tables(TEXT) == TEXT, "run: python tests/make_readme.py"


def test_the_option_tables_are_those_of_the_optimizers() -> None:
    assert "| hidden | the rule of the optimizer |" in OPTIM
    assert re.search(r"^\| `fraction` \|  \| `0.25` \| `0.25` \|  \|  \| in \(0, 1\] \|$", OPTIM, re.MULTILINE)
    assert with_tables(OPTIM) == OPTIM, "run: python tests/make_readme.py"


def test_every_test_that_proves_a_layout_is_there() -> None:
    root, proofs = README.parent, re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", OPTIM)
    assert len(proofs) > 10
    for file, name in proofs:
        text = (root / "tests" / file).read_text(encoding="utf-8")
        assert not name or f"\ndef {name}(" in text, (file, name)
    for name in re.findall(r"`((?:optim|tests)/[\w./]*)`", OPTIM):
        assert (root / name).exists(), name


def test_the_benchmark_table_has_the_optimizers_and_rows_of_the_benchmark() -> None:
    source = (README.parent / "tests" / "benchmarks" / "optim.py").read_text(encoding="utf-8")
    table = OPTIM.split("<!-- benchmark -->\n")[1].split("\n\n")[0].splitlines()
    for row in (line.split("|")[1].strip() for line in [table[0], *table[2:]]):
        assert f'"{row}"' in source or row.startswith("all_to_all, "), row


def test_every_file_and_target_it_names_is_there() -> None:
    root = README.parent
    for name in re.findall(r"`((?:optim|dashboards|tests|scion_telemetry)/[\w./]*)`", TEXT):
        assert (root / name).exists(), name
    for link in re.findall(r"\]\(([\w./]+)\)", TEXT):
        assert (root / link).exists(), link
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
