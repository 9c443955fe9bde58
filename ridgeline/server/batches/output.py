"""A batch's output and error files, written from the stored lines in input order when the batch ends.

They are written under their final names and synced before the database references them. A server that dies in
between leaves orphan files; the next one removes them and writes them again.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ridgeline.server.batches.bodies import Batch, Failure, File, OutputLine
from ridgeline.server.batches.store import (
    DONE,
    FAILED,
    PENDING,
    BatchStore,
    End,
    KeptLine,
    new_id,
    sync_folder,
)

PAGE = 256


@dataclass(slots=True)
class _Draft:
    """A file being written; created with its first line."""

    folder: Path
    name: str
    id: str = ""
    file: BinaryIO | None = None

    def add(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self.file is None:
            self.id = new_id("file-")
            self.file = (self.folder / self.id).open("xb")
        self.file.write(b"\n".join(lines) + b"\n")

    def close(self, created_at: int, keep_s: int) -> File | None:
        if self.file is None:
            return None
        self.file.flush()
        os.fsync(self.file.fileno())
        size = self.file.tell()
        self.file.close()
        sync_folder(self.folder)
        return File(
            id=self.id,
            bytes=size,
            created_at=created_at,
            expires_at=created_at + keep_s,
            filename=self.name,
            purpose="batch_output",
        )


async def write_output(
    store: BatchStore, batch: Batch, ending: End, keep_s: int
) -> tuple[File | None, File | None]:
    """The output file and the error file, each None where it would be empty."""
    output = _Draft(store.folder, f"{batch.id}_output.jsonl")
    errors = _Draft(store.folder, f"{batch.id}_error.jsonl")
    after, now = 0, int(time.time())
    while page := await store.kept(batch.id, after, PAGE):
        after = page[-1].number
        await asyncio.to_thread(_write, page, batch.id, ending, output, errors)
    return await asyncio.to_thread(output.close, now, keep_s), await asyncio.to_thread(
        errors.close, now, keep_s
    )


def _write(page: list[KeptLine], batch_id: str, ending: End, output: _Draft, errors: _Draft) -> None:
    output.add([line.answer or b"" for line in page if line.outcome == DONE])
    failed = [
        line.answer or b"" if line.outcome == FAILED else _expired(batch_id, line)
        for line in page
        if line.outcome == FAILED or (line.outcome == PENDING and ending == "expired")
    ]
    errors.add(failed)


def _expired(batch_id: str, line: KeptLine) -> bytes:
    failure = Failure("batch_expired", "the batch expired before this line was answered")
    return msgspec.json.encode(OutputLine(line_name(batch_id, line.number), line.custom_id, None, failure))


def line_name(batch_id: str, number: int) -> str:
    """The id of one line's request in logs and output; stable across restarts."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
