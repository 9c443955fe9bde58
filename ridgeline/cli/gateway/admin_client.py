"""Client of a gateway's admin API, for the verbs keys, teams and usage.

It uses no proxy and follows no redirect: the admin key is sent only to the given address.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.cli.errors import RemoteError, check_trust
from ridgeline.cli.parsing import path_argument
from ridgeline.gateway.admin.credentials import FILE, read_admin_keys
from ridgeline.gateway.tenants.errors import StoreError
from ridgeline.proxy.blocking_client import BlockingClient, WholeAnswer
from ridgeline.proxy.errors import BrokenOff, Unreachable
from ridgeline.running import RunRecord, running_gateway, state_home

DEFAULT_URL = "http://127.0.0.1:8081"
TIMEOUT_S = 30.0
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the gateway")
    group.add_argument(
        "--admin-url",
        metavar="URL",
        help="its admin API (default: $RIDGELINE_ADMIN_URL, else that of the gateway that runs on this "
        f"machine, else {DEFAULT_URL})",
    )
    group.add_argument(
        "--admin-key-file",
        metavar="FILE",
        type=path_argument,
        help="file with the admin key (default: $RIDGELINE_ADMIN_KEY_FILE, else admin-key in the gateway's "
        "state directory)",
    )
    parser.add_argument("--json", action="store_true", help="print the gateway's answer as JSON")


class AdminClient:
    def __init__(self, url: str, key_file: Path) -> None:
        self._url = url.rstrip("/")
        if urllib.parse.urlsplit(self._url).scheme not in ("http", "https"):
            raise RemoteError(f"--admin-url must begin with http:// or https://, not {url!r}")
        self._client = BlockingClient(
            self._url, timeout_s=TIMEOUT_S, api_key=_first_key(key_file), direct=True
        )

    @classmethod
    def of(cls, args: argparse.Namespace) -> AdminClient:
        """The gateway of the flags and the environment; without them, the one that runs on this machine."""
        url = args.admin_url or os.environ.get("RIDGELINE_ADMIN_URL")
        gateway = (
            running_gateway(url.rstrip("/")) if url else running_gateway() or running_gateway(DEFAULT_URL)
        )
        url = url or (DEFAULT_URL if gateway is None else gateway.admin_url)
        return cls(url, args.admin_key_file or key_file_of(gateway, state_home() / "gateway"))

    def get(self, path: str, **query: Any) -> Any:
        return self._ask("GET", path, query, None)

    def every(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """All of a list, page by page."""
        after: str | None = None
        while True:
            page = self.get(path, **query, after=after, limit=1000)
            yield from page["data"]
            after = page["next"]
            if after is None:
                return

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._ask(method, path, {}, body or {})

    def _ask(self, method: str, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None) -> Any:
        given = {name: value for name, value in query.items() if value is not None}
        data = None if body is None else json.dumps(body).encode()
        try:
            answer = self._client.ask(method, path, data, given)
        except Unreachable as error:
            check_trust(self._url, error)
            raise RemoteError(
                f"no gateway listens at {self._url} ({error}): start one with `ridgeline gateway`, "
                "or give its admin address with --admin-url"
            ) from error
        except BrokenOff as error:
            raise RemoteError(f"the connection to {self._url} broke off: {error}") from error
        if not 200 <= answer.status < 300:
            raise RemoteError(self._refused(answer))
        try:
            return json.loads(answer.body)
        except ValueError as error:
            raise RemoteError(f"{self._url} is not the admin API of a gateway") from error

    def _refused(self, answer: WholeAnswer) -> str:
        try:
            message = str(json.loads(answer.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"{self._url} answered {answer.status}; it is not the admin API of a gateway"
        if answer.status == 401:
            return f"{self._url} rejected this admin key; give its file with --admin-key-file"
        return message


def key_file_of(gateway: RunRecord | None, state_dir: Path) -> Path:
    """The admin key's file of the environment, of a running gateway, or in a state directory."""
    named = os.environ.get("RIDGELINE_ADMIN_KEY_FILE")
    if named:
        return path_argument(named)
    return state_dir / FILE if gateway is None else Path(gateway.key_file)


def duration_s(text: str) -> float | None:
    """Seconds of 30d, 12h, 90m, 45s, 2w; None if it is not a duration."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    return float(found[1]) * _SECONDS[found[2]] if found else None


def segment(text: str) -> str:
    """One escaped part of a path."""
    return urllib.parse.quote(text, safe="")


def _first_key(path: Path) -> str:
    try:
        return read_admin_keys(path)[0][1]
    except StoreError as error:
        raise RemoteError(
            f"no admin key: {error}; `ridgeline gateway` creates it at its first start, as admin-key in its "
            "state directory: start one, or give that file with --admin-key-file"
        ) from error
