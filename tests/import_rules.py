"""Who may import whom (the house's floor plan), and the walk over the syntax trees that holds the code to it."""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "scion_telemetry"
EXTRAS = {"wandb", "wandb_workspaces"}
"""What an extra brings: imported inside functions, so that the module itself works without."""

TABLES = {"pandas", "numpy"}
OFFLINE = {"rows", "words", "store", "_store*"}
"""Modules of the offline half that the others of it may use."""

SHOWN = {"cli", "__main__", "_cli*", "dashboards", "analysis", "plots", "_plot*", "demo"}
"""Modules that stand above the tracker, or beside it for people who read runs."""

PARTS = {
    *(
        "chosen",
        "collect",
        "cost",
        "describe",
        "finish",
        "places",
        "plan",
        "rounds",
        "scalars",
        "selected",
        "setup",
        "sheet",
        "shown",
    ),
    *("sigma", "state", "verify", "watch"),
}
"""The parts that the tracker drives: nobody but they, the tracker and the package itself imports them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What the modules that match ``modules`` may import besides the standard library.

    Patterns name modules below ``scion_telemetry``; a pattern that matches a package covers what is in it.

    Args:
        modules: Patterns of the importing modules.
        outside: Top-level names of third-party packages; ``vendors`` of them per file, None for any number.
        inside: Patterns of modules that may be imported.
        never: Patterns of modules that may not, though ``inside`` would allow them.
        vendors: How many third-party packages one file may import.
    """

    modules: frozenset[str]
    outside: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    vendors: int | None = None


def rule(
    modules: set[str],
    outside: set[str] | None = None,
    inside: set[str] | None = None,
    never: set[str] | None = None,
    vendors: int | None = None,
) -> Rule:
    return Rule(
        modules=frozenset(modules),
        outside=frozenset(outside or ()),
        inside=frozenset(inside or ()),
        never=frozenset(never or ()),
        vendors=vendors,
    )


RULES = (
    rule({"rows", "words", "schedule"}),
    rule({"optim"}, {"torch"}, {"optim"}),
    rule({"metrics"}, {"torch", "numpy"}, {"optim.layout", "rows", "metrics"}),
    rule({"reduce", "_reduce*"}, {"torch", "numpy"}, {"optim.layout", "rows", "metrics", "reduce", "_reduce*"}),
    # They know what they measure, and neither the tracker nor a destination.
    rule(
        PARTS,
        {"torch", "numpy"},
        {
            *(f"optim.{name}" for name in ("events", "groups", "layout", "selection")),
            "rows",
            "metrics",
            "reduce",
            *PARTS,
        },
    ),
    rule({"writer"}, inside={"rows"}),
    rule({"sinks"}, {"rich", *EXTRAS}, {"rows", "words", "sinks"}, vendors=1),
    rule({"store", "_store*"}, TABLES, {"rows", "store", "_store*"}),
    rule({"plots", "_plot*"}, {*TABLES, "matplotlib"}, {*OFFLINE, "analysis", "plots", "_plot*"}),
    rule({"analysis"}, TABLES, {*OFFLINE, "analysis"}),
    rule({"dashboards"}, {*TABLES, "matplotlib", *EXTRAS}, {*OFFLINE, "plots", "_plot*", "analysis", "dashboards"}),
    rule({"tracker", "_tracker*"}, {"torch"}, {"*"}, never={*SHOWN, "integrations", "testing"}),
    rule({"testing"}, {"torch", "numpy"}, {"*"}, never=SHOWN | PARTS),
    rule({"integrations"}, {"torch"}, {"*"}, never=SHOWN | PARTS | {"testing"}, vendors=2),
    rule(
        {"demo"},
        {"torch", *TABLES, "matplotlib", "rich"},
        {"*"},
        never={"cli", "_cli*", "__main__", "testing", *PARTS},
    ),
    rule(
        {"cli", "_cli*", "__main__"},
        {"typer", "rich", "torch", "matplotlib", *TABLES},
        {"*"},
        never={"testing", *PARTS},
    ),
    # The package itself: lazy names. What its type checkers see may come from anywhere.
    rule({""}, set(), {"*"}, never={"cli", "_cli*", "__main__", "testing", "demo"}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported module, by its absolute name.

    Args:
        target: ``torch.distributed``, ``scion_telemetry.rows``.
        line: Line of the statement.
        relative: Whether it was spelled with dots.
        at_import: Whether it runs when the module is imported: neither inside a function nor under TYPE_CHECKING.
    """

    target: str
    line: int
    relative: bool
    at_import: bool


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the packages: its absolute name and its file."""
    found = {}
    for name, folder in ((PACKAGE, PACKAGE), (f"{PACKAGE}.optim", "optim"), (f"{PACKAGE}.dashboards", "dashboards")):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if name == PACKAGE and parts[0] in ("optim", "dashboards"):
                continue
            found[".".join((name, *parts)).removesuffix(".__init__")] = path
    return found


def imports(source: str, module: str, *, is_package: bool, known: Mapping[str, object]) -> Iterator[Import]:
    """The imports of a module; ``from package import module`` counts as an import of that module."""
    for node, at_import in _walk(ast.parse(source), at_import=True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(target=alias.name, line=node.lineno, relative=False, at_import=at_import)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = package[: len(package) - node.level + 1]
                origin = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                target = full if full in known else origin
                yield Import(target=target, line=node.lineno, relative=node.level > 0, at_import=at_import)


def _walk(node: ast.AST, *, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, at_import
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    types_only = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        in_else = types_only and child in node.orelse  # type: ignore[attr-defined]
        yield from _walk(child, at_import=at_import and not inside and (not types_only or in_else))


def violations(module: str, source: str, *, is_package: bool, known: Mapping[str, object]) -> list[str]:
    """What a module imports against the rules, in words; a module that no rule covers is one too."""
    inner = module.removeprefix(PACKAGE).removeprefix(".")
    law = next((law for law in RULES if any(matches(inner, pattern) for pattern in law.modules)), None)
    if law is None:
        return [f"{module} has no rule: say in tests/import_rules.py what it may import"]
    found, vendors = [], set()
    for item in imports(source, module, is_package=is_package, known=known):
        top, _, rest = item.target.partition(".")
        where = f"{module}:{item.line} imports {item.target}"
        if top == PACKAGE:
            if not _allowed(rest, law):
                found.append(f"{where}, which is not its to import")
            if matches(inner, "optim") and not item.relative:
                found.append(f"{where} by its full name: optim/ must run where it is copied to")
        elif top not in sys.stdlib_module_names:
            vendors.add(top)
            if top not in law.outside:
                found.append(f"{where}, but may import {sorted(law.outside) or 'the standard library only'}")
            if top in EXTRAS and item.at_import:
                found.append(f"{where} at its top: import what an extra brings inside functions")
    if law.vendors is not None and len(vendors) > law.vendors:
        found.append(f"{module} imports {sorted(vendors)}: at most {law.vendors} per file")
    return found


def _allowed(inner: str, law: Rule) -> bool:
    # The package itself only for its version: its lazy names would hide what is used.
    if any(matches(inner, pattern) for pattern in law.never):
        return False
    return inner != "" and any(matches(inner, pattern) for pattern in law.inside)


def matches(inner: str, pattern: str) -> bool:
    """Whether a module below the package is what the pattern names, or is inside of it."""
    if pattern == "":
        return inner == ""
    depth = pattern.count(".") + 1
    return pattern == "*" or fnmatchcase(".".join(inner.split(".")[:depth]), pattern)
