"""`ridgeline gateway`: reads settings from a file, or uses those for one local server; runs the gateway."""

from __future__ import annotations

import argparse
import json
import socket
from dataclasses import replace
from urllib.parse import urlsplit

from ridgeline.cli.flags.aliases import print_notes
from ridgeline.cli.flags.environment import from_environment
from ridgeline.cli.gateway import keys, routes, teams, usage
from ridgeline.cli.parsing import VerbGroup, Verbs, add_verb, path_argument
from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.options import OptionError, add_flags, given_flags, json_schema
from ridgeline.telemetry import logs

DEFAULT_UPSTREAM = "http://127.0.0.1:8000"

DESCRIPTION = """\
Run a gateway between applications and many models: keys, limits, budgets, retries, fallbacks, a ledger of
every token and cent, caches, redaction, and routing to the cheapest model that is good enough. Clients use
the APIs of OpenAI or Anthropic; upstreams are ridgeline, vLLM, SGLang, llama-server and hosted providers.
Without --config it serves the models of a server on this machine, without keys, to local clients only. With
--config, clients need keys: `ridgeline gateway keys create --name me`. Environment variables override the
file's [gateway] section (--port is RIDGELINE_GATEWAY_PORT), and flags override both.
Ctrl-C or SIGTERM lets running answers finish, then stops."""

EXAMPLES = """\
  ridgeline serve & ridgeline gateway
  ridgeline gateway --upstream http://127.0.0.1:9000 --port 9080 --admin-port 9081 --state-dir second
  ridgeline gateway --print-example > gateway.toml && ridgeline gateway --config gateway.toml
  KEY=$(ridgeline gateway keys create --name app --rpm 600 --daily-usd 5)
  curl 127.0.0.1:8080/v1/chat/completions -H "authorization: Bearer $KEY" \\
       -H "content-type: application/json" -d @request.json
  ridgeline gateway usage --by key,model
"""

EXAMPLE_FILE = """\
# ridgeline gateway --config gateway.toml; every key: ridgeline gateway --print-schema, docs/gateway.md

[gateway]
port = 8080
workers = 1                       # more than one needs [redis] for exact limits

[[upstreams]]                     # a ridgeline server: ridgeline serve smollm2-135m
name = "local"
kind = "ridgeline"                # or openai (vLLM, SGLang, llama-server, hosted), anthropic
url = "http://127.0.0.1:8000"
# key_env = ["LOCAL_KEY"]         # the variable with its key, if the server has --api-keys

# [[upstreams]]
# name = "hosted"
# kind = "openai"
# url = "https://api.openai.com"
# key_env = ["OPENAI_API_KEY"]    # keys come from the environment or files, never from here

[[models]]
name = "fast"                     # the name in clients' requests
targets = ["local/smollm2-135m"]  # upstream/model; further targets are fallbacks
price_in = 0.05                   # US dollars per million tokens
price_out = 0.10
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "gateway", "put keys, limits and budgets in front of models", DESCRIPTION, EXAMPLES
    )
    parser.add_argument("--config", type=path_argument, metavar="FILE", help="gateway.toml")
    parser.add_argument(
        "--upstream",
        metavar="URL",
        help=f"without --config: front this server (default: {DEFAULT_UPSTREAM})",
    )
    parser.add_argument(
        "--admin-port", type=int, metavar="N", help="port of the admin API (default: the file's, or 8081)"
    )
    parser.add_argument("--print-example", action="store_true", help="print a small gateway.toml and exit")
    parser.add_argument("--print-schema", action="store_true", help="print the file's JSON schema and exit")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    add_flags(parser, "gateway", GatewayConfig, title="gateway")
    parser.set_defaults(run=run, logs_notes=True)
    group = VerbGroup(parser)
    for verb in (keys, teams, usage, routes):
        verb.add_parser(group)


def run(args: argparse.Namespace) -> int:
    if args.print_example:
        print(EXAMPLE_FILE, end="")
        return 0
    from ridgeline.gateway.process.trial import try_certificates, try_parts, try_upstreams
    from ridgeline.gateway.settings import LISTS, SECTIONS, GatewaySettings, embedded, read_settings

    if args.print_schema:
        print(json.dumps(json_schema(SECTIONS, lists=LISTS), indent=2))
        return 0
    if args.config is not None and args.upstream is not None:
        raise OptionError("--upstream cannot be combined with --config; add the server to [[upstreams]]")
    flags = from_environment(args, gateway=GatewayConfig)["gateway"] | given_flags(args, "gateway")

    def read() -> GatewaySettings:
        if args.config is not None:
            found = read_settings(args.config, flags)
        else:
            found = embedded(args.upstream or DEFAULT_UPSTREAM, flags)
        try_upstreams(found)
        try_certificates(found)
        if args.admin_port is None:
            return found
        return replace(found, admin=replace(found.admin, port=args.admin_port))

    settings = read()
    if args.check:
        try_parts(settings)
        parts = ("upstreams", "models", "routes", "guards")
        counts = [(len(getattr(settings, part)), part) for part in parts]
        shown = ", ".join(f"{n} {part if n > 1 else part[:-1]}" for n, part in counts if n)
        print(f"{args.config or 'the embedded default'}: {shown}; the configuration is valid")
        return 0
    logs.setup(settings.gateway.log_level, settings.gateway.log_format)
    print_notes(args)
    if args.config is None and not _listens(settings.upstreams[0].url):
        print(
            f"nothing listens at {settings.upstreams[0].url} yet: start a server there, for example with "
            "`ridgeline serve`, or give another address with --upstream",
            file=logs.for_people(),
        )
    from ridgeline.gateway.process.main import run as serve

    return serve(settings, read)


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    if parts.hostname is None:  # a socket's path, already checked
        return True
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=0.5).close()
    except OSError:
        return False
    return True
