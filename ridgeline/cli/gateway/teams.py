"""`ridgeline gateway teams`: creates, shows and changes the teams of a gateway, over its admin API."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.gateway.admin_client import AdminClient, add_admin_flags, segment
from ridgeline.cli.gateway.keys import team_id
from ridgeline.cli.gateway.limits_flags import add_limit_flags, given_limits, limits_line, moment, print_table
from ridgeline.cli.models import print_lines
from ridgeline.cli.parsing import Verbs, add_verb

DESCRIPTION = """\
Teams of a gateway: the keys of a team share its limits and its budget beside their own, cached answers, and
stored files, batches and responses. The weight is a team's share of a busy upstream."""

EXAMPLES = """\
  ridgeline gateway teams create search --monthly-usd 500 --weight 2
  ridgeline gateway keys create --name app --team search
  ridgeline gateway teams list
  ridgeline gateway teams update search --monthly-usd 800
  ridgeline gateway teams delete search
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "teams", "create and change a gateway's teams", DESCRIPTION, EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    create = add_verb(
        actions,
        "create",
        "make a team",
        "Create a team. Without a flag for a limit, there is no limit.",
        "  ridgeline gateway teams create search --tpm 200000 --monthly-usd 500",
    )
    create.add_argument("name", metavar="NAME", help="name of the team; must be unique")
    _add_settings(create)
    create.set_defaults(run=run_create)

    update = add_verb(
        actions,
        "update",
        "change a team",
        "Change a team while its keys are in use; settings without a flag stay, `none` removes a limit.",
        "  ridgeline gateway teams update search --rpm 1000 --monthly-usd none",
    )
    _add_team(update)
    update.add_argument("--name", metavar="TEXT", default=argparse.SUPPRESS, help="a new name")
    _add_settings(update)
    update.set_defaults(run=run_update)

    lister = add_verb(
        actions, "list", "all teams", "The teams of a gateway.", "  ridgeline gateway teams list --json"
    )
    lister.set_defaults(run=run_list)

    show = add_verb(
        actions, "show", "one team", "Show all settings of a team.", "  ridgeline gateway teams show search"
    )
    _add_team(show)
    show.set_defaults(run=run_show)

    delete = add_verb(
        actions,
        "delete",
        "delete a team without keys",
        "Delete a team. Revoke its keys first, or move them with `ridgeline gateway keys update --team`.",
        "  ridgeline gateway teams delete search",
    )
    _add_team(delete)
    delete.set_defaults(run=run_delete)

    for action in (create, update, lister, show, delete):
        add_admin_flags(action)


def run_create(args: argparse.Namespace) -> int:
    return _print_team(AdminClient.of(args).send("POST", "/admin/teams", _fields(args)), args)


def run_update(args: argparse.Namespace) -> int:
    fields = _fields(args)
    if not fields:
        raise RemoteError(
            "nothing to change: give at least one flag (see `ridgeline gateway teams update --help`)"
        )
    client = AdminClient.of(args)
    return _print_team(client.send("PATCH", _path(client, args.team), fields), args)


def run_list(args: argparse.Namespace) -> int:
    teams = list(AdminClient.of(args).every("/admin/teams"))
    if args.json:
        print(json.dumps(teams, indent=2))
        return 0
    rows = [
        [team["id"], team["name"], f"{team['weight']:g}", limits_line(team["limits"]) or "none"]
        for team in teams
    ]
    print_table(["id", "name", "weight", "limits"], rows)
    return 0


def run_show(args: argparse.Namespace) -> int:
    client = AdminClient.of(args)
    return _print_team(client.get(_path(client, args.team)), args)


def run_delete(args: argparse.Namespace) -> int:
    client = AdminClient.of(args)
    gone = client.send("DELETE", _path(client, args.team))
    print(json.dumps(gone, indent=2) if args.json else f"deleted {gone['id']}")
    return 0


def _add_team(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("team", metavar="TEAM", help="its name or id")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weight",
        type=float,
        metavar="X",
        default=argparse.SUPPRESS,
        help="its share of a busy upstream, beside other teams (default: 1)",
    )
    parser.add_argument(
        "--residency",
        metavar="REGION",
        action="append",
        default=argparse.SUPPRESS,
        help="a region that may compute its requests, or eu-*; repeatable; '*': any (default)",
    )
    add_limit_flags(parser)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    given = vars(args)
    fields = given_limits(args) | {name: given[name] for name in ("name", "weight") if name in given}
    if "residency" in given:
        fields["residency"] = [] if "*" in args.residency else args.residency
    return fields


def _path(client: AdminClient, team: str) -> str:
    return f"/admin/teams/{segment(team_id(client, team))}"


def _print_team(team: dict[str, Any], args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(team, indent=2))
        return 0
    print_lines(
        [
            ("id", team["id"]),
            ("name", team["name"]),
            ("weight", f"{team['weight']:g}"),
            ("residency", ", ".join(team["residency"]) or "any region"),
            ("limits", limits_line(team["limits"]) or "none"),
            ("created", moment(team["created_at"])),
        ]
    )
    return 0
