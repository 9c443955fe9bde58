"""Settings of upstreams: the [[upstreams]] tables, and [retries] for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.options import OptionError, check_range, option
from ridgeline.proxy.breaker import BreakerLimits

Kind = Literal["ridgeline", "fleet", "openai", "anthropic"]
OURS = ("ridgeline", "fleet")  # kinds whose answers come from ridgeline servers
DAY_S = 86_400
READ_ON_S = 10.0


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """One [[upstreams]] table: a server, how to reach it, and with which keys."""

    name: str = option("", "its name in targets of [[models]]")
    kind: Kind = option(
        "openai",
        "dialect and credentials: Bearer, or for anthropic x-api-key. fleet: replicas of `ridgeline fleet`",
    )
    url: str = option(
        "", "http://host:port, https://host or unix:/path; may end in /v1. Kind fleet: of the control API"
    )
    control: Path | None = option(
        None,
        "kind fleet: the controller's socket, controller.sock in the fleet's state_dir; or set url and a key",
    )
    progress_s: float = option(
        10.0, "kind fleet: eject a replica whose steps stand still for this many seconds while requests run"
    )
    migrations: int = option(3, "kind fleet: most replicas to which one request moves after its first fails")
    region: str = option(
        "",
        "region in which it computes, for the residency of teams and keys; not for kind fleet: its replicas "
        "have their own",
    )
    has_responses: bool = option(True, "false: the upstream has no /v1/responses; translate to chat")
    cache_salt: bool | None = option(
        None,
        "send cache_salt, one per tenant, so that tenants share no cached prefixes; default: true for kinds "
        "ridgeline and fleet, else false. vLLM and SGLang support the field: set true",
    )
    key_env: tuple[str, ...] = option((), "environment variables that each hold a key")
    key_file: Path | None = option(None, "file with one key per line; lines that begin with # are ignored")
    ca_file: Path | None = option(None, "PEM file of the CA certificates to trust; default: the system's")
    anthropic_version: str = option(
        "2023-06-01", "anthropic-version to send if the client sends none; kind anthropic only"
    )
    max_concurrent: int = option(256, "most concurrent requests from one worker")
    max_waiting: int = option(1024, "most queued requests in one worker; further ones get 429")
    queue_timeout_s: float = option(
        30.0, "longest time in the queue in seconds; then the next target, or 429"
    )
    connect_timeout_s: float = option(5.0, "time limit in seconds for connecting, TLS included")
    first_byte_timeout_s: float = option(
        300.0, "time limit in seconds from a request to the first byte of its answer"
    )
    idle_timeout_s: float = option(120.0, "longest time in seconds without a byte within an answer")
    keep_alive_s: float | None = option(
        None,
        "close an unused connection after this many seconds; keep it below the upstream's own keep-alive "
        "timeout. Default: 4, with https 30",
    )
    read_on_s: float | None = option(
        None,
        "read an answer on for its usage this many seconds after its client left, because the upstream bills "
        "it anyway; 0: close the connection at once. Default: 0 for kinds ridgeline and fleet, else 10",
    )
    stall_s: float = option(
        60.0, "treat the upstream as down if none of its streams gets a byte for this many seconds; 0: never"
    )
    probe_s: float | None = option(
        None, "seconds between health probes; 0: no probes. Default: 5 for kind ridgeline, else 0"
    )
    probe_path: str | None = option(
        None,
        "path of a health probe; default: /ready for kind ridgeline, /fleet/status for fleet, else "
        "/v1/models",
    )
    probe_timeout_s: float = option(2.0, "time limit in seconds for a health probe")
    gpu_hour_usd: float = option(0.0, "US dollars per hour of its hardware; prices models without a price")
    gpu_tokens_in_per_s: float = option(0.0, "input tokens per second of the hardware at full load")
    gpu_tokens_out_per_s: float = option(0.0, "output tokens per second of the hardware at full load")
    provider: str = option("", "its name in genai-prices, such as groq; empty: by kind and URL")

    def __post_init__(self) -> None:
        where = f"[[upstreams]] {self.name or '(no name)'}:"
        check_range(self, where, 1, 1_000_000, "max_concurrent", "max_waiting")
        waits = ("queue_timeout_s", "connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s")
        check_range(self, where, 0.001, DAY_S, *waits, "probe_timeout_s")
        check_range(self, where, 0, DAY_S, "stall_s", "probe_s", "keep_alive_s", "read_on_s")
        check_range(self, where, 0, 10**9, "gpu_hour_usd", "gpu_tokens_in_per_s", "gpu_tokens_out_per_s")
        check_range(self, where, 0.1, DAY_S, "progress_s")
        check_range(self, where, 0, 100, "migrations")
        self._check_control(where)
        if self.region and self.kind == "fleet":
            raise OptionError(f"{where} region: the replicas of a fleet have their own; set [gateway] region")
        if self.probe_path is not None and not self.probe_path.startswith("/"):
            raise OptionError(f"{where} probe_path must begin with /")
        if self.cache_salt and self.kind == "anthropic":
            raise OptionError(f"{where} cache_salt: kind anthropic does not know the field; leave it out")

    def _check_control(self, where: str) -> None:
        if self.kind != "fleet":
            if self.control is not None:
                raise OptionError(f'{where} control is for kind = "fleet" only')
        elif (self.control is None) == (not self.url):
            raise OptionError(
                f"{where} kind fleet needs the address of its controller: set control to the socket's path, "
                "or url to its control API and key_file to its token"
            )

    @property
    def is_ours(self) -> bool:
        """Whether ridgeline servers answer: they speak every dialect and report a request's usage."""
        return self.kind in OURS

    @property
    def address(self) -> str:
        """Of the server, or of a fleet's controller."""
        return self.url if self.control is None else f"unix:{self.control.expanduser().absolute()}"

    @property
    def takes_cache_salt(self) -> bool:
        return self.is_ours if self.cache_salt is None else self.cache_salt

    @property
    def reads_on_s(self) -> float:
        if self.read_on_s is not None:
            return self.read_on_s
        return 0.0 if self.is_ours else READ_ON_S


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """[retries]: retries, hedges and breakers for all upstreams."""

    retries: int = option(2, "most retries at one target after a network error, a 5xx or a 429")
    backoff_ms: float = option(500.0, "seconds before the first retry; doubled for each further one")
    backoff_max_ms: float = option(
        5000.0, "longest wait in seconds before a retry; each wait varies by a random factor of 0.8 to 1.2"
    )
    retry_after_max_s: float = option(
        10.0, "longest Retry-After in seconds to wait for; beyond it the next target is tried"
    )
    budget_ratio: float = option(0.1, "most retries and hedges, as a share of all requests")
    budget_per_s: float = option(1.0, "retries and hedges per second that are always allowed")
    breaker_failures: int = option(5, "failures within breaker_window_s that open an upstream's breaker, …")
    breaker_ratio: float = option(0.5, "… if they are at least this share of its requests")
    breaker_window_s: float = option(30.0, "seconds for which a failure counts")
    breaker_open_s: float = option(
        5.0, "seconds until an open breaker allows one trial request; doubled if it fails"
    )
    breaker_open_max_s: float = option(60.0, "longest time in seconds between trial requests")
    credential_dead_s: float = option(300.0, "seconds until a refused key (401, 402, 403) is tried again")

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
