"""Credentials: the keys of an upstream, used in turn, and their state.

Read once at start, from environment variables and a file; stored as header lines. A key is named by its
source: the key itself is never in a log, row, message or metric.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from ridgeline.gateway.upstreams.config import UpstreamConfig
from ridgeline.options import OptionError
from ridgeline.proxy.errors import InvalidHead
from ridgeline.proxy.request_head import header_lines

NO_KEY = "none"  # name of the credential of an upstream without keys
MAX_KEYS = 1000
MAX_REFUSED_MODELS = 1000  # refused models of one key; beyond this the key is dead


class Credential:
    """A refused key is dead for a while; a key at its rate limit rests until the limit has room."""

    __slots__ = ("_refused", "dead_until", "lines", "name", "rests_until")

    def __init__(self, name: str, lines: bytes) -> None:
        self.name, self.lines = name, lines
        self.revive()

    def revive(self) -> None:
        self.dead_until = self.rests_until = 0.0
        self._refused: dict[str, float] = {}  # model → until when

    def kill(self, until: float, model: str | None = None) -> None:
        """model: the key is refused only for this model."""
        if model is None or len(self._refused) >= MAX_REFUSED_MODELS:
            self.dead_until = until
        else:
            self._refused[model] = until

    def is_dead(self, now: float, model: str | None = None) -> bool:
        if now < self.dead_until:
            return True
        if not self._refused or model is None:
            return False
        until = self._refused.get(model)
        if until is not None and now >= until:
            del self._refused[model]
            until = None
        return until is not None

    def state(self, now: float) -> Literal["usable", "resting", "dead"]:
        if self.is_dead(now):
            return "dead"
        return "resting" if now < self.rests_until else "usable"


class Credentials:
    def __init__(self, keys: Sequence[Credential]) -> None:
        self.keys = list(keys)
        self._turn = 0

    def pick(self, model: str, now: float) -> Credential | None:
        """The next in turn that can be used now."""
        keys = self.keys
        count = len(keys)
        for step in range(count):
            index = (self._turn + step) % count
            key = keys[index]
            if now >= key.rests_until and not key.is_dead(now, model):
                self._turn = index + 1
                return key
        return None

    def rest_s(self, model: str, now: float) -> float | None:
        """Seconds until one can be used; None: all are dead."""
        alive = [key.rests_until for key in self.keys if not key.is_dead(now, model)]
        return max(min(alive) - now, 0.0) if alive else None

    def states(self, now: float) -> dict[str, int]:
        counts = {"usable": 0, "resting": 0, "dead": 0}
        for key in self.keys:
            counts[key.state(now)] += 1
        return counts


def read_credentials(config: UpstreamConfig, environment: Mapping[str, str] = os.environ) -> Credentials:
    """The configured keys; without any, one credential that sends no key."""
    where = f"[[upstreams]] {config.name}:"
    found: list[tuple[str, str]] = []
    for name in config.key_env:
        secret = environment.get(name, "").strip()
        if not secret:
            raise OptionError(f"{where} key_env: the environment variable {name} is not set")
        found.append((name, secret))
    if config.key_file is not None:
        found += _from_file(config, where)
    if len(found) > MAX_KEYS:
        raise OptionError(f"{where} at most {MAX_KEYS} keys")
    if not found:
        return Credentials([Credential(NO_KEY, b"")])
    return Credentials(
        [Credential(name, _lines(config, secret, f"{where} {name}")) for name, secret in found]
    )


def _from_file(config: UpstreamConfig, where: str) -> list[tuple[str, str]]:
    path = config.key_file
    assert path is not None
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise OptionError(f"{where} key_file {path} cannot be read: {reason}") from None
    numbered = [(f"{path.name}:{number}", line.strip()) for number, line in enumerate(lines, start=1)]
    keys = [(name, line) for name, line in numbered if line and not line.startswith("#")]
    if not keys:
        raise OptionError(f"{where} key_file {path} holds no key")
    return keys


def _lines(config: UpstreamConfig, secret: str, where: str) -> bytes:
    try:
        coded = secret.encode("ascii")
        if b" " in coded or b"\t" in coded:
            raise ValueError
        if config.kind == "anthropic":
            return header_lines([(b"x-api-key", coded)])
        return header_lines([(b"authorization", b"Bearer " + coded)])
    except (InvalidHead, ValueError):
        raise OptionError(
            f"{where} is not a key: it contains characters that are not allowed in a key"
        ) from None
