"""What Codex 0.166 sends to /v1/responses, shortened: accepted, with its namespaces told apart in calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.web.response_tools import flat_name
from tests.server.responses import RESPONSES, keeping, prompt_of, sdk, told
from tests.server.scripted_client import say
from tests.server.stage import Stage

HERMES = '{{ tools }}<tool_call>{"name": ...}</tool_call> {{ messages }}'
NO_ARGUMENTS = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
EXEC = {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False}
CLOSE = {"type": "function", "name": "close_agent", "strict": False, "parameters": NO_ARGUMENTS}


def message(role: str, text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


CODEX: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "input": [message("developer", "Be brief."), message("user", "hi")],
    "tools": [
        {**EXEC, "parameters": NO_ARGUMENTS},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [CLOSE]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a1e312-922d-7ef2-91a9-798b10d420b9",
    "client_metadata": {"x-codex-window-id": "01a1e312:0", "turn_id": "01a1e312"},
}


def calling(name: str) -> Stage:
    said = json.dumps({"name": name, "arguments": {}})
    return Stage(say(f"<tool_call>\n{said}\n</tool_call>"), template=HERMES)


async def test_codexs_request_is_answered() -> None:
    stage = Stage(template=HERMES)
    stream = await stage.post(RESPONSES, CODEX)
    assert stream.status_code == 200, stream.text
    response = told(stream.text)[-1]["response"]
    assert response["status"] == "completed"
    assert [tool["type"] for tool in response["tools"]] == ["function", "namespace"]  # those that are offered
    await stage.post(RESPONSES, {**CODEX, "tool_choice": "required"})
    source = stage.client.asked[1]["params"].grammar.source
    assert "exec_command" in source
    assert "multi_agent_v1__close_agent" in source
    assert "web_search" not in source


async def test_a_call_in_a_namespace_tells_namespace_and_name_apart_whole_and_streamed() -> None:
    stage = calling("multi_agent_v1__close_agent")
    done = [event for event in told((await stage.post(RESPONSES, CODEX)).text) if "item" in event]
    whole = (await stage.post(RESPONSES, {**CODEX, "stream": False})).json()["output"]
    for item in (*(event["item"] for event in done), *whole):
        assert (item["namespace"], item["name"]) == ("multi_agent_v1", "close_agent")
    plain = (await calling("exec_command").post(RESPONSES, {**CODEX, "stream": False})).json()["output"]
    assert "namespace" not in plain[0]


async def test_a_namespaced_call_that_is_sent_back_is_the_one_that_the_model_made() -> None:
    call = {"type": "function_call", "call_id": "c1", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    apart = {**call, "namespace": "multi_agent_v1", "name": "close_agent"}
    flat = {**call, "name": "multi_agent_v1__close_agent"}
    stage = Stage(template=HERMES)
    for sent in (apart, flat):
        answer = await stage.post(RESPONSES, {**CODEX, "input": [*CODEX["input"], sent, output]})
        assert answer.status_code == 200, answer.text
    first, second = stage.client.asked
    assert first["prompt"] == second["prompt"]


async def test_a_function_in_a_namespace_can_be_chosen_by_its_own_name() -> None:
    stage = calling("multi_agent_v1__close_agent")
    for choice in (
        {"type": "function", "name": "close_agent"},
        {"type": "function", "name": "multi_agent_v1__close_agent"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "close_agent"}]},
    ):
        answer = await stage.post(RESPONSES, {**CODEX, "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        assert "exec_command" not in stage.client.asked[-1]["params"].grammar.source.partition("start")[0]


def test_a_flat_name_is_one_that_a_function_may_have_and_differs_where_the_names_do() -> None:
    assert flat_name(None, "f") == "f"
    assert flat_name("mcp__files", "read") == "mcp__files__read"
    long = [flat_name("n" * 60, name) for name in ("read_all", "read_one")]
    assert len({*long, flat_name("n s", "read"), flat_name("n_s", "read")}) == 4
    assert all(len(name) <= 64 for name in long)


async def test_a_conversation_is_compacted_to_the_users_messages_and_a_summary(tmp_path: Path) -> None:
    stage = keeping(tmp_path, say("We met Ada."))
    stage.client.hello = msgspec.structs.replace(stage.client.hello, max_context=2000)
    client = sdk(stage)
    said: list[Any] = [
        {"role": "user", "content": "I am Ada."},
        {"role": "assistant", "content": "Hello."},
    ]
    compacted = await client.responses.compact(model="m", input=said)
    assert (compacted.object, compacted.usage.output_tokens) == ("response.compaction", 11)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert "Summarize" in prompt_of(stage)
    assert "assistant: Hello." in prompt_of(stage)

    sent = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    answer: Any = await client.responses.create(input=[*sent, {"role": "user", "content": "Who?"}])
    prompt = prompt_of(stage)
    assert "We met Ada." in prompt
    assert "Hello." not in prompt
    after = await client.responses.create(input="And?", previous_response_id=answer.id)
    assert "We met Ada." in prompt_of(stage), after.id


async def test_a_response_has_what_open_responses_requires(stage: Stage) -> None:
    body = {"input": "a", "store": False, "presence_penalty": 0.5, "truncation": "auto"}
    answer = (await stage.post(RESPONSES, {**body, "text": {"verbosity": "low"}})).json()
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.5, 0.0)
    assert (answer["truncation"], answer["text"]["verbosity"]) == ("auto", "low")
    long = await stage.post(RESPONSES, {**body, "input": "a" * 300})  # nothing is left out of it
    assert long.json()["error"]["code"] == "context_length_exceeded"
