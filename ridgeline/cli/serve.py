"""`ridgeline serve`: read the settings, fetch missing models, start the server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.cli.flags.aliases import add_aliases, print_notes
from ridgeline.cli.flags.environment import from_environment
from ridgeline.cli.parsing import DEFAULT_MODEL, MODEL_HELP, Verbs, add_verb, path_argument
from ridgeline.cli.progress import fetch
from ridgeline.engine.config import EngineConfig
from ridgeline.options import (
    add_flags,
    build,
    given_flags,
    json_schema,
    option,
    options_of,
    read_file,
    to_toml,
)
from ridgeline.server.config import ServerConfig
from ridgeline.server.process.setup import ModelSetup, named
from ridgeline.telemetry import logs

SECTIONS = {"engine": EngineConfig, "server": ServerConfig}


@dataclass(frozen=True, slots=True)
class ModelTable(EngineConfig):
    """One [[models]] table of the file: what of [engine] is different for this model, and its names."""

    names: tuple[str, ...] = option((), "names clients may ask for it by; default: the model's own")


DESCRIPTION = """\
Serve models over HTTP with the APIs of OpenAI and Anthropic: /v1/chat/completions, /v1/responses,
/v1/messages, /v1/embeddings and more; GET /docs lists them. Several models run side by side, each in
its own engine process; a request without a model means the first.
Models are fetched on first use. Ctrl-C or SIGTERM lets running answers finish, then stops.
Settings come from --config (TOML with [server], [engine] and a [[models]] table for each model, whose keys
are those of [engine], and names). Environment variables override the file, and flags override both:
--kv-tokens is kv_tokens in the file and RIDGELINE_KV_TOKENS in the environment.
Flags of vLLM and llama.cpp are accepted where they mean the same: --max-model-len, --max-num-seqs, -c …"""

EXAMPLES = """\
  ridgeline serve
  ridgeline serve smollm2-135m --port 9000 --kv-tokens 32768
  ridgeline serve Qwen/Qwen3-8B --max-model-len 8192
  ridgeline serve smollm2-135m all-minilm-l6-v2 --alias gpt-4o=smollm2-135m
  ridgeline serve ./my-model --host 0.0.0.0 --api-key-file keys.txt
  RIDGELINE_PORT=9000 RIDGELINE_API_KEYS=secret ridgeline serve
  ridgeline serve --print-config > ridgeline.toml && ridgeline serve --config ridgeline.toml
  curl 127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello!"}]}'
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "serve", "serve a model over HTTP", DESCRIPTION, EXAMPLES)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    parser.add_argument("--config", type=path_argument, metavar="FILE", help="TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as TOML and stop")
    parser.add_argument("--print-schema", action="store_true", help="print the file's JSON schema and stop")
    add_flags(parser, "server", ServerConfig, title="server")
    add_flags(parser, "engine", EngineConfig, title="engine", skip=("model",))
    parser.add_argument(
        "-m", "--model", dest="named", metavar="MODEL", action="append", help=argparse.SUPPRESS
    )
    add_aliases(parser)
    parser.set_defaults(run=run, logs_notes=True)


def run(args: argparse.Namespace) -> int:
    args.models += args.named or []
    if args.print_schema:
        print(json.dumps(json_schema(SECTIONS, lists={"models": ModelTable}), indent=2))
        return 0
    file_values, tables = read_models_file(args.config) if args.config else ({}, [])
    variables = from_environment(args, server=ServerConfig, engine=EngineConfig)
    server = build(
        ServerConfig, file_values.get("server", {}), variables["server"], given_flags(args, "server")
    )
    setups = model_setups(args, file_values.get("engine", {}), tables, server, variables["engine"])
    if args.print_config:
        print_notes(args)
        engine = replace(setups[0].engine, model=DEFAULT_MODEL) if len(setups) > 1 else setups[0].engine
        print(to_toml({"engine": engine, "server": server}), end="")
        if len(setups) > 1:
            print("".join(_model_toml(setup) for setup in setups), end="")
        return 0
    from ridgeline.server.process.main import check, serve

    logs.setup(server.log_level, server.log_format)
    print_notes(args)
    check(server)
    for setup in () if server.weight_sources else setups:
        fetch(setup.engine.model, logs.for_people())
    return serve(setups, server)


def read_models_file(path: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The file's sections, and the values of each [[models]] table."""
    values = read_file(path, SECTIONS, lists={"models": ModelTable})
    tables: Any = values.pop("models", [])
    return values, tables


def model_setups(
    args: argparse.Namespace,
    engine_values: dict[str, Any],
    tables: list[dict[str, Any]],
    server: ServerConfig,
    variables: Mapping[str, Any] | None = None,
) -> list[ModelSetup]:
    """[engine], the model's own table, variables, flags. MODEL and RIDGELINE_MODEL replace the tables."""
    over = {**(variables or {}), **given_flags(args, "engine")}
    model = over.pop("model", None)
    if args.models or model:
        tables = [{"model": name} for name in args.models or [model]]
    elif not tables:
        tables = [{}]
    configs = [
        build(EngineConfig, engine_values, {k: v for k, v in table.items() if k != "names"}, over)
        for table in tables
    ]
    names = [tuple(table.get("names", ())) for table in tables]
    return named(configs, names, server)


def _model_toml(setup: ModelSetup) -> str:
    defaults = {option.name: option.default for option in options_of(EngineConfig)}
    own = {k: v for k, v in asdict(setup.engine).items() if k == "model" or v != defaults[k]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in own.items()]
    return "\n".join(["", "[[models]]", *lines, f"names = {json.dumps(list(setup.names))}", ""])
