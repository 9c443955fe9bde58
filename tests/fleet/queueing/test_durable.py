"""Held requests outlive the process that took them: kill -9, torn records, full disks, keys used twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.queueing.durable import DurableQueue
from ridgeline.fleet.queueing.held_ledger import (
    Answer,
    Dropped,
    HeldLedger,
    HeldRequest,
    KeyReused,
    decode_record,
    encode_record,
)
from ridgeline.fleet.queueing.journal import MAGIC, Journal, JournalError, frame, split
from ridgeline.proxy.errors import QueueRefused

FRONT = """
import asyncio, sys
from pathlib import Path
from ridgeline.fleet.queueing.durable import DurableQueue

async def main():
    queue = DurableQueue(Path(sys.argv[1]))
    async def hold(number):
        id = await queue.hold(f"key-{number}", "m", "/v1/chat/completions", b"body %d" % number)
        print(number, id, flush=True)
    await asyncio.gather(*(hold(number) for number in range(int(sys.argv[2]))))
    print("all", queue.syncs, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def killed_front(path: Path, requests: int, after: int) -> list[str]:
    """The lines that a front printed before it was killed with SIGKILL, `after` of them read."""
    front = subprocess.Popen([sys.executable, "-c", FRONT, str(path), str(requests)], stdout=subprocess.PIPE)
    assert front.stdout is not None
    try:
        lines = [front.stdout.readline() for _ in range(after)]
    finally:
        front.send_signal(signal.SIGKILL)
        rest = front.stdout.read()
        front.wait()
    complete = b"".join(lines) + rest
    return complete[: complete.rfind(b"\n") + 1].decode().splitlines()  # the kill may cut the last line


async def test_a_thousand_requests_outlive_a_kill_of_the_front_in_their_order(tmp_path: Path) -> None:
    lines = killed_front(tmp_path / "held", 1000, after=1001)
    acknowledged = {line.split()[1] for line in lines if not line.startswith("all")}
    syncs = next(int(line.split()[1]) for line in lines if line.startswith("all"))
    assert len(acknowledged) == 1000
    assert syncs < 1000  # requests that come together share an fsync
    queue = DurableQueue(tmp_path / "held")
    assert queue.recovered == 1000
    waiting = queue.waiting("m")
    assert {request.id for request in waiting} == acknowledged
    assert [request.body for request in waiting] == [b"body %d" % number for number in range(1000)]
    sent = []
    for request in waiting:  # the first replica is ready
        sent.append(request.number)
        await queue.answered(request.id, 200, [("content-type", "text/plain")], b"re: " + request.body)
    assert sent == list(range(1000))
    assert queue.waiting() == []
    again = await queue.hold("key-7", "m", "/v1/chat/completions", b"body 7")  # the client asks again
    answer = await queue.wait_for(again, 1.0)
    assert answer is not None
    assert answer.body == b"re: body 7"
    queue.close()


def test_every_acknowledged_request_is_kept_when_the_kill_comes_in_between(tmp_path: Path) -> None:
    lines = killed_front(tmp_path / "held", 400, after=30)
    acknowledged = [line.split()[1] for line in lines if line.strip() and not line.startswith("all")]
    assert len(acknowledged) >= 30
    queue = DurableQueue(tmp_path / "held")
    waiting = queue.waiting()
    assert set(acknowledged) <= {request.id for request in waiting}
    assert [request.number for request in waiting] == sorted(request.number for request in waiting)
    queue.close()


async def test_answers_outlive_the_front_and_are_forgotten_once_fetched(tmp_path: Path) -> None:
    queue = DurableQueue(tmp_path / "held")
    id = await queue.hold("k", "m", "/p", b"b", tenant="t")
    await queue.answered(id, 200, [], b"done")
    queue.close()
    queue = DurableQueue(tmp_path / "held")
    assert queue.recovered == 0
    answer = queue.answer(id)
    assert answer is not None
    assert answer.body == b"done"
    assert queue.tenant_of(id) == "t"
    await queue.drop(id, "fetched")
    queue.close()
    queue = DurableQueue(tmp_path / "held")
    assert queue.answer(id) is None
    assert queue.tenant_of(id) is None
    queue.close()


async def test_a_key_names_one_request_of_one_tenant(tmp_path: Path) -> None:
    queue = DurableQueue(tmp_path / "held")
    first = await queue.hold("k", "m", "/p", b"b", tenant="a")
    assert await queue.hold("k", "m", "/p", b"b", tenant="a") == first
    assert await queue.hold("k", "m", "/p", b"b", tenant="b") != first
    with pytest.raises(KeyReused, match="'k' belongs to another request"):
        await queue.hold("k", "m", "/p", b"other", tenant="a")
    assert queue.count("m") == 2
    assert queue.position(first) == 1
    queue.close()


async def test_a_waiting_client_gets_the_answer_when_it_comes(tmp_path: Path) -> None:
    queue = DurableQueue(tmp_path / "held")
    id = await queue.hold("k", "m", "/p", b"b")
    assert await queue.wait_for(id, 0.01) is None
    waiting = asyncio.create_task(queue.wait_for(id, 60.0))
    await asyncio.sleep(0)
    await queue.answered(id, 200, [], b"x")
    await queue.answered(id, 500, [], b"too late")
    answer = await waiting
    assert answer is not None
    assert (answer.status, answer.body) == (200, b"x")
    queue.close()


async def test_a_full_queue_refuses_and_old_answers_make_room(tmp_path: Path) -> None:
    now = [0.0]
    queue = DurableQueue(tmp_path / "held", max_waiting=2, answer_s=10, clock=lambda: now[0])
    first = await queue.hold("1", "m", "/p", b"")
    await queue.hold("2", "m", "/p", b"")
    with pytest.raises(QueueRefused):
        await queue.hold("3", "m", "/p", b"")
    await queue.answered(first, 200, [], b"")
    await queue.hold("3", "m", "/p", b"")
    now[0] = 9.0
    assert await queue.expire() == 0
    now[0] = 10.0
    assert await queue.expire() == 1
    assert queue.answer(first) is None
    queue.close()


async def test_a_rewritten_journal_has_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.fleet.queueing.durable.COMPACT_BYTES", 20_000)
    queue = DurableQueue(tmp_path / "held")
    ids = [await queue.hold(f"k{number}", "m", "/p", bytes(1000)) for number in range(100)]
    for id in ids[:90]:
        await queue.answered(id, 200, [], b"x")
    for id in ids[:80]:
        await queue.drop(id, "fetched")
    queue.close()
    assert (tmp_path / "held").stat().st_size < 80_000
    queue = DurableQueue(tmp_path / "held")
    assert [request.id for request in queue.waiting()] == ids[90:]
    assert all(queue.answer(id) is not None for id in ids[80:90])
    assert await queue.hold("k85", "m", "/p", bytes(1000)) == ids[85]  # its key still names it
    with pytest.raises(KeyReused):
        await queue.hold("k85", "m", "/p", b"other")
    queue.close()


def test_two_fronts_do_not_share_a_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path / "held")
    with pytest.raises(JournalError, match="in use by another process"):
        Journal(tmp_path / "held")
    first.close()
    Journal(tmp_path / "held").close()


def test_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "held").write_bytes(b"something else entirely")
    with pytest.raises(JournalError, match="move it away"):
        Journal(tmp_path / "held")
    assert (tmp_path / "held").read_bytes() == b"something else entirely"


async def test_a_request_that_cannot_be_written_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = DurableQueue(tmp_path / "held")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(JournalError, match="No space left"):
        await queue.hold("k", "m", "/p", b"b")
    await asyncio.sleep(0)
    assert queue.waiting() == []
    monkeypatch.undo()
    queue.close()


@given(st.lists(st.binary(max_size=200), max_size=20), st.integers(0, 3000), st.binary(max_size=30))
def test_a_cut_or_damaged_file_gives_a_beginning_of_its_records(
    records: list[bytes], cut: int, rubbish: bytes
) -> None:
    whole = MAGIC + b"".join(map(frame, records))
    found, end = split(whole)
    assert (found, end) == (records, len(whole))
    kept = whole[: max(len(MAGIC), cut)]
    found, end = split(kept + rubbish)
    assert found[: len(records)] == records[: len(found)] or len(found) > len(records)
    assert len(found) >= sum(
        len(MAGIC + b"".join(map(frame, records[: n + 1]))) <= cut for n in range(len(records))
    )


operations = st.lists(st.tuples(st.sampled_from("hhad"), st.integers(0, 9)), max_size=60)


@settings(deadline=None)
@given(operations)
def test_replayed_records_give_the_same_ledger(steps: list[tuple[str, int]]) -> None:
    ledger, journal = HeldLedger(), []
    for number, (what, which) in enumerate(steps):
        record: HeldRequest | Answer | Dropped
        if what == "h" and ledger.tenant_of(str(which)) is None:
            record = HeldRequest(str(which), number, f"k{which}", "m", "/p", b"%d" % which)
        elif what == "a":
            record = Answer(str(which), 200, (), b"x")
        else:
            record = Dropped(str(which), "")
        ledger.apply(record)
        journal.append(encode_record(record))
    for replayed in (journal, [encode_record(record) for record in ledger.records()]):
        other = HeldLedger()
        for data in replayed:
            other.apply(decode_record(data))
        assert list(other.waiting.values()) == list(ledger.waiting.values())
        assert other.answers == ledger.answers
        for which in range(10):
            assert other.tenant_of(str(which)) == ledger.tenant_of(str(which))
            assert other.find("", f"k{which}", "/p", b"%d" % which) == ledger.find(
                "", f"k{which}", "/p", b"%d" % which
            )
