"""StreamRelay: sends a streamed answer to the client as it arrives. A stream never ends without a last event.

Bytes are searched for usage, translated if dialects differ, and restored after a guard; bytes wait only as
long as these steps need.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

from ridgeline.gateway.accounting.row import Outcome
from ridgeline.gateway.dialects.error_bodies import error_event
from ridgeline.gateway.dialects.streams.usage_reader import Hide, UsageReader
from ridgeline.gateway.dialects.translate import StreamTranslator
from ridgeline.gateway.errors import REVOKED, GatewayError, UpstreamFailed, out_of_time
from ridgeline.gateway.objects.stored_responses import FirstEvent, is_stored, remember_response
from ridgeline.gateway.pipeline.job import Job
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import Headers, RequestState, Send
from ridgeline.gateway.upstreams.errors import UpstreamBroken

SLOW_READER = "slow_reader"
LAST_WORDS_S = 5.0  # for the client to read the end of a stream past its deadline


class Stage(Protocol):
    """A stage that the bytes of a streamed answer pass."""

    def feed(self, data: bytes) -> bytes: ...
    def finish(self) -> bytes: ...


class StreamRelay:
    def __init__(self, parts: Parts, request: RequestState, job: Job) -> None:
        self._parts, self._request, self._job = parts, request, job
        self._stall_s = parts.settings.gateway.stream_stall_s
        self._total = request.deadline
        self._kind = request.place.endpoint.kind
        sent = job.sent_to(request.answering.target, request.place.endpoint.family)
        # A ridgeline server reports the usage of an interrupted stream; for others the texts are counted.
        config = parts.settings.upstreams
        is_ours = any(one.name == request.row.upstream and one.is_ours for one in config)
        # The client never sees the upstream's own events after a translation.
        hide: Hide = "" if sent.is_translated else sent.hide
        self._reader = UsageReader(self._kind, sent.family, hide, count_texts=not is_ours)
        assert job.model is not None
        if job.model.config.tokenizer is not None and not is_ours:
            self._reader.texts = request.texts
        self._is_translated = sent.is_translated
        self._stages: list[Stage] = []
        if sent.is_translated:
            self._stages.append(StreamTranslator(self._kind, sent.family, request.fields))
        self._keeper = job.cache.stream_keeper() if job.cache is not None else None
        if self._keeper is not None:
            self._stages.append(self._keeper)
        if job.restorer is not None:
            self._stages.append(job.restorer.stream(self._kind))
        self._last = b""  # sent to the client

    async def run(self, headers: Headers, send: Send) -> None:
        request, reader = self._request, self._reader
        opened = request.answering
        answer = opened.answer
        request.end_as("ok", answer.status)
        request.started = True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        broken: GatewayError | None = None
        try:
            if self._kind == "responses" and not self._is_translated and is_stored(request):
                await self._remember(send)
            await self._relay(send)
            if reader.error:  # reported by the upstream in the stream
                request.end_as("upstream_failed", answer.status, "upstream_error")
            elif not reader.done:
                message = "the upstream ended its stream before the answer was complete"
                broken = UpstreamFailed(message, code="upstream_broken")
        except UpstreamBroken as error:
            broken = UpstreamFailed("the upstream's stream was interrupted", code="upstream_broken")
            if error.cause == "total_timeout":
                broken = out_of_time()
        except GatewayError as error:  # of a guard: its held text is never sent
            broken = error
            self._stages.clear()
        except asyncio.CancelledError:
            if request.gone or request.expired is None or request.expired.code == SLOW_READER:
                raise
            request.task.uncancel()  # past its deadline: send the client an error
            broken, request.expired = request.expired, None
        finally:
            request.usage = reader.usage  # also after the client disconnected
        await self._end(broken, send)

    async def _remember(self, send: Send) -> None:
        """Read the stream until its response's id is known, and record the owner before the id is sent."""
        opened, first = self._request.answering, FirstEvent()
        data: bytes | None = opened.first
        while data is not None:
            comments = first.feed(data)
            if comments and (out := self._passed(comments)):
                await self._send(out, send)
            if first.is_done:
                break
            data = await opened.next()
        await remember_response(self._parts, self._request, first.held)
        opened.first = first.held

    async def _relay(self, send: Send) -> None:
        """Pass the stream on, without waking a task for every piece."""
        opened, flow = self._request.answering, self._request.connection.flow

        def write(out: bytes) -> None:
            step = send({"type": "http.response.body", "body": out, "more_body": True})
            with contextlib.suppress(StopIteration):  # with room to write, `send` never waits
                step.__await__().send(None)

        await opened.relay(
            self._passed,
            is_full=lambda: flow.write_paused,
            write=write,
            send=lambda out: self._send(out, send),
        )

    def _passed(self, data: bytes) -> bytes:
        out = self._reader.feed(data)
        for stage in self._stages:
            out = stage.feed(out)
        if out:
            self._last = out
        return out

    async def _send(self, out: bytes, send: Send) -> None:
        """Waits for a client that does not read, up to a limit."""
        request = self._request
        request.wait_until(min(time.monotonic() + self._stall_s, self._total), _slow_reader)
        await send({"type": "http.response.body", "body": out, "more_body": True})
        request.wait_until(self._total, out_of_time)

    async def _end(self, broken: GatewayError | None, send: Send) -> None:
        request, reader = self._request, self._reader
        out = reader.finish() if broken is None or self._stages else b""
        for stage in self._stages:
            out = stage.feed(out) + stage.finish()
        usage = request.usage = reader.usage
        if broken is not None:
            is_revoked = broken.code == REVOKED
            outcome: Outcome = "invalid" if is_revoked else "upstream_failed"
            request.end_as(outcome, request.answering.answer.status, broken.code)
            last = out or self._last
            if last and not last.endswith((b"\n\n", b"\r\n\r\n")):
                out += b"\n\n"  # half an event: end it before the next one
            out += error_event(
                self._kind,
                broken.status,
                broken.type,
                broken.message,
                None,
                broken.code,
                request.id,
                reader.events,
            )
            request.answering.close(is_revoked)  # not a fault of the upstream
        else:
            request.late_usage = usage is None or usage.source != "reported"
            request.answering.close(True)
            if self._keeper is not None and self._job.cache is not None:
                answer = request.answering.answer
                await self._job.cache.keep_stream(self._keeper, answer.status, answer.headers, usage)
        now = time.monotonic()
        request.wait_until(min(now + self._stall_s, max(self._total, now + LAST_WORDS_S)), _slow_reader)
        await send({"type": "http.response.body", "body": out})


def _slow_reader() -> GatewayError:
    return GatewayError("the client did not read for stream_stall_s", status=499, code=SLOW_READER)
