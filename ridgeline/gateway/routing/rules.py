"""Rules: the operator's conditions for choosing a model, tried in order before any prediction."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.gateway.routing.config import RuleConfig
from ridgeline.gateway.routing.reading import Reading
from ridgeline.gateway.routing.routing_request import RoutingRequest
from ridgeline.options import OptionError

SEARCHED_CHARS = 20_000  # of the last user turn that keywords and patterns search: bounds the work

# The condition's reason, or None if it does not hold.
Condition = Callable[[RoutingRequest, Reading], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    route: str
    model: str
    always: bool
    conditions: tuple[Condition, ...]

    def match(self, request: RoutingRequest, reading: Reading) -> list[str] | None:
        """A reason for each condition if the rule matches, else None."""
        reasons = []
        for condition in self.conditions:
            reason = condition(request, reading)
            if reason is None:
                return None
            reasons.append(reason)
        return reasons


def compiled(configs: Sequence[RuleConfig]) -> tuple[Rule, ...]:
    """The checked rules; OptionError names the wrong one."""
    return tuple(_rule(number, config) for number, config in enumerate(configs, start=1))


def _rule(number: int, config: RuleConfig) -> Rule:
    name = config.name or f"rule {number}"
    if not config.model:
        raise OptionError(f"[[rules]] {number} ({name}): model is missing; name one of the route's")
    return Rule(name, config.route, config.model, config.always, tuple(_conditions(number, config)))


def _conditions(number: int, config: RuleConfig) -> list[Condition]:
    """Cheap conditions first: a text is searched only if all others hold."""
    found = [
        _one_of("tenant", config.tenants, lambda request, reading: request.tenant),
        _one_of("key", config.keys, lambda request, reading: request.key_id),
        _one_of("endpoint", config.endpoints, lambda request, reading: request.kind),
        _is("tools", config.tools, lambda reading: reading.tools),
        _is("images", config.images, lambda reading: reading.images > 0),
        _bounds("tokens", config.tokens_min, config.tokens_max, lambda reading: reading.tokens),
        _bounds(
            "max_tokens", config.max_tokens_min, config.max_tokens_max, lambda reading: reading.max_tokens
        ),
        _one_of("language", config.languages, lambda request, reading: reading.language),
        _keywords(config.keywords),
        _pattern(number, config.pattern),
    ]
    return [condition for condition in found if condition is not None]


def _one_of(
    what: str, allowed: tuple[str, ...], value: Callable[[RoutingRequest, Reading], str]
) -> Condition | None:
    if not allowed:
        return None
    known = frozenset(allowed)

    def condition(request: RoutingRequest, reading: Reading) -> str | None:
        found = value(request, reading)
        return f"{what} {found}" if found in known else None

    return condition


def _is(what: str, wanted: bool | None, value: Callable[[Reading], bool]) -> Condition | None:
    if wanted is None:
        return None
    reason = f"has {what}" if wanted else f"has no {what}"
    return lambda request, reading: reason if value(reading) is wanted else None


def _bounds(
    what: str, least: int | None, most: int | None, value: Callable[[Reading], int | None]
) -> Condition | None:
    if least is None and most is None:
        return None
    bounds = " ".join(
        text for text in (f">= {least}" * (least is not None), f"<= {most}" * (most is not None)) if text
    )

    def condition(request: RoutingRequest, reading: Reading) -> str | None:
        found = value(reading)
        if found is None or (least is not None and found < least) or (most is not None and found > most):
            return None
        return f"{what} {found} {bounds}"

    return condition


def _keywords(keywords: tuple[str, ...]) -> Condition | None:
    if not keywords:
        return None
    # Whole words: "sum" is not in "summary". Scripts without spaces have no word boundaries.
    parts = [rf"\b{re.escape(word)}\b" if word.isascii() else re.escape(word) for word in keywords]
    search = re.compile("|".join(parts), re.IGNORECASE).search

    def condition(request: RoutingRequest, reading: Reading) -> str | None:
        found = search(reading.last[:SEARCHED_CHARS])
        if found is None:
            return None
        named = next((word for word in keywords if word.lower() == found.group().lower()), "")
        return f"keyword {named}"  # as configured: the client's text is never written to the ledger

    return condition


def _pattern(number: int, pattern: str | None) -> Condition | None:
    if pattern is None:
        return None
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise OptionError(
            f"[[rules]] {number}: pattern {pattern!r} is not a regular expression: {error}"
        ) from None
    return lambda request, reading: "pattern" if search(reading.last[:SEARCHED_CHARS]) else None
