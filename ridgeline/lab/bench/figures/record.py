"""RequestRecord: what one request of a run went through. One line of requests.jsonl.

Stamps are seconds from the start of the run, taken from one monotonic clock; None is "it never happened".
Every metric is computed from these and nothing else (`metrics`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "failed", "timeout", "cancelled"]
CountedBy = Literal["usage", "tokenizer", "chunks", "nothing"]
# Where the tokens of each chunk are from: the server's running usage; as many chunks as tokens, so one each;
# or only their sum is known, and what is more than one each is spread evenly over the chunks after the first.
SplitBy = Literal["usage", "one_each", "spread"]


class ServerTiming(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the server itself says it took, in milliseconds; None where it does not say."""

    queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    inference_ms: float | None = None


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int  # in the order of the plan
    t_sched: float  # when it was to be sent; closed loop: when its slot became free
    t_send: float | None  # the first byte was handed to the socket
    t_first: float | None  # first chunk with at least one output token; reasoning counts
    t_first_visible: float | None  # first chunk with content that is not reasoning
    t_last: float | None  # last chunk with output tokens, not usage or [DONE]
    t_end: float | None  # the answer was whole, or it failed
    status: Status
    planned_in: int  # tokens the plan asked for
    planned_out: int
    n_in: int | None = None  # prompt tokens by the server's usage
    n_cached: int | None = None  # of these, from its prefix cache; None: it does not say
    n_out: int = 0
    counted_by: CountedBy = "nothing"  # where n_out is from
    n_first: int = 0  # output tokens in the first chunk
    chunk_at: list[float] = []  # stamps of the chunks with output tokens
    chunk_tokens: list[int] = []  # output tokens of each; together n_out
    split_by: SplitBy = "one_each"
    http_status: int | None = None
    cause: str = (
        ""  # why it is not ok, in a word to count by: "refused", "http_503", "truncated"; see `client`
    )
    error: str = ""  # the same in words
    connect_s: float = 0.0  # of t_send − t_sched: until the server had accepted a connection; 0: one was open
    held_s: float = 0.0  # likewise: until fewer requests than the cap were under way
    warmup: bool = False  # sent to warm the server: in no metric
    conversation: int | None = None
    turn: int = 0
    server: ServerTiming | None = None
