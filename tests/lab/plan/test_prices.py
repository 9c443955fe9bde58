import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.prices import Offer, given_offer, hosted_offers

pytest.importorskip("genai_prices")


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B", "llama-3.1-8b-instruct-fp8"]
)
def test_a_model_is_found_however_it_is_spelled(name: str) -> None:
    found = hosted_offers(name, 8_030_000_000)
    assert found is not None
    assert found.count >= 5
    assert found.typical.same_model
    for offer in (found.typical, found.cheapest):
        assert "8b" in offer.model.lower()
        assert "3.1" in offer.model
    assert found.cheapest.usd(4e6, 1e6) <= found.typical.usd(4e6, 1e6)


def test_another_size_of_a_family_is_another_model() -> None:
    small, large = (
        hosted_offers("Qwen/Qwen3-8B", 8_190_000_000),
        hosted_offers("Qwen/Qwen3-32B", 32_800_000_000),
    )
    assert small is not None
    assert large is not None
    assert "32b" in large.typical.model.lower()
    assert "32b" not in small.typical.model.lower()


def test_a_model_nobody_hosts_gets_the_nearest_and_is_told_so() -> None:
    found = hosted_offers("smollm2-135m", 134_515_008)
    assert found is not None
    assert not found.typical.same_model
    assert "not the same model" in found.note


def test_a_model_far_from_all_others_gets_no_price() -> None:
    assert hosted_offers("tiny-test-model", 1_000_000) is None


def test_a_hosted_model_can_be_named_with_its_provider() -> None:
    found = hosted_offers("anything", 1, wanted="openai/gpt-4.1-mini")
    assert found is not None
    assert (found.typical.provider, found.typical.model) == ("openai", "gpt-4.1-mini")
    assert found.typical.cached is not None
    assert found.typical.batch_input is not None
    with pytest.raises(BadInput, match="--price-in"):
        hosted_offers("anything", 1, wanted="no-such-model-at-all")


def test_cached_tokens_cost_what_is_listed_and_else_the_full_price() -> None:
    listed = Offer("a", "m", input=1.0, output=4.0, cached=0.1)
    assert listed.usd(1e6, 1e6, cached_tokens=0.5e6) == pytest.approx(0.5 + 0.05 + 4.0)
    silent = given_offer(1.0, 4.0).typical
    assert silent.usd(1e6, 1e6, cached_tokens=0.5e6) == pytest.approx(5.0)
    assert silent.batch_usd(1e6, 1e6) is None
