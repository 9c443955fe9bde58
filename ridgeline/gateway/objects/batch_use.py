"""A batch's usage: so far, from its upstream's counts; at the end, from its `usage` or its output file.

ridgeline's server reports the usage of the answered lines in `usage`, also while the batch runs. Hosted
providers report the number of finished lines, and the usage when the batch has ended: until then it is a
share of the estimate.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from ridgeline.gateway.accounting.prices import TokenPrices
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.dialects.counts import Counts, usage_of
from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.objects.batch_meta import BatchMeta, meta_of
from ridgeline.gateway.tenants.owned import Owned
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.gateway.upstreams.upstreams import Upstreams

ASK_S = 60.0
MAX_LINE = 16 << 20
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
RUNNING = frozenset({"validating", "in_progress"})
KIND_OF_URL = {"/v1/embeddings": "embeddings", "/v1/responses": "responses", "/v1/completions": "completions"}


class LineCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct):
    """A batch as its upstream shows it."""

    id: str = ""
    status: str = ""
    endpoint: str = "/v1/chat/completions"
    input_file_id: str = ""
    request_counts: LineCounts | None = None
    usage: Counts | None = None
    output_file_id: str | None = None


class Used(NamedTuple):
    usage: Usage
    cost_pusd: int
    left_pusd: int = 0  # estimated cost of the lines without an answer


class _Reply(msgspec.Struct):
    status_code: int = 200
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Answered(msgspec.Struct):
    response: _Reply | None = None


_line = msgspec.json.Decoder(_Answered)


def used_so_far(batch: Batch, meta: BatchMeta, prices: TokenPrices) -> Used:
    counts = batch.request_counts or LineCounts()
    total = counts.total or meta.lines
    done = min(counts.completed + counts.failed, total)
    estimate = meta.cost_pusd
    left = estimate * (total - done) // total if total else estimate
    usage = batch.usage.usage() if batch.usage is not None else Usage()
    if usage.tokens_in or usage.tokens_out:
        cost = _cost_of_lines(usage, counts.completed, prices)
        # If lines cost more than estimated so far, expect the same of the rest.
        left = max(left, cost * (total - done) // max(counts.completed, 1))
        return Used(usage, cost, left)
    if not total:
        return Used(Usage(), 0, left)
    tokens_in, tokens_out = (most * counts.completed // total for most in (meta.tokens_in, meta.tokens_out))
    guess = Usage(tokens_in, tokens_out=tokens_out, source="estimated")
    return Used(guess, estimate * counts.completed // total, left)


async def used_in_all(upstreams: Upstreams, owned: Owned, batch: Batch, prices: TokenPrices) -> Used:
    """Usage of a batch that has ended. Without its output file: from the count of its answered lines."""
    usage = batch.usage.usage() if batch.usage is not None else Usage()
    if (usage.tokens_in or usage.tokens_out) and not prices.above:
        return Used(usage, prices.cost(usage))
    counted = used_so_far(batch, meta_of(owned), prices)._replace(left_pusd=0)
    if not batch.output_file_id:
        return counted
    kind = KIND_OF_URL.get(batch.endpoint, "chat")
    used = await _sum(upstreams, owned, batch.output_file_id, kind, prices)
    return used or (counted if counted.usage.tokens_in or counted.usage.tokens_out else last_seen(owned))


def last_seen(owned: Owned) -> Used:
    """The usage at the last poll, for a batch that its upstream no longer knows."""
    meta = meta_of(owned)
    tokens_in, tokens_out = meta.used
    usage = Usage(tokens_in, tokens_out=tokens_out, source="estimated")
    return Used(usage, meta.spent_pusd)


def _cost_of_lines(usage: Usage, lines: int, prices: TokenPrices) -> int:
    """A price that depends on the prompt's length is taken at the mean line."""
    if not prices.above or lines < 1:
        return prices.cost(usage)
    mean = Usage(
        usage.tokens_in // lines,
        usage.tokens_cached // lines,
        usage.tokens_cache_write // lines,
        usage.tokens_out // lines,
    )
    return prices.cost(mean) * lines


async def _sum(
    upstreams: Upstreams, owned: Owned, file_id: str, kind: str, prices: TokenPrices
) -> Used | None:
    """Reads line by line: an output file may exceed memory. None: the upstream no longer has it."""
    mean = _mean_line(meta_of(owned))
    asked = Outgoing("GET", f"/v1/files/{file_id}/content", [], b"", False)
    deadline = time.monotonic() + ASK_S
    opened = await upstreams.open([Target(owned.upstream, "")], lambda _: asked, tenant="", deadline=deadline)
    total, cost, rest = Usage(source="reported"), 0, b""
    try:
        if opened.answer.status == 404:
            return None
        if opened.answer.status != 200:
            raise GatewayError("the upstream did not return the batch's output file")
        while (data := await opened.next()) is not None:
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE:
                raise GatewayError("a line of a batch's output is too long")
            cost += sum(_add(total, kind, line, prices, mean) for line in lines)
        cost += _add(total, kind, rest, prices, mean)
        opened.close(True)
    finally:
        opened.abort()
    return Used(total, cost)


def _mean_line(meta: BatchMeta) -> Used:
    """A line's usage from the estimate of its batch."""
    lines = meta.lines or 1
    usage = Usage(meta.tokens_in // lines, tokens_out=meta.tokens_out // lines, source="estimated")
    return Used(usage, meta.cost_pusd // lines)


def _add(total: Usage, kind: str, line: bytes, prices: TokenPrices, mean: Used) -> int:
    """The line's cost. An answer without `usage` counts as the mean line, and marks the sum as estimated."""
    if not line.strip():
        return 0
    answered = _line.decode(line)
    if answered.response is None:
        return 0
    used = usage_of(kind, "openai", bytes(answered.response.body))
    if used is None and answered.response.status_code >= 400:
        return 0
    if used is None:
        total.source = "estimated"
    one = used or mean.usage
    total.tokens_in += one.tokens_in
    total.tokens_cached += one.tokens_cached
    total.tokens_cache_write += one.tokens_cache_write
    total.tokens_out += one.tokens_out
    total.tokens_reasoning += one.tokens_reasoning
    return prices.cost(used) if used is not None else mean.cost_pusd
