"""Handover: moves the counts of a MemoryLimiter from a draining worker to the worker that replaces it.

A reload must not give tenants a fresh minute. The old worker connects to the new one's socket and sends its
counts and open reservations; from then on it asks the new worker, so that both count in one place while the
old one finishes its requests. The socket is in the state directory, which only its owner can read.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.limits.handover_messages import (
    Admit,
    Adopt,
    Bye,
    Call,
    HoldCost,
    Reply,
    Reserve,
    ReserveBackground,
    Settle,
    Take,
    Taking,
    read,
    written,
)
from ridgeline.gateway.limits.limiter_types import Reservation, Subject
from ridgeline.gateway.limits.memory_limiter import MemoryLimiter

ASK_S = 2.0  # for the new worker to answer, beside its wait for the ledger; then the old one counts by itself
MOST_SUBJECTS = 3  # key, team and model: the ledger may be asked for each

log = logging.getLogger("ridgeline.gateway")


class HandoverLimiter:
    """A MemoryLimiter that can receive another's counts, and pass them on."""

    degraded = False

    def __init__(self, local: MemoryLimiter) -> None:
        self._local = local
        self._open: dict[str, Reservation] = {}  # not settled yet, by id
        self._successor: Successor | None = None
        self._server: asyncio.Server | None = None
        self.has_adopted = False
        self._predecessors: set[asyncio.StreamWriter] = set()

    @property
    def predecessors(self) -> int:
        """How many workers drain and ask here."""
        return len(self._predecessors)

    # ---- a Limiter ----

    async def admit(
        self, subjects: Sequence[Subject], when_unknown: str = "closed", *, costs: bool = True
    ) -> Reservation:
        return await self._take(Admit(subjects, when_unknown, costs), None)

    async def reserve(
        self,
        subjects: Sequence[Subject],
        tokens: int,
        cost_pusd: int,
        when_unknown: str = "closed",
        admitted: Reservation | None = None,
    ) -> Reservation:
        return await self._take(Reserve(subjects, tokens, cost_pusd, when_unknown), admitted)

    async def reserve_background(
        self, id: str, subjects: Sequence[Subject], tokens: int, cost_pusd: int, when_unknown: str = "closed"
    ) -> Reservation:
        return await self._take(ReserveBackground(id, subjects, tokens, cost_pusd, when_unknown), None)

    async def hold(self, reservation: Reservation, cost_pusd: int) -> int | None:
        successor = self._successor
        if successor is not None:
            try:
                async with self._deadline():
                    return await successor.hold(reservation, cost_pusd)
            except (OSError, EOFError, TimeoutError):
                self._give_up(successor)
        return await self._local.hold(reservation, cost_pusd)

    def settle(self, reservation: Reservation, tokens: int, cost_pusd: int) -> None:
        self._open.pop(reservation.id, None)
        if self._successor is None:
            self._local.settle(reservation, tokens, cost_pusd)
        elif not reservation.settled:
            self._successor.settle(reservation, tokens, cost_pusd)
            reservation.settled = True

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._predecessors:
                writer.close()
            while self._predecessors:
                await asyncio.sleep(0.001)
        if self._successor is not None:
            self._successor.close()
        await self._local.close()

    async def _take(self, taking: Taking, admitted: Reservation | None) -> Reservation:
        reservation: Reservation | None = None
        if self._successor is None:
            reservation = await taking.at(self._local, admitted)
            if self._successor is not None:  # handed over while it waited for the ledger
                self._local.settle(reservation, 0, 0)
                reservation = None
        if reservation is None:
            reservation = await self._take_there(taking, admitted)
        if admitted is not None:
            self._open.pop(admitted.id, None)
        if reservation.subjects and not reservation.is_background:
            self._open[reservation.id] = reservation
        return reservation

    async def _take_there(self, taking: Taking, admitted: Reservation | None) -> Reservation:
        successor = self._successor
        assert successor is not None
        try:
            async with self._deadline():
                return await successor.take(taking, None if admitted is None else admitted.id)
        except (OSError, EOFError, TimeoutError):
            self._give_up(successor)
            return await taking.at(self._local, admitted)

    def _deadline(self) -> asyncio.Timeout:
        return asyncio.timeout(ASK_S + MOST_SUBJECTS * self._local.seed_timeout_s)

    def _give_up(self, successor: Successor) -> None:
        log.warning("the worker with the limits does not answer; this one counts separately")
        successor.close()
        self._successor = None

    # ---- the worker that drains ----

    async def hand_over(self, path: Path) -> None:
        """Send all counts to the worker that listens there. OSError: they stay here."""
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            # No await between the copy and the change: nothing is counted in between.
            successor = self._successor = Successor(reader, writer)
            try:
                await successor.ask(Adopt(self._local.counts, self._open))
            except BaseException:
                self._successor = None
                successor.close()
                raise

    # ---- the worker that takes over ----

    async def listen(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(path))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs: dict[str, Reservation] = {}
        answering: set[asyncio.Task[None]] = set()
        self._predecessors.add(writer)
        try:
            while True:
                message = await read(reader)
                assert isinstance(message, Call)
                number, what = message
                if isinstance(what, Bye):
                    for reservation in theirs.values():  # nothing was used of what is left
                        self.settle(reservation, 0, 0)
                    theirs.clear()
                elif isinstance(what, Settle):
                    self._settle_theirs(theirs, what)
                elif isinstance(what, Adopt):
                    self._adopt(theirs, what)
                    writer.write(written(Reply(number, None)))
                else:
                    task = asyncio.create_task(self._answer(theirs, number, what, writer))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
        except (EOFError, OSError):
            pass
        finally:
            self._predecessors.discard(writer)
            for task in answering:
                task.cancel()
            for reservation in theirs.values():  # of a worker that died: taken for used
                self.settle(reservation, reservation.tokens, reservation.cost_pusd)
            writer.close()

    def _adopt(self, theirs: dict[str, Reservation], told: Adopt) -> None:
        self.has_adopted = True
        self._local.adopt(told.counts)
        theirs.update(told.reservations)
        self._open.update(told.reservations)

    def _settle_theirs(self, theirs: dict[str, Reservation], told: Settle) -> None:
        one = told.reservation
        reservation = one if one.is_background else theirs.pop(one.id, None)
        if reservation is not None:
            self.settle(reservation, told.tokens, told.cost_pusd)

    async def _answer(
        self,
        theirs: dict[str, Reservation],
        number: int,
        asked: Take | HoldCost,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            if isinstance(asked, HoldCost):
                room = await self.hold(asked.reservation, asked.cost_pusd)
                writer.write(written(Reply(number, room)))
                return
            admitted = theirs.get(asked.admitted_id) if asked.admitted_id is not None else None
            reservation = await self._take(asked.taking, admitted)
        except GatewayError as error:
            writer.write(written(Reply(number, None, error)))
            return
        if admitted is not None:
            theirs.pop(admitted.id, None)
        if not reservation.is_background:
            theirs[reservation.id] = reservation
        writer.write(written(Reply(number, _copy(reservation))))


class Successor:
    """The old worker's side of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Reservation | int | None]] = {}
        self._reading = asyncio.create_task(self._read(reader))

    async def take(self, taking: Taking, admitted_id: str | None) -> Reservation:
        reservation = await self.ask(Take(taking, admitted_id))
        assert isinstance(reservation, Reservation)
        return reservation

    async def hold(self, reservation: Reservation, cost_pusd: int) -> int | None:
        room = await self.ask(HoldCost(_copy(reservation), cost_pusd))
        assert not isinstance(room, Reservation)
        return room

    def ask(self, what: Take | HoldCost | Adopt) -> asyncio.Future[Reservation | int | None]:
        """Sent at once. The answer, or the error that was raised there."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            answer.set_exception(EOFError())
        self._writer.write(written(Call(number, what)))
        return answer

    def settle(self, reservation: Reservation, tokens: int, cost_pusd: int) -> None:
        self._writer.write(written(Call(0, Settle(_copy(reservation), tokens, cost_pusd))))

    def close(self) -> None:
        self._writer.write(written(Call(0, Bye())))
        self._writer.close()
        self._reading.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = await read(reader)
                assert isinstance(message, Reply)
                number, result, error = message
                answer = self._asked.pop(number)
                if answer.done():  # its caller has left
                    if isinstance(result, Reservation):
                        self.settle(result, 0, 0)
                elif error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)
        except (EOFError, OSError):
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(EOFError())


def _copy(reservation: Reservation) -> Reservation:
    """Without what the counts hold of it."""
    copy = Reservation(
        reservation.id,
        reservation.subjects,
        reservation.tokens,
        reservation.cost_pusd,
        reservation.at_ms,
        reservation.is_background,
    )
    copy.known, copy.standings = reservation.known, reservation.standings
    return copy
