"""instructor over both SDKs, in the modes that rest on tools, on JSON and on a schema."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel

from tests.clients.cases import case
from tests.clients.conftest import KEY, MODEL, TIMEOUT_S, Target
from tests.clients.questions import JSON_QUESTION, QUESTION, ROOM, TURNS, Report

OPENAI, ANTHROPIC = CLIENTS = ("instructor (openai)", "instructor (anthropic)")
ASKED: dict[str, Any] = {"messages": QUESTION, "response_model": Report, "max_tokens": ROOM, "max_retries": 1}


def client_of(name: str, target: Target, mode: Mode | None = None, blocking: bool = True) -> Any:
    options: dict[str, Any] = {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S}
    if name == OPENAI:
        kind = openai.OpenAI if blocking else openai.AsyncOpenAI
        return instructor.from_openai(
            kind(base_url=target.v1, **options), mode=mode or Mode.TOOLS, model=MODEL
        )
    other = anthropic.Anthropic if blocking else anthropic.AsyncAnthropic
    return instructor.from_anthropic(
        other(base_url=target.root, **options), mode=mode or Mode.ANTHROPIC_TOOLS, model=MODEL
    )


@case("tools: named", "whole")
@case("several turns", "whole")
async def test_a_class_is_filled_by_a_tool_call(client: Any, client_name: str, target: Target) -> None:
    assert isinstance(client.create(**ASKED), Report)
    report, raw = client.create_with_completion(**{**ASKED, "messages": TURNS})
    assert isinstance(report, Report)
    assert raw.usage
    assert isinstance(await client_of(client_name, target, blocking=False).create(**ASKED), Report)


@case("JSON schema", "whole", only=OPENAI)
@pytest.mark.parametrize("mode", [Mode.JSON_SCHEMA, Mode.TOOLS_STRICT])
def test_a_class_is_filled_under_its_schema(target: Target, mode: Mode) -> None:
    assert isinstance(client_of(OPENAI, target, mode).create(**ASKED), Report)


@case("JSON mode", "whole", only=OPENAI)
def test_a_class_is_filled_in_json_mode(target: Target) -> None:
    """JSON of any form is allowed there, and a small model takes it: so the class asks for no field."""

    class Loose(BaseModel, extra="allow"):
        pass

    options = {**ASKED, "messages": JSON_QUESTION, "temperature": 0, "response_model": Loose}
    assert isinstance(client_of(OPENAI, target, Mode.JSON).create(**options), Loose)


@case("JSON schema", "streamed", only=OPENAI)
def test_a_partial_class_grows_while_it_streams(target: Target) -> None:
    client = client_of(OPENAI, target, Mode.JSON_SCHEMA)
    partial = list(
        client.create_partial(**{name: ASKED[name] for name in ("messages", "response_model", "max_tokens")})
    )
    assert len(partial) > 1
    Report.model_validate(partial[-1].model_dump())


@case("tools: named", "streamed")
def test_a_partial_class_grows_while_a_tool_call_streams(client: Any) -> None:
    partial = list(
        client.create_partial(**{name: ASKED[name] for name in ("messages", "response_model", "max_tokens")})
    )
    Report.model_validate(partial[-1].model_dump())


@case("error: unknown model")
def test_an_unknown_model_is_not_found(client: Any, client_name: str) -> None:
    sdk: Any = openai if client_name == OPENAI else anthropic
    with pytest.raises((sdk.NotFoundError, InstructorRetryException), match="gpt-9"):
        client.create(**ASKED, model="gpt-9")
