"""Adds other tools' flags to a parser, hidden from its help: `add_aliases` after the parser's own flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ridgeline.cli.flags.alias_table import ALIASES, IGNORED, REFUSED, Alias, Ignored, Refused
from ridgeline.telemetry import logs


def add_aliases(parser: argparse.ArgumentParser) -> None:
    """Every row of the table whose option or section this parser has, unless the flag is the parser's own."""
    targets: dict[str, argparse.Action] = {}
    for action in parser._actions:
        targets.setdefault(action.dest, action)
    sections = {dest.partition(".")[0] for dest in targets if "." in dest}
    for alias in ALIASES:
        if alias.option in targets and (flags := _free(parser, alias.flags)):
            _add_alias(parser, flags, alias, targets[alias.option])
    for ignored in IGNORED:
        if ignored.section in sections and (flags := _free(parser, ignored.flags)):
            nargs = {"none": 0, "one": None, "optional": "?"}[ignored.takes]
            _add(parser, flags, _IgnoredAction, row=ignored, nargs=nargs)
    for refused in REFUSED:
        if refused.section in sections and (flags := _free(parser, refused.flags)):
            _add(parser, flags, _RefusedAction, row=refused, nargs="?")


def print_notes(args: argparse.Namespace) -> None:
    """Notes from parsing and reading settings: one line each on stderr, or one log event each."""
    for note in getattr(args, "notes", ()):
        print(f"note: {note}", file=logs.for_people())
    args.notes = []


def add_note(args: argparse.Namespace, note: str) -> None:
    args.notes = [*getattr(args, "notes", ()), note]


def _free(parser: argparse.ArgumentParser, flags: Sequence[str]) -> list[str]:
    return [flag for flag in flags if flag not in parser._option_string_actions]


def _add(parser: argparse.ArgumentParser, flags: Sequence[str], action: Any, **settings: Any) -> None:
    parser.add_argument(*flags, action=action, dest=argparse.SUPPRESS, help=argparse.SUPPRESS, **settings)


def _add_alias(
    parser: argparse.ArgumentParser, flags: Sequence[str], alias: Alias, target: argparse.Action
) -> None:
    if alias.const is not None:
        _add(parser, flags, _AliasAction, target=target, alias=alias, nargs=0)
        return

    def read(text: str) -> Any:
        if alias.read is not None:
            try:
                return alias.read(text)
            except (ValueError, OverflowError):
                raise argparse.ArgumentTypeError(f"{text!r} cannot be read") from None
        own = target.type or str
        assert callable(own)
        return own(alias.values.get(text, text))

    _add(parser, flags, _AliasAction, target=target, alias=alias, type=read, choices=target.choices)


class _AliasAction(argparse.Action):
    """Passes its value to the action of our flag."""

    def __init__(self, *args: Any, target: argparse.Action, alias: Alias, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._target, self._alias = target, alias

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        const = self._alias.const
        flag = self.option_strings[0]
        if isinstance(const, bool):  # the flag of a BooleanOptionalAction says which
            flag = self._target.option_strings[0 if const else 1]
        given: Any = values if const is None else const
        for value in given if isinstance(given, list) else [given]:
            self._target(parser, namespace, value, flag)


class _IgnoredAction(argparse.Action):
    def __init__(self, *args: Any, row: Ignored, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._row = row

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        row = self._row
        if row.allowed and isinstance(values, str) and values not in row.allowed:
            parser.error(f"{option_string} {values}: {row.why}; {row.otherwise}")
        add_note(namespace, f"{option_string} ({row.tool}) is ignored: {row.why}")


class _RefusedAction(argparse.Action):
    def __init__(self, *args: Any, row: Refused, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._row = row

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} ({self._row.tool}) has no equal: {self._row.instead}")
