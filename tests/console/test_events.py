"""The event stream: snapshots, changes, resuming, frames; nothing is computed without readers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from ridgeline.console import events
from ridgeline.console.events import EventHub, Topic
from tests.patience import PATIENCE_S


class Source:
    def __init__(self) -> None:
        self.state: list[int] = []
        self.new: list[int] = []
        self.frames = 0

    def add(self, value: int) -> None:
        self.state.append(value)
        self.new.append(value)

    def changes(self) -> list[int] | None:
        new, self.new = self.new, []
        return new or None

    async def frame(self) -> dict[str, int]:
        self.frames += 1
        return {"number": self.frames}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CHANGES_S", 0.005)
    monkeypatch.setattr(events, "FRAME_S", 0.02)


def hub_of(source: Source) -> EventHub:
    return EventHub({"things": Topic(lambda: list(source.state), source.changes, source.frame)})


class Reader:
    """Reads a stream into events."""

    def __init__(self, hub: EventHub, last_id: str = "", topics: tuple[str, ...] = ("things",)) -> None:
        self._stream = hub.stream(topics, last_id)
        self.events: list[tuple[str, Any]] = []
        self.last_id = last_id
        self.text = b""

    async def until(self, wanted: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not wanted(self):
                part = await anext(self._stream)
                self.text += part
                for block in part.decode().split("\n\n"):
                    lines = [line for line in block.splitlines() if not line.startswith(":")]
                    fields = dict(line.split(": ", 1) for line in lines)
                    if fields:
                        self.last_id = fields["id"]
                        self.events.append((fields["event"], msgspec.json.decode(fields["data"])))

    @property
    def values(self) -> list[int]:
        """Everything told, in snapshots and changes."""
        told = [*self.of("things.snapshot"), *self.of("things")]
        return [value for values in told for value in values]

    def of(self, name: str) -> list[Any]:
        return [data for event, data in self.events if event == name]

    async def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            await self._stream.aclose()  # type: ignore[attr-defined]


async def test_a_reader_begins_with_a_snapshot_and_then_gets_changes_and_frames() -> None:
    source = Source()
    source.add(1)
    reader = Reader(hub_of(source))
    await reader.until(lambda one: one.of("things.snapshot"))
    source.add(2)
    await reader.until(lambda one: one.of("things") and len(one.of("things.frame")) > 1)
    assert reader.of("things.snapshot") == [[1]]
    assert reader.of("things") == [[2]]
    await reader.close()


async def test_a_reader_that_reconnects_gets_what_it_missed_once() -> None:
    source = Source()
    hub = hub_of(source)
    first = Reader(hub)
    await first.until(lambda one: one.of("things.snapshot"))
    source.add(1)
    await first.until(lambda one: one.of("things"))
    await first.close()
    source.add(2)
    await asyncio.sleep(0.05)
    source.add(3)
    second = Reader(hub, first.last_id)
    await second.until(lambda one: one.values == [2, 3])
    assert second.of("things.snapshot") == []
    await second.close()


@pytest.mark.parametrize("last_id", ["", "nonsense", "00000000.5", "x.99999999999999999999999", ".", "1"])
async def test_an_unknown_last_id_gives_a_snapshot(last_id: str) -> None:
    reader = Reader(hub_of(Source()), last_id)
    await reader.until(lambda one: one.of("things.snapshot"))
    await reader.close()


async def test_a_reader_that_is_too_slow_gets_a_new_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEPT_EVENTS", 4)
    source = Source()
    hub = hub_of(source)
    reader, other = Reader(hub), Reader(hub)
    await reader.until(lambda one: one.of("things.snapshot"))
    for value in range(10):  # each is one event, seen by the reader that keeps up
        source.add(value)
        await other.until(lambda one, value=value: value in one.values)
    await reader.until(lambda one: len(one.of("things.snapshot")) == 2)
    assert reader.of("things.snapshot")[1] == list(range(10))
    await reader.close()
    await other.close()


async def test_without_readers_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LINGER_S", 0.0)
    source = Source()
    hub = hub_of(source)
    assert source.frames == 0
    reader = Reader(hub)
    await reader.until(lambda one: one.of("things.frame"))
    await reader.close()
    await asyncio.sleep(0.05)
    made = source.frames
    await asyncio.sleep(0.1)
    assert source.frames == made
    assert hub.readers == 0


async def test_a_faulty_topic_does_not_end_the_stream() -> None:
    source = Source()
    hub = hub_of(source)

    async def broken() -> Any:
        raise RuntimeError("no figures")

    hub.topics["broken"] = Topic(dict, frame=broken)
    reader = Reader(hub)
    source.add(7)
    await reader.until(lambda one: one.of("things.snapshot"))
    source.add(8)
    await reader.until(lambda one: one.of("things"))
    await reader.close()


async def test_the_stream_ends_when_the_host_stops() -> None:
    stopping: list[bool] = []
    hub = EventHub({"things": Topic(list)}, lambda: bool(stopping))
    reader = Reader(hub)
    await reader.until(lambda one: one.of("things.snapshot"))
    stopping.append(True)
    with pytest.raises(StopAsyncIteration):
        await reader.until(lambda one: False)
