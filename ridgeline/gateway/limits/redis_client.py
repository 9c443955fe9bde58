"""RedisClient: one connection to Redis for all commands of a worker, maintained in the background.

Commands of one iteration of the event loop are sent in one write. Without a connection they fail at once, and
the first late answer closes the connection: so an unreachable or hanging Redis costs one deadline, not one
per request. It is available again as soon as it answers a new connection's greeting.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import ssl
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.options import OptionError

logger = logging.getLogger(__name__)

MAX_PENDING = 65_536
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 1.0
# An idle connection is asked for a sign of life, so that its death costs no request the deadline.
HEARTBEAT_S = 1.0


class RedisError(Exception):
    """Redis has answered with an error."""


class RedisUnavailable(Exception):
    """No connection, or no answer before the deadline: it is unknown whether the command ran."""


Reply: TypeAlias = "bytes | int | list[Reply] | RedisError | RedisUnavailable | None"
Done = Callable[[Reply], None]  # called once, with an exception where there is no answer


def encode(*parts: bytes | str | int) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(map(bulk, parts))


def bulk(part: bytes | str | int) -> bytes:
    data = part if isinstance(part, bytes) else str(part).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


_PING = encode("PING")


class RedisClient:
    """`greeting` are commands that every new connection begins with; `on_ready` is told of each one."""

    def __init__(
        self,
        config: RedisConfig,
        *,
        greeting: Sequence[bytes] = (),
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = _Address(config)
        self._greeting = [*self._address.greeting, *greeting, _PING]
        self._on_ready = on_ready
        self._timeout_s = config.timeout_ms / 1000
        self._connect_timeout_s = config.connect_timeout_ms / 1000
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()

    @property
    def available(self) -> bool:
        return self._connection is not None

    async def start(self) -> None:
        """Connects; keeps trying in the background if the first attempt fails."""
        self._task = asyncio.ensure_future(self._keep_connected())
        await self._tried.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, command: bytes, done: Done) -> None:
        """Sends an encoded command with others of this moment. RedisUnavailable: nothing was sent."""
        if self._connection is None:
            raise RedisUnavailable("no connection to Redis")
        self._connection.submit(command, done)

    def call(self, *parts: bytes | str | int) -> asyncio.Future[Reply]:
        """The answer to a command, within the deadline. Raises RedisError or RedisUnavailable."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.submit(encode(*parts), functools.partial(resolve, future))
        return future

    def reconnect(self, why: str) -> None:
        """Ends the connection, for one that leads to the wrong server; the next begins as usual."""
        if self._connection is not None:
            self._connection.drop(why)

    async def _keep_connected(self) -> None:
        backoff_s, said = FIRST_BACKOFF_S, False
        while True:
            connection: _Connection | None = None
            try:
                # Not wait_for: in Python 3.11 a connection refused in the moment of `close` would swallow it.
                async with asyncio.timeout(self._connect_timeout_s):
                    connection = await self._connect()
                if said:
                    logger.warning("Redis at %s answers again", self._address.shown)
                backoff_s, said = FIRST_BACKOFF_S, False
                self._connection = connection
                self._tried.set()
                self._on_ready()
                while not (await asyncio.wait((connection.lost,), timeout=HEARTBEAT_S))[0]:
                    connection.submit(_PING, lambda reply: None)
                await connection.lost
            except (OSError, TimeoutError, RedisError, RedisUnavailable) as error:
                if not said:
                    logger.warning("Redis at %s: %s", self._address.shown, error or "no answer")
                said = True
            finally:
                self._connection = None
                self._tried.set()
                if connection is not None:
                    connection.drop("the connection is closed")
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(backoff_s * 2, LAST_BACKOFF_S)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        address = self._address
        _, connection = await loop.create_connection(
            lambda: _Connection(loop, self._timeout_s, self._gone),
            address.host,
            address.port,
            ssl=address.tls,
        )
        try:
            answers: list[asyncio.Future[Reply]] = []
            for command in self._greeting:
                answers.append(loop.create_future())
                connection.submit(command, functools.partial(resolve, answers[-1]))
            for answer in await asyncio.gather(*answers, return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer
        except BaseException:
            connection.drop("the greeting was not answered")
            raise
        return connection

    def _gone(self, connection: _Connection) -> None:
        """At once, not when the task runs: nothing may be written to a connection that has ended."""
        if self._connection is connection:
            self._connection = None


def resolve(future: asyncio.Future[Reply], reply: Reply) -> None:
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


class _Address:
    """What a Redis URL says."""

    def __init__(self, config: RedisConfig) -> None:
        if not config.url:
            raise OptionError("[redis] url is missing; set it to redis://host:6379/0")
        try:
            parts = urllib.parse.urlsplit(config.url)
            self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 6379
            database = int(parts.path.strip("/") or 0)
        except ValueError:
            raise OptionError("[redis] url must look like redis://user:password@host:6379/0") from None
        self.shown = f"{self.host}:{self.port}"
        self.tls: ssl.SSLContext | None = None
        if parts.scheme == "rediss":
            try:
                self.tls = ssl.create_default_context(cafile=config.ca_file)
            except OSError as error:
                raise OptionError(f"[redis] ca_file: {error}") from None
        password = urllib.parse.unquote(parts.password or "")
        if config.password_file is not None:
            try:
                password = config.password_file.read_text().strip()
            except OSError as error:
                raise OptionError(f"[redis] password_file: {error}") from None
        user = urllib.parse.unquote(parts.username or "")
        self.greeting: list[bytes] = []
        if password:
            self.greeting.append(encode("AUTH", *([user] if user else []), password))
        if database:
            self.greeting.append(encode("SELECT", database))


class _Connection(asyncio.Protocol):
    """Commands out in order, answers in the same order. The oldest unanswered one has the first deadline."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float, gone: Callable[[_Connection], None]
    ) -> None:
        self._loop, self._timeout_s, self._gone = loop, timeout_s, gone
        self.lost: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._pending: deque[tuple[float, Done]] = deque()
        self._rest = b""
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, command: bytes, done: Done) -> None:
        if self._transport is None or len(self._pending) >= MAX_PENDING:
            raise RedisUnavailable(
                "too many commands wait for Redis" if self._transport else "no connection to Redis"
            )
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(command)
        self._pending.append((self._loop.time(), done))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._check_deadline)

    def drop(self, why: str) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._gone(self)
        transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        self._out.clear()
        pending, self._pending = self._pending, deque()
        for _, done in pending:
            done(RedisUnavailable(why))
        if not self.lost.done():
            self.lost.set_exception(RedisUnavailable(why))
            self.lost.exception()  # looked at: a connection that ends in its greeting has no other reader

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._pending:
            return
        left_s = self._pending[0][0] + self._timeout_s - self._loop.time()
        if left_s <= 0:
            self.drop(f"no answer within {self._timeout_s * 1000:.0f} ms")
        else:
            self._timer = self._loop.call_later(left_s, self._check_deadline)

    # ---- called by the loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def connection_lost(self, error: Exception | None) -> None:
        self.drop(str(error or "Redis has closed the connection"))

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data if self._rest else data, 0
        size = len(data)
        try:
            while at < size:
                reply, at = _read(data, at)
                self._pending.popleft()[1](reply)
        except _Incomplete:
            pass
        except (ValueError, IndexError):
            self.drop("the server does not speak Redis' protocol")
        self._rest = data[at:]


class _Incomplete(Exception):
    """The rest of an answer has yet to come."""


def _read(data: bytes, at: int) -> tuple[Reply, int]:
    """One answer of RESP2 and where the next one begins."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise _Incomplete
    kind, line = data[at], data[at + 1 : end]
    at = end + 2
    if kind == 36:  # $
        length = int(line)
        if length < 0:
            return None, at
        if len(data) < at + length + 2:
            raise _Incomplete
        return data[at : at + length], at + length + 2
    if kind == 58:  # :
        return int(line), at
    if kind == 43:  # +
        return line, at
    if kind == 45:  # -
        return RedisError(line.decode(errors="replace")), at
    if kind != 42:  # *
        raise ValueError(f"an answer begins with {kind}")
    items: list[Reply] | None = None if int(line) < 0 else []
    for _ in range(int(line)):
        item, at = _read(data, at)
        assert items is not None
        items.append(item)
    return items, at
