"""The cost limits of one render of a chat template, and the size of a value before it is created.

Every loop iteration, call, filter and emitted character is charged to the render's budget by
`template_sandbox`. Sizes are counted in characters; an element of a list or a table counts as eight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

from jinja2.utils import Namespace

MAX_STEPS = 500_000  # loop iterations, calls and filters in one render: a few seconds at most
MAX_CHARS = 32_000_000  # characters emitted in one render, and the size of any one value when written out
MAX_BUILT = 512_000_000  # size of all values created in one render, even if they are gone again
MAX_READ = 1_000_000_000  # size of all values passed to calls, filters and comparisons
MAX_INTEGER_BITS = 4096
ITEM_CHARS = 8

_NUMBER = re.compile(r"\d{1,20}")
_WIDTH_ARGUMENT = re.compile(r"%[^%]*\*|\{[^{}]*\{")


class BudgetExceeded(Exception):
    """The render exceeded a limit; the message says which."""


class Budget:
    """One render's budget. `inputs`: the sizes of the containers passed to it, by identity."""

    def __init__(self) -> None:
        self.steps = self.chars = self.built = self.read = 0
        self.inputs: dict[int, int] = {}

    def charge(self, steps: int = 0, chars: int = 0, built: int = 0, read: int = 0) -> None:
        self.steps += steps
        self.chars += chars
        self.built += built
        self.read += read
        if self.steps > MAX_STEPS:
            raise BudgetExceeded(f"it took more than {MAX_STEPS:,} loop iterations, calls and filters")
        if self.chars > MAX_CHARS:
            raise BudgetExceeded(f"it wrote more than {MAX_CHARS:,} characters")
        if self.built > MAX_BUILT or self.read > MAX_READ:
            raise BudgetExceeded("it copied and compared too much text")


_budget: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def render_budget(data: Mapping[str, Any]) -> Iterator[None]:
    """A new budget for a render of `data`; every template of the sandbox must run within one."""
    budget = Budget()
    written_size(data, budget.inputs)
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def charge(steps: int = 0, chars: int = 0, built: int = 0, read: int = 0) -> None:
    _budget.get().charge(steps, chars, built, read)


def take(values: Iterable[Any]) -> None:
    """Charge what an operation is about to read; rejects a value too large to be written out."""
    budget = _budget.get()
    for value in values:
        if isinstance(value, str) or id(value) in budget.inputs:
            budget.charge(read=own_size(value))
        else:  # visiting elements is slower than reading text
            budget.charge(read=16 * written_size(value, {}, budget.inputs))


def made(value: Any) -> Any:
    """The value, after it is charged as created."""
    size = own_size(value)
    refuse_above(size)
    _budget.get().charge(built=size)
    return value


def refuse_above(size: int) -> None:
    if size > MAX_CHARS:
        raise BudgetExceeded(f"it tried to create a value longer than {MAX_CHARS:,} characters")


def own_size(value: Any) -> int:
    """The size of the value itself; elements of a container are references."""
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM_CHARS * len(value) if isinstance(value, list | tuple | dict) else 0


def written_size(value: Any, known: dict[int, int], inputs: Mapping[int, int] | None = None) -> int:
    """The size when written out: a list that contains another twice counts it twice, at any depth.

    `known` collects the size of every container visited, so that each is visited only once.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Namespace):
        value = value._Namespace__attrs  # its text shows its content
    if not isinstance(value, list | tuple | dict):
        return 1
    size = known.get(id(value)) or (inputs or {}).get(id(value))
    if size is not None:
        return size
    size = ITEM_CHARS * len(value)
    for item in chain(value, value.values()) if isinstance(value, dict) else value:
        size += written_size(item, known, inputs)
        refuse_above(size)
    known[id(value)] = size
    return size


def grown_size(operation: str, text: str | bytes, arguments: tuple[Any, ...]) -> int:
    """A lower bound of the length of a text method's or filter's result, if it can multiply its inputs."""
    length, texts = len(text), [argument for argument in arguments if isinstance(argument, str | bytes)]
    widest = max([1, *map(len, texts), *(abs(number) for number in arguments if isinstance(number, int))])
    match operation:
        case "ljust" | "rjust" | "center" | "zfill" | "truncate":
            return length + widest
        case "expandtabs" | "wordwrap":
            return length * (1 + widest)
        case "indent":
            return length + (len(text.splitlines()) + 1) * widest
        case "replace" if len(texts) > 1 and isinstance(text, str) and isinstance(texts[0], str):
            return length + (text.count(texts[0]) if texts[0] else length + 1) * len(texts[1])
        case "replace" | "translate":
            tables = [table for table in arguments if isinstance(table, dict)]
            entries = [own_size(entry) for table in tables for entry in table.values()]
            return length * (1 + max([widest, *entries]))
    return length


def formatted_size(form: str, arguments: Iterable[Any]) -> int:
    """A lower bound of the length of `form` filled in: any field may hold all arguments, at full width."""
    arguments = list(arguments)
    widths = [int(number) for number in _NUMBER.findall(form)]
    if _WIDTH_ARGUMENT.search(form):
        widths += [abs(argument) for argument in arguments if isinstance(argument, int)]
    field = max([1, *widths]) + sum(written_size(argument, {}) for argument in arguments)
    return len(form) + (form.count("{") + form.count("%")) * field
