"""What the verbs' parsers share: the help layout, MODEL, and the engine's settings from file and flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ridgeline.engine.config import EngineConfig
from ridgeline.options import build, given_flags, options_of

MODEL_HELP = "short name (see `ridgeline models list`), directory, .gguf file or hf:org/name[@revision]"
DEFAULT_MODEL: str = next(option.default for option in options_of(EngineConfig) if option.name == "model")


class Help(argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines; flags get room for their names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


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
    return parser


def engine_config(args: argparse.Namespace, file_values: dict[str, Any] | None = None) -> EngineConfig:
    """File, then flags, then the MODEL argument if it was given."""
    named = {"model": args.model} if args.model else {}
    return build(EngineConfig, file_values or {}, given_flags(args, "engine"), named)


def path_argument(text: str) -> Path:
    return Path(text).expanduser()
