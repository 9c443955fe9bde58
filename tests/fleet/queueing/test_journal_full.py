"""The journal on a full disk: what was lost is written when there is room again, and nothing else is lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.fleet.queueing import journal
from ridgeline.fleet.queueing.durable import RETRY_S, DurableQueue
from ridgeline.fleet.queueing.held_ledger import HeldLedger, decode_record
from ridgeline.fleet.queueing.journal import JournalError, split
from ridgeline.proxy.errors import QueueRefused
from tests.patience import PATIENCE_S


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def on_disk(path: Path) -> HeldLedger:
    """The state that a restart would find."""
    ledger = HeldLedger()
    for data in split(path.read_bytes())[0]:
        ledger.apply(decode_record(data))
    return ledger


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_lost_answers_and_drops_are_written_at_the_next_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "held"
    queue = DurableQueue(path)
    answered, dropped = [await queue.hold(key, "m", "/p", b"body") for key in "ad"]
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(JournalError, match="No space left"):
            await queue.answered(answered, 200, [], b"answer")
        with pytest.raises(JournalError, match="No space left"):
            await queue.drop(dropped, "cancelled")
    assert list(on_disk(path).waiting) == [answered, dropped]
    last = await queue.hold("l", "m", "/p", b"body")
    await until(lambda: list(on_disk(path).waiting) == [last])
    assert list(on_disk(path).answers) == [answered]
    queue.close()


async def test_only_requests_on_the_disk_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = DurableQueue(tmp_path / "held")
    await queue.hold("1", "m", "/p", b"body")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        holding = asyncio.create_task(queue.hold("2", "m", "/p", b"body"))
        counts = set()
        while not holding.done():
            await asyncio.sleep(0)
            counts.add(queue.appended)
        assert isinstance(holding.exception(), JournalError)
    assert counts == {1}  # a counter never falls
    queue.close()


async def test_lost_answers_are_written_when_the_queue_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = DurableQueue(tmp_path / "held")
    id = await queue.hold("k", "m", "/p", b"body")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(JournalError):
            await queue.answered(id, 200, [], b"answer")
    queue.close()
    assert list(on_disk(tmp_path / "held").answers) == [id]


async def test_a_failed_rewrite_leaves_no_file_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, path, write = [0.0], tmp_path / "held", journal._write
    queue = DurableQueue(path, max_bytes=5000, clock=lambda: now[0])

    async def fill(first: int) -> None:
        for number in range(first, first + 4):
            id = await queue.hold(f"{number}", "m", "/p", bytes(1000))
            await queue.drop(id, "fetched")

    def no_second_file(file: int, data: bytes) -> None:
        write(file, data[:100])
        if data.startswith(journal.MAGIC):
            full()
        write(file, data[100:])

    await fill(0)
    with monkeypatch.context() as patched:
        patched.setattr(journal, "_write", no_second_file)
        queue._rewrite()
        await until(lambda: not queue._is_rewriting)
        assert not path.with_suffix(".new").exists()
        assert queue.size == path.stat().st_size > 4000
        with pytest.raises(QueueRefused):
            await queue.hold("x", "m", "/p", bytes(1000))
    now[0] += RETRY_S
    await fill(4)
    assert queue.waiting() == []
    queue.close()


async def test_dead_bytes_are_known_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "held"
    queue = DurableQueue(path)
    kept = await queue.hold("kept", "m", "/p", b"body")
    for number in range(4):
        await queue.drop(await queue.hold(f"{number}", "m", "/p", bytes(1000)), "fetched")
    queue.close()
    queue = DurableQueue(path, max_bytes=4000)
    new = await queue.hold("new", "m", "/p", bytes(1000))
    assert list(on_disk(path).waiting) == [kept, new]
    assert queue.size == path.stat().st_size < 2000
    queue.close()


async def test_after_the_rename_the_new_file_is_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "held"
    queue = DurableQueue(path, max_bytes=3000)
    await queue.drop(await queue.hold("0", "m", "/p", bytes(2000)), "fetched")
    with monkeypatch.context() as patched:
        patched.setattr(journal, "_sync_folder", full)
        for key in "12":
            with pytest.raises(JournalError, match="No space left"):
                await queue.hold(key, "m", "/p", bytes(1000))
    kept = await queue.hold("kept", "m", "/p", bytes(1000))
    assert list(on_disk(path).waiting) == [kept]
    queue.close()


async def test_a_cancelled_wait_does_not_end_the_writing(tmp_path: Path) -> None:
    queue = DurableQueue(tmp_path / "held")
    id = await queue.hold("k", "m", "/p", b"body")
    task = asyncio.create_task(queue.answered(id, 200, [], b"answer"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await queue.hold("l", "m", "/p", b"body")
    queue.close()
    assert list(on_disk(tmp_path / "held").answers) == [id]
