"""Decisions by prediction; conversations that stay; shadow routes; what happens without vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.routing.config import RouteConfig, RuleConfig
from ridgeline.gateway.routing.learned.artifact import Artifact, save
from ridgeline.gateway.routing.router import ModelRouter
from ridgeline.gateway.routing.sticky import StickyTable
from ridgeline.options import OptionError
from tests.clock import Clock
from tests.gateway.routing.stand import MODELS, Topics, artifact, ask


@pytest.fixture(scope="module")
def fitted() -> Artifact:
    return artifact()


@pytest.fixture(scope="module")
def path(fitted: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "route.npz"
    save(fitted, path)
    return path


def router(path: Path, *rules: RuleConfig, topics: Topics | None = None, **options: Any) -> ModelRouter:
    clock = options.pop("clock", Clock(0.0))
    route = RouteConfig(models=MODELS, artifact=path, **options)
    return ModelRouter([route], rules, (topics or Topics()).embedder(), clock)


async def test_a_text_goes_to_the_cheapest_model_that_will_do_and_the_ledger_is_told_why(path: Path) -> None:
    easy = await router(path).decide(ask("which river is the longest"))
    hard = await router(path).decide(ask("what is the sum of these"))
    assert (easy.model, hard.model) == ("small", "large")
    assert hard.why["by"] == "predicted"
    assert hard.why["chance"]["small"] < 0.4 < 0.8 < hard.why["chance"]["large"]
    assert easy.why["gain_per_cost"] < easy.why["threshold"] == 0.3 < hard.why["gain_per_cost"]
    assert "river" not in str(easy.why)


async def test_a_threshold_of_the_route_overrides_the_artifacts(path: Path) -> None:
    frugal = router(path, threshold=2.0)
    lavish = router(path, threshold=-1.0)
    assert (await frugal.decide(ask("what is the sum of these"))).model == "small"
    assert (await lavish.decide(ask("which river is the longest"))).model == "large"


async def test_a_dear_request_must_promise_more(fitted: Artifact, tmp_path: Path) -> None:
    from dataclasses import replace

    from ridgeline.gateway.routing.learned.artifact import ModelCost

    by_token = replace(fitted, costs=(ModelCost(0.0), ModelCost(0.0, 0.01)), threshold=0.3)
    save(by_token, tmp_path / "by-token.npz")
    short, long = "what is the sum of these", "what is the sum of these " + "and those " * 200
    choices = router(tmp_path / "by-token.npz", sticky_s=0.0)
    assert (await choices.decide(ask(short))).model == "large"
    assert (await choices.decide(ask(long))).model == "small"


async def test_without_vectors_the_default_answers_and_the_ledger_is_told(path: Path) -> None:
    topics = Topics()
    topics.failure = ConnectionError()
    found = await router(path, topics=topics, default="small").decide(ask("what is the sum of these"))
    assert (found.model, found.why["by"]) == ("small", "default")
    assert "ConnectionError" in found.why["reason"]


async def test_a_request_without_a_users_text_gets_the_default(path: Path) -> None:
    topics = Topics()
    found = await router(path, topics=topics).decide(ask(""))
    assert (found.model, topics.bodies) == ("large", [])


async def test_short_later_turns_are_read_with_the_users_turns_before_them(path: Path) -> None:
    topics = Topics()
    found = await router(path, topics=topics, sticky_s=0.0).decide(
        ask("what is the sum of these", "That is a river of numbers, a river!", "and now?")
    )
    assert topics.bodies[0]["input"] == ["what is the sum of these\nand now?"]
    assert found.model == "large"


async def test_only_the_first_characters_of_a_long_text_are_embedded(path: Path) -> None:
    topics = Topics()
    await router(path, topics=topics).decide(ask("river " * 1000, "yes", "x" * 5000))
    assert topics.bodies[0]["input"] == ["x" * 240]
    assert topics.bodies[0]["truncate_prompt_tokens"] == 48


async def test_a_conversation_stays_on_its_model_for_a_time(path: Path) -> None:
    clock = Clock(0.0)
    choices = router(path, clock=clock, sticky_s=60.0)
    first, later = (
        "what is the sum of these",
        ("what is the sum of these", "10", "and which river is long " * 3),
    )
    assert (await choices.decide(ask(first))).model == "large"
    clock.now = 59.0
    kept = await choices.decide(ask(*later))
    assert (kept.model, kept.why["by"]) == ("large", "sticky")
    clock.now = 118.0  # kept again 59 s ago
    assert (await choices.decide(ask(*later))).why["by"] == "sticky"
    clock.now = 179.0
    assert (await choices.decide(ask(*later))).model == "small"


async def test_the_first_turn_of_a_conversation_is_decided_anew_each_time(path: Path) -> None:
    choices = router(path)
    for _ in range(2):
        assert (await choices.decide(ask("which river"))).why["by"] == "predicted"


async def test_a_conversation_is_of_one_tenant_and_may_be_named_by_its_client(path: Path) -> None:
    choices = router(path)
    await choices.decide(ask("what is the sum", tenant="a", conversation="c1"))
    named = ask("which river", tenant="a", conversation="c1")
    assert (await choices.decide(named)).why["by"] == "sticky"
    other = ask("which river", tenant="b", conversation="c1")
    assert (await choices.decide(other)).why["by"] == "predicted"


async def test_rules_that_hold_always_go_before_the_conversation_and_leave_it_where_it_is(path: Path) -> None:
    choices = router(
        path,
        RuleConfig(name="tools", model="large", tools=True, always=True),
        RuleConfig(name="greeting", model="large", keywords=("hello",)),
    )
    await choices.decide(ask("which river"))
    assert (await choices.decide(ask("which river", "Nile", "hello"))).why["by"] == "sticky"
    assert (await choices.decide(ask("which river", "Nile", "hello", tools=[{}]))).why["rule"] == "tools"
    assert (await choices.decide(ask("which river", "Nile", "hello"))).model == "small"


async def test_an_escalation_moves_the_conversation_to_the_stronger_model(path: Path) -> None:
    choices = router(path, cascade=True, cascade_threshold=0.5)
    request = ask("which river")
    weak = await choices.decide(request)
    assert weak.cascade is not None
    assert (weak.model, weak.escalate_to, weak.cascade.threshold) == ("small", "large", 0.5)
    choices.escalated(request, weak, 0.31)
    assert (weak.why["escalated_from"], weak.why["confidence"]) == ("small", 0.31)
    after = await choices.decide(ask("which river", "Nile", "and then?"))
    assert (after.model, after.cascade) == ("large", None)


async def test_a_conversation_on_the_cheap_model_can_still_escalate(path: Path) -> None:
    choices = router(path, cascade=True)
    await choices.decide(ask("which river"))
    later = await choices.decide(ask("which river", "Nile", "and then?"))
    assert (later.why["by"], later.escalate_to) == ("sticky", "large")


async def test_a_shadow_route_decides_and_uses_the_default(path: Path) -> None:
    found = await router(path, shadow=True, default="large", cascade=True).decide(ask("which river"))
    assert (found.model, found.shadow, found.why["shadow"]) == ("large", "small", "small")
    assert found.cascade is None


def test_the_older_spelling_of_the_key_still_names_the_artifact(path: Path) -> None:
    assert RouteConfig(models=MODELS, artefact=path).artifact == path


def test_an_artifact_of_other_models_or_vectors_is_refused_at_the_start(path: Path) -> None:
    swapped = RouteConfig(models=("large", "small"), artifact=path)
    with pytest.raises(OptionError, match="fitted for the models small, large"):
        ModelRouter([swapped], [], Topics().embedder())
    route = RouteConfig(models=MODELS, artifact=path)
    with pytest.raises(OptionError, match="needs vectors"):
        ModelRouter([route], [], None)
    from ridgeline.gateway.routing.config import EmbeddingsConfig
    from ridgeline.gateway.routing.embedder import Embedder

    with pytest.raises(OptionError, match="vectors of 'topics'"):
        ModelRouter([route], [], Embedder(EmbeddingsConfig(model="other"), Topics().post))


def test_the_table_of_conversations_is_bounded_and_forgets_the_longest_unused() -> None:
    table = StickyTable(entries=2)
    for name in (b"a", b"b", b"a", b"c"):
        table.remember(name, "small", 10.0)
    assert [table.model(name, 0.0) for name in (b"a", b"b", b"c")] == ["small", None, "small"]
    assert table.model(b"a", 10.0) is None
    assert len(table) == 1
