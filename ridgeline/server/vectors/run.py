"""Runs one request for vectors while its client is connected, and books it once, however it ends."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

from starlette.requests import Request

from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.link.packed_texts import PackedTexts
from ridgeline.engine.schedule.request import is_background
from ridgeline.server.answering.running_request import outcome
from ridgeline.server.console.request_log import LoggedRequest, request_log
from ridgeline.server.errors import DeadlineExceeded
from ridgeline.server.http.read_body import while_connected
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.records.usage_book import UsageBook, counted
from ridgeline.server.served_models import Served, ServedModels
from ridgeline.server.vectors.protocol import VectorRequest
from ridgeline.telemetry.logs import log_request
from ridgeline.telemetry.timing import TimingRecord

if TYPE_CHECKING:
    from ridgeline.engine.client.open_embedding import Floats


async def compute(
    request: Request,
    served: Served,
    body: VectorRequest,
    texts: PackedTexts,
    want: Literal["vector", "score"] = "vector",
) -> Floats:
    """The encoder's answer. The gate books requests that the encoder refuses (429, 400)."""
    served_models, context = ServedModels.of(request), RequestContext.of(request)
    priority = max(body.priority or 0, context.least_priority)
    limit_s = None if is_background(priority) else served_models.config.request_timeout_s
    timing = TimingRecord(context.arrival, prompt_tokens=texts.num_tokens)
    error: BaseException | None = None
    usages = served_models.part(UsageBook)
    used = usages.begin(context.request_id, lambda: counted(texts.num_tokens))
    requests, model = served_models.part(request_log), served.model.names[0]
    logged = requests.begin(
        LoggedRequest(context.request_id, model, context.path, context.arrival, (texts.num_tokens,))
    )
    try:
        async with asyncio.timeout_at(None if limit_s is None else _loop_time(context.arrival + limit_s)):
            working = served.ready_client().embed(
                texts,
                want=want,
                request_id=context.request_id,
                priority=priority,
            )
            return await while_connected(request.receive, working)
    except TimeoutError:
        assert limit_s is not None
        error = DeadlineExceeded(limit_s)
        raise error from None
    except BaseException as raised:
        error = raised
        raise
    finally:
        if isinstance(error, InvalidRequest | QueueFull):
            usages.refuse(used)
            requests.refuse(logged)
        else:
            context.booked = True
            status, failure = outcome(error)
            usages.end(used, status)
            timing.end = timing.sent = time.monotonic()
            requests.end(logged, status, [timing])
            served.metrics.request_finished(timing, context.path, failure or "stop", is_background(priority))
            log_request(context.request_id, context.path, status, timing, failure or "stop")
            if served_models.tracing is not None:
                served_models.tracing.book(context, [timing], served.name, status, failure, with_engine=False)


def _loop_time(monotonic: float) -> float:
    return asyncio.get_running_loop().time() + monotonic - time.monotonic()
