"""Prices: whole picodollars per token, from gateway.toml, genai-prices' table or a GPU's hour."""

from __future__ import annotations

import random
from dataclasses import dataclass
from decimal import Decimal

import genai_prices
import pytest

from ridgeline.gateway.accounting.config import PricesConfig
from ridgeline.gateway.accounting.prices import Prices
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.settings import ModelConfig
from ridgeline.gateway.upstreams.config import UpstreamConfig
from ridgeline.options import OptionError

OPENAI = UpstreamConfig(name="openai", kind="openai", url="https://api.openai.com/v1")
ANTHROPIC = UpstreamConfig(name="anthropic", kind="anthropic", url="https://api.anthropic.com")
OWN = UpstreamConfig(name="own", kind="ridgeline", url="http://127.0.0.1:8000")
USAGE = Usage(tokens_in=1000, tokens_cached=300, tokens_cache_write=200, tokens_out=50)


def prices(*models: ModelConfig, upstreams: tuple[UpstreamConfig, ...] = (OPENAI, ANTHROPIC, OWN)) -> Prices:
    return Prices(models, upstreams, PricesConfig())


def test_a_price_in_the_configuration_comes_first_and_is_taken_digit_by_digit() -> None:
    priced = prices(ModelConfig(name="gpt-4o", price_in=0.1, price_cached=0.01, price_out=0.3))
    # 0.1 dollars per million tokens are 100,000 picodollars per token, whatever a binary 0.1 is
    cost, source = priced.cost("gpt-4o", "openai", "gpt-4o", USAGE)
    assert (cost, source) == (500 * 100_000 + 300 * 10_000 + 200 * 100_000 + 50 * 300_000, "config")


def test_the_longest_pattern_and_before_it_the_whole_name_decides() -> None:
    priced = prices(
        ModelConfig(name="*", price_in=1.0),
        ModelConfig(name="big-*", price_in=2.0),
        ModelConfig(name="big-one", price_in=3.0),
        ModelConfig(name="free-*"),
    )
    one = Usage(tokens_in=1)
    asked = ("big-one", "big-two", "other", "free-x")
    assert [priced.cost(name, "own", "x", one)[0] for name in asked] == [3_000_000, 2_000_000, 1_000_000, 0]


@pytest.mark.parametrize(
    ("upstream", "model"),
    [
        ("openai", "gpt-4o"),
        ("openai", "gpt-4o-mini-2024-07-18"),
        ("openai", "text-embedding-3-small"),
        ("anthropic", "claude-sonnet-4-5"),
        ("anthropic", "claude-3-5-haiku-latest"),
    ],
)
def test_the_table_s_prices_are_those_that_genai_prices_computes(upstream: str, model: str) -> None:
    priced = prices()
    chance = random.Random(3)
    for _ in range(50):
        tokens_in = chance.choice([chance.randrange(1, 5000), chance.randrange(199_990, 200_010), 500_000])
        cached = chance.randrange(tokens_in)
        written = chance.randrange(tokens_in - cached) if upstream == "anthropic" else 0
        usage = Usage(tokens_in, cached, written, chance.randrange(3000))
        theirs = genai_prices.calc_price(
            genai_prices.Usage(
                input_tokens=usage.tokens_in,
                cache_read_tokens=cached,
                cache_write_tokens=written,
                output_tokens=usage.tokens_out,
            ),
            model,
            provider_id=upstream,
        ).total_price
        cost, source = priced.cost("public", upstream, model, usage)
        assert (Decimal(cost) / 10**12, source) == (theirs, "genai-prices")


def test_a_model_that_nobody_prices_costs_nothing_and_says_so() -> None:
    assert prices().cost("m", "openai", "no-such-model", USAGE) == (0, "none")
    assert prices().cost("m", "own", "gpt-4o", USAGE) == (0, "none")  # our own is not OpenAI's


def test_a_provider_may_be_named_where_the_address_does_not_tell() -> None:
    proxied = UpstreamConfig(name="proxied", kind="openai", url="https://proxy.example/v1", provider="groq")
    cost, source = prices(upstreams=(proxied,)).cost(
        "m", "proxied", "llama-3.3-70b-versatile", Usage(tokens_in=1000)
    )
    assert source == "genai-prices"
    assert cost > 0
    wrong = UpstreamConfig(name="wrong", kind="openai", url="https://proxy.example/v1", provider="grok")
    with pytest.raises(OptionError, match="unknown provider 'grok'"):
        prices(upstreams=(wrong,))


def test_a_gpu_s_hour_is_shared_by_the_time_that_tokens_take() -> None:
    gpu = UpstreamConfig(
        name="own",
        kind="ridgeline",
        url="http://127.0.0.1:8000",
        gpu_hour_usd=3.6,
        gpu_tokens_in_per_s=10_000,
        gpu_tokens_out_per_s=1_000,
    )
    priced = prices(upstreams=(gpu,))
    # A second costs 0.001 dollars: 100,000 picodollars per token read, a million per token written.
    cost, source = priced.cost("m", "own", "m", USAGE)
    assert (cost, source) == (700 * 100_000 + 50 * 1_000_000, "gpu-hours")
    full_hour = Usage(tokens_in=10_000 * 1800, tokens_out=1_000 * 1800)
    assert priced.cost("m", "own", "m", full_hour)[0] == 36 * 10**11


def test_an_hour_s_price_without_rates_is_refused_with_what_to_do() -> None:
    with pytest.raises(OptionError, match="ridgeline bench"):
        prices(upstreams=(UpstreamConfig(name="own", kind="ridgeline", url="http://x", gpu_hour_usd=2.0),))


def test_a_price_below_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="price_out must be from 0"):
        prices(ModelConfig(name="m", price_out=-1.0))


def test_a_table_s_price_is_looked_up_again_after_a_while_and_names_are_bounded() -> None:
    @dataclass
    class Clock:
        now: float = 0.0

    clock = Clock()
    priced = Prices([], [OPENAI], PricesConfig(), now=lambda: clock.now)
    first = priced.of("m", "openai", "gpt-4o")
    assert priced.of("m", "openai", "gpt-4o") is first
    clock.now = 61.0
    assert priced.of("m", "openai", "gpt-4o") is not first
    for number in range(5000):
        priced.of(f"m{number}", "openai", "x")
    assert len(priced._cached) <= 4096
