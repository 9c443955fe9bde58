"""PolicyWatch: keeps one worker's policy as new as the store, by asking for its version four times a second.

While the store is away the last policy stays in use, and `snapshot` says how old it is. With PostgreSQL a
copy lies in the state directory, digests only, so that a worker that starts meanwhile knows its keys too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from ridgeline.gateway.tenants.errors import StoreError, StoreUnavailable
from ridgeline.gateway.tenants.policy import Changes, Policy
from ridgeline.gateway.tenants.secret_file import replaced
from ridgeline.gateway.tenants.store import Store

log = logging.getLogger(__name__)

COPY = "policy-copy.json"
STALE_S = 1.0  # without an answer of the store for this long, a revocation elsewhere may not be known here


class _Copy(msgspec.Struct):
    server_secret: str
    contents: Changes


class PolicyWatch:
    def __init__(self, store: Store, *, changed: Callable[[Policy], None] | None = None) -> None:
        """changed: called on the event loop with each policy that replaces another."""
        self.policy = Policy("")  # knows nobody
        self._store = store
        self._changed = changed
        self._copy = store.state_dir / COPY if store.is_shared else None
        self._is_copy = False  # not yet confirmed by the store itself
        self._task: asyncio.Task[None] | None = None
        self._asked_at = -float("inf")  # monotonic; of the last answer
        self._failures = 0

    async def start(self) -> None:
        """Returns with a policy in place. StoreUnavailable where neither the store nor a copy has one."""
        try:
            await self.refresh()
        except StoreUnavailable:
            copy = await asyncio.to_thread(self._read_copy)
            if copy is None:
                raise
            self._failures += 1
            self._is_copy = True
            self.policy = Policy(copy.server_secret).advanced(copy.contents)
            log.warning("the store is away: keys and teams are those of the copy in the state directory")
        self._task = asyncio.create_task(self._poll(), name="policy-watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def refresh(self) -> bool:
        """Ask now; True if there is a new policy. StoreUnavailable: the one in place stays."""
        await self._store.prepare()
        if self.policy.version == 0 or self._is_copy:
            before = Policy(self._store.server_secret)
            changes = await self._store.changes(0)
        else:
            before = self.policy
            if await self._store.version() == before.version:
                self._asked_at = time.monotonic()
                return False
            changes = await self._store.changes(before.version)
        self.policy = before.advanced(changes)
        self._is_copy = False
        self._asked_at = time.monotonic()
        if self._changed is not None:
            self._changed(self.policy)
        if self._copy is not None:
            await asyncio.to_thread(self._write_copy, self.policy)
        return True

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self._asked_at > STALE_S

    def snapshot(self) -> dict[str, float]:
        """For metrics: how old the policy may be, and how often the store did not answer."""
        age = time.monotonic() - self._asked_at
        return {
            "policy_version": self.policy.version,
            "policy_age_s": age,  # infinite: the store has never answered
            "store_up": float(not self.is_stale),
            "store_failures": self._failures,
        }

    async def _poll(self) -> None:
        was_down = self._failures > 0
        while True:
            await asyncio.sleep(self._store.config.poll_s)
            try:
                await self.refresh()
            except (StoreUnavailable, StoreError) as error:
                self._failures += 1
                if not was_down:
                    log.warning("keys and teams stay as they were: %s", error)
                was_down = True
            except Exception:
                # A poll that ends would leave revoked keys in use for ever.
                self._failures += 1
                if not was_down:
                    log.exception("keys and teams stay as they were")
                was_down = True
            else:
                if was_down:
                    log.warning("the store answers again; keys and teams are up to date")
                was_down = False

    def _read_copy(self) -> _Copy | None:
        if self._copy is None:
            return None
        try:
            return msgspec.json.decode(self._copy.read_bytes(), type=_Copy)
        except (OSError, msgspec.DecodeError):
            return None

    def _write_copy(self, policy: Policy) -> None:
        assert self._copy is not None
        try:
            content = msgspec.json.encode(_Copy(self._store.server_secret, policy.contents()))
            self._copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replaced(self._copy, content)
        except OSError as error:
            log.warning("%s: cannot be written: %s", self._copy, error.strerror)
