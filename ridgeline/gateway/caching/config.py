"""CacheConfig: the [cache] section of gateway.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import OptionError, option


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
        if not self.ttl_s > 0:
            raise OptionError(f"ttl_s must be above 0, got {self.ttl_s}")
        if not 0 < self.semantic_threshold <= 1:
            raise OptionError(
                f"semantic_threshold must be above 0 and at most 1, got {self.semantic_threshold}"
            )
        for name in (
            "max_bytes",
            "max_answer_bytes",
            "semantic_text_bytes",
            "semantic_entries",
            "semantic_max_bytes",
        ):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")
