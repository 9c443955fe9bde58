"""Which engine answers `run` and `chat`: one loaded here, or the server at --url."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from ridgeline.cli.answers import Answers, LocalAnswers
from ridgeline.cli.flags.aliases import add_aliases
from ridgeline.cli.parsing import engine_config
from ridgeline.cli.progress import fetch
from ridgeline.cli.remote import RemoteAnswers
from ridgeline.engine.config import EngineConfig
from ridgeline.options import OptionError, add_flags, given_flags

API_KEY_VARIABLE = "RIDGELINE_API_KEY"
# Settings that only a server with many clients has a use for.
SERVER_ONLY = ("model", "max_waiting", "background_tokens", "step_ring")


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="ask the server there instead of loading a model here")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for --url (default: ${API_KEY_VARIABLE})")
    add_flags(parser, "engine", EngineConfig, title="engine, when the model is loaded here", skip=SERVER_ONLY)
    add_aliases(parser)


def open_answers(args: argparse.Namespace) -> Answers:
    if args.url:
        given = given_flags(args, "engine")
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise OptionError(f"{flag} is a setting of the engine, and with --url the server has its own")
        return RemoteAnswers(args.url, args.model, args.api_key or os.environ.get(API_KEY_VARIABLE, ""))
    config = engine_config(args)
    fetch(config.model, sys.stderr)
    with announced(f"loading {config.model} …"):
        return LocalAnswers(config)


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """A line on a terminal's stderr for as long as it takes; nothing is left of it."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
