"""ReplicaFeed: follows GET /replica/feed of one replica while the table has it.

It reconnects with the epoch and the last event it knows; after a gap in the events it asks for a snapshot. A
replica whose feed breaks and cannot be opened again is lost until its feed starts again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from ridgeline.fleet.router.lines import lines_of
from ridgeline.fleet.router.replica import Replica
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import ProxyError
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.replica.messages import FEED_PATH, Load, Started, decode_line

RETRY_S = (0.02, 0.1, 0.25, 0.5, 1.0)
NO_FEED_S = 30.0  # seconds until a server without a feed is asked again

log = logging.getLogger(__name__)


class ReplicaFeed:
    def __init__(
        self,
        replica: Replica,
        client: HttpClient,
        book: LoadBook,
        prefixes: PrefixMap,
        *,
        key_lines: Callable[[], bytes],
        silent_s: float,
        on_load: Callable[[], None],
    ) -> None:
        """on_load: called when the replica may take more requests. silent_s: timeout of the feed's lines."""
        self._replica, self._client, self._book, self._prefixes = replica, client, book, prefixes
        self._key_lines, self._on_load = key_lines, on_load
        self._timeouts = Timeouts(connect_s=2.0, first_byte_s=silent_s, idle_s=silent_s)
        self._needs_snapshot = True
        self.gaps = 0

    async def follow(self) -> None:
        """Read the feed and reconnect, until cancelled."""
        failures = 0
        while True:
            heard = False
            try:
                heard = await self._read()
            except (ProxyError, msgspec.MsgspecError) as error:
                log.info("the feed of replica %s broke: %s", self._replica.id, error)
            except Exception:  # a bug here: without its feed the replica would be lost for good
                log.exception("a line of the feed of replica %s could not be used", self._replica.id)
                self._needs_snapshot = True
            if not self._replica.has_feed:
                await asyncio.sleep(NO_FEED_S)
                continue
            failures = 0 if heard else failures + 1
            if failures and not self._replica.is_lost and self._replica.started is not None:
                self.lose()
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])

    def lose(self) -> None:
        """Send it no request until its feed starts again."""
        replica = self._replica
        if not replica.is_lost:
            log.warning("replica %s is lost", replica.id)
        self._needs_snapshot = True
        replica.lose()
        self._book.lost(replica.id)

    async def _read(self) -> bool:
        """Read until the feed ends. Returns whether a line arrived."""
        epoch, seq = self._prefixes.position(self._replica.id)
        resumes = epoch and not self._needs_snapshot
        path = f"{FEED_PATH}?epoch={epoch}&after={seq}" if resumes else FEED_PATH
        answer = await self._client.ask(
            self._replica.origin,
            "GET",
            path,
            [],
            timeouts=self._timeouts,
            fixed=self._key_lines(),
            stream=True,
        )
        try:
            if answer.status in (404, 405):
                log.warning(
                    "replica %s has no feed; only its requests in flight count as its load", self._replica.id
                )
                self._replica.has_feed = False
                return False
            if answer.status != 200:
                log.warning("replica %s: its feed answered with status %d", self._replica.id, answer.status)
                return False
            return await self._hear(answer)
        finally:
            answer.abort()

    async def _hear(self, answer: UpstreamAnswer) -> bool:
        heard = False
        replica, book, prefixes = self._replica, self._book, self._prefixes
        async for lines in lines_of(answer):
            for text in lines:
                line = decode_line(text)
                heard = True
                replica.hear(line)
                if isinstance(line, Started):
                    self._needs_snapshot = False
                if prefixes.hear(replica.id, line):
                    self.gaps += 1
                    self._needs_snapshot = True
                    return True
                book.hear(replica.id, line)
                if isinstance(line, Load):
                    self._on_load()
        return heard
