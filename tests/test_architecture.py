"""The shape of the code: no import cycles, no crowded folder, no file that grew two ideas.

Every import counts: those inside functions, and those for types alone.
"""

from __future__ import annotations

import ast
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from inspect import ismodule
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 20
MOST_LINES = 410  # "under about 400"
MOST_SCRIPT_LINES = 450  # of tests and benchmarks: cases one after another

# Files above MOST_LINES, each with its reason and its own bound.
LONG = {
    "ridgeline/engine/run/cuda/runner.py": 430,  # one step: the ways to launch it, side by side
    "ridgeline/engine/grammar/keywords.py": 440,  # one table of JSON Schema keywords
    "tests/gateway/guard/corpus.py": 460,  # one table of formats with their generators
    "ridgeline/ops/cuda/attention/prefill_specialized.py": 460,  # one kernel; its roles read as a whole
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "ridgeline").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & known.keys()


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other: what is left without those that import none, or that none imports."""
    left = {name: set(targets) - {name} for name, targets in graph.items()}
    while True:
        imported = set().union(*left.values()) if left else set()
        leaves = {name for name, targets in left.items() if not targets or name not in imported}
        if not leaves:
            break
        left = {name: targets - leaves for name, targets in left.items() if name not in leaves}
    return [[name, *sorted(targets)] for name, targets in sorted(left.items())]


def test_no_module_reaches_itself_through_imports() -> None:
    known = modules()
    assert cycles({name: imports_of(path, known) for name, path in known.items()}) == []


def test_a_cycle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert [found[0] for found in cycles(graph)] == ["b", "c"]


def test_no_folder_has_more_than_twenty_modules() -> None:
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in modules().values())
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}


def test_no_file_is_longer_than_about_four_hundred_lines_without_a_reason() -> None:
    long = {}
    scripts = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    for path in [*modules().values(), *scripts]:
        name = str(path.relative_to(ROOT))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        most = MOST_LINES if name.startswith("ridgeline/") else MOST_SCRIPT_LINES
        if lines > LONG.get(name, most):
            long[name] = lines
    assert long == {}


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests/gpu"])
def test_what_scripts_import_exists(folder: str) -> None:
    """Other tests run few of them: a renamed class would be found by a user."""
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported: dict[str, Any] = {}  # modules, by the name they have here
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ridgeline"):
                package = import_module(str(node.module))
                for alias in node.names:
                    if hasattr(package, alias.name) and not ismodule(getattr(package, alias.name)):
                        continue
                    if find_spec(f"{node.module}.{alias.name}") is None:
                        missing.append(f"{path.relative_to(ROOT)}: {node.module}.{alias.name}")
                    else:
                        name = alias.asname or alias.name
                        imported[name] = import_module(f"{node.module}.{alias.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = imported.get(node.value.id)
                if module is not None and not hasattr(module, node.attr):
                    missing.append(f"{path.relative_to(ROOT)}: {module.__name__}.{node.attr}")
    assert missing == []
