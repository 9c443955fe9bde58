"""gateway.toml: reads all sections and checks them against each other.

Each part declares its own section; here they become one immutable GatewaySettings, which the supervisor
passes to its workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ridgeline.gateway.accounting.config import LedgerConfig, PricesConfig
from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.caching.config import CacheConfig
from ridgeline.gateway.dialects.config import DialectConfig
from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.gateway.observe.config import ObserveConfig
from ridgeline.gateway.routing.config import EmbeddingsConfig, RouteConfig, RuleConfig
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.keys import Limits
from ridgeline.gateway.upstreams.config import RetryConfig, UpstreamConfig
from ridgeline.gateway.upstreams.outgoing import Target
from ridgeline.options import OptionError, build, check_range, check_values, option, read_file
from ridgeline.running import state_home

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_LIMIT = 10**12
MOST_PRICE = 10**6  # US dollars per million tokens


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One [[models]] table: a public name, and its targets."""

    name: str = option("", "public name; a trailing * stands for any ending")
    targets: tuple[str, ...] = option(
        (), "upstream/model, or upstream/* to keep the requested name; append *3 for weight 3"
    )
    strategy: Literal["ordered", "weighted"] = option(
        "ordered", "ordered: try the next target only after a failure; weighted: draw the first by weight"
    )
    hedge_after_ms: float | None = option(
        None, "send the request to a second target after this many milliseconds without an answer"
    )
    requests_per_minute: int | None = option(None, "limit for all keys together")
    tokens_per_minute: int | None = option(None, "limit for all keys together")
    concurrent: int | None = option(None, "most concurrent requests of all keys together")
    price_in: float | None = option(None, "US dollars per million input tokens; default: genai-prices")
    price_cached: float | None = option(
        None, "US dollars per million input tokens read from a cache; default: price_in"
    )
    price_cache_write: float | None = option(
        None, "US dollars per million input tokens written to a cache; default: price_in"
    )
    price_out: float | None = option(None, "US dollars per million output tokens")
    price_minute: float | None = option(
        None, "US dollars per minute of audio that is transcribed or translated; default: genai-prices"
    )
    price_characters: float | None = option(
        None, "US dollars per million characters of text turned into speech; default: genai-prices"
    )
    shared_prefixes: bool = option(
        False,
        "share cached prefixes between tenants; a tenant can then detect another tenant's prompts",
    )
    tokenizer: Path | None = option(
        None,
        "tokenizer.json of the model, or its folder; counts tokens that an upstream does not report. "
        "Default: a formula over bytes",
    )
    semantic_threshold: float | None = option(
        None, "least similarity of a semantic cache hit; default: [cache]"
    )

    def __post_init__(self) -> None:
        where = f"[[models]] {self.name or '(no name)'}:"
        check_range(self, where, 0, MOST_LIMIT, "requests_per_minute", "tokens_per_minute", "concurrent")
        prices = ("price_in", "price_cached", "price_cache_write", "price_out")
        check_range(self, where, 0, MOST_PRICE, *prices, "price_minute", "price_characters")
        check_range(self, where, 1, 600_000, "hedge_after_ms")
        check_range(self, where, 0.01, 1, "semantic_threshold")

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrent)


SECTIONS: Mapping[str, type] = {
    "gateway": GatewayConfig,
    "admin": AdminConfig,
    "store": StoreConfig,
    "redis": RedisConfig,
    "retries": RetryConfig,
    "dialects": DialectConfig,
    "embeddings": EmbeddingsConfig,
    "cache": CacheConfig,
    "ledger": LedgerConfig,
    "prices": PricesConfig,
    "observe": ObserveConfig,
}
LISTS: Mapping[str, type] = {
    "upstreams": UpstreamConfig,
    "models": ModelConfig,
    "routes": RouteConfig,
    "rules": RuleConfig,
    "guards": GuardConfig,
}


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All settings of the file with defaults, checked against each other."""

    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    retries: RetryConfig = field(default_factory=RetryConfig)
    dialects: DialectConfig = field(default_factory=DialectConfig)
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    prices: PricesConfig = field(default_factory=PricesConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    upstreams: tuple[UpstreamConfig, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    routes: tuple[RouteConfig, ...] = ()
    rules: tuple[RuleConfig, ...] = ()
    guards: tuple[GuardConfig, ...] = ()

    @property
    def state_dir(self) -> Path:
        chosen = self.gateway.state_dir
        return state_home() / "gateway" if chosen is None else chosen.expanduser()

    @property
    def objects_upstream(self) -> str | None:
        if self.gateway.objects_upstream is not None:
            return self.gateway.objects_upstream
        return next((one.name for one in self.upstreams if one.kind in ("ridgeline", "openai")), None)


def read_settings(path: Path, flags: Mapping[str, Any] | None = None) -> GatewaySettings:
    """The file's settings; flags override [gateway]. OptionError says what to change."""
    values = read_file(path, SECTIONS, LISTS)
    values["gateway"] = {**values.get("gateway", {}), **(flags or {})}
    return checked(make_settings(values))


def make_settings(values: Mapping[str, Any]) -> GatewaySettings:
    """From plain values, as in a file or a worker's input."""
    sections: dict[str, Any] = {name: build(kind, values.get(name, {})) for name, kind in SECTIONS.items()}
    lists: dict[str, Any] = {
        name: tuple(build(kind, v) for v in values.get(name, ())) for name, kind in LISTS.items()
    }
    return GatewaySettings(**sections, **lists)


def to_json(settings: GatewaySettings) -> bytes:
    """One line, for a worker's standard input."""
    values = {
        name: [_set(asdict(one)) for one in value] if isinstance(value, tuple) else _set(asdict(value))
        for name, value in ((f.name, getattr(settings, f.name)) for f in fields(GatewaySettings))
    }
    return json.dumps(values, default=str).encode()


def from_json(line: bytes) -> GatewaySettings:
    values = json.loads(line)
    known = {name: check_values(kind, values[name]) for name, kind in SECTIONS.items()}
    lists = {name: [check_values(kind, one) for one in values[name]] for name, kind in LISTS.items()}
    return make_settings({**known, **lists})


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def embedded(url: str, flags: Mapping[str, Any] | None = None) -> GatewaySettings:
    """Settings without a file: every model of one local server, for every process on this machine."""
    return checked(
        make_settings(
            {
                "gateway": {"require_keys": False, **(flags or {})},
                "upstreams": [{"name": "local", "kind": "ridgeline", "url": url}],
                "models": [{"name": "*", "targets": ("local/*",)}],
            }
        )
    )


def checked(settings: GatewaySettings) -> GatewaySettings:
    """The settings, or an OptionError that names the conflict."""
    gateway = settings.gateway
    if gateway.workers > 1 and not settings.redis.url:
        raise OptionError(
            "[gateway] workers: several processes need Redis to count limits together: set [redis] url, "
            "or workers = 1"
        )
    if settings.cache.place == "redis" and not settings.redis.url:
        raise OptionError('[cache] place = "redis" needs [redis] url')
    if not gateway.require_keys and gateway.host not in LOOPBACK:
        raise OptionError(
            f"[gateway] require_keys = false would open {gateway.host} to every client: listen on 127.0.0.1, "
            "or require keys"
        )
    if not settings.upstreams:
        raise OptionError("no [[upstreams]]: add at least one server to send requests to")
    if not settings.models:
        raise OptionError(
            "no [[models]]: add at least one model, for example name = '*', targets = ['NAME/*']"
        )
    upstreams = _unique("upstreams", [one.name for one in settings.upstreams])
    public = _unique("models", [one.name for one in settings.models]) | _unique(
        "routes", [one.name for one in settings.routes]
    )
    for model in settings.models:
        _check_tokenizer(model)
        if model.hedge_after_ms is not None and settings.retries.retries == 0:
            raise OptionError(
                f"[[models]] {model.name}: hedge_after_ms sends a request to a second target while the "
                "first is busy, but [retries] retries = 0 allows one attempt: remove hedge_after_ms, or set "
                "retries to 1 or more"
            )
        for target in targets_of(model):
            if target.upstream not in upstreams:
                raise OptionError(
                    f"[[models]] {model.name}: no upstream is named {target.upstream!r}; "
                    f"known: {', '.join(sorted(upstreams))}"
                )
    if settings.objects_upstream is not None and settings.objects_upstream not in upstreams:
        raise OptionError(f"[gateway] objects_upstream: no upstream is named {settings.objects_upstream!r}")
    kinds = {one.name: one.kind for one in settings.upstreams}
    if settings.objects_upstream is not None and kinds[settings.objects_upstream] == "fleet":
        raise OptionError(
            f"[gateway] objects_upstream: {settings.objects_upstream} is a fleet, where a file would lie "
            "on one replica: name an upstream of kind ridgeline or openai"
        )
    if settings.embeddings.upstream and settings.embeddings.upstream not in upstreams:
        raise OptionError(f"[embeddings] upstream: no upstream is named {settings.embeddings.upstream!r}")
    _unique("guards", [one.name for one in settings.guards])
    for route in settings.routes:
        for name in route.models:
            if name not in public and not any(_matches(one.name, name) for one in settings.models):
                raise OptionError(f"[[routes]] {route.name}: no [[models]] is named {name!r}")
    return settings


def _check_tokenizer(model: ModelConfig) -> None:
    file = model.tokenizer
    if file is not None and not (file / "tokenizer.json" if file.is_dir() else file).is_file():
        raise OptionError(
            f"[[models]] {model.name}: tokenizer {file} is not a tokenizer.json or a folder with one"
        )


def targets_of(model: ModelConfig) -> tuple[Target, ...]:
    if not model.targets:
        raise OptionError(
            f"[[models]] {model.name or '(no name)'}: targets is empty: write ['upstream/model']"
        )
    return tuple(_target(model.name, text) for text in model.targets)


def _target(model: str, text: str) -> Target:
    upstream, slash, rest = text.partition("/")
    if not slash or not upstream or not rest:
        raise OptionError(f"[[models]] {model}: target {text!r} must be upstream/model")
    name, weight = rest, 1.0
    head, star, tail = rest.rpartition("*")
    if star and tail:
        try:
            name, weight = head, float(tail)
        except ValueError:
            raise OptionError(f"[[models]] {model}: {tail!r} in {text!r} is not a weight") from None
        if not 0 < weight < 1e6:
            raise OptionError(f"[[models]] {model}: the weight in {text!r} must be above 0")
    return Target(upstream, name, weight)


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _unique(section: str, names: list[str]) -> set[str]:
    for name in names:
        if not name:
            raise OptionError(f"[[{section}]]: a table has no name")
        if names.count(name) > 1:
            raise OptionError(f"[[{section}]]: two tables are named {name!r}")
    return set(names)
