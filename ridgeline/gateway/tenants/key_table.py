"""KeyTable: every key and team, in memory, for lookups on each request. Never waits, never queries the store.

Belongs to one event loop: `apply` applies changes between two requests; its cost depends on the number of
changes, not of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from time import time

import msgspec

from ridgeline.gateway.errors import Unauthorized, key_revoked
from ridgeline.gateway.tenants.digest import digester
from ridgeline.gateway.tenants.keys import Key, Team


class Secret(msgspec.Struct, frozen=True, gc=False):
    """One of a key's secrets by its digest; a rotated one is valid until its grace ends."""

    digest: str  # hexadecimal
    until: float | None = None  # unix seconds


class KeyEntry(msgspec.Struct, frozen=True, gc=False):
    key: Key
    secrets: tuple[Secret, ...]


class Changes(msgspec.Struct, frozen=True):
    """Changes in the store since a version; everything if `whole`."""

    version: int
    whole: bool
    keys: tuple[KeyEntry, ...] = ()
    teams: tuple[Team, ...] = ()
    gone: tuple[str, ...] = ()  # ids of keys and teams


class _Access(msgspec.Struct, frozen=True, gc=False):
    key: Key
    until: float  # unix seconds; the end of the key or of this secret, whichever comes first


class KeyTable:
    """The keys and teams of a gateway, to be looked up in about a microsecond."""

    def __init__(self, server_secret: str) -> None:
        self.version = 0
        self._digest: Callable[[str], bytes | None] = digester(server_secret)
        self._accesses: dict[bytes, _Access] = {}
        self._keys: dict[str, KeyEntry] = {}
        self._teams: dict[str, Team] = {}

    def lookup(self, secret: str) -> Key | None:
        """The key with this secret, if it may be used now."""
        access = self._accesses.get(self._digest(secret))  # type: ignore[arg-type]  # None matches no digest
        if access is None or access.until <= time():
            return None
        return access.key

    def refusal(self, secret: str) -> Unauthorized:
        """Why `lookup` found none. Only the secret reveals that its key is expired or revoked."""
        access = self._accesses.get(self._digest(secret))  # type: ignore[arg-type]
        if access is None:
            return Unauthorized("the API key is unknown to this gateway")
        if access.key.revoked_at is not None:
            return key_revoked()
        if access.key.expires_at is not None and access.key.expires_at <= time():
            return Unauthorized("the API key has expired", code="expired_api_key")
        return Unauthorized("the API key has been replaced by a new one", code="rotated_api_key")

    def key(self, id: str) -> Key | None:
        """The current key, if it may be used: for requests that have waited since their admission."""
        entry = self._keys.get(id)
        if entry is None or _end(entry.key) <= time():
            return None
        return entry.key

    def known_key(self, id: str) -> Key | None:
        """The key, even if it may no longer be used."""
        entry = self._keys.get(id)
        return None if entry is None else entry.key

    def ends_requests(self, id: str) -> bool:
        """Whether the key was revoked together with its running requests."""
        key = self.known_key(id)
        return key is not None and key.revoked_at is not None and key.ends_requests

    def team(self, id: str) -> Team | None:
        return self._teams.get(id)

    def keys(self) -> Iterable[Key]:
        """Every key, including those that may no longer be used."""
        return (entry.key for entry in self._keys.values())

    def teams(self) -> Iterable[Team]:
        return self._teams.values()

    def apply(self, changes: Changes) -> KeyTable:
        """Apply the changes; returns itself."""
        if changes.whole:
            self._accesses, self._keys, self._teams = {}, {}, {}
        for id in changes.gone:
            self._remove_key(id)
            self._teams.pop(id, None)
        for entry in changes.keys:
            self._remove_key(entry.key.id)
            self._add_key(entry)
        for team in changes.teams:
            self._teams[team.id] = team
        self.version = changes.version
        return self

    def contents(self) -> Changes:
        """Everything, in the form for `apply`."""
        return Changes(self.version, True, tuple(self._keys.values()), tuple(self._teams.values()))

    def _add_key(self, entry: KeyEntry) -> None:
        self._keys[entry.key.id] = entry
        end = _end(entry.key)
        for secret in entry.secrets:
            until = end if secret.until is None else min(end, secret.until)
            self._accesses[bytes.fromhex(secret.digest)] = _Access(entry.key, until)

    def _remove_key(self, id: str) -> None:
        entry = self._keys.pop(id, None)
        if entry is not None:
            for secret in entry.secrets:
                self._accesses.pop(bytes.fromhex(secret.digest), None)


def _end(key: Key) -> float:
    if key.revoked_at is not None:
        return -math.inf
    return math.inf if key.expires_at is None else key.expires_at
