"""CacheConfig: the [cache] section of gateway.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import check_range, option


@dataclass(frozen=True)
class CacheConfig:
    header: Literal["off", "exact", "semantic"] = option(
        "exact", "The most a request may enable with x-ridgeline-cache if its key allows less"
    )
    sampled: bool = option(
        False, "Store sampled answers (temperature not 0) even without the header x-ridgeline-cache"
    )
    place: Literal["memory", "redis"] = option(
        "memory", "Where exact answers are stored: in each worker's memory, or also in [redis], shared by all"
    )
    ttl_s: float = option(3600.0, "Lifetime of a stored answer in seconds")
    max_bytes: int = option(
        128 << 20, "Bytes of exact answers in one worker's memory; the least recently used is evicted"
    )
    max_answer_bytes: int = option(1 << 20, "Largest answer in bytes that is stored")
    semantic_threshold: float = option(
        0.97, "Least cosine similarity of a semantic hit; a model's own threshold takes precedence"
    )
    semantic_strict: bool = option(
        True,
        "Require equal numbers, negations, names and other decisive words for a semantic hit",
    )
    semantic_text_bytes: int = option(
        512, "Longest question in bytes for semantic lookup: an embedding model reads only a text's beginning"
    )
    semantic_entries: int = option(1000, "Questions stored per set of parameters; the oldest is evicted")
    semantic_max_bytes: int = option(64 << 20, "Bytes of vectors and answers in one worker's memory")

    def __post_init__(self) -> None:
        check_range(self, "[cache]", 0.001, 10 * 365 * 86_400, "ttl_s")
        check_range(self, "[cache]", 0.01, 1, "semantic_threshold")
        check_range(self, "[cache]", 1, 1 << 40, "max_bytes", "semantic_max_bytes")
        check_range(self, "[cache]", 1, 1 << 30, "max_answer_bytes", "semantic_text_bytes")
        check_range(self, "[cache]", 1, 10_000_000, "semantic_entries")
