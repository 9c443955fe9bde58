"""`ridgeline`: selects the verb, and turns every expected error into one clear line and an exit code.

Nothing heavy is imported here or by the verbs' parsers: `ridgeline --help` answers at once. Only the module
of the named verb is imported: all others together would double its start-up time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ridgeline import __version__
from ridgeline.cli.errors import RemoteError
from ridgeline.cli.flags.aliases import print_notes
from ridgeline.cli.parsing import Help, OldName, Parser
from ridgeline.engine.errors import EngineError, InvalidConfig, InvalidRequest
from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.tenants.errors import StoreError
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.models.errors import ModelError
from ridgeline.options import OptionError
from ridgeline.server.process.errors import PortTaken
from ridgeline.telemetry import logs

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

# Each verb's module in this package.
VERBS = {
    "serve": "serve",
    "gateway": "gateway.gateway",
    "fleet": "fleet.fleet",
    "chat": "chat",
    "run": "run",
    "batch": "batch",
    "rag": "rag.rag",
    "models": "models",
    "ps": "ps",
    "stop": "stop",
    "doctor": "doctor.doctor",
    "bench": "lab.bench",
    "plan": "lab.plan",
    "simulate": "lab.simulate",
    "tune": "lab.tune",
    "profile": "lab.profile",
    "evaluate": "lab.evaluate",
    "quantize": "lab.quantize",
    "train-drafter": "lab.train_drafter",
    "explain": "lab.explain",
    "lint-prompts": "gateway.lint_prompts",
    "completion": "completion",
}

# Older names of verbs that are now below `gateway`.
OLD_NAMES = {
    "keys": "gateway.keys",
    "teams": "gateway.teams",
    "usage": "gateway.usage",
    "router": "gateway.routes",
}

LAB_PACKAGES = ("scipy", "genai_prices")  # from the extra `lab`, imported where they are needed

EXAMPLES = """\
examples:
  ridgeline serve                                     serve the default model on 127.0.0.1:8000
  ridgeline serve Qwen/Qwen3-8B --max-model-len 8192  a model of the hub; flags of vLLM and llama.cpp work
  ridgeline serve ./model.gguf --port 9000            a file
  ridgeline run "Name three rivers"                   one answer, to stdout
  ridgeline chat --url http://127.0.0.1:8000          talk to a running server
  ridgeline rag add docs/                             make files searchable; then `ridgeline rag ask "…"`
  ridgeline ps                                        list running servers; `ridgeline stop` ends one
  ridgeline models list                               list short names of models
  ridgeline bench http://127.0.0.1:8000               measure a server under load
  ridgeline plan Qwen3-8B --hardware h200 --rate 5    predict what serving a model takes
  ridgeline explain TTFT                              a term, its formula, and how to measure it
  ridgeline gateway keys create --name app            make a key at a running gateway
  source <(ridgeline completion bash)                 complete verbs and flags in this shell

`ridgeline VERB --help` explains a verb. A setting comes from its flag, else its RIDGELINE_* variable, else
the file of --config, else its default.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 pipe closed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        build_parser().print_help()
        return EXIT_USAGE
    first = next((argument for argument in arguments if not argument.startswith("-")), "")
    known = first in VERBS or first in OLD_NAMES
    args, unknown = build_parser([first] if known else list(VERBS)).parse_known_args(arguments)
    if unknown:
        args.parser.refuse(unknown)
    debug = args.debug or bool(os.environ.get("RIDGELINE_DEBUG"))
    if not getattr(args, "logs_notes", False):  # a server writes them to its log
        print_notes(args)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Python would report it again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (OptionError, InvalidConfig, InvalidRequest, BadInput) as error:
        return _failed(error, EXIT_USAGE, debug)
    except (ModelError, EngineError, RemoteError, LabError, LedgerError, StoreError, PortTaken) as error:
        return _failed(error, EXIT_FAILED, debug)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in LAB_PACKAGES:
            return _failed(
                LabError(f"this needs {error.name}: pip install 'ridgeline[lab]'"), EXIT_FAILED, debug
            )
        if debug:
            raise
        if isinstance(error, OSError) and error.filename is not None:  # a file that cannot be opened
            logs.fail(f"ridgeline: {error.filename}: {error.strerror}")
            return EXIT_FAILED
        logs.fail(
            f"ridgeline: unexpected {type(error).__name__}: {error}\n"
            "This is a bug. `ridgeline --debug …` shows where it happened."
        )
        return EXIT_FAILED


def build_parser(verbs: Sequence[str] = tuple(VERBS)) -> Parser:
    parser = Parser(
        prog="ridgeline",
        description="Run language models on your own machine: serve, chat, inspect.",
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"ridgeline {__version__}")
    parser.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    parsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in verbs:
        if verb in OLD_NAMES:
            import_module(f"ridgeline.cli.{OLD_NAMES[verb]}").add_parser(OldName(parsers, verb))
        else:
            import_module(f"ridgeline.cli.{VERBS[verb]}").add_parser(parsers)
    return parser


def _failed(error: Exception, code: int, debug: bool) -> int:
    if debug:
        raise error
    logs.fail(f"ridgeline: {error}")
    return code


if __name__ == "__main__":
    sys.exit(main())
