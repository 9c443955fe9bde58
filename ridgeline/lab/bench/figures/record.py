"""RequestRecord: the measurements of one request. One line of requests.jsonl.

Timestamps are seconds from the start of the run, from one monotonic clock; None means it did not happen.
Every metric is computed only from these (`metrics`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "failed", "timeout", "cancelled"]
CountedBy = Literal["usage", "tokenizer", "chunks", "nothing"]
# Source of the tokens per chunk: the server's running usage; equal counts of chunks and tokens, so one each;
# or only the sum is known, and the excess over one each is spread evenly over the chunks after the first.
SplitBy = Literal["usage", "one_each", "spread"]


class ServerTiming(msgspec.Struct, frozen=True, omit_defaults=True):
    """The server's own timings, in milliseconds, and its speculation; None if not reported."""

    queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    inference_ms: float | None = None
    drafted_tokens: int | None = None  # guesses that it verified
    accepted_tokens: int | None = None  # those that were right


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int  # in the order of the plan
    t_sched: float  # when it was due; closed loop: when its slot became free
    t_send: float | None  # the first byte was handed to the socket
    t_first: float | None  # first chunk with at least one output token; reasoning counts
    t_first_visible: float | None  # first chunk with content that is not reasoning
    t_last: float | None  # last chunk with output tokens, not usage or [DONE]
    t_end: float | None  # the answer was complete, or it failed
    status: Status
    planned_in: int  # tokens the plan asked for
    planned_out: int
    n_in: int | None = None  # prompt tokens by the server's usage
    n_cached: int | None = None  # of these, from its prefix cache; None: not reported
    n_out: int = 0
    counted_by: CountedBy = "nothing"  # source of n_out
    n_first: int = 0  # output tokens in the first chunk
    chunk_at: list[float] = []  # stamps of the chunks with output tokens
    chunk_tokens: list[int] = []  # output tokens of each; together n_out
    split_by: SplitBy = "one_each"
    http_status: int | None = None
    cause: str = ""  # cause of a failure, for counting: "refused", "http_503", "truncated"; see `client`
    error: str = ""  # the same in words
    connect_s: float = 0.0  # part of t_send − t_sched: connecting; 0: a connection was open
    held_s: float = 0.0  # part of t_send − t_sched: waiting under the concurrency cap
    warmup: bool = False  # warm-up request: in no metric
    conversation: int | None = None
    turn: int = 0
    server: ServerTiming | None = None
