"""The packages that two folders beside scion_telemetry/ belong to: what is built must hold what the tree holds.

``python tests/test_packaging.py FOLDER`` builds the sdist and the wheel into FOLDER and checks both.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "scion_telemetry": "scion_telemetry",
    "scion_telemetry/optim": "optim",
    "scion_telemetry/dashboards": "dashboards",
}
"""Path in the wheel to path in the tree."""

NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "*.egg-info", "runs", "wandb", "htmlcov", "node_modules"
)
MAX_LINES = 500


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_files(root: Path) -> dict[str, Path]:
    """Every file that belongs in the wheel: its path there, and where it is in the tree."""
    found = {}
    for inside, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*")):
            parts = path.relative_to(root / folder).parts
            # rglob does not follow the links; where a copy of the tree has folders in their place, they count once.
            through_link = inside == "scion_telemetry" and parts[0] in ("optim", "dashboards")
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if path.is_file() and not through_link and not hidden:
                found["/".join((inside, *parts))] = path
    return found


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if not through_link(path)]


def through_link(path: Path) -> bool:
    return path.relative_to(ROOT).parts[:2] in (("scion_telemetry", "optim"), ("scion_telemetry", "dashboards"))


def build(root: Path, into: Path) -> tuple[Path, Path]:
    """Build the sdist and the wheel of a copy of the tree, so that the tree gets no build/ and no egg-info."""
    copy = into / "tree"
    shutil.copytree(root, copy, symlinks=True, ignore=NOT_SOURCE)
    sdist = run_backend("build_sdist", copy, into)
    wheel = run_backend("build_wheel", copy, into)
    shutil.rmtree(copy)
    return sdist, wheel


def run_backend(hook: str, tree: Path, into: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


def check_wheel(wheel: Path, root: Path) -> None:
    """The wheel holds the files of the packages byte by byte, the licence, the command, and nothing else."""
    expected = package_files(root)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = {name for name in names if ".dist-info/" in name}
        assert names - info == set(expected)
        for name, path in expected.items():
            assert archive.read(name) == path.read_bytes(), name
        by_name = {name.partition(".dist-info/")[2]: archive.read(name) for name in info}
    assert by_name["licenses/LICENSE"] == (root / "LICENSE").read_bytes()
    assert b"scion-telemetry = scion_telemetry.cli:main" in by_name["entry_points.txt"]
    metadata = message_from_bytes(by_name["METADATA"])
    assert metadata["Name"] == "scion-telemetry"
    assert metadata["License-Expression"] == "Apache-2.0"


def check_sdist(sdist: Path, root: Path, into: Path) -> None:
    """The sdist builds the same wheel where nothing but the sdist is."""
    subprocess.run([sys.executable, "-m", "tarfile", "-e", str(sdist), str(into)], capture_output=True, check=True)
    (unpacked,) = (path for path in into.iterdir() if path.is_dir())
    check_wheel(run_backend("build_wheel", unpacked, into), root)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_wheel_holds_what_the_tree_holds(built: tuple[Path, Path]) -> None:
    check_wheel(built[1], ROOT)


def test_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    check_sdist(built[0], ROOT, tmp_path)


def test_a_wheel_that_lacks_a_file_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    poorer = tmp_path / built[1].name
    with zipfile.ZipFile(built[1]) as whole, zipfile.ZipFile(poorer, "w") as archive:
        for name in whole.namelist():
            if name != "scion_telemetry/optim/layout.py":
                archive.writestr(name, whole.read(name))
    with pytest.raises(AssertionError, match="layout"):
        check_wheel(poorer, ROOT)


def test_package_list_is_that_of_the_tree() -> None:
    folders = {name.rpartition("/")[0] for name in package_files(ROOT) if name.endswith(".py")}
    assert project()["tool"]["setuptools"]["packages"] == sorted(folder.replace("/", ".") for folder in folders)
    for folder in folders:
        assert f"{folder}/__init__.py" in package_files(ROOT)


def test_links_are_committed_as_links() -> None:
    for name in ("optim", "dashboards"):
        assert os.readlink(ROOT / "scion_telemetry" / name) == f"../{name}"
    if (ROOT / ".git").exists():
        command = [
            "git",
            "-c",
            "safe.directory=*",
            "ls-files",
            "-s",
            "scion_telemetry/optim",
            "scion_telemetry/dashboards",
        ]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert [line.split()[0] for line in listed.splitlines()] == ["120000", "120000"]


def test_nothing_imports_the_two_folders_by_their_bare_names() -> None:
    for path in python_files("scion_telemetry", "optim", "dashboards", "tests", "examples"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            bare = {name.partition(".")[0] for name in names} & {"optim", "dashboards"}
            assert not bare, f"{path}:{getattr(node, 'lineno', 0)} would import a second copy of {bare}"
    for path in [*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        found = re.search(
            r"^\s*(?:import|from) +(?:optim|dashboards)\b", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert not found, f"{path} shows {found}"


def requirements() -> list[Requirement]:
    table = project()["project"]
    lines = [*table["dependencies"], *(line for extra in table["optional-dependencies"].values() for line in extra)]
    parsed = [Requirement(line) for line in lines]
    return [requirement for requirement in parsed if canonicalize_name(requirement.name) != "scion-telemetry"]


def test_every_dependency_is_pinned_to_a_version_that_it_allows() -> None:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = {}
    for line in filter(None, lines):
        name, equal, version = line.partition("==")
        assert equal, f"constraints.txt pins exact versions, got {line!r}"
        pins[canonicalize_name(name)] = version
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{requirement} has no pin in constraints.txt"
        assert pins[name] in requirement.specifier, f"{requirement} does not allow the pinned {pins[name]}"
    assert set(pins) == {canonicalize_name(requirement.name) for requirement in requirements()}


def test_build_requirement_is_allowed_by_the_pin() -> None:
    for line in project()["build-system"]["requires"]:
        assert line in project()["project"]["optional-dependencies"]["dev"]


def test_files_stay_short_enough_to_read() -> None:
    for path in python_files("scion_telemetry", "optim", "dashboards"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it"


def main(into: Path) -> None:
    """Build into a folder and check what was built."""
    into.mkdir(parents=True, exist_ok=True)
    sdist, wheel = build(ROOT, into)
    check_wheel(wheel, ROOT)
    unpacked = into / "unpacked"
    unpacked.mkdir()
    check_sdist(sdist, ROOT, unpacked)
    shutil.rmtree(unpacked)
    sys.stdout.write(f"{sdist.name} and {wheel.name} hold what the tree holds\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
