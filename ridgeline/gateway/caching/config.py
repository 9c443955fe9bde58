"""CacheConfig: the [cache] section of gateway.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import check_range, option


@dataclass(frozen=True)
class CacheConfig:
    header: Literal["off", "exact", "semantic"] = option(
        "exact", "The most a request may ask for by x-ridgeline-cache whose key allows less"
    )
    sampled: bool = option(
        False, "Keep answers drawn at random too (temperature not 0) without being asked by the header"
    )
    place: Literal["memory", "redis"] = option(
        "memory", "Where exact answers are kept: in each worker, or also in [redis], shared by all"
    )
    ttl_s: float = option(3600.0, "How long an answer may be used")
    max_bytes: int = option(128 << 20, "Bytes of exact answers in one worker's memory; the oldest used goes")
    max_answer_bytes: int = option(1 << 20, "A larger answer is not kept")
    semantic_threshold: float = option(
        0.97, "Cosine similarity from which a question counts as asked before; a model's own goes first"
    )
    semantic_strict: bool = option(
        True,
        "Numbers, negations, names and other telling words must be the same too, however similar the rest",
    )
    semantic_text_bytes: int = option(
        512, "Longer questions are not looked up by meaning: an embedding model reads only a text's beginning"
    )
    semantic_entries: int = option(1000, "Questions kept under one set of parameters; the oldest goes")
    semantic_max_bytes: int = option(64 << 20, "Bytes of vectors and answers in one worker's memory")

    def __post_init__(self) -> None:
        check_range(self, "[cache]", 0.001, 10 * 365 * 86_400, "ttl_s")
        check_range(self, "[cache]", 0.01, 1, "semantic_threshold")
        check_range(self, "[cache]", 1, 1 << 40, "max_bytes", "semantic_max_bytes")
        check_range(self, "[cache]", 1, 1 << 30, "max_answer_bytes", "semantic_text_bytes")
        check_range(self, "[cache]", 1, 10_000_000, "semantic_entries")
