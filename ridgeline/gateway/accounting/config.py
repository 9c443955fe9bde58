"""Settings of the ledger and of prices: the sections [ledger] and [prices] of gateway.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import OptionError, check_range, option


@dataclass(frozen=True)
class LedgerConfig:
    fsync: Literal["off", "interval", "always"] = option(
        "off",
        "When write-ahead files are forced to the disk: off (a crash of the gateway loses nothing, one of "
        "the machine may lose seconds), interval (at every flush), always (with every row)",
    )
    flush_ms: int = option(200, "Milliseconds between moves of rows to the store")
    segment_bytes: int = option(4 << 20, "Size in bytes at which a new write-ahead file is started")
    max_bytes: int = option(
        4 << 30, "Most bytes of write-ahead files per worker, while the store is unreachable"
    )
    when_full: Literal["refuse", "serve"] = option(
        "refuse",
        "If the write-ahead files cannot grow (max_bytes, disk full): refuse new requests with 503, or "
        "serve them and keep their rows in memory (memory_rows); further rows are counted as dropped",
    )
    memory_rows: int = option(10_000, "Most rows in memory while they cannot be written to a file")
    takeover_s: float = option(5.0, "Seconds between searches for files of dead workers")
    ask_lost_s: float = option(
        60.0, "Seconds for which an upstream is asked for the usage of a request whose gateway died"
    )
    stop_s: float = option(5.0, "Seconds for a stopping worker to move its rows; the rest stays in its files")
    retry_s: float = option(5.0, "Longest pause in seconds between attempts to reach the store")
    store_timeout_s: float = option(10.0, "Time limit in seconds for one answer of the store")
    keep_days: int = option(
        0, "Remove rows older than this many days from the store; 0 keeps all; monthly budgets need 32"
    )

    def __post_init__(self) -> None:
        for name, least in (
            ("flush_ms", 1),
            ("segment_bytes", 4096),
            ("max_bytes", self.segment_bytes),
            ("memory_rows", 0),
            ("takeover_s", 0.01),
            ("ask_lost_s", 0),
            ("stop_s", 0),
            ("retry_s", 0.01),
            ("store_timeout_s", 0.01),
            ("keep_days", 0),
        ):
            value = getattr(self, name)
            if not least <= value < 1e15:
                raise OptionError(f"[ledger] {name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class PricesConfig:
    table: bool = option(True, "Use genai-prices' table (as installed, never fetched) for hosted models")
    gpu_hour_usd: float = option(
        0.0, "US dollars per hour of a self-hosted replica, for upstreams without gpu_hour_usd"
    )
    gpu_tokens_in_per_s: float = option(
        0.0, "Prompt tokens per second of a replica at full load, as measured; an upstream may override it"
    )
    gpu_tokens_out_per_s: float = option(
        0.0, "Output tokens per second of a replica at full load, as measured; an upstream may override it"
    )

    def __post_init__(self) -> None:
        check_range(self, "[prices]", 0, 10**9, "gpu_hour_usd", "gpu_tokens_in_per_s", "gpu_tokens_out_per_s")
