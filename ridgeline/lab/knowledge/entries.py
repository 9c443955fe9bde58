"""Entries: the glossary's terms and the techniques with their gates, from the two tables beside this file.

`ridgeline explain` prints them, `pages` writes the documentation from them.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ridgeline.lab.errors import BadInput


@dataclass(frozen=True, slots=True)
class Term:
    """A glossary term."""

    name: str
    meaning: str
    measure: str  # the command that shows it
    aliases: tuple[str, ...] = ()
    formula: str = ""
    figure: str = ""
    see: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique, and when to use it."""

    name: str
    what: str
    gate: str
    pays: tuple[str, ...]
    hurts: tuple[str, ...]
    interacts: tuple[str, ...]
    figures: tuple[str, ...]
    here: str  # its support in ridgeline
    measure: str
    aliases: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        return self.name.lower().replace(" ", "-")


Entry = Term | Technique


@functools.cache
def terms() -> tuple[Term, ...]:
    return tuple(Term(**_frozen(table)) for table in _read("terms.toml")["term"])


@functools.cache
def techniques() -> tuple[Technique, ...]:
    return tuple(Technique(**_frozen(table)) for table in _read("techniques.toml")["technique"])


def entries() -> tuple[Entry, ...]:
    return (*techniques(), *terms())


def find(word: str) -> Entry:
    """The entry of this name or alias, ignoring case and separators."""
    known = {_plain(name): entry for entry in reversed(entries()) for name in (*entry.aliases, entry.name)}
    asked = _plain(word)
    if asked in known:
        return known[asked]
    within = [entry.name for key, entry in known.items() if asked in key] if len(asked) > 2 else []
    near = [known[key].name for key in difflib.get_close_matches(asked, known, n=3, cutoff=0.6)]
    names = list(dict.fromkeys([*within, *near]))[:4]
    hint = f"did you mean {', '.join(names)}?" if names else "`ridgeline explain` lists all entries"
    raise BadInput(f"no entry for {word!r}; {hint}")


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def _plain(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum() or letter in "$+")
