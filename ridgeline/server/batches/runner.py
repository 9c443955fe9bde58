"""BatchRunner: runs every open batch from its current status to its end, across restarts.

Started and stopped by `server.process.main`; the endpoints report new and cancelled batches. All durable
state is in the store: work in progress is lost with the process and repeated, stored answers are not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

import msgspec
from starlette.types import ASGIApp

from ridgeline.server.batches.answering import LineSender
from ridgeline.server.batches.bodies import OVER, Batch, LineErrors, RequestCounts, Status
from ridgeline.server.batches.inner import post
from ridgeline.server.batches.journal import Journal
from ridgeline.server.batches.lines import check_input, read_line
from ridgeline.server.batches.output import line_name, write_output
from ridgeline.server.batches.store import BatchStore, End, Finished, PendingLine
from ridgeline.server.http.off_loop import off_loop

log = logging.getLogger("ridgeline.server")

PAGE = 256  # line offsets loaded at a time; bodies are read one by one
SWEEP_S = 30.0
AGAIN_S = 5.0  # after an unexpected error, such as a full disk
KEEP_BATCHES_S = 30 * 24 * 3600


class BatchRunner:
    def __init__(self, store: BatchStore, max_line_bytes: int) -> None:
        self._store = store
        self._max_line_bytes = max_line_bytes
        self._journal = Journal(store)
        self._asker: LineSender | None = None
        self._slots = asyncio.Semaphore(1)
        self._working: dict[str, asyncio.Task[None]] = {}
        self._computing: dict[str, asyncio.Task[None]] = {}
        self._sweeping: asyncio.Task[None] | None = None

    # ── from outside ─────────────────────────────────────────────────────────────────────────────────────

    async def start(self, app: ASGIApp, key: str | None, in_flight: int) -> None:
        """Resume the batches of the last server. in_flight: concurrent lines of all batches together."""
        self._asker = LineSender(partial(post, app, key))
        self._slots = asyncio.Semaphore(in_flight)
        left = await self._store.open_batches()
        if left:
            log.info("resuming %d batches", len(left))
        for batch in left:
            self.take_up(batch.id)
        self._sweeping = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Send nothing more. Lines in flight are dropped; the next server sends them again."""
        self._asker = None
        tasks = [*self._working.values(), *([self._sweeping] if self._sweeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def take_up(self, batch_id: str) -> None:
        """Add a new batch. Before start(), it waits."""
        if self._asker is not None and batch_id not in self._working:
            task = asyncio.create_task(self._work_until_over(batch_id))
            self._working[batch_id] = task
            task.add_done_callback(lambda _: self._working.pop(batch_id, None))

    async def cancel(self, batch_id: str) -> Batch:
        """Answered lines are kept and written; the others are never sent."""

        def change(batch: Batch) -> Batch:
            if batch.status not in ("validating", "in_progress"):
                return batch
            return _at("cancelling", batch)

        batch = await self._store.change(batch_id, change, "cancelled")
        self._interrupt(batch_id)
        return batch

    def _interrupt(self, batch_id: str) -> None:
        if batch_id in self._computing:
            self._computing[batch_id].cancel()

    # ── one batch ────────────────────────────────────────────────────────────────────────────────────────

    async def _work_until_over(self, batch_id: str) -> None:
        while True:
            try:
                batch = await self._store.batch(batch_id)
                if batch.status in OVER:
                    return
                await self._advance(batch)
            except Exception:
                log.exception("%s failed; retrying in %.0f s", batch_id, AGAIN_S)
                await asyncio.sleep(AGAIN_S)

    async def _advance(self, batch: Batch) -> None:
        """Move the batch to its next status and store it."""
        match batch.status:
            case "validating":
                await self._validate(batch)
            case "in_progress":
                await self._compute(batch)
            case "finalizing" | "cancelling":
                await self._finish(batch)

    async def _validate(self, batch: Batch) -> None:
        path = self._store.path(batch.input_file_id)
        lines, errors = await asyncio.to_thread(check_input, path, batch.endpoint, self._max_line_bytes)

        def change(current: Batch) -> Batch:
            if current.status != "validating":
                return current  # cancelled in between
            if errors:
                return msgspec.structs.replace(_at("failed", current), errors=LineErrors(errors))
            counts = RequestCounts(total=len(lines))
            return msgspec.structs.replace(_at("in_progress", current), request_counts=counts)

        await self._store.begin(batch.id, [] if errors else lines, change)

    async def _compute(self, batch: Batch) -> None:
        """Send all unanswered lines; then the batch is finalizing, unless it was interrupted."""
        assert self._asker is not None
        lines = asyncio.create_task(self._ask_all(batch, self._asker))
        self._computing[batch.id] = lines
        try:
            await asyncio.wait([lines])
        except asyncio.CancelledError:
            lines.cancel()
            await asyncio.wait([lines])  # ignore the result: the server is stopping
            raise
        finally:
            del self._computing[batch.id]
        if not lines.cancelled():
            lines.result()
        if not await self._store.pending(batch.id, 0, 1):
            await self._end(batch.id, "completed")

    async def _ask_all(self, batch: Batch, sender: LineSender) -> None:
        async with asyncio.TaskGroup() as asking:
            async for line in self._pending(batch.id):
                await self._slots.acquire()
                asked = asking.create_task(self._ask(batch, line, sender))
                asked.add_done_callback(lambda _: self._slots.release())
                await asyncio.sleep(0)  # let other requests on this loop run

    async def _pending(self, batch_id: str) -> AsyncIterator[PendingLine]:
        after = 0
        while page := await self._store.pending(batch_id, after, PAGE):
            after = page[-1].number
            for line in page:
                yield line

    async def _ask(self, batch: Batch, line: PendingLine, sender: LineSender) -> None:
        body = await off_loop(line.length, lambda: self._body(batch, line))
        name = line_name(batch.id, line.number)
        outcome, answer, usage = await sender.ask(name, line.custom_id, batch.endpoint, body)
        await self._journal.keep(Finished(batch.id, line.number, outcome, answer, usage))

    def _body(self, batch: Batch, line: PendingLine) -> bytes:
        with self._store.path(batch.input_file_id).open("rb") as file:
            file.seek(line.offset)
            return bytes(read_line(file.read(line.length)).body)

    async def _end(self, batch_id: str, ending: End) -> None:
        def change(batch: Batch) -> Batch:
            return _at("finalizing", batch) if batch.status in ("validating", "in_progress") else batch

        await self._store.change(batch_id, change, ending)

    async def _finish(self, batch: Batch) -> None:
        ending, keep_s = await self._store.ending(batch.id)
        output, errors = await write_output(self._store, batch, ending, keep_s)

        def change(current: Batch) -> Batch:
            return msgspec.structs.replace(
                _at(ending, current),
                output_file_id=output.id if output else None,
                error_file_id=errors.id if errors else None,
            )

        await self._store.finish(batch.id, [file for file in (output, errors) if file], change)
        log.info("%s: %s", batch.id, ending)

    # ── expiry ─────────────────────────────────────────────────────────────────────────────────────────

    async def _sweep(self) -> None:
        while True:
            try:
                now = time.time()
                for batch in await self._store.open_batches():
                    if batch.expires_at <= now:
                        await self._end(batch.id, "expired")
                        self._interrupt(batch.id)
                await self._store.sweep(now, KEEP_BATCHES_S)
            except Exception:
                log.exception("removing expired files and batches failed; will be retried")
            await asyncio.sleep(SWEEP_S)


def _at(status: Status, batch: Batch) -> Batch:
    """The batch with that status and the current time."""
    return msgspec.structs.replace(batch, status=status, **{f"{status}_at": int(time.time())})
