"""Settings of routing: [[routes]], [[rules]] and [embeddings] of gateway.toml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.options import check_range, option


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """One [[routes]] table: a name that clients send as `model`, and the models to choose from."""

    name: str = option("auto", "what clients send as `model`")
    models: tuple[str, ...] = option((), "public names of models, from the cheapest to the strongest")
    default: str | None = option(
        None, "model if no rule or prediction applies, or embedding fails; default: the strongest"
    )
    artifact: Path | None = option(
        None, "file written by `ridgeline gateway routes fit`; without it only rules and default apply"
    )
    artefact: Path | None = option(None, "older spelling of artifact")
    threshold: float | None = option(
        None, "predicted gain in quality that a more expensive model needs; overrides the artifact's"
    )
    cascade: bool = option(
        False, "ask the cheaper model first, and the strongest when its answer is not confident"
    )
    cascade_threshold: float | None = option(
        None, "confidence (0 to 1) below which the cascade escalates; overrides the artifact's, or 0.7"
    )
    sticky_s: float = option(
        600.0, "keep a conversation's model for this many seconds after its last request; 0: never"
    )
    shadow: bool = option(False, "record decisions in the ledger, but send every request to the default")

    def __post_init__(self) -> None:
        where = f"[[routes]] {self.name}:"
        if self.artifact is None and self.artefact is not None:
            object.__setattr__(self, "artifact", self.artefact)
        check_range(self, where, 0, 1, "cascade_threshold")
        check_range(self, where, -1, 1000, "threshold")
        check_range(self, where, 0, 365 * 86_400, "sticky_s")


@dataclass(frozen=True, slots=True)
class RuleConfig:
    """One [[rules]] table. All given conditions must hold; of a list, any value. First match wins."""

    name: str = option("", "shown in the ledger; default: its number")
    route: str = option("", "the route it applies to; empty: all routes")
    model: str = option("", "model for matching requests: one of the route's models")
    always: bool = option(False, "also apply to conversations that already have a model")
    tokens_min: int | None = option(None, "least number of prompt tokens (estimated)")
    tokens_max: int | None = option(None, "greatest number of prompt tokens (estimated)")
    max_tokens_min: int | None = option(None, "least number of answer tokens that the request allows")
    max_tokens_max: int | None = option(None, "greatest number of answer tokens that the request allows")
    tools: bool | None = option(None, "true: requests with tools; false: without")
    images: bool | None = option(None, "true: requests with images; false: without")
    languages: tuple[str, ...] = option((), "language of the last user turn: en, de, zh, …")
    tenants: tuple[str, ...] = option((), "teams; for keys without a team, their ids")
    keys: tuple[str, ...] = option((), "ids of keys")
    endpoints: tuple[str, ...] = option((), "chat, completions, responses, messages, …")
    keywords: tuple[str, ...] = option((), "words or phrases in the last user turn; case is ignored")
    pattern: str | None = option(None, "regular expression to find in the last user turn")

    def __post_init__(self) -> None:
        where = f"[[rules]] {self.name or self.model}:"
        check_range(self, where, 0, 10**9, "tokens_min", "tokens_max", "max_tokens_min", "max_tokens_max")


@dataclass(frozen=True, slots=True)
class EmbeddingsConfig:
    """[embeddings]: the upstream that embeds texts for routes and the semantic cache."""

    upstream: str = option("", "name of an upstream with /v1/embeddings; empty: no vectors")
    model: str = option("all-minilm-l6-v2", "the model's name there")
    timeout_ms: float = option(250.0, "time limit for a vector; after it a route uses its default")
    cache_entries: int = option(4096, "cached vectors of recent texts (1.5 kB each)")
    max_concurrent: int = option(64, "most concurrent requests for vectors; further ones fail")
    truncate: bool = option(
        True, "send `truncate_prompt_tokens` (ridgeline, vLLM); off for servers that refuse it"
    )

    def __post_init__(self) -> None:
        check_range(self, "[embeddings]", 1, 600_000, "timeout_ms")
        check_range(self, "[embeddings]", 0, 10_000_000, "cache_entries")
        check_range(self, "[embeddings]", 1, 100_000, "max_concurrent")
