"""Prices of hosted models from the installed genai-prices: offers of a model, or of the nearest one.

`break_even` compares them with GPUs. Prices are dollars per million tokens. An offer of another model is
marked; no discount is assumed that the table does not list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ridgeline.lab.errors import BadInput, LabError

if TYPE_CHECKING:
    from decimal import Decimal

# Name parts for how a model is served or tuned, not which model it is.
_NOISE = re.compile(
    r"instruct|chat|it|hf|gguf|meta|turbo|versatile|instant|fast|latest|preview|dense|dynamic|awq|gptq|bnb"
    r"|(bf|fp|nvfp|mxfp|int|q)\d+|\d+bit|w\da\d+"
)
_NO_TEXT_MODEL = re.compile(r"guard|embed|rerank|tts|whisper|audio|image|ocr|video|vision")
_WORD = re.compile(r"\d+x\d+(?:\.\d+)?b|(?<![a-z\d])a?\d+(?:\.\d+)?[bm](?![a-z\d])|[a-z]+|\d+(?:\.\d+)?")
_SIZE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])$")
_FAR = math.log(8)  # an offer of a model eight times larger or smaller is not comparable


@dataclass(frozen=True, slots=True)
class Offer:
    """One provider's price for a model. `cached` and `batch_*` are None if the provider lists none."""

    provider: str
    model: str
    input: float
    output: float
    cached: float | None = None
    batch_input: float | None = None
    batch_output: float | None = None
    same_model: bool = True  # False: the nearest model, see `Offers.note`

    def usd(self, input_tokens: float, output_tokens: float, cached_tokens: float = 0.0) -> float:
        cached = self.input if self.cached is None else self.cached
        fresh = input_tokens - cached_tokens
        return (fresh * self.input + cached_tokens * cached + output_tokens * self.output) / 1e6

    def batch_usd(self, input_tokens: float, output_tokens: float) -> float | None:
        if self.batch_input is None or self.batch_output is None:
            return None
        return (input_tokens * self.batch_input + output_tokens * self.batch_output) / 1e6

    def __str__(self) -> str:
        cached = "" if self.cached is None else f", ${self.cached:g} cached"
        return f"{self.model} at {self.provider}: ${self.input:g} in, ${self.output:g} out{cached} per Mtok"


@dataclass(frozen=True, slots=True)
class Offers:
    """The median-priced offer, which the plan uses, and the cheapest one."""

    typical: Offer
    cheapest: Offer
    count: int
    note: str  # source of the prices and their limitations


def given_offer(price_in: float, price_out: float, cached: float | None = None) -> Offers:
    """A price given by the user."""
    offer = Offer("your price", "hosted model", price_in, price_out, cached)
    return Offers(offer, offer, 1, "price as given")


def hosted_offers(
    model: str, parameters: int, *, wanted: str | None = None, in_to_out: float = 4.0
) -> Offers | None:
    """Offers of this model by any provider; else of the one nearest in family and size; None: nothing near.

    model:     as it calls itself, with its organisation or without
    wanted:    a hosted model by name, "provider/model" or "model", instead; BadInput where there is none
    in_to_out: input tokens per output token of the traffic, by which offers are ranked
    """
    priced = list(_priced())
    if wanted is not None:
        found = [offer for offer in priced if _is_named(offer, wanted)]
        if not found:
            raise BadInput(f"--hosted {wanted}: no price is known for it; give --price-in and --price-out")
        return _offers(found, in_to_out, "hosted model as named")
    words = _words(model)
    same = [offer for offer in priced if words and _words(offer.model) == words]
    if same:
        return _offers(same, in_to_out, "the same model")
    return _nearest(priced, words, parameters, in_to_out)


def _nearest(priced: list[Offer], words: frozenset[str], parameters: int, in_to_out: float) -> Offers | None:
    """Of the same family if one is listed, else of any; the nearest size in the name."""
    sized = [(offer, size) for offer in priced if (size := _size(offer.model)) is not None]
    letters = {word for word in words if word.isalpha()}
    family = [(offer, size) for offer, size in sized if letters and letters <= _words(offer.model)]
    for candidates, kind in ((family, "family"), (sized, "size")):
        near = [(abs(math.log(size / parameters)), offer) for offer, size in candidates]
        if not near or min(near, key=lambda pair: pair[0])[0] > _FAR:
            continue
        least = min(distance for distance, _ in near)
        found = [offer for distance, offer in near if distance <= least + 0.05]
        note = f"not the same model: the nearest listed by {kind}"
        return _offers([replace(offer, same_model=False) for offer in found], in_to_out, note)
    return None


def _offers(found: list[Offer], in_to_out: float, note: str) -> Offers:
    ranked = sorted(found, key=lambda offer: offer.usd(in_to_out * 1e6, 1e6))
    source = f"{note}; genai-prices {version('genai-prices')}, {len(ranked)} offer{'s' * (len(ranked) > 1)}"
    return Offers(ranked[(len(ranked) - 1) // 2], ranked[0], len(ranked), source)


def _priced() -> Iterator[Offer]:
    """Every text model of the table with a price per token."""
    try:
        from genai_prices.data import providers
    except ImportError as error:
        raise LabError(
            "prices of hosted models need genai-prices: pip install 'ridgeline[lab]', "
            "or give --price-in and --price-out"
        ) from error
    now = datetime.now(tz=UTC)
    for provider in providers:
        for model in provider.models:
            if model.deprecated or ":" in model.id.removesuffix(":0"):
                continue  # ":free", ":batch": not for live traffic
            prices = model.get_prices(now)
            batch = model.get_prices(now, {"processing": "batch"})
            paid, answer = _usd(prices, "input_mtok"), _usd(prices, "output_mtok")
            if not paid or not answer:
                continue
            has_batch = _usd(batch, "input_mtok") != paid
            yield Offer(
                provider=provider.id,
                model=model.id,
                input=paid,
                output=answer,
                cached=_usd(prices, "cache_read_mtok"),
                batch_input=_usd(batch, "input_mtok") if has_batch else None,
                batch_output=_usd(batch, "output_mtok") if has_batch else None,
            )


def _usd(prices: Any, key: str) -> float | None:
    """A price by its key; for prices that depend on prompt length, that of a short one."""
    value: Decimal | Any | None = vars(prices).get(key)
    if value is None:
        return None
    return float(value.base) if hasattr(value, "base") else float(value)


def _is_named(offer: Offer, wanted: str) -> bool:
    provider, slash, model = wanted.lower().partition("/")
    names = (offer.model.lower(), offer.model.lower().rpartition("/")[2])
    return wanted.lower() in names or bool(slash and provider == offer.provider and model in names)


def _words(name: str) -> frozenset[str]:
    """What distinguishes a model: family, version, size; without organisation and serving suffixes."""
    own = re.sub(r"(\d)p(\d)", r"\1.\2", re.split(r"[/@]|--", name.lower())[-1])  # one provider writes v3p2
    parts = (part for part in re.split(r"[-_ :]", own) if not _NOISE.fullmatch(part))
    words = {word for part in parts for word in _WORD.findall(part)}
    return frozenset(word for word in words if word != "v" and not re.fullmatch(r"a\d+(?:\.\d+)?b", word))


def _size(name: str) -> float | None:
    """Parameters by the name: 8b, 135m, 8x7b."""
    if _NO_TEXT_MODEL.search(name.lower()):
        return None
    for word in _WORD.findall(re.split(r"[/@]|--", name.lower())[-1]):
        found = _SIZE.match(word)
        if found:
            unit = 1e9 if found[3] == "b" else 1e6
            return int(found[1] or 1) * float(found[2]) * unit
    return None
