"""Shared by the verbs' parsers: the help layout, MODEL, and the engine's settings from file and flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ridgeline.cli.flags.aliases import print_notes
from ridgeline.cli.flags.environment import from_environment
from ridgeline.engine.config import EngineConfig
from ridgeline.options import build, given_flags, options_of

MODEL_HELP = (
    "short name (see `ridgeline models list`), directory, .gguf file or org/name[@revision] of the hub"
)
DEFAULT_MODEL: str = next(option.default for option in options_of(EngineConfig) if option.name == "model")


# Commands of other tools, and the command here.
OTHER_ACTIONS = {"ls": "list", "remove": "rm", "delete": "rm", "show": "inspect", "download": "pull"}
OTHER_VERBS = {
    "pull": "ridgeline models pull",
    "list": "ridgeline models list",
    "ls": "ridgeline models list",
    "show": "ridgeline models inspect",
    "rm": "ridgeline models rm",
    "start": "ridgeline serve",
    "server": "ridgeline serve",
    "complete": "ridgeline run",
    "benchmark": "ridgeline bench",
    "run-batch": "ridgeline batch",
    "collect-env": "ridgeline doctor",
    "help": "ridgeline --help",
    "version": "ridgeline --version",
}


class Help(argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines; flags get room for their names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, with the nearest flag, instead of a page of usage.

    subverbs: if the first argument is one of these words, its own parser reads the rest, else the verb's
              parser does: `plan MODEL --hardware h200` beside `plan verify FILE DIR`.
    """

    subverbs: dict[str, argparse.ArgumentParser]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subverbs = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args and args[0] in self.subverbs:
            return self.subverbs[args[0]].parse_known_args(args[1:], namespace)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error for the first unknown argument."""
        from ridgeline.cli.flags.suggest import flag_suggestion, verb_suggestion

        flag = unknown[0].partition("=")[0]
        if self.subverbs and not flag.startswith("-"):
            self.error(f"unknown argument {flag}{verb_suggestion(flag, self.subverbs, {})}")
        self.error(f"unknown argument {flag}{flag_suggestion(flag, self)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from ridgeline.cli.flags.suggest import verb_suggestion

            others = {"ridgeline": OTHER_VERBS, "ridgeline models": OTHER_ACTIONS}.get(self.prog, {})
            near = verb_suggestion(value, action.choices, others)
            self.error(f"unknown {str(action.metavar).lower()} {value!r}{near}")
        super()._check_value(action, value)


Verbs = Any  # argparse's own type for what add_subparsers returns is private and generic


def add_verb(
    verbs: Verbs, name: str, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """A verb's parser: one line for the list of verbs, a description, and examples below the flags."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog="examples:\n" + examples.rstrip("\n"),
        formatter_class=Help,
    )
    parser.set_defaults(parser=parser)
    return parser


class VerbGroup:
    """Takes verbs as `add_subparsers` does, below a verb with its own arguments.

    `ridgeline gateway --port 8080` beside `ridgeline gateway keys list`. The outer verb's help lists them.
    """

    def __init__(self, verb: argparse.ArgumentParser) -> None:
        assert isinstance(verb, Parser)
        self._verb = verb
        self._examples = verb.epilog or ""
        self._lines: list[str] = []

    def add_parser(self, name: str, *, help: str = "", **settings: Any) -> Parser:
        parser = Parser(prog=f"{self._verb.prog} {name}", **settings)
        self._verb.subverbs[name] = parser
        self._lines.append(f"  {name:<12} {help}")
        self._verb.epilog = "\n".join(["verbs:", *self._lines, "", self._examples])
        return parser


class OldName:
    """Adds a verb under an older name; the list of verbs does not show it."""

    def __init__(self, verbs: Verbs, name: str) -> None:
        self._verbs, self._name = verbs, name

    def add_parser(self, name: str, *, help: str = "", **settings: Any) -> Parser:
        parser: Parser = self._verbs.add_parser(self._name, **settings)
        return parser


def add_subverb(
    verb: argparse.ArgumentParser, name: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """A parser for `ridgeline VERB NAME …`, where VERB also has its own arguments."""
    parser = Parser(
        prog=f"{verb.prog} {name}",
        description=description,
        epilog="examples:\n" + examples.rstrip("\n"),
        formatter_class=Help,
    )
    parser.set_defaults(parser=parser)
    assert isinstance(verb, Parser)
    verb.subverbs[name] = parser
    return parser


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The environment, then flags, then the MODEL argument if it was given."""
    named = {"model": args.model} if args.model else {}
    variables = from_environment(args, engine=EngineConfig)["engine"]
    print_notes(args)
    return build(EngineConfig, variables, given_flags(args, "engine"), named)


def path_argument(text: str) -> Path:
    return Path(text).expanduser()
