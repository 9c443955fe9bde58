"""ObserveConfig: the [observe] section of gateway.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import OptionError, check_range, option


@dataclass(frozen=True)
class ObserveConfig:
    access_log: str = option("stderr", "Where a line for each request goes: stderr, off, or a file's path")
    access_log_format: Literal["auto", "json", "text"] = option(
        "auto", "Of the access log's lines; auto: text on a terminal, JSON elsewhere"
    )
    log_bodies: bool = option(
        False, "Add requests to the access log, as the guard let them pass; without a guard, as they came"
    )
    log_body_bytes: int = option(4096, "At most so much of a body stands in the access log")
    key_label: bool = option(False, "Count requests, tokens and cost by key id too")
    max_series: int = option(5000, "Sets of labels kept apart in the metrics; more are counted as `other`")
    otlp_endpoint: str = option(
        "", "Where traces go, by OTLP over HTTP, e.g. http://127.0.0.1:4318; empty: no traces"
    )
    trace_sample: float = option(
        0.01, "Share of requests traced that bring no traceparent of their own, 0 to 1"
    )
    trace_queue: int = option(2048, "Traced requests that may wait for export; more are dropped and counted")
    trust_traceparent: bool = option(
        True, "Continue a client's trace and its decision to sample; off: every trace begins here"
    )

    def __post_init__(self) -> None:
        check_range(self, "[observe]", 0, 1, "trace_sample")
        check_range(self, "[observe]", 1, 1_000_000, "max_series", "trace_queue")
        check_range(self, "[observe]", 1, 1 << 26, "log_body_bytes")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise OptionError(
                f"[observe] otlp_endpoint must be an http:// or https:// URL, got {self.otlp_endpoint!r}"
            )
