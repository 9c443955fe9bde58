"""Lease: one controller at a time acts on a state directory. It lives in the state directory's database.

Each new holder gets a larger fence. Every write of a controller checks its fence in the same transaction:
after a takeover, the write is refused (LeaseLost). No two clocks are compared: a lease is free when its
process has ended, or when it was not renewed for LEASE_S by the waiting process's monotonic clock.
A process that was paused inside a write keeps the database locked: `end_holder` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass

from ridgeline.running import process_place, process_ticks
from ridgeline.storage.database import Database, Work, statement
from ridgeline.storage.errors import StorageError, StorageUnavailable
from ridgeline.storage.sqlite_file import is_locked

log = logging.getLogger("ridgeline.fleet")

LEASE_S = 6.0
RENEW_S = 1.5
STEPS = (
    (
        "CREATE TABLE fleet_lease (one BIGINT PRIMARY KEY, fence BIGINT NOT NULL, renewals BIGINT NOT NULL, "
        "pid BIGINT NOT NULL, ticks BIGINT NOT NULL, place TEXT NOT NULL)",
        "INSERT INTO fleet_lease VALUES (1, 0, 0, 0, 0, '')",
    ),
)


class LeaseLost(Exception):
    """Another controller holds the lease: this one must stop."""


@dataclass(frozen=True, slots=True)
class Holder:
    fence: int
    renewals: int
    pid: int
    ticks: int
    place: str

    @property
    def is_gone(self) -> bool:
        """Whether the lease was released, or its process on this machine has ended."""
        if self.pid == 0:
            return True
        return self.is_here and process_ticks(self.pid) != self.ticks

    @property
    def is_here(self) -> bool:
        """Whether its process number means something on this machine."""
        return self.place == process_place()


class Lease:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.fence = 0  # 0: not held
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0

    async def holder(self) -> Holder:
        rows = await self._database.ask("SELECT fence, renewals, pid, ticks, place FROM fleet_lease")
        return Holder(*rows[0])

    async def try_take(self, now: float | None = None) -> Holder | None:
        """Take the lease if it is free and return None; else return its holder."""
        now = time.monotonic() if now is None else now
        holder = await self.holder()
        if self._seen != (holder.fence, holder.renewals):
            self._seen, self._seen_at = (holder.fence, holder.renewals), now
        if not holder.is_gone and now - self._seen_at < LEASE_S:
            return holder
        try:
            self.fence = await self._database.write(_take(holder))
        except StorageError as error:
            log.error("the lease is free, but cannot be taken: %s", error)
            if isinstance(error, StorageUnavailable) and is_locked(error.cause):
                end_holder(holder)
            return holder
        return None if self.fence else await self.holder()

    async def keep(self) -> None:
        """Renew the lease until cancelled, or until LeaseLost."""
        while True:
            try:
                await self.renew()
            except StorageError as error:
                log.error("the lease was not renewed: %s", error)
            await asyncio.sleep(RENEW_S)

    async def renew(self) -> None:
        await self._database.write(
            fenced(self.fence, statement("UPDATE fleet_lease SET renewals = renewals + 1"))
        )

    async def release(self) -> None:
        """Let the next controller start at once. Does nothing for a controller that lost the lease."""
        await self._database.write(statement("UPDATE fleet_lease SET pid = 0 WHERE fence = ?", self.fence))


def end_holder(holder: Holder) -> None:
    """Kill a process on this machine that did not renew its lease and may hold the database's lock.

    Nothing is lost: replicas and routers outlive their controller.
    """
    if holder.pid == 0 or not holder.is_here:
        return
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(holder.pid)
        try:
            if process_ticks(holder.pid) == holder.ticks:
                log.warning("process %d does not renew its lease: killing it", holder.pid)
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def fenced(fence: int, work: Work[object]) -> Work[object]:
    """Do the work in a transaction that only the lease's holder may commit."""
    rows = yield "SELECT fence FROM fleet_lease", ()
    if rows[0][0] != fence or fence == 0:
        raise LeaseLost(f"the lease passed to another controller (fence {rows[0][0]}, ours is {fence})")
    return (yield from work)


def _take(expected: Holder) -> Work[int]:
    """Returns the new fence; 0 if another process was faster."""
    rows = yield "SELECT fence, renewals FROM fleet_lease", ()
    if tuple(rows[0]) != (expected.fence, expected.renewals):
        return 0
    pid = os.getpid()
    yield (
        "UPDATE fleet_lease SET fence = fence + 1, renewals = 0, pid = ?, ticks = ?, place = ?",
        (pid, process_ticks(pid) or 0, process_place()),
    )
    return expected.fence + 1
