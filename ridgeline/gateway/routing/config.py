"""What an operator says of routing: [[routes]], [[rules]] and [embeddings] of gateway.toml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.options import check_range, option


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """One [[routes]] table: a name that clients ask for as a model, and the models it stands for."""

    name: str = option("auto", "what clients send as `model`")
    models: tuple[str, ...] = option((), "public names of models, from the cheapest to the strongest")
    default: str | None = option(
        None, "model when nothing decides, or no vector is to be had; default: the strongest"
    )
    artefact: Path | None = option(
        None, "file that `ridgeline gateway routes fit` wrote; none: rules and default alone"
    )
    threshold: float | None = option(
        None, "gain in quality that a dearer model must promise, instead of the artefact's"
    )
    cascade: bool = option(
        False, "ask the cheaper model first, and the strongest when its answer is not confident"
    )
    cascade_threshold: float | None = option(
        None, "confidence (0 to 1) below which the cascade escalates, instead of the artefact's or 0.7"
    )
    sticky_s: float = option(
        600.0, "seconds after its last request for which a conversation keeps its model; 0: never"
    )
    shadow: bool = option(False, "decide and write it to the ledger, but send everything to the default")

    def __post_init__(self) -> None:
        where = f"[[routes]] {self.name}:"
        check_range(self, where, 0, 1, "cascade_threshold")
        check_range(self, where, -1, 1000, "threshold")
        check_range(self, where, 0, 365 * 86_400, "sticky_s")


@dataclass(frozen=True, slots=True)
class RuleConfig:
    """One [[rules]] table. All conditions that are given must hold; of a list, any one. First match wins."""

    name: str = option("", "shown in the ledger; default: its number")
    route: str = option("", "for this route alone; empty: for all of them")
    model: str = option("", "where a request that matches goes: one of the route's models")
    always: bool = option(False, "also for conversations that have a model already")
    tokens_min: int | None = option(None, "at least so many prompt tokens (estimated)")
    tokens_max: int | None = option(None, "at most so many prompt tokens (estimated)")
    max_tokens_min: int | None = option(None, "asks for an answer of at least so many tokens")
    max_tokens_max: int | None = option(None, "asks for an answer of at most so many tokens")
    tools: bool | None = option(None, "has tools, or has none")
    images: bool | None = option(None, "has images, or has none")
    languages: tuple[str, ...] = option((), "language of the last user turn: en, de, zh, …")
    tenants: tuple[str, ...] = option((), "teams, or keys without one")
    keys: tuple[str, ...] = option((), "ids of keys")
    endpoints: tuple[str, ...] = option((), "chat, completions, responses, messages, …")
    keywords: tuple[str, ...] = option((), "words or phrases of the last user turn, in any case")
    pattern: str | None = option(None, "regular expression that the last user turn holds")

    def __post_init__(self) -> None:
        where = f"[[rules]] {self.name or self.model}:"
        check_range(self, where, 0, 10**9, "tokens_min", "tokens_max", "max_tokens_min", "max_tokens_max")


@dataclass(frozen=True, slots=True)
class EmbeddingsConfig:
    """[embeddings]: which upstream turns texts into vectors, for routes and the semantic cache."""

    upstream: str = option("", "name of an upstream with /v1/embeddings; empty: no vectors")
    model: str = option("all-minilm-l6-v2", "the model's name there")
    timeout_ms: float = option(250.0, "longest wait for a vector; then a route takes its default")
    cache_entries: int = option(4096, "vectors of recent texts that are kept (1.5 kB each)")
    max_concurrent: int = option(64, "requests for vectors under way at once; more are not sent")
    truncate: bool = option(
        True, "send `truncate_prompt_tokens` (ridgeline, vLLM); off for servers that refuse it"
    )

    def __post_init__(self) -> None:
        check_range(self, "[embeddings]", 1, 600_000, "timeout_ms")
        check_range(self, "[embeddings]", 0, 10_000_000, "cache_entries")
        check_range(self, "[embeddings]", 1, 100_000, "max_concurrent")
