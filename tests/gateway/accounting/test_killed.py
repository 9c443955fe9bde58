"""Processes that are killed in the middle of their work lose no row and count none twice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from ridgeline.gateway.accounting.store.records import line_of
from tests.gateway.accounting.books import QUICK, journal_folders, opening, row, started, stored
from tests.gateway.waiting import until

ROUNDS = 5


async def test_every_closed_row_of_killed_processes_is_in_the_table_once(tmp_path: Path) -> None:
    chance = random.Random(11)
    closed: set[int] = set()
    for round_number in range(ROUNDS):
        closed |= killed_writer(tmp_path, round_number * 100_000, after_s=chance.uniform(0.0, 0.25))
    assert len(closed) > 100
    async with started(tmp_path) as ledger:
        await until(lambda: not [one for one in journal_folders(tmp_path) if one != ledger._journal.folder])
    table = dict(stored(tmp_path, "request_id, outcome"))
    booked = {int(name.removeprefix("req_")) for name, outcome in table.items() if outcome == "ok"}
    assert closed <= booked
    # Killed between the append and the word of it: at most one row of each process.
    assert len(booked - closed) <= ROUNDS
    lost = {int(name.removeprefix("req_")) for name, outcome in table.items() if outcome == "lost"}
    assert lost >= open_requests(closed)
    assert len(lost - open_requests(closed)) <= 2 * ROUNDS
    sums = stored(tmp_path, "tokens_in - 10 - CAST(substr(request_id, 5) AS INTEGER), outcome")
    assert {difference for difference, outcome in sums if outcome == "ok"} == {0}


async def test_a_last_record_torn_at_any_byte_spoils_no_other(tmp_path: Path) -> None:
    whole = line_of(row(1)) + line_of(opening(2))
    torn = line_of(row(3))
    for cut in range(0, len(torn), 29):
        state_dir = tmp_path / str(cut)
        folder = state_dir / "ledger" / "dead"
        folder.mkdir(parents=True)
        (folder / "0000000001.wal").write_bytes(whole + torn[:cut])
        async with started(state_dir, QUICK) as ledger:
            await until(lambda ledger=ledger: ledger.state().taken_over == 1)
        assert stored(state_dir, "request_id, outcome") == [("req_000001", "ok"), ("req_000002", "lost")]


async def test_a_damaged_record_in_the_middle_is_left_out_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "ledger" / "dead"
    folder.mkdir(parents=True)
    damaged = line_of(row(2)).replace(b"small", b"large")
    (folder / "0000000001.wal").write_bytes(line_of(row(1)) + damaged + b"\xff\n\n" + line_of(row(3)))
    async with started(tmp_path) as ledger:
        await until(lambda: ledger.state().taken_over == 1)
        assert ledger.state().damaged == 2
    assert stored(tmp_path) == ["req_000001", "req_000003"]


def killed_writer(state_dir: Path, first: int, after_s: float) -> set[int]:
    """What a process said it had closed before it was killed."""
    command = [sys.executable, "-m", "tests.gateway.accounting.writer_process", str(state_dir), str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), True)
    said = os.read(process.stdout.fileno(), 1 << 16)  # it works
    end = time.monotonic() + after_s
    while time.monotonic() < end:
        said += os.read(process.stdout.fileno(), 1 << 16)
    process.kill()
    said += process.stdout.read()
    process.wait()
    process.stdout.close()
    return {int(line) for line in said.split(b"\n")[:-1]}


def open_requests(closed: set[int]) -> set[int]:
    """Every third one of each process was opened and never closed."""
    found: set[int] = set()
    for start in range(0, ROUNDS * 100_000, 100_000):
        last = max(number for number in closed if start <= number < start + 100_000)
        found |= {number for number in range(start, last) if number % 3 == 0}
    return found
