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
    flush_ms: int = option(200, "How long rows gather before they are moved to the store, in milliseconds")
    segment_bytes: int = option(4 << 20, "A write-ahead file is closed and a new one begun at this size")
    max_bytes: int = option(
        4 << 30, "Most bytes of write-ahead files per worker, while the store cannot be reached"
    )
    when_full: Literal["refuse", "serve"] = option(
        "refuse",
        "What happens when the write-ahead files cannot grow (max_bytes, disk full): refuse new requests "
        "with 503, or serve them and keep their rows in memory (memory_rows), the rest counted as dropped",
    )
    memory_rows: int = option(10_000, "Most rows kept in memory while they can be written to no file")
    takeover_s: float = option(5.0, "How often files of dead workers are looked for, in seconds")
    ask_lost_s: float = option(
        60.0, "How long an upstream is asked what a request used whose gateway died, in seconds"
    )
    stop_s: float = option(
        5.0, "How long a stopping worker moves its rows before it leaves them in its files"
    )
    retry_s: float = option(5.0, "Longest pause between two tries to reach a store that is away, in seconds")
    store_timeout_s: float = option(10.0, "Longest wait for one answer of the store, in seconds")
    keep_days: int = option(
        0, "Rows older than this are removed from the store; 0 keeps all of them, monthly budgets need 32"
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
        0.0, "What an hour of a replica of ours costs, in US dollars, where its upstream says none of its own"
    )
    gpu_tokens_in_per_s: float = option(
        0.0, "Prompt tokens that a full replica reads per second, as measured; its upstream may say its own"
    )
    gpu_tokens_out_per_s: float = option(
        0.0, "Tokens that a full replica writes per second, as measured; its upstream may say its own"
    )

    def __post_init__(self) -> None:
        check_range(self, "[prices]", 0, 10**9, "gpu_hour_usd", "gpu_tokens_in_per_s", "gpu_tokens_out_per_s")
