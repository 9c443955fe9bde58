"""The official openai SDK: answers held to JSON, to a schema by `parse` and `stream`, and embeddings."""

from __future__ import annotations

import json
import math
from typing import Any

from tests.clients.cases import case
from tests.clients.conftest import EMBEDDER, MODEL, Target
from tests.clients.either import each, entered, parts_of, settled
from tests.clients.openai_clients import CLIENTS, client_of, joined
from tests.clients.questions import JSON_QUESTION, QUESTION, REPORT_SCHEMA, ROOM, TEXTS, Report

__all__ = ["CLIENTS", "client_of"]  # read by conftest
BRIEF: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": ROOM}


@case("JSON mode", "whole", "streamed")
async def test_json_mode_writes_an_object(client: Any) -> None:
    options = {**BRIEF, "messages": JSON_QUESTION, "response_format": {"type": "json_object"}}
    whole = await settled(client.chat.completions.create(**options))
    [choice] = whole.choices
    assert isinstance(json.loads(choice.message.content), dict)
    assert choice.finish_reason == "stop"
    [streamed] = joined(await parts_of(client.chat.completions.create(**options, stream=True)))
    assert (streamed.content, streamed.finish_reason) == (choice.message.content, choice.finish_reason)


@case("JSON schema", "whole", "streamed")
async def test_a_schema_holds_whole_and_streamed(client: Any) -> None:
    form = {"name": "report", "schema": REPORT_SCHEMA, "strict": True}
    options = {**BRIEF, "response_format": {"type": "json_schema", "json_schema": form}}
    whole = await settled(client.chat.completions.create(**options))
    Report.model_validate_json(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "stop"
    [streamed] = joined(await parts_of(client.chat.completions.create(**options, stream=True)))
    assert streamed.content == whole.choices[0].message.content


@case("JSON schema", "whole")
async def test_parse_makes_the_class_of_the_answer(client: Any) -> None:
    answer = await settled(client.chat.completions.parse(**BRIEF, response_format=Report))
    assert isinstance(answer.choices[0].message.parsed, Report)


@case("JSON schema", "streamed")
async def test_the_streaming_helper_makes_the_class_of_the_answer(client: Any) -> None:
    async with entered(client.chat.completions.stream(**BRIEF, response_format=Report)) as stream:
        kinds = {event.type async for event in each(stream)}
        final = await settled(stream.get_final_completion())
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Report)


@case("embeddings: float", "whole")
async def test_embeddings_are_unit_vectors_in_the_order_of_their_texts(client: Any) -> None:
    options = {"model": EMBEDDER, "encoding_format": "float"}
    answer = await settled(client.embeddings.create(**options, input=TEXTS))
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    for entry, text in zip(answer.data, TEXTS, strict=True):
        alone = await settled(client.embeddings.create(**options, input=text))
        assert math.isclose(math.hypot(*entry.embedding), 1, abs_tol=1e-3)
        assert math.dist(alone.data[0].embedding, entry.embedding) < 1e-3


@case("embeddings: base64", "whole")
async def test_embeddings_in_base64_are_the_same_numbers(client: Any, target: Target) -> None:
    """The SDK asks for base64 by itself, and decodes it, when no format is named."""
    raw = target.post(
        "/v1/embeddings", {"model": EMBEDDER, "input": TEXTS, "encoding_format": "base64"}
    ).json()
    assert isinstance(raw["data"][0]["embedding"], str)
    decoded = await settled(client.embeddings.create(model=EMBEDDER, input=TEXTS))
    floats = await settled(client.embeddings.create(model=EMBEDDER, input=TEXTS, encoding_format="float"))
    for one, other in zip(decoded.data, floats.data, strict=True):
        assert math.dist(one.embedding, other.embedding) < 1e-4
