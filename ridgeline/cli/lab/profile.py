"""`ridgeline profile`: the time of steps by operator, beside the machine's limits."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from ridgeline.cli.flags.aliases import add_aliases
from ridgeline.cli.parsing import (
    DEFAULT_MODEL,
    MODEL_HELP,
    Verbs,
    add_verb,
    engine_config,
    path_argument,
)
from ridgeline.engine.config import EngineConfig
from ridgeline.lab.errors import BadInput
from ridgeline.options import add_flags, given_flags

PROMPT_TOKENS, TTFT_PROMPT_TOKENS = 512, 128
PHASES: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")

DESCRIPTION = """\
Run a fixed number of engine steps, prefill and decode apart, and show where their time goes: every operator's
time, bytes and FLOPs beside this machine's limits. The torch and cuda backends run under torch's profiler,
which also writes a trace for https://ui.perfetto.dev. The native library computes a step in one call: py-spy
samples its current operator. py-spy also shows the Python around the steps.

With --pid: sample a running server instead, its front and its engines.

With --ttft: send single requests to a running server, or to one started here for a model, and show where the
milliseconds of a first token go, host and device, beside the limit."""

EXAMPLES = """\
  ridgeline profile
  ridgeline profile smollm2-135m --phase decode --sequences 32 --context 1024
  ridgeline profile smollm2-135m --backend torch --steps 10
  ridgeline profile --pid 4242 --seconds 10 --url http://127.0.0.1:8000
  ridgeline profile --ttft http://127.0.0.1:8000 --prompt-tokens 128
  ridgeline profile --ttft smollm2-135m
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "profile", "show where the time of steps goes", DESCRIPTION, EXAMPLES)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    parser.add_argument(
        "--phase", choices=PHASES, action="append", help="profile only this phase (default: both)"
    )
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="profile this many steps (default: 20)"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=8,
        metavar="N",
        help="decode this many sequences together (default: 8)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=512,
        metavar="N",
        help="begin decoding after this many tokens of context (default: 512)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help=f"prompts of this many tokens (default: {PROMPT_TOKENS}; with --ttft {TTFT_PROMPT_TOKENS})",
    )
    parser.add_argument(
        "--seconds",
        type=int,
        default=5,
        metavar="N",
        help="sample with py-spy for this many seconds; 0: not at all (default: 5)",
    )
    parser.add_argument(
        "--stacks", action="store_true", help="keep stacks in torch's profiler; slow and large"
    )
    parser.add_argument(
        "--top", type=int, default=12, metavar="N", help="show this many rows of each table (default: 12)"
    )
    parser.add_argument("--pid", type=int, metavar="PID", help="sample this server's processes instead")
    parser.add_argument(
        "--url", metavar="URL", help="with --pid: read the step records of the server at this address"
    )
    parser.add_argument(
        "--ttft", metavar="URL|MODEL", help="profile the first tokens of this server, or of this model's"
    )
    parser.add_argument(
        "--requests", type=int, default=20, metavar="N", help="with --ttft: send this many (default: 20)"
    )
    parser.add_argument(
        "--native", action="store_true", help="with --pid: show functions of native libraries too"
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        metavar="DIR",
        help="write files to this folder (default: bench-results/<date>-profile)",
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    add_flags(parser, "engine", EngineConfig, title="engine", skip=("model",))
    add_aliases(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.ttft is not None:
        return _first_tokens(args)
    out = args.out or Path("bench-results") / f"{datetime.now():%Y%m%d-%H%M%S}-profile"
    return _sample(args, out) if args.pid is not None else _profile(args, out)


def _profile(args: argparse.Namespace, out: Path) -> int:
    if args.url or args.native:
        raise BadInput("--url and --native go with --pid")
    from ridgeline.cli.progress import fetch
    from ridgeline.engine.start.build import build_engine
    from ridgeline.lab.profile.load import Shape
    from ridgeline.lab.profile.run import ProfileRequest, profile_engine
    from ridgeline.lab.profile.table import profile_lines

    config = engine_config(args)
    phases = tuple(phase for phase in PHASES if phase in (args.phase or PHASES))
    tokens = PROMPT_TOKENS if args.prompt_tokens is None else args.prompt_tokens
    shape = Shape(args.sequences, args.context, tokens)
    request = ProfileRequest(phases, args.steps, shape, args.seconds, args.stacks, out)
    files = fetch(config.model, sys.stderr)
    built = build_engine(config, files.path)
    found = profile_engine(built, files.name, request, lambda text: print(text, file=sys.stderr, flush=True))
    path = found.save(out)
    if args.json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        print("\n".join(profile_lines(found, args.top)))
        print(f"wrote {path}")
    return 0


def _first_tokens(args: argparse.Namespace) -> int:
    from ridgeline.cli.progress import fetch
    from ridgeline.lab.profile.first_token import first_token_lines, profile_first_tokens
    from ridgeline.lab.tune.servers import TunedServer

    if args.model is not None or args.pid is not None or args.url is not None:
        raise BadInput("--ttft names the server or the model: leave out MODEL, --pid and --url")
    tokens = args.prompt_tokens or TTFT_PROMPT_TOKENS
    if args.ttft.startswith(("http://", "https://")):
        found = profile_first_tokens(args.ttft, tokens, args.requests)
    else:
        fetch(args.ttft, sys.stderr)
        print(f"starting a server of {args.ttft}", file=sys.stderr, flush=True)
        settings = given_flags(args, "engine")
        with TemporaryDirectory() as folder, TunedServer(args.ttft, settings, Path(folder)) as server:
            found = profile_first_tokens(server.url, tokens, args.requests)
    print(json.dumps(asdict(found), indent=2) if args.json else "\n".join(first_token_lines(found)))
    return 0


def _sample(args: argparse.Namespace, out: Path) -> int:
    from ridgeline.lab.profile.host import host_lines, profile_processes

    if args.seconds < 1:
        raise BadInput("--seconds must be at least 1 with --pid")
    if args.pid < 1:
        raise BadInput(f"--pid must be a process's number, got {args.pid}")
    print(f"sampling for {args.seconds} s", file=sys.stderr, flush=True)
    found = profile_processes(args.pid, args.seconds, out, native=args.native, url=args.url)
    print(json.dumps(asdict(found), indent=2) if args.json else "\n".join(host_lines(found, args.top)))
    return 0
