"""`ridgeline serve`: settings from file and flags, the model fetched if need be, then the server."""

from __future__ import annotations

import argparse
import json
import sys

from ridgeline.cli.parsing import DEFAULT_MODEL, MODEL_HELP, Verbs, add_verb, engine_config, path_argument
from ridgeline.cli.progress import fetch
from ridgeline.engine.config import EngineConfig
from ridgeline.options import add_flags, build, given_flags, json_schema, read_file, to_toml
from ridgeline.server.config import ServerConfig

SECTIONS = {"engine": EngineConfig, "server": ServerConfig}

DESCRIPTION = """\
Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.
The model is fetched on first use. Ctrl-C or SIGTERM lets running answers finish, then stops.
Settings come from --config (TOML with [engine] and [server]); flags override it."""

EXAMPLES = """\
  ridgeline serve
  ridgeline serve smollm2-135m --port 9000 --kv-tokens 32768
  ridgeline serve ./my-model --host 0.0.0.0 --api-key-file keys.txt
  ridgeline serve --print-config > ridgeline.toml && ridgeline serve --config ridgeline.toml
  curl 127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello!"}]}'
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "serve", "serve a model over HTTP", DESCRIPTION, EXAMPLES)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    parser.add_argument("--config", type=path_argument, metavar="FILE", help="TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as TOML and stop")
    parser.add_argument("--print-schema", action="store_true", help="print the file's JSON schema and stop")
    add_flags(parser, "server", ServerConfig, title="server")
    add_flags(parser, "engine", EngineConfig, title="engine", skip=("model",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.print_schema:
        print(json.dumps(json_schema(SECTIONS), indent=2))
        return 0
    file_values = read_file(args.config, SECTIONS) if args.config else {}
    engine = engine_config(args, file_values.get("engine"))
    server = build(ServerConfig, file_values.get("server", {}), given_flags(args, "server"))
    if args.print_config:
        print(to_toml({"engine": engine, "server": server}), end="")
        return 0
    fetch(engine.model, sys.stderr)
    from ridgeline.server.main import serve

    return serve(engine, server)
