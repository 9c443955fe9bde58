"""Messages between an old and a new worker during a handover: pickled, with their length before them."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.limits.counts import Counts
from ridgeline.gateway.limits.limiter_types import Limiter, Reservation, Subject

_HEAD = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Admit:
    subjects: Sequence[Subject]
    when_unknown: str
    costs: bool

    async def at(self, limiter: Limiter, admitted: Reservation | None) -> Reservation:
        return await limiter.admit(self.subjects, self.when_unknown, costs=self.costs)


@dataclass(frozen=True, slots=True)
class Reserve:
    subjects: Sequence[Subject]
    tokens: int
    cost_pusd: int
    when_unknown: str

    async def at(self, limiter: Limiter, admitted: Reservation | None) -> Reservation:
        return await limiter.reserve(
            self.subjects, self.tokens, self.cost_pusd, self.when_unknown, admitted=admitted
        )


@dataclass(frozen=True, slots=True)
class ReserveBackground:
    id: str
    subjects: Sequence[Subject]
    tokens: int
    cost_pusd: int
    when_unknown: str

    async def at(self, limiter: Limiter, admitted: Reservation | None) -> Reservation:
        return await limiter.reserve_background(
            self.id, self.subjects, self.tokens, self.cost_pusd, self.when_unknown
        )


Taking: TypeAlias = Admit | Reserve | ReserveBackground


@dataclass(frozen=True, slots=True)
class Take:
    """admitted_id: the reservation that the new one replaces."""

    taking: Taking
    admitted_id: str | None


@dataclass(frozen=True, slots=True)
class HoldCost:
    reservation: Reservation
    cost_pusd: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Not answered."""

    reservation: Reservation
    tokens: int
    cost_pusd: int


@dataclass(frozen=True, slots=True)
class Adopt:
    counts: OrderedDict[tuple[str, str], Counts]
    reservations: dict[str, Reservation]  # not settled yet, by id


@dataclass(frozen=True, slots=True)
class Bye:
    """The old worker has answered all of its requests. Not answered."""


class Call(NamedTuple):
    number: int
    what: Take | HoldCost | Settle | Adopt | Bye


class Reply(NamedTuple):
    number: int
    result: Reservation | int | None
    error: GatewayError | None = None


def written(message: Call | Reply) -> bytes:
    data = pickle.dumps(message)
    return _HEAD.pack(len(data)) + data


async def read(reader: asyncio.StreamReader) -> Call | Reply:
    """Pickles are safe here: only the gateway's user may open the socket's folder."""
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    message: Call | Reply = pickle.loads(await reader.readexactly(size))
    return message
