"""`ridgeline gateway keys`: creates, shows, changes, rotates and revokes keys over the admin API."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from typing import Any

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.gateway.admin_client import AdminClient, add_admin_flags, duration_s, segment
from ridgeline.cli.gateway.limits_flags import add_limit_flags, given_limits, limits_line, moment, print_table
from ridgeline.cli.models import print_lines
from ridgeline.cli.parsing import Verbs, add_verb

DESCRIPTION = """\
Keys that applications use at a gateway. A key may be restricted to models, endpoints, limits, a budget and an
expiry date. The gateway stores a digest: the key itself is shown once, when it is created or rotated.
Every change takes effect on every worker within a second, and is in the audit log."""

EXAMPLES = """\
  KEY=$(ridgeline gateway keys create --name app --team search --rpm 100 --daily-usd 5 --expires 30d)
  ridgeline gateway keys list
  ridgeline gateway keys update app --rpm 200 --daily-usd none
  ridgeline gateway keys rotate app --grace 1d
  ridgeline gateway keys revoke app
"""

CREATE = """\
Create a key. Only the key is printed to stdout, once, for use in scripts; its permissions go to stderr.
Without a flag for a limit, there is no limit."""

CREATE_EXAMPLES = """\
  ridgeline gateway keys create --name laptop
  ridgeline gateway keys create --name app --team search --model 'gpt-*' --model small --endpoint chat \\
      --rpm 100 --tpm 20000 --concurrent 8 --daily-usd 5 --monthly-usd 100 --expires 30d
  ridgeline gateway keys create --name ci --expires 2027-01-31 --cache exact --priority 2 --json
"""

UPDATE = """\
Change a key while it is in use; settings without a flag stay. `none` removes a limit, the team, a guard or
the expiry date; --model '*' and --endpoint any allow all again."""

UPDATE_EXAMPLES = """\
  ridgeline gateway keys update app --rpm 200 --daily-usd none
  ridgeline gateway keys update app --model 'gpt-*' --expires none
"""

ROTATE = """\
Give a key a new secret, printed to stdout once. The old one becomes invalid at once; with --grace it stays
valid for that time, for applications that are restarted one by one. Nothing else changes."""

REVOKE = """\
Revoke a key permanently, on every worker within a second; queued requests are refused too. Running requests
finish. With --end-requests they end within a second, streams with an error event, and running batches are
cancelled; this also works on a revoked key. The key stays listed with --revoked, for reports;
`gateway keys delete` removes it."""

AUDIT = "The audit log: actions on keys, teams and the gateway, with author, time and address; newest last."


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "keys", "create, change and revoke a gateway's keys", DESCRIPTION, EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    create = add_verb(actions, "create", "create a key, and print it once", CREATE, CREATE_EXAMPLES)
    create.add_argument(
        "--name", required=True, metavar="TEXT", help="name of the key, at most 128 characters"
    )
    _add_scopes(create)
    create.set_defaults(run=run_create)

    update = add_verb(actions, "update", "change a key", UPDATE, UPDATE_EXAMPLES)
    _add_key(update)
    update.add_argument("--name", metavar="TEXT", default=argparse.SUPPRESS, help="a new name")
    _add_scopes(update)
    update.set_defaults(run=run_update)

    lister = add_verb(
        actions, "list", "all keys", "The keys of a gateway.", "  ridgeline gateway keys list --team search"
    )
    lister.add_argument("--team", metavar="TEAM", help="only keys of this team: its name or id")
    lister.add_argument("--revoked", action="store_true", help="include revoked keys")
    lister.set_defaults(run=run_list)

    show = add_verb(
        actions, "show", "show one key", "Show all settings of a key.", "  ridgeline gateway keys show app"
    )
    _add_key(show)
    show.set_defaults(run=run_show)

    rotate = add_verb(
        actions, "rotate", "give a key a new secret", ROTATE, "  ridgeline gateway keys rotate app --grace 1d"
    )
    _add_key(rotate)
    rotate.add_argument(
        "--grace",
        metavar="TIME",
        default="0s",
        help="time for which the old secret stays valid, as 10m, 12h, 7d",
    )
    rotate.set_defaults(run=run_rotate)

    revoke = add_verb(actions, "revoke", "end a key", REVOKE, "  ridgeline gateway keys revoke app")
    _add_key(revoke)
    revoke.add_argument(
        "--end-requests", action="store_true", help="also end its running requests and batches"
    )
    revoke.set_defaults(run=run_revoke)

    delete = add_verb(
        actions,
        "delete",
        "delete a revoked key",
        "Delete a revoked key.",
        "  ridgeline gateway keys delete key_…",
    )
    _add_key(delete)
    delete.set_defaults(run=run_delete)

    audit = add_verb(
        actions, "audit", "show the audit log", AUDIT, "  ridgeline gateway keys audit --since 1d"
    )
    audit.add_argument("--since", metavar="TIME", help="as 2h, 7d, or a time such as 2027-01-31T12:00:00Z")
    audit.add_argument("--limit", metavar="N", type=int, default=100, help="number of entries (default: 100)")
    audit.set_defaults(run=run_audit)

    for action in (create, update, lister, show, rotate, revoke, delete, audit):
        add_admin_flags(action)


def run_create(args: argparse.Namespace) -> int:
    client = AdminClient.of(args)
    made = client.send("POST", "/admin/keys", _fields(client, args))
    return _print_secret(made, args)


def run_update(args: argparse.Namespace) -> int:
    client = AdminClient.of(args)
    fields = _fields(client, args)
    if not fields:
        raise RemoteError(
            "nothing to change: give at least one flag (see `ridgeline gateway keys update --help`)"
        )
    return _print_key(client, client.send("PATCH", _path(client, args.key), fields), args)


def run_list(args: argparse.Namespace) -> int:
    client = AdminClient.of(args)
    team = team_id(client, args.team) if args.team else None
    keys = list(client.every("/admin/keys", team=team, revoked="true" if args.revoked else None))
    if args.json:
        print(json.dumps(keys, indent=2))
        return 0
    teams = _team_names(client)
    rows = [
        [
            key["id"],
            key["name"],
            teams.get(key["team"], key["team"]),
            key["state"],
            ", ".join(key["models"]) or "all",
            ", ".join(key["endpoints"]) or "all",
            limits_line(key["limits"]) or "none",
            moment(key["expires_at"], "never"),
        ]
        for key in keys
    ]
    print_table(["id", "name", "team", "state", "models", "endpoints", "limits", "expires"], rows)
    return 0


def run_show(args: argparse.Namespace) -> int:
    client = AdminClient.of(args)
    return _print_key(client, client.get(_path(client, args.key, with_revoked=True)), args)


def run_rotate(args: argparse.Namespace) -> int:
    grace_s = duration_s(args.grace)
    if grace_s is None:
        raise RemoteError(f"--grace {args.grace!r} is not a time such as 10m, 12h or 7d")
    client = AdminClient.of(args)
    made = client.send("POST", _path(client, args.key) + "/rotate", {"grace_s": grace_s})
    return _print_secret(made, args)


def run_revoke(args: argparse.Namespace) -> int:
    client = AdminClient.of(args)
    path = _path(client, args.key, with_revoked=args.end_requests)
    revoked = client.send("POST", f"{path}/revoke", {"end_requests": args.end_requests})
    print(json.dumps(revoked, indent=2) if args.json else f"revoked {revoked['id']} ({revoked['name']})")
    return 0


def run_delete(args: argparse.Namespace) -> int:
    client = AdminClient.of(args)
    gone = client.send("DELETE", _path(client, args.key, with_revoked=True))
    print(json.dumps(gone, indent=2) if args.json else f"deleted {gone['id']}")
    return 0


def run_audit(args: argparse.Namespace) -> int:
    since = args.since
    if since and (ago_s := duration_s(since)) is not None:
        since = f"{time.time() - ago_s:.3f}"
    records = AdminClient.of(args).get("/admin/audit", since=since, limit=args.limit)["data"]
    if args.json:
        print(json.dumps(records, indent=2))
        return 0
    rows = [
        [
            moment(one["at_ms"] / 1000),
            one["who"] or "?",
            one["address"],
            one["action"],
            one["outcome"],
            one["target"],
            _difference(one["before"], one["after"]),
        ]
        for one in records
    ]
    print_table(["when", "who", "from", "action", "outcome", "target", "change"], rows)
    return 0


def team_id(client: AdminClient, name: str) -> str:
    """A team by its id or its name."""
    if name.startswith("team_"):
        return name
    found = client.get("/admin/teams", name=name)["data"]
    if not found:
        raise RemoteError(f"no team is named {name!r}; `ridgeline gateway teams list` lists them")
    return str(found[0]["id"])


# ---- arguments ----


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="its id (key_…), or its name if no other key has it")


def _add_scopes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("permissions")

    def add(flag: str, metavar: str, help: str, **settings: Any) -> None:
        group.add_argument(flag, metavar=metavar, help=help, default=argparse.SUPPRESS, **settings)

    add("--team", "TEAM", "team whose limits and budget it shares: name or id")
    add(
        "--model",
        "NAME",
        "a model that it may use, or a pattern such as 'gpt-*'; repeatable",
        action="append",
    )
    add("--endpoint", "NAME", "chat, messages, embeddings, …; repeatable", action="append")
    add("--expires", "TIME", "expiry: 30d, 12h, or 2027-01-31T12:00:00Z")
    add(
        "--residency",
        "REGION",
        "a region that may compute its requests, or eu-*; repeatable",
        action="append",
    )
    add("--guard", "NAME", "a [[guards]] policy for its requests")
    group.add_argument(
        "--cache",
        choices=("off", "exact", "semantic"),
        default=argparse.SUPPRESS,
        help="cache that its requests use by default (default: off)",
    )
    group.add_argument(
        "--priority",
        type=int,
        choices=(0, 1, 2),
        default=argparse.SUPPRESS,
        help="priority at a busy upstream: 0 before 1 before 2 (default: 1)",
    )
    group.add_argument(
        "--when-limits-unknown",
        choices=("open", "closed"),
        default=argparse.SUPPRESS,
        help="while Redis is unreachable: allow its requests, or refuse them (default: closed)",
    )
    add_limit_flags(parser)


def _fields(client: AdminClient, args: argparse.Namespace) -> dict[str, Any]:
    """The body's fields for the given flags."""
    given = vars(args)
    fields: dict[str, Any] = given_limits(args)
    for name in ("name", "cache", "priority", "when_limits_unknown"):
        if name in given:
            fields[name] = given[name]
    if "guard" in given:
        fields["guard"] = None if args.guard == "none" else args.guard
    if "team" in given:
        fields["team"] = None if args.team == "none" else team_id(client, args.team)
    if "model" in given:
        fields["models"] = [] if "*" in args.model else args.model
    if "residency" in given:
        fields["residency"] = [] if "*" in args.residency else args.residency
    if "endpoint" in given:
        fields["endpoints"] = [] if "any" in args.endpoint else args.endpoint
    if "expires" in given:
        fields |= _expiry(args.expires)
    return fields


def _expiry(text: str) -> dict[str, Any]:
    if text in ("none", "never"):
        return {"expires_at": None}
    if (seconds := duration_s(text)) is not None:
        return {"expires_in_s": seconds}
    if not re.match(r"\d{4}-|\d{9}", text):
        raise RemoteError(f"--expires {text!r} is not a time such as 30d, 12h or 2027-01-31T12:00:00Z")
    return {"expires_at": text}


def _path(client: AdminClient, key: str, *, with_revoked: bool = False) -> str:
    """The path of a key by its id or name."""
    if key.startswith("key_"):
        return f"/admin/keys/{segment(key)}"
    if key.startswith("rl-"):
        raise RemoteError("that is a key's secret; give the key's id or name (`ridgeline gateway keys list`)")
    found = list(client.every("/admin/keys", name=key, revoked="true" if with_revoked else None))
    if len(found) > 1:
        ids = ", ".join(one["id"] for one in found[:5])
        raise RemoteError(f"{len(found)} keys are named {key!r}; use an id ({ids})")
    if not found:
        raise RemoteError(f"no key is named {key!r}; `ridgeline gateway keys list` lists them")
    return f"/admin/keys/{found[0]['id']}"


# ---- output ----


def _print_secret(made: dict[str, Any], args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(made, indent=2))
        return 0
    allowed = limits_line(made["limits"]) or "no limits"
    until = moment(made["expires_at"], "never")
    print(f"{made['id']} ({made['name']}): {allowed}; expires: {until}", file=sys.stderr)
    for old in made["old_secrets_until"]:
        print(f"an older secret is valid until {moment(old)}", file=sys.stderr)
    print("The key (shown only once):", file=sys.stderr, flush=True)
    print(made["secret"])
    return 0


def _print_key(client: AdminClient, key: dict[str, Any], args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(key, indent=2))
        return 0
    teams = _team_names(client) if key["team"] else {}
    lines = [
        ("id", key["id"]),
        ("name", key["name"]),
        ("state", key["state"]),
        ("team", f"{teams.get(key['team'], '?')} ({key['team']})" if key["team"] else "none"),
        ("models", ", ".join(key["models"]) or "all"),
        ("endpoints", ", ".join(key["endpoints"]) or "all"),
        ("limits", limits_line(key["limits"]) or "none"),
        ("residency", ", ".join(key["residency"]) or "any region"),
        ("priority", str(key["priority"])),
        ("when limits unknown", key["when_limits_unknown"]),
        ("guard", key["guard"] or "the gateway's default"),
        ("cache", key["cache"]),
        ("created", moment(key["created_at"])),
        ("expires", moment(key["expires_at"], "never")),
    ]
    if key["revoked_at"] is not None:
        lines.append(("revoked", moment(key["revoked_at"])))
    lines += [("an old secret until", moment(until)) for until in key["old_secrets_until"]]
    print_lines(lines)
    return 0


def _team_names(client: AdminClient) -> dict[str, str]:
    return {team["id"]: team["name"] for team in client.every("/admin/teams")}


def _difference(before: Any, after: Any) -> str:
    """The fields that a record changed; for a new object, all fields that are set."""
    old, new = _flat(before or {}), _flat(after or {})
    changed = [
        f"{name}: {_short(name, old.get(name))} → {_short(name, value)}"
        if before
        else f"{name}: {_short(name, value)}"
        for name, value in new.items()
        if old.get(name) != value and name != "id"
    ]
    return ", ".join(changed)


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    """Flattens limits into fields, without the empty ones."""
    limits = document.get("limits") or {}
    fields = {name: value for name, value in document.items() if name != "limits"} | limits
    return {name: None if value in ("", []) else value for name, value in fields.items()}


def _short(name: str, value: Any) -> str:
    if name.endswith("_at") and isinstance(value, int | float):
        return moment(value)
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
