"""`ridgeline gateway`: settings from a file, or those that front a local server; then the gateway."""

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
Stand between applications and many models: keys, limits, budgets, retries, fallbacks, a ledger of every
token and cent, caches, redaction, and routing to the cheapest model that will do. Clients speak the APIs of
OpenAI or Anthropic; upstreams are ridgeline, vLLM, SGLang, llama-server, hosted providers.
Without --config it fronts the server on this machine, for every user of this machine. With it, keys are
needed: `ridgeline gateway keys create --name me`. The file's [gateway] section is overridden by
environment variables (--port is RIDGELINE_GATEWAY_PORT), and these by flags.
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
workers = 1                       # several need [redis], so that limits stay exact

[[upstreams]]                     # a ridgeline server: ridgeline serve smollm2-135m
name = "local"
kind = "ridgeline"                # or openai (vLLM, SGLang, llama-server, hosted), anthropic
url = "http://127.0.0.1:8000"

# [[upstreams]]
# name = "hosted"
# kind = "openai"
# url = "https://api.openai.com"
# key_env = ["OPENAI_API_KEY"]    # keys come from the environment or files, never from here

[[models]]
name = "fast"                     # what clients ask for
targets = ["local/smollm2-135m"]  # upstream/model; the next ones are asked when one fails
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
    parser.add_argument("--print-example", action="store_true", help="print a small gateway.toml and stop")
    parser.add_argument("--print-schema", action="store_true", help="print the file's JSON schema and stop")
    parser.add_argument("--check", action="store_true", help="read and check the configuration, and stop")
    add_flags(parser, "gateway", GatewayConfig, title="gateway")
    parser.set_defaults(run=run, logs_notes=True)
    group = VerbGroup(parser)
    for verb in (keys, teams, usage, routes):
        verb.add_parser(group)


def run(args: argparse.Namespace) -> int:
    if args.print_example:
        print(EXAMPLE_FILE, end="")
        return 0
    from ridgeline.gateway.config import LISTS, SECTIONS, GatewaySettings, embedded, read_settings
    from ridgeline.gateway.process.trial import try_certificates, try_parts, try_upstreams

    if args.print_schema:
        print(json.dumps(json_schema(SECTIONS, lists=LISTS), indent=2))
        return 0
    if args.config is not None and args.upstream is not None:
        raise OptionError("--upstream is for a gateway without --config; name it in [[upstreams]]")
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
        print(f"{args.config or 'the embedded default'}: {shown}, all fits")
        return 0
    logs.setup(settings.gateway.log_level, settings.gateway.log_format)
    print_notes(args)
    if args.config is None and not _listens(settings.upstreams[0].url):
        print(
            f"nothing listens at {settings.upstreams[0].url} yet: start a server there, for example with "
            "`ridgeline serve`, or name another with --upstream",
            file=logs.for_people(),
        )
    from ridgeline.gateway.process.main import run as serve

    return serve(settings, read)


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    if parts.hostname is None:  # a socket's path, which has been looked at
        return True
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=0.5).close()
    except OSError:
        return False
    return True
