"""collect_steps(): polls a server for all its step records during a run.

The engine keeps a ring buffer; with frequent polls no record is lost. Used with a bench by `measure`. A
failed poll is compensated by the next one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import BrokenOff, Unreachable
from ridgeline.telemetry.stats import StepRecord

EVERY_S = 1.0
TIMEOUT_S = 10.0
PATIENCE = 5  # consecutive failed polls before giving up

_decoder = msgspec.json.Decoder(StepRecord)


@dataclass
class Collected:
    """lost: steps that left the ring buffer before they were read."""

    records: list[StepRecord] = field(default_factory=list)
    lost: int = 0

    def add(self, new: list[StepRecord]) -> None:
        if self.records and new:
            self.lost += max(0, new[0].step_id - self.records[-1].step_id - 1)
        self.records += new


async def collect_steps(
    url: str, stop: asyncio.Event, *, model: str = "", api_key: str = "", every_s: float = EVERY_S
) -> Collected:
    """From now until `stop` is set, and once more then. LabError if the server has no step records."""
    found = Collected()
    last = await _newest(url, model, api_key)
    failures = 0
    is_over = False
    while not is_over:
        try:
            await asyncio.wait_for(stop.wait(), every_s)
            is_over = True
        except TimeoutError:
            pass
        try:
            new = await asyncio.to_thread(_ask, url, last, model, api_key)
        except LabError:
            failures += 1
            if failures >= PATIENCE or is_over:
                raise
            continue
        failures = 0
        found.add(new)
        if new:
            last = new[-1].step_id
    return found


async def _newest(url: str, model: str, api_key: str) -> int:
    """The last step before the run; earlier records belong to other traffic."""
    records = await asyncio.to_thread(_ask, url, -1, model, api_key)
    return records[-1].step_id if records else -1


def read_steps(path: Path) -> list[StepRecord]:
    """A file of step records, one JSON object per line, as /debug/steps writes them."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_decoder.decode(line))
        except msgspec.DecodeError as error:
            raise BadInput(f"{path}, line {number}: not a step record: {error}") from error
    return records


def _ask(url: str, since: int, model: str, api_key: str) -> list[StepRecord]:
    query = {"since": str(since)} | ({"model": model} if model else {})
    address = url if "://" in url else f"http://{url}"
    client = BlockingClient(address, timeout_s=TIMEOUT_S, api_key=api_key)
    try:
        answer = client.ask("GET", "/debug/steps", query=query)
        if answer.status != 200:
            raise LabError(
                f"{client.url} answers /debug/steps with {answer.status}: step times are fitted on ridgeline "
                "servers"
            )
        return [_decoder.decode(line) for line in answer.body.splitlines()]
    except (Unreachable, BrokenOff, msgspec.DecodeError) as error:
        raise LabError(f"{client.url}/debug/steps: {error}; is a ridgeline server running there?") from error
