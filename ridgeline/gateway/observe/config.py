"""ObserveConfig: the [observe] section of gateway.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import OptionError, check_range, option


@dataclass(frozen=True)
class ObserveConfig:
    access_log: str = option(
        "stderr", "Destination of the access log, one line per request: stderr, off, or a file's path"
    )
    access_log_format: Literal["auto", "json", "text"] = option(
        "auto", "Format of the access log; auto: text on a terminal, JSON elsewhere"
    )
    log_bodies: bool = option(
        False, "Add requests to the access log: after the guard, or unchanged without one"
    )
    log_body_bytes: int = option(4096, "Most bytes of a body in the access log")
    key_label: bool = option(False, "Also count requests, tokens and cost by key id")
    max_series: int = option(5000, "Most sets of labels in the metrics; further ones are counted as `other`")
    otlp_endpoint: str = option(
        "", "OTLP/HTTP endpoint for traces, e.g. http://127.0.0.1:4318; empty: no traces"
    )
    trace_sample: float = option(0.01, "Share of requests without a traceparent that are traced, 0 to 1")
    trace_queue: int = option(
        2048, "Most traced requests that wait for export; further ones are dropped and counted"
    )
    trust_traceparent: bool = option(
        True, "Continue a client's trace and its sampling decision; off: start every trace here"
    )

    def __post_init__(self) -> None:
        check_range(self, "[observe]", 0, 1, "trace_sample")
        check_range(self, "[observe]", 1, 1_000_000, "max_series", "trace_queue")
        check_range(self, "[observe]", 1, 1 << 26, "log_body_bytes")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise OptionError(
                f"[observe] otlp_endpoint must be an http:// or https:// URL, got {self.otlp_endpoint!r}"
            )
