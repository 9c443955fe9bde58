"""Prices: the cost of a request, in whole picodollars per token, so that sums are exact.

In this order: the price set for the model in gateway.toml; genai-prices' table, as it is installed, by the
upstream's provider and the model's name there; for self-hosted models the share of a GPU's hour that their
tokens take. Called once per request by the pipeline; nothing is ever fetched.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ridgeline.gateway.accounting.config import PricesConfig
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.upstreams.config import OURS
from ridgeline.options import OptionError

if TYPE_CHECKING:  # an extra of the gateway
    from genai_prices.types import Provider, TieredPrices

PUSD_PER_USD = 10**12
_MOST_CACHED = 4096  # clients may use any model name if a target is upstream/*
_TABLE_HOLDS_S = 60.0  # some providers charge by the hour of the day
# US dollars by the names that genai-prices has for units
PricesByUnit: TypeAlias = "dict[str, Decimal | TieredPrices | None]"


class PricedModel(Protocol):
    """As in [[models]]: US dollars per million tokens."""

    @property
    def name(self) -> str: ...
    @property
    def price_in(self) -> float | None: ...
    @property
    def price_cached(self) -> float | None: ...
    @property
    def price_cache_write(self) -> float | None: ...
    @property
    def price_out(self) -> float | None: ...
    @property
    def price_minute(self) -> float | None: ...
    @property
    def price_characters(self) -> float | None: ...


class PricedUpstream(Protocol):
    """As in [[upstreams]]."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def gpu_hour_usd(self) -> float: ...
    @property
    def gpu_tokens_in_per_s(self) -> float: ...
    @property
    def gpu_tokens_out_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Picodollars per token, per minute of audio and per character of speech.

    above: others, that hold for all tokens of a request with a longer prompt. audio_in, audio_out: of tokens
    of sound, where they differ from those of text.
    """

    fresh: int = 0
    cached: int = 0
    cache_write: int = 0
    out: int = 0
    source: str = "none"  # config, genai-prices, gpu-hours
    above: tuple[tuple[int, TokenPrices], ...] = ()  # (tokens of the prompt, prices), rising
    audio_in: int | None = None
    audio_out: int | None = None
    minute: int = 0
    character: int = 0

    def cost(self, usage: Usage) -> int:
        prices = self
        for start, higher in self.above:
            if usage.tokens_in > start:
                prices = higher
        audio_in = usage.audio_in if self.audio_in is not None else 0
        audio_out = usage.audio_out if self.audio_out is not None else 0
        fresh = usage.tokens_in - usage.tokens_cached - usage.tokens_cache_write - audio_in
        return (
            max(fresh, 0) * prices.fresh
            + usage.tokens_cached * prices.cached
            + usage.tokens_cache_write * prices.cache_write
            + (usage.tokens_out - audio_out) * prices.out
            + audio_in * (self.audio_in or 0)
            + audio_out * (self.audio_out or 0)
            + usage.audio_ms * self.minute // 60_000
            + usage.characters * self.character
        )


class Prices:
    """Made at start: reads the table then, if an upstream is a hosted one."""

    def __init__(
        self,
        models: Sequence[PricedModel],
        upstreams: Sequence[PricedUpstream],
        config: PricesConfig,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._set: dict[str, TokenPrices] = {}
        self._patterns: list[tuple[str, TokenPrices | None]] = []
        for model in models:
            prices = _set_prices(model)
            if model.name.endswith("*"):
                self._patterns.append((model.name[:-1], prices))
            elif prices is not None:
                self._set[model.name] = prices
        self._named = {model.name for model in models}
        self._patterns.sort(key=lambda pair: -len(pair[0]))
        self._by_gpu = {one.name: prices for one in upstreams if (prices := _gpu_prices(one, config))}
        self._providers = {one.name: found for one in upstreams if (found := _provider(one, config))}
        self._cached: dict[tuple[str, str, str], tuple[TokenPrices, float]] = {}

    def cost(self, model: str, upstream: str, upstream_model: str, usage: Usage) -> tuple[int, str]:
        """Picodollars, and the source of the price: config, genai-prices, gpu-hours or none."""
        prices = self.of(model, upstream, upstream_model)
        return prices.cost(usage), prices.source

    def of(self, model: str, upstream: str, upstream_model: str) -> TokenPrices:
        """The prices themselves, for estimates ahead of a request."""
        cached = self._cached.get((model, upstream, upstream_model))
        if cached is None or cached[1] < self._now():
            return self._find(model, upstream, upstream_model)
        return cached[0]

    def _find(self, model: str, upstream: str, upstream_model: str) -> TokenPrices:
        prices = (
            self._set_for(model)
            or _table_prices(self._providers.get(upstream), upstream_model)
            or self._by_gpu.get(upstream)
            or TokenPrices()
        )
        if len(self._cached) >= _MOST_CACHED:
            self._cached.clear()
        self._cached[model, upstream, upstream_model] = (prices, self._now() + _TABLE_HOLDS_S)
        return prices

    def _set_for(self, model: str) -> TokenPrices | None:
        if model in self._named:
            return self._set.get(model)
        for prefix, prices in self._patterns:
            if model.startswith(prefix):
                return prices
        return None


# ---- set in gateway.toml ----


def _set_prices(model: PricedModel) -> TokenPrices | None:
    given = (
        *(model.price_in, model.price_cached, model.price_cache_write, model.price_out),
        *(model.price_minute, model.price_characters),
    )
    if all(price is None for price in given):
        return None
    fresh = _per_token(model.price_in or 0.0)
    return TokenPrices(
        fresh=fresh,
        cached=fresh if model.price_cached is None else _per_token(model.price_cached),
        cache_write=fresh if model.price_cache_write is None else _per_token(model.price_cache_write),
        out=_per_token(model.price_out or 0.0),
        source="config",
        minute=_whole(Decimal(str(model.price_minute or 0.0)) * PUSD_PER_USD),
        character=_per_token(model.price_characters or 0.0),
    )


def _per_token(usd_per_million: float | Decimal) -> int:
    """From the decimal digits as written, not from the nearest binary number."""
    return _whole(Decimal(str(usd_per_million)) * (PUSD_PER_USD // 10**6))


def _whole(value: Decimal) -> int:
    return int(value.quantize(Decimal(1), ROUND_HALF_EVEN))


# ---- GPU hours ----


def _gpu_prices(upstream: PricedUpstream, config: PricesConfig) -> TokenPrices | None:
    """A token's price is its share of a fully used replica: price per hour ÷ tokens per hour.

    Tokens read from the prefix cache are free. The rates are measured once (`ridgeline bench`) and
    configured, so that the price of a request does not depend on other traffic.
    """
    own = upstream.kind in OURS
    hour_usd = upstream.gpu_hour_usd or (config.gpu_hour_usd if own else 0.0)
    if not hour_usd:
        return None
    rate_in = upstream.gpu_tokens_in_per_s or config.gpu_tokens_in_per_s
    rate_out = upstream.gpu_tokens_out_per_s or config.gpu_tokens_out_per_s
    if hour_usd < 0 or rate_in <= 0 or rate_out <= 0:
        raise OptionError(
            f"[[upstreams]] {upstream.name}: gpu_hour_usd needs gpu_tokens_in_per_s and "
            "gpu_tokens_out_per_s, the rates of a replica at full load; measure them with `ridgeline bench`"
        )
    second = Decimal(str(hour_usd)) * PUSD_PER_USD / 3600
    fresh, out = (_whole(second / Decimal(str(rate))) for rate in (rate_in, rate_out))
    return TokenPrices(fresh=fresh, cached=0, cache_write=fresh, out=out, source="gpu-hours")


# ---- genai-prices ----


def _provider(upstream: PricedUpstream, config: PricesConfig) -> Provider | None:
    """The table's provider of an upstream: by its configured name, or by its address. None: not hosted."""
    if not config.table or upstream.kind in OURS:
        return None
    try:
        from genai_prices.data import providers
    except ImportError as error:
        if not upstream.provider:
            return None
        raise OptionError(
            f"[[upstreams]] {upstream.name}: prices of {upstream.provider} need genai-prices: "
            "pip install 'ridgeline[gateway]'"
        ) from error
    if upstream.provider:
        found = next((one for one in providers if one.id == upstream.provider), None)
        if found is None:
            known = ", ".join(one.id for one in providers)
            raise OptionError(
                f"[[upstreams]] {upstream.name}: unknown provider {upstream.provider!r}: {known}"
            )
        return found
    return next((one for one in providers if re.match(one.api_pattern, upstream.url)), None)


def _table_prices(provider: Provider | None, model: str) -> TokenPrices | None:
    if provider is None:
        return None
    from genai_prices.data import providers

    found = provider.find_model(model, all_providers=providers)
    if found is None:
        return None
    prices = vars(found.get_prices(datetime.now(tz=UTC)))
    starts = {tier.start for price in prices.values() for tier in getattr(price, "tiers", ())}
    base = _at(prices, None)
    above = tuple((start, _at(prices, start)) for start in sorted(starts))
    hour = prices.get("input_audio_hours") or prices.get("audio_hours") or 0
    return replace(
        base,
        above=above,
        audio_in=_flat(prices, "input_audio_mtok"),
        audio_out=_flat(prices, "output_audio_mtok"),
        minute=_whole(Decimal(hour) * PUSD_PER_USD / 60),
        character=_flat(prices, "input_mchars") or 0,
    )


def _flat(prices: PricesByUnit, key: str) -> int | None:
    """A price without tiers; of one with them, the first."""
    value = prices.get(key)
    if value is None:
        return None
    return _per_token(value if isinstance(value, Decimal) else value.base)


def _at(prices: PricesByUnit, start: int | None) -> TokenPrices:
    """The prices for prompts longer than `start`; of all others for None."""

    def price(key: str, otherwise: int) -> int:
        value = prices.get(key)
        if value is None:
            return otherwise
        if isinstance(value, Decimal):
            return _per_token(value)
        reached = [tier.price for tier in value.tiers if start is not None and tier.start <= start]
        return _per_token(reached[-1] if reached else value.base)

    fresh = price("input_mtok", 0)
    cached, written = price("cache_read_mtok", fresh), price("cache_write_mtok", fresh)
    return TokenPrices(fresh, cached, written, price("output_mtok", 0), "genai-prices")
