"""AdminKeys: the keys of administrators, from a file that is reloaded when it changes.

A key is compared by its digest, with every key of the file and in constant time. It never leaves this module
and `gate`: logs, errors and records hold the name beside it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.tenants.errors import StoreError
from ridgeline.gateway.tenants.secret_file import made_once, read_secret

PREFIX = "rla-"
MIN_LENGTH = 32
DEFAULT_NAME = "admin"
FILE = "admin-key"


def key_file(config: AdminConfig, state_dir: Path) -> Path:
    return (config.key_file or state_dir / FILE).expanduser()


class AdminKeys:
    def __init__(self, path: Path) -> None:
        """Creates the file if it is missing. StoreError if it cannot be used."""
        self.path = path
        self.is_new = made_once(path, lambda: PREFIX + secrets.token_urlsafe(32))  # shown to the operator
        self._seen: tuple[int, int, int] | None = None
        self._names: list[tuple[bytes, str]] = []
        self._refresh()

    def who(self, secret: str) -> str | None:
        """The name of the administrator with this key."""
        self._refresh()
        digest, found = _digest(secret), None
        for known, name in self._names:  # compare all, for constant time
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _refresh(self) -> None:
        try:
            now = self.path.stat()
        except OSError as error:
            # A file that was removed revokes its keys; a file that never existed is an error at the start.
            if self._seen is None:
                raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from error
            self._names = []
            return
        seen = (now.st_mtime_ns, now.st_size, now.st_ino)
        if seen == self._seen:
            return
        try:
            self._names = [(_digest(key), name) for name, key in read_admin_keys(self.path)]
        except StoreError:
            if self._seen is None:
                raise
            self._names = []  # an unreadable file admits no key
        self._seen = seen


def read_admin_keys(path: Path) -> list[tuple[str, str]]:
    """Names and keys: each line has a key, or a name and a key; # begins a comment."""
    found = []
    for number, line in enumerate(read_secret(path).splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or len(words[-1]) < MIN_LENGTH:
            raise StoreError(
                f"{path}:{number}: a line must be a key of at least {MIN_LENGTH} characters, or name and key"
            )
        found.append((words[0] if len(words) == 2 else DEFAULT_NAME, words[-1]))
    if not found:
        raise StoreError(f"{path}: holds no admin key; add one, or remove the file to create one")
    return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
