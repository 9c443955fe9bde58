"""Every command with its verbs and flags, read off the parsers: what a shell completes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ridgeline.cli.parsing import Parser, path_argument

Value = Literal["none", "choice", "file", "other"]
_FILE_METAVARS = ("FILE", "DIR", "IN", "OUT", "MODEL")


@dataclass(frozen=True, slots=True)
class Flag:
    """
    strings: -m and --model
    value:   none follows, one of `choices`, a path, or a text that cannot be guessed
    """

    strings: tuple[str, ...]
    help: str
    value: Value
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """
    path:         ("ridgeline", "models", "pull")
    verbs:        the words that may follow, each with its help: verbs, or the choices of an argument
    takes_model:  an argument is a MODEL
    takes_file:   an argument is a path
    """

    path: tuple[str, ...]
    verbs: tuple[tuple[str, str], ...]
    flags: tuple[Flag, ...]
    takes_model: bool
    takes_file: bool

    @property
    def name(self) -> str:
        return " ".join(self.path)


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ("ridgeline",)) -> Iterator[Command]:
    """The command of this parser and all below it."""
    below = _below(parser)
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    arguments = [action for action in shown if not action.option_strings]
    words = [str(word) for action in arguments for word in action.choices or () if word not in below]
    is_model = any("MODEL" in str(action.metavar) for action in arguments)
    yield Command(
        path,
        (*((name, help_text) for name, (_, help_text) in below.items()), *((word, "") for word in words)),
        tuple(_flag(action) for action in shown if action.option_strings),
        takes_model=is_model,
        takes_file=is_model or any(_is_file(action) for action in arguments),
    )
    for name, (inner, _) in below.items():
        yield from commands(inner, (*path, name))


def _below(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    found: dict[str, tuple[argparse.ArgumentParser, str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found |= {name: (action.choices[name], help_text) for name, help_text in helps.items()}
    if isinstance(parser, Parser):
        found |= {name: (inner, _short(inner.description)) for name, inner in parser.subverbs.items()}
    return found


def _flag(action: argparse.Action) -> Flag:
    value: Value = "other"
    choices = tuple(map(str, action.choices or ()))
    if action.nargs == 0:
        value = "none"
    elif choices:
        value = "choice"
    elif _is_file(action):
        value = "file"
    return Flag(tuple(action.option_strings), _short(action.help), value, choices)


def _is_file(action: argparse.Action) -> bool:
    return action.type is path_argument or str(action.metavar) in _FILE_METAVARS


def _short(text: str | None) -> str:
    """The first clause, on one line."""
    line = " ".join((text or "").replace("%%", "%").split())
    first = re.split(r"[;(]|\. ", line, maxsplit=1)[0].strip(" .:")
    return first if len(first) <= 70 else first[:69] + "…"
