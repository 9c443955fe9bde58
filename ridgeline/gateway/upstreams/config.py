"""What an operator says of upstreams: the [[upstreams]] tables, and [retries] for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.options import OptionError, check_range, option
from ridgeline.proxy.breaker import BreakerLimits

Kind = Literal["ridgeline", "openai", "anthropic"]
DAY_S = 86_400
READ_ON_S = 10.0


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """One [[upstreams]] table: a server, how to reach it, and with which keys."""

    name: str = option("", "what [[models]] call it by")
    kind: Kind = option("openai", "dialect and credentials: Bearer, or for anthropic x-api-key")
    url: str = option("", "http://host:port, https://host or unix:/path; a last /v1 may stand there")
    has_responses: bool = option(True, "false: it knows chat only, and /v1/responses is translated to that")
    cache_salt: bool | None = option(
        None,
        "send cache_salt, one per tenant, so that tenants share no cached prefixes; default: true for kind "
        "ridgeline, else false. vLLM and SGLang know the field: set true",
    )
    key_env: tuple[str, ...] = option((), "environment variables that each hold a key")
    key_file: Path | None = option(
        None, "a file with a key on each line; lines that begin with # do not count"
    )
    ca_file: Path | None = option(
        None, "PEM file of the authorities its certificate may come from; default: the system's"
    )
    anthropic_version: str = option("2023-06-01", "sent where the client names none; kind anthropic only")
    max_concurrent: int = option(256, "requests under way there at once, from one worker")
    max_waiting: int = option(1024, "requests that wait for their turn, in one worker; one more gets 429")
    queue_timeout_s: float = option(30.0, "longest wait for a turn; then the next target, or 429")
    connect_timeout_s: float = option(5.0, "longest time for a connection, with TLS")
    first_byte_timeout_s: float = option(300.0, "longest time from a request to the first byte of its answer")
    idle_timeout_s: float = option(120.0, "longest silence within an answer")
    keep_alive_s: float | None = option(
        None,
        "close an unused connection after this many seconds; keep it below the upstream's own keep-alive "
        "timeout. Default: 4, with https 30",
    )
    read_on_s: float | None = option(
        None,
        "read an answer on for its usage this many seconds after its client left, because the upstream bills "
        "it anyway; 0: close the connection at once. Default: 0 for kind ridgeline, else 10",
    )
    stall_s: float = option(
        60.0, "streams under way and no byte on any of them for so long: taken for down; 0: never"
    )
    probe_s: float | None = option(
        None, "time between two probes; 0: none. Default: 5 for kind ridgeline, none for others"
    )
    probe_path: str | None = option(
        None, "what a probe asks for; default: /ready for kind ridgeline, else /v1/models"
    )
    probe_timeout_s: float = option(2.0, "a probe that takes longer has failed")
    gpu_hour_usd: float = option(0.0, "what an hour of its hardware costs; prices models without a price")
    gpu_tokens_in_per_s: float = option(0.0, "input tokens a second that the hardware does when it is full")
    gpu_tokens_out_per_s: float = option(0.0, "output tokens a second that it does when it is full")
    provider: str = option("", "its name in genai-prices, such as groq; empty: by kind and URL")

    def __post_init__(self) -> None:
        where = f"[[upstreams]] {self.name or '(no name)'}:"
        check_range(self, where, 1, 1_000_000, "max_concurrent", "max_waiting")
        waits = ("queue_timeout_s", "connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s")
        check_range(self, where, 0.001, DAY_S, *waits, "probe_timeout_s")
        check_range(self, where, 0, DAY_S, "stall_s", "probe_s", "keep_alive_s", "read_on_s")
        check_range(self, where, 0, 10**9, "gpu_hour_usd", "gpu_tokens_in_per_s", "gpu_tokens_out_per_s")
        if self.probe_path is not None and not self.probe_path.startswith("/"):
            raise OptionError(f"{where} probe_path must begin with /")
        if self.cache_salt and self.kind == "anthropic":
            raise OptionError(f"{where} cache_salt: kind anthropic does not know the field; leave it out")

    @property
    def takes_cache_salt(self) -> bool:
        return self.kind == "ridgeline" if self.cache_salt is None else self.cache_salt

    @property
    def reads_on_s(self) -> float:
        if self.read_on_s is not None:
            return self.read_on_s
        return 0.0 if self.kind == "ridgeline" else READ_ON_S


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """[retries]: what happens when an upstream does not answer."""

    retries: int = option(2, "times that one target is asked again after a network error, a 5xx or a 429")
    backoff_ms: float = option(500.0, "wait before the first retry; each further one waits twice as long")
    backoff_max_ms: float = option(5000.0, "longest such wait; each is drawn from 0.8 to 1.2 of it")
    retry_after_max_s: float = option(
        10.0, "longest Retry-After that is waited for; with a longer one the next target is asked"
    )
    budget_ratio: float = option(0.1, "retries and hedges, as a part of all requests")
    budget_per_s: float = option(1.0, "retries and hedges a second beside that part, however few requests")
    breaker_failures: int = option(5, "failures within breaker_window_s that open an upstream's breaker …")
    breaker_ratio: float = option(0.5, "… if they are at least this part of what was asked")
    breaker_window_s: float = option(30.0, "how long a failure counts")
    breaker_open_s: float = option(
        5.0, "an open breaker lets one request try after so long; doubled if that fails"
    )
    breaker_open_max_s: float = option(60.0, "longest time between two such tries")
    credential_dead_s: float = option(
        300.0, "a key that was refused (401, 402, 403) is tried again after so long"
    )

    @property
    def breaker_limits(self) -> BreakerLimits:
        return BreakerLimits(
            self.breaker_failures,
            self.breaker_ratio,
            self.breaker_window_s,
            self.breaker_open_s,
            self.breaker_open_max_s,
        )

    def __post_init__(self) -> None:
        check_range(self, "[retries]", 0, 10, "retries")
        check_range(self, "[retries]", 0, 1, "budget_ratio")
        check_range(self, "[retries]", 0.01, 1, "breaker_ratio")
        check_range(self, "[retries]", 1, 1_000_000, "breaker_failures")
        check_range(self, "[retries]", 0, 1_000_000, "budget_per_s")
        pauses = ("breaker_window_s", "breaker_open_s", "breaker_open_max_s", "credential_dead_s")
        check_range(self, "[retries]", 0.001, DAY_S, *pauses)
        check_range(self, "[retries]", 0, 1000 * DAY_S, "backoff_ms", "backoff_max_ms")
        check_range(self, "[retries]", 0, DAY_S, "retry_after_max_s")
