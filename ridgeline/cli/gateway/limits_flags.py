"""Flags for limits that keys and teams share, and the output of limits, times and tables."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

FLAGS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("rpm", "requests_per_minute", int, "requests in any 60 seconds"),
    ("tpm", "tokens_per_minute", int, "tokens in any 60 seconds, read and written"),
    ("concurrent", "concurrent", int, "concurrent requests"),
    ("daily-usd", "daily_usd", float, "US dollars per day (UTC)"),
    ("monthly-usd", "monthly_usd", float, "US dollars per calendar month (UTC)"),
)


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits", "A number, or none for no limit.")
    for flag, field, kind, help in FLAGS:
        group.add_argument(
            f"--{flag}",
            dest=field,
            metavar="N" if kind is int else "X",
            type=_number_or_none(kind),
            default=argparse.SUPPRESS,
            help=help,
        )


def given_limits(args: argparse.Namespace) -> dict[str, Any]:
    """The field `limits` of a body, if any limit was given."""
    limits = {field: getattr(args, field) for _, field, _, _ in FLAGS if hasattr(args, field)}
    return {"limits": limits} if limits else {}


def limits_line(limits: dict[str, Any]) -> str:
    from ridgeline.gateway.tenants.keys import usd_text

    units = {
        "requests_per_minute": "{:,} rpm",
        "tokens_per_minute": "{:,} tpm",
        "concurrent": "{:,} at once",
        "daily_usd": "${} a day",
        "monthly_usd": "${} a month",
    }
    given = {name: limits[name] for name in units if limits[name] is not None}
    return ", ".join(
        units[name].format(usd_text(value) if name.endswith("_usd") else value)
        for name, value in given.items()
    )


def moment(seconds: float | None, empty: str = "") -> str:
    return empty if seconds is None else time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Without a terminal's width, nothing is truncated or wrapped.
    console = Console(width=None if sys.stdout.isatty() else 400, highlight=False)
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _number_or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text == "none":
            return None
        try:
            return kind(text)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun} or none") from None

    return parse
