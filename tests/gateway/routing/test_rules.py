"""Rules of a route, and what is read of a request to decide by them."""

from __future__ import annotations

import json

import pytest

from ridgeline.gateway.body import read_fields
from ridgeline.gateway.errors import BadRequest, NotFound
from ridgeline.gateway.routing.config import RouteConfig, RuleConfig
from ridgeline.gateway.routing.learned.language import language_of
from ridgeline.gateway.routing.reading import read
from ridgeline.gateway.routing.router import ModelRouter, RoutingRequest
from ridgeline.options import OptionError
from tests.gateway.routing.stand import MODELS, ask, chat

ROUTE = RouteConfig(name="auto", models=MODELS, sticky_s=0.0)


def router(*rules: RuleConfig, route: RouteConfig = ROUTE) -> ModelRouter:
    return ModelRouter([route], rules)


async def model_of(request: RoutingRequest, rule: RuleConfig) -> str:
    return (
        await router(rule, route=RouteConfig(models=MODELS, default="large", sticky_s=0.0)).decide(request)
    ).model


IMAGE = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.mark.parametrize(
    ("rule", "matching", "other"),
    [
        ({"tokens_max": 10}, ask("hello there"), ask("word " * 40)),
        ({"tokens_min": 30}, ask("word " * 40), ask("hello")),
        ({"tokens_min": 30}, ask("河流" * 25), ask("rivers " * 8)),
        ({"tools": True}, ask("hi", tools=[{"type": "function"}]), ask("hi", tools=[])),
        ({"tools": False}, ask("hi"), ask("hi", tools=[{"type": "function"}])),
        ({"images": True}, ask(IMAGE), ask("what is this")),
        (
            {"languages": ("de", "fr")},
            ask("wie heißt der längste Fluss in Europa"),
            ask("what is the longest river"),
        ),
        ({"languages": ("zh",)}, ask("最长的河流是什么"), ask("最も長い川は何ですか")),
        ({"tenants": ("team_a",)}, ask("hi", tenant="team_a"), ask("hi", tenant="team_b")),
        ({"keys": ("key_1",)}, ask("hi", key_id="key_1"), ask("hi", key_id="key_2")),
        (
            {"endpoints": ("chat",)},
            ask("hi"),
            RoutingRequest("auto", "completions", read_fields(b'{"prompt": "hi"}')),
        ),
        ({"keywords": ("Sum", "total of")}, ask("give me the SUM!"), ask("give me a summary, and tot of")),
        ({"keywords": ("sum",)}, ask("sum", "4", "the sum again"), ask("the sum", "4", "thank you")),
        ({"pattern": r"\d{4}"}, ask("in 1999"), ask("in 99")),
        ({"max_tokens_max": 50}, ask("hi", max_tokens=50), ask("hi")),
        ({"max_tokens_min": 50}, ask("hi", max_completion_tokens=50), ask("hi", max_completion_tokens=49)),
    ],
)
async def test_each_condition_of_a_rule_tells_requests_apart(
    rule: dict[str, object], matching: RoutingRequest, other: RoutingRequest
) -> None:
    config = RuleConfig(model="small", **rule)  # type: ignore[arg-type]
    assert await model_of(matching, config) == "small"
    assert await model_of(other, config) == "large"


async def test_the_first_of_the_rules_that_match_decides_and_says_why() -> None:
    found = await router(
        RuleConfig(name="long", model="large", tokens_min=1000),
        RuleConfig(name="short questions", model="small", tokens_max=20, keywords=("capital",)),
        RuleConfig(name="all", model="large"),
    ).decide(ask("the Capital of France"))
    assert (found.model, found.why["by"], found.why["rule"]) == ("small", "rule", "short questions")
    assert found.why["because"] == ["tokens 5 <= 20", "keyword capital"]


async def test_all_conditions_of_a_rule_must_hold() -> None:
    both = RuleConfig(model="small", tools=True, keywords=("sum",))
    assert await model_of(ask("a sum", tools=[{}]), both) == "small"
    assert await model_of(ask("a sum"), both) == "large"


async def test_a_rule_of_another_route_does_not_count() -> None:
    routes = [RouteConfig(name="auto", models=MODELS), RouteConfig(name="code", models=MODELS)]
    found = await ModelRouter(routes, [RuleConfig(route="code", model="small")]).decide(ask("hi"))
    assert (found.model, found.why["by"]) == ("large", "default")


async def test_a_rule_of_all_routes_is_skipped_where_a_route_lacks_its_model() -> None:
    routes = [RouteConfig(name="auto", models=MODELS), RouteConfig(name="wide", models=(*MODELS, "largest"))]
    found = await ModelRouter(routes, [RuleConfig(model="largest")]).decide(ask("hi"))
    assert (found.model, found.why["by"]) == ("large", "default")


async def test_an_unknown_route_is_a_404_that_names_it() -> None:
    with pytest.raises(NotFound, match="nowhere") as error:
        await router().decide(RoutingRequest("nowhere", "chat", chat("hi")))
    assert (error.value.status, error.value.param) == (404, "model")


async def test_messages_that_are_none_are_a_400_that_names_the_field() -> None:
    with pytest.raises(BadRequest) as error:
        await router().decide(RoutingRequest("auto", "chat", read_fields(b'{"messages": {"role": 1}}')))
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    ("routes", "rules", "message"),
    [
        ([RouteConfig()], [], "models is missing"),
        ([RouteConfig(models=("a", "a"))], [], "twice"),
        ([RouteConfig(models=("a",)), RouteConfig(models=("b",))], [], "twice"),
        ([RouteConfig(models=("a", "b"), default="c")], [], "default 'c'"),
        ([ROUTE], [RuleConfig(tools=True)], "model is missing"),
        ([ROUTE], [RuleConfig(model="small", route="other")], "route 'other' does not exist"),
        ([ROUTE], [RuleConfig(model="tiny", route="auto")], "'tiny' is not one of"),
        ([ROUTE], [RuleConfig(model="tiny")], "'tiny'"),
        ([ROUTE], [RuleConfig(model="small", pattern="(")], "regular expression"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_at_the_start(
    routes: list[RouteConfig], rules: list[RuleConfig], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        ModelRouter(routes, rules)


def test_every_dialect_is_read_alike() -> None:
    image = {"type": "input_image", "image_url": "data:,"}
    bodies = {
        "chat": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Why?"}, {"type": "image_url"}]},
            ]
        },
        "messages": {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}, {"type": "image"}]}],
        },
        "responses": {
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}, image]}],
        },
    }
    readings = [read(kind, read_fields(json.dumps(body).encode())) for kind, body in bodies.items()]
    facts = {(r.turns, r.opening, r.images, r.tokens, r.is_later_turn) for r in readings}
    assert facts == {(("Why?",), ("Be brief.", "Why?"), 1, 1003, False)}


def test_assistant_replies_are_no_part_of_the_turns() -> None:
    reading = read("chat", chat("one", "ONE", "two", "TWO", "three", "THREE", "four"))
    assert reading.turns == ("two", "three", "four")
    assert reading.opening == ("one",)
    assert reading.is_later_turn


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the capital of France?", "en"),
        ("Quelle est la capitale de la France et pourquoi", "fr"),
        ("¿Cuál es la capital de los Países Bajos?", "es"),
        ("Which is Москва", "ru"),
        ("Яка столиця України і чому", "uk"),
        ("서울은 어디에 있습니까", "ko"),
        ("x = 4 + 5", ""),
        ("", ""),
    ],
)
def test_languages_are_told_by_script_and_common_words(text: str, language: str) -> None:
    assert language_of(text) == language
