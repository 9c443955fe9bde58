"""LedgerRow: one request, with key, outcome, usage and cost. Written once, when the request has ended.

`Opening` holds what is known before anything is sent upstream: it is written ahead, so that a request whose
gateway died is not lost.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# ok: answered completely. client_gone: the client disconnected first. upstream_failed: no answer, or an
# incomplete one. refused: the upstream refused it with a 4xx. limited, blocked, invalid: the gateway refused
# it before any upstream; limited also for a batch that a budget stopped. cached: answered from a cache.
# lost: the gateway died during the request.
Outcome = Literal[
    "ok", "client_gone", "upstream_failed", "refused", "limited", "blocked", "invalid", "cached", "lost"
]


class Opening(msgspec.Struct, frozen=True):
    request_id: str
    at_ms: int  # unix milliseconds of arrival
    key_id: str
    team_id: str
    endpoint: str
    model_asked: str
    model: str
    upstream: str
    upstream_model: str
    stream: bool
    tokens_in_estimate: int = 0
    answers: int = 0  # written beside each other; 0: the endpoint has no output tokens
    output_limit: int | None = None  # tokens of one answer, where the request names a limit
    audio_ms: int = 0
    characters: int = 0


class LedgerRow(msgspec.Struct):
    """Times in milliseconds; None where a request did not get that far. Cost in picodollars (1e-12 USD):
    an integer, so that sums are exact whatever the price of a token.
    """

    request_id: str
    at_ms: int
    key_id: str = ""
    team_id: str = ""
    endpoint: str = ""
    model_asked: str = ""
    model: str = ""  # after routing: the public name
    upstream: str = ""
    upstream_model: str = ""
    credential: str = ""  # which of the upstream's keys, by its name
    stream: bool = False
    status: int = 0
    outcome: Outcome = "ok"
    error_code: str = ""
    tokens_in: int = 0
    tokens_cached: int = 0
    tokens_cache_write: int = 0
    tokens_out: int = 0
    tokens_reasoning: int = 0
    audio_ms: int = 0  # of sound that was transcribed or translated
    characters: int = 0  # of text that was spoken
    usage_source: str = "none"
    cost_pusd: int = 0
    price_source: str = ""  # config, genai-prices, gpu-hours, none
    attempts: int = 0
    cache: str = ""  # exact, semantic
    similarity: float | None = None
    gateway_ms: float | None = None  # the gateway's work before the upstream request
    queue_ms: float | None = None  # time in the upstream's queue
    ttft_ms: float | None = None  # upstream request → first byte of its answer's body
    stream_ms: float | None = None  # first byte → last
    total_ms: float = 0.0
    route: str = ""  # JSON: which model and why, by which rule or neighbours; retries and fallbacks taken
    guard: str = ""  # JSON: kinds found and what was done, never the text
    repeats: int = 0  # further requests with the same outcome, without their own row
