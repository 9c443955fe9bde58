"""ControlLink: a router's connection to its controller. Follows the table, posts demand.

Without its controller a router keeps serving with the last table: every failure here is logged once and
tried again, and none reaches a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from ridgeline.fleet.messages import Demand, Table
from ridgeline.fleet.router.lines import lines_of
from ridgeline.proxy.errors import ProxyError, RequestBroken
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import Origin

TABLE_PATH, DEMAND_PATH = "/fleet/table", "/fleet/demand"
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
# A controller sends a line every two seconds. A silent one may have stopped, and another one may listen at
# the same address.
_TABLE = Timeouts(connect_s=5.0, first_byte_s=10.0, idle_s=10.0)
_DEMAND = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0)

log = logging.getLogger(__name__)


class ControlLink:
    def __init__(
        self, client: HttpClient, origin: Origin, lines: bytes, on_table: Callable[[Table], None]
    ) -> None:
        """lines: header lines with the token, made by `header_lines`; empty for a socket."""
        self.client, self._origin, self._on_table = client, origin, on_table
        self._lines = lines
        self._tables = msgspec.json.Decoder(Table)
        self.is_connected = False
        self.losses = 0  # how often the connection to the controller was lost

    async def follow(self) -> None:
        """Call `on_table` with each table as it arrives, until cancelled."""
        failures = 0
        while True:
            try:
                await self._read()
                failures = 0
            except (ProxyError, msgspec.MsgspecError) as error:
                failures += 1
                if failures == 1:
                    log.warning(
                        "the controller does not answer; the router keeps serving with the last table: %s",
                        error,
                    )
            except Exception:  # a bug here: the next table may be usable
                self.is_connected, failures = False, failures + 1
                log.exception("a table could not be used")
            if self.is_connected:
                self.is_connected, failures = False, 0
                self.losses += 1
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])

    async def _read(self) -> None:
        answer = await self.client.ask(
            self._origin, "GET", TABLE_PATH, [], timeouts=_TABLE, fixed=self._lines, stream=True
        )
        try:
            if answer.status != 200:
                log.error("the controller answered %d to a request for its table", answer.status)
                raise RequestBroken("garbage")
            async for lines in lines_of(answer):
                if not self.is_connected:
                    self.is_connected = True
                    log.info("following the controller's table")
                for line in lines:
                    self._on_table(self._tables.decode(line))
        finally:
            answer.abort()

    async def post(self, demand: Demand) -> bool:
        """Post demand. Returns False if the controller has not counted it, and will not.

        One that has not answered in time may still count it: that is True.
        """
        try:
            answer = await self.client.ask(
                self._origin,
                "POST",
                DEMAND_PATH,
                [(b"content-type", b"application/json")],
                msgspec.json.encode(demand),
                timeouts=_DEMAND,
                fixed=self._lines,
            )
            await answer.read(1 << 16)
        except RequestBroken as error:
            return error.is_timeout and error.cause != "connect_timeout"
        except ProxyError:
            return False
        return answer.status < 300
