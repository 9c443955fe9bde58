"""The matrix of clients: which test shows which feature with which client, and the page that lists them.

A test module names its clients in CLIENTS and marks its tests with `case`. The page's rows and columns come
from these marks alone, so that a test can hold the page to them; `python -m tests.clients` writes it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "clients.md"
BEGIN, END = "<!-- matrix: written by python -m tests.clients -->", "<!-- end of the matrix -->"

Mode = Literal["whole", "streamed"]
Test = Callable[..., Any]

# The page's rows, in this order; a case of another feature is an error.
FEATURES = (
    "chat",
    "several turns",
    "system prompt",
    "usage",
    "stop",
    "n",
    "logprobs",
    "seed",
    "JSON mode",
    "JSON schema",
    "tools: required",
    "tools: named",
    "tools: auto",
    "tools: result in a second turn",
    "reasoning",
    "completions",
    "embeddings: float",
    "embeddings: base64",
    "count tokens",
    "responses",
    "responses: kept, listed, deleted",
    "responses: previous_response_id",
    "responses: JSON schema",
    "responses: tools",
    "files and batches",
    "models",
    "error: unknown model",
    "error: bad field",
    "error: wrong key",
    "error: prompt too long",
    "timeout",
    "leaving a stream",
)


class Case(NamedTuple):
    client: str
    feature: str
    mode: Mode


def case(feature: str, *modes: Mode, only: str | None = None) -> Callable[[Test], Test]:
    """Marks a test as the one for a feature, whole, streamed or both; `only` one of the module's clients."""
    if feature not in FEATURES:
        raise ValueError(f"{feature!r} is not a row of the page: {', '.join(FEATURES)}")
    return pytest.mark.client_case(feature, modes or ("whole",), only)


def cases_of(module: ModuleType, test: Test, client: str | None = None) -> Iterator[Case]:
    """The cases that a test function stands for; of one client, if the test ran with that one."""
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "client_case":
            feature, modes, only = mark.args
            clients = [only] if only else [client] if client else module.CLIENTS
            yield from (Case(name, feature, mode) for name in clients for mode in modes)


def all_cases() -> list[Case]:
    """Every case there is, by import alone."""
    found: list[Case] = []
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}")
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and test.__module__ == module.__name__:
                found += cases_of(module, test)
    return found


def table(results: Mapping[Case, bool]) -> str:
    """The matrix in Markdown; what failed is struck out."""
    clients = list(dict.fromkeys(sorted(case.client for case in results)))
    lines = ["| | " + " | ".join(clients) + " |", "|---" * (len(clients) + 1) + "|"]
    for feature in FEATURES:
        cells = []
        for client in clients:
            modes = [case for case in results if case[:2] == (client, feature)]
            shown = (each.mode if results[each] else f"~~{each.mode}~~" for each in sorted(modes)[::-1])
            cells.append(", ".join(shown))
        if any(cells):
            lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(results: Mapping[Case, bool]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")


def written() -> Iterable[Case]:
    """The cases that the page lists."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    head, _, *rows = rest.partition(END)[0].strip().splitlines()
    clients = [cell.strip() for cell in head.strip("|").split("|")][1:]
    for row in rows:
        feature, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        for client, cell in zip(clients, cells, strict=True):
            modes = [mode.strip("~ ") for mode in cell.split(",") if mode]
            yield from (Case(client, feature, mode) for mode in modes)  # type: ignore[arg-type]
