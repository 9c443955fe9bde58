"""ControlClient: talks to a fleet's controller, over the socket in its state directory or over TCP."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.parsing import path_argument
from ridgeline.options import OptionError
from ridgeline.running import running_fleets, state_home

SOCKET = "controller.sock"
TIMEOUT_S = 30.0


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the fleet")
    group.add_argument(
        "--state-dir",
        type=path_argument,
        metavar="DIR",
        help="state directory of the fleet (default: that of the fleet running on this machine)",
    )
    group.add_argument("--config", type=path_argument, metavar="FILE", help="its fleet.toml")
    group.add_argument(
        "--url", metavar="URL", help="URL of the fleet's control API over TCP ([fleet] control_host)"
    )
    group.add_argument(
        "--token-file", type=path_argument, metavar="FILE", help="file with the control token, for --url"
    )


def state_dir_of(args: argparse.Namespace) -> Path:
    """The state directory of the flags; else of the only running fleet; else the default."""
    if args.state_dir is not None:
        return Path(args.state_dir)
    if args.config is not None:
        from ridgeline.fleet.config import read_fleet

        return read_fleet(args.config).state_dir
    found = running_fleets()
    if len(found) > 1:
        shown = ", ".join(f"{one.state_dir} ({one.url})" for one in found)
        raise OptionError(f"{len(found)} fleets are running; choose one with --state-dir: {shown}")
    return Path(found[0].state_dir) if found else state_home() / "fleet"


class ControlClient:
    def __init__(self, state_dir: Path | None, url: str = "", token: str = "") -> None:
        self._state_dir, self._url = state_dir, url
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    @classmethod
    def of(cls, args: argparse.Namespace) -> ControlClient:
        if args.url is None:
            return cls(state_dir_of(args))
        if args.token_file is None:
            raise OptionError(
                "--url needs --token-file: the file control-token of the fleet's state directory"
            )
        try:
            token = args.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise OptionError(f"--token-file: {args.token_file} cannot be read: {error.strerror}") from None
        return cls(None, args.url, token)

    @property
    def where(self) -> str:
        return self._url or str(self._state_dir)

    def get(self, path: str, **query: Any) -> Any:
        return json.loads(self.read(path, **query))

    def read(self, path: str, **query: Any) -> bytes:
        with self._ask("GET", _with_query(path, query), None) as answer:
            return answer.read()

    def lines(self, path: str, **query: Any) -> Iterator[Any]:
        """Yield each line of a stream as it arrives, until the controller ends."""
        with self._ask("GET", _with_query(path, query), None, timeout_s=None) as answer:
            try:
                for line in answer:
                    yield json.loads(line)
            except (OSError, http.client.HTTPException):
                return

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        with self._ask("POST", path, json.dumps(body).encode()) as answer:
            return json.loads(answer.read())

    def _ask(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None = TIMEOUT_S
    ) -> http.client.HTTPResponse:
        connection = self._connection(timeout_s)
        headers = dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise NoController(
                f"no controller answers at {self.where}: start one with `ridgeline fleet up fleet.toml`, "
                f"or choose a fleet with --state-dir ({error or type(error).__name__})"
            ) from None
        if answer.status >= 300:
            text = answer.read()
            try:
                message = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"{self.where} answered {answer.status}; it is not a fleet's control API"
            raise RemoteError(str(message))
        return answer

    def _connection(self, timeout_s: float | None) -> http.client.HTTPConnection:
        if self._state_dir is not None:
            return _UnixConnection(self._state_dir / SOCKET, timeout_s)
        parts = urllib.parse.urlsplit(self._url)
        if parts.scheme != "http" or parts.hostname is None:
            raise OptionError(f"--url must be http://HOST:PORT, not {self._url!r}")
        return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)


class NoController(RemoteError):
    """No controller listens there."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _with_query(path: str, query: Mapping[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urllib.parse.urlencode(given)}" if given else path
