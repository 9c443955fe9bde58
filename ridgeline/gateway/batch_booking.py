"""BatchBooking: what finished batches used, booked once each. One worker looks after all of them.

A batch is computed by its upstream in its own time; its row is written when it has ended, under its own id,
so that a second worker or a restart books nothing twice. What it used is in the batch's own `usage`, or else
in the answers of its output file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.dialects.counts import usage_of
from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.parts import Parts
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.gateway.usage import Usage

log = logging.getLogger("ridgeline.gateway")

POLL_S = 15.0
ASK_S = 60.0
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
MAX_BATCH_BYTES = 1 << 20
MAX_LINE = 16 << 20
KIND_OF_URL = {"/v1/embeddings": "embeddings", "/v1/responses": "responses", "/v1/completions": "completions"}


class _Counts(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0


class _Batch(msgspec.Struct):
    status: str
    endpoint: str = "/v1/chat/completions"
    usage: _Counts | None = None
    output_file_id: str | None = None


class _Reply(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Answered(msgspec.Struct):
    response: _Reply | None = None


_line = msgspec.json.Decoder(_Answered)


class BatchBooking:
    def __init__(self, parts: Parts, poll_s: float = POLL_S) -> None:
        self._parts = parts
        self._poll_s = poll_s

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.book_ended()
            except Exception:
                log.exception("batches could not be looked after; tried again")

    async def book_ended(self) -> None:
        for owned in await self._parts.owned.pending("batch"):
            try:
                await self._book(owned)
            except (GatewayError, msgspec.DecodeError, OSError) as error:
                log.warning("a batch could not be asked for", extra={"batch": owned.id, "cause": str(error)})

    async def _book(self, owned: Any) -> None:
        asked = Outgoing("GET", f"/v1/batches/{owned.id}", [], b"", False)
        body = await self._parts.upstreams.fetch(
            Target(owned.upstream, ""), asked, limit=MAX_BATCH_BYTES, within_s=ASK_S
        )
        batch = msgspec.json.decode(body, type=_Batch)
        if batch.status not in ENDED:
            return
        usage = Usage()
        if batch.usage is not None and batch.usage.input_tokens:
            usage = Usage(batch.usage.input_tokens, tokens_out=batch.usage.output_tokens, source="reported")
        elif batch.output_file_id:
            usage = await self._sum(owned.upstream, batch)
        meta = owned.meta
        row = LedgerRow(
            owned.id,
            int(time.time() * 1000),
            key_id=meta.get("key", ""),
            team_id=meta.get("team", ""),
            endpoint="batches",
            model_asked=meta.get("model", ""),
            model=meta.get("model", ""),
            upstream=owned.upstream,
            upstream_model=meta.get("upstream_model", ""),
            status=200,
            outcome="ok" if batch.status == "completed" else "upstream_failed",
            error_code="" if batch.status == "completed" else f"batch_{batch.status}",
            tokens_in=usage.tokens_in,
            tokens_cached=usage.tokens_cached,
            tokens_out=usage.tokens_out,
            tokens_reasoning=usage.tokens_reasoning,
            usage_source=usage.source,
        )
        row.cost_pusd, row.price_source = self._parts.prices.cost(
            row.model, row.upstream, row.upstream_model, usage
        )
        self._parts.ledger.close(row)
        await self._parts.owned.settled(owned.id)

    async def _sum(self, upstream: str, batch: _Batch) -> Usage:
        """Line by line: an output file may be larger than memory."""
        total, kind = Usage(source="reported"), KIND_OF_URL.get(batch.endpoint, "chat")
        asked = Outgoing("GET", f"/v1/files/{batch.output_file_id}/content", [], b"", False)
        opened = await self._parts.upstreams.open(
            [Target(upstream, "")], lambda _: asked, tenant="", deadline=time.monotonic() + ASK_S
        )
        rest = b""
        try:
            if opened.answer.status != 200:
                raise GatewayError("the batch's output file cannot be read")
            while (data := await opened.answer.next()) is not None:
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE:
                    raise GatewayError("a line of a batch's output is too long")
                for line in lines:
                    _add(total, kind, line)
            _add(total, kind, rest)
            opened.close(True)
        finally:
            opened.abort()
        return total


def _add(total: Usage, kind: str, line: bytes) -> None:
    if not line.strip():
        return
    answered = _line.decode(line)
    used = usage_of(kind, "openai", bytes(answered.response.body)) if answered.response is not None else None
    if used is not None:
        total.tokens_in += used.tokens_in
        total.tokens_cached += used.tokens_cached
        total.tokens_out += used.tokens_out
        total.tokens_reasoning += used.tokens_reasoning
