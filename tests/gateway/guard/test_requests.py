"""Requests through the guard: every endpoint and every place of a text; what is refused, and what fails."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from ridgeline.gateway.body import read_fields, write_fields
from ridgeline.gateway.errors import BadRequest, GatewayError
from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.gateway.guard.errors import Blocked, GuardFailed, Unreadable
from ridgeline.gateway.guard.guards import Guard, GuardedRequest, Guards
from ridgeline.gateway.guard.scanner import Scanner
from ridgeline.gateway.offload.offload import Offload
from ridgeline.gateway.settings import make_settings
from ridgeline.options import OptionError

MAIL = "ann.lee@example.org"


def ask(body: dict | bytes, kind: str = "chat", **config) -> GuardedRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(Guard(GuardConfig(**config)).request(kind, read_fields(data)))


def forwarded(body: dict, kind: str = "chat", **config) -> dict:
    return json.loads(write_fields(ask(body, kind, **config).fields))


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

BODIES = {
    "chat": {"model": "m", "messages": [
        {"role": "system", "content": f"you serve {MAIL}"},
        {"role": "user", "content": [{"type": "text", "text": MAIL}, {"type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{PNG}"}}]},
        {"role": "assistant", "tool_calls": [{"id": "call_a1", "type": "function", "function": {"name": "f",
        "arguments": json.dumps({"to": MAIL})}}]},
        {"role": "tool", "tool_call_id": "call_a1", "content": json.dumps({"found": MAIL})},
    ], "tools": [{"type": "function", "function": {"name": "f", "description": f"writes to {MAIL}",
    "parameters": {"type": "object", "properties": {"to": {"type": "string", "default": MAIL}}}}}],
        "user": MAIL, "metadata": {"owner": MAIL, MAIL: "1"}},
    "completions": {"model": "m", "prompt": [f"to {MAIL}"], "suffix": MAIL},
    "responses": {"model": "m", "instructions": MAIL, "input": [
        {"role": "user", "content": [{"type": "input_text", "text": MAIL}, {"type": "input_file",
        "filename": f"{MAIL} cv.txt"}]},
        {"type": "function_call", "call_id": "call_a1", "name": "f", "arguments": json.dumps({"to": MAIL})},
        {"type": "function_call_output", "call_id": "call_a1", "output": f"sent to {MAIL}"}]},
    "messages": {"model": "m", "system": [{"type": "text", "text": MAIL}], "messages": [
        {"role": "user", "content": MAIL},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_a1", "name": "f",
        "input": {"to": MAIL, "id": MAIL}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_a1",
        "content": [{"type": "text", "text": MAIL}]}]}],
        "metadata": {"user_id": MAIL}},
    "embeddings": {"model": "m", "input": [MAIL, f"and {MAIL}"]},
    "rerank": {"model": "m", "query": MAIL, "documents": [MAIL, {"text": MAIL}]},
    "score": {"model": "m", "text_1": MAIL, "text_2": [MAIL]},
    "something else": {"model": "m", "deep": [{"er": [[{"x": MAIL}]]}]},
}  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
def test_no_place_of_any_endpoint_is_left_out(kind):
    asked = ask(BODIES[kind], kind)
    body = write_fields(asked.fields).decode()
    assert MAIL not in body
    assert "<EMAIL_1>" in body
    assert "<EMAIL_2>" not in body  # the same value has the same placeholder
    assert asked.findings["email"] == json.dumps(BODIES[kind]).count(MAIL)
    assert json.loads(body)["model"] == "m"


def test_pictures_and_ids_and_everything_else_stay_as_they_are():
    body = {**BODIES["chat"], "temperature": 0.25, "seed": 1234567890123, "stop": ["\n"], "stream": True}
    read = forwarded(body)
    assert read["messages"][1]["content"][1]["image_url"]["url"].endswith(PNG)
    assert read["messages"][2]["tool_calls"][0]["id"] == read["messages"][3]["tool_call_id"] == "call_a1"
    assert [read[name] for name in ("temperature", "seed", "stop", "stream")] == [
        0.25,
        1234567890123,
        ["\n"],
        True,
    ]
    assert json.loads(read["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"to": "<EMAIL_1>"}


def test_text_that_is_dressed_up_as_a_picture_is_read():
    content = [{"type": "image_url", "image_url": {"url": f"https://x.org/?mail={MAIL}"}}]
    assert MAIL not in json.dumps(forwarded({"messages": [{"role": "user", "content": content}]}))


def test_a_key_in_place_of_an_id_is_no_id():
    body = {"previous_response_id": "sk-proj-abcdefghij0123456789", "input": "x"}
    assert "abcdefghij" not in json.dumps(forwarded(body, "responses"))


def test_a_value_in_place_of_a_name_is_redacted():
    assert forwarded({MAIL: None, "input": "x"}, "responses") == {"<EMAIL_1>": None, "input": "x"}


def test_names_of_fields_tell_what_their_values_are():
    arguments = json.dumps(
        {"password": "tulip-x", "apiKey": "a1b2c3d4e5f6g7h8", "phone": "5550142", "n": 5550142}
    )
    call = {"id": "c1", "function": {"name": "f", "arguments": arguments}}
    read = forwarded(
        {"messages": [{"role": "assistant", "tool_calls": [call]}], "metadata": {"password": "rose9"}}
    )
    changed = json.loads(read["messages"][0]["tool_calls"][0]["function"]["arguments"])
    assert changed == {"password": "<SECRET_1>", "apiKey": "<SECRET_2>", "phone": "<PHONE_1>", "n": 5550142}
    assert read["metadata"] == {"password": "<SECRET_3>"}


def test_a_name_that_stands_twice_cannot_hide_a_value():
    body = b'{"messages":[{"role":"user","content":"ann.lee@example.org","content":"hello"}]}'
    assert b"ann.lee" not in write_fields(ask(body).fields)


def test_a_clean_request_is_passed_with_nothing_to_do_for_its_answer():
    asked = ask({"model": "m", "messages": [{"role": "user", "content": "hello there"}]})
    assert (asked.action, asked.findings, asked.restorer) == ("pass", {}, None)


def test_blocked_requests_name_kinds_and_the_field_but_no_text(caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Blocked) as blocked:
        ask({"model": "m", "prompt": f"{MAIL} and password = hunter2"}, "completions", block=("secret",))
    error = blocked.value
    assert (error.status, error.code, error.param, error.found) == (
        400,
        "content_blocked",
        "prompt",
        {"secret": 1},
    )
    assert "hunter2" not in error.message + caplog.text
    assert MAIL not in error.message + caplog.text


def test_kinds_are_logged_redacted_or_left_alone_as_the_policy_says():
    body = {"prompt": f"{MAIL}, 192.168.7.9, +49 30 1234567"}
    asked = ask(body, "completions", redact=("phone",), log=("ip",))
    assert json.loads(bytes(asked.fields["prompt"])) == f"{MAIL}, 192.168.7.9, <PHONE_1>"
    assert asked.findings == {"ip": 1, "phone": 1}


def test_allowed_values_are_not_touched():
    read = forwarded({"prompt": "help@acme.com or ann@acme.com, not bob@x.org"}, allow=("*@ACME.com",))
    assert read["prompt"] == "help@acme.com or ann@acme.com, not <EMAIL_1>"


def test_a_placeholder_that_the_client_wrote_itself_is_given_to_no_value():
    asked = ask(
        {"messages": [{"role": "user", "content": MAIL}, {"role": "user", "content": "keep <EMAIL_1>"}]}
    )
    assert "<EMAIL_2>" in bytes(asked.fields["messages"]).decode()
    assert asked.restorer is not None
    answer = b'{"choices":[{"message":{"content":"<EMAIL_1> <EMAIL_2>"}}]}'
    assert b"<EMAIL_1> ann.lee@example.org" in asked.restorer.answer("chat", answer)


def test_a_longer_conversation_has_the_same_placeholders_from_the_start():
    turns = [{"role": "user", "content": "a@x.org b@x.org"}, {"role": "assistant", "content": "b@x.org"}]
    first = forwarded({"messages": turns[:1]})["messages"]
    second = forwarded({"messages": [*turns, {"role": "user", "content": "c@x.org"}]})["messages"]
    assert second[:1] == first
    assert second[2]["content"] == "<EMAIL_3>"


def test_a_conversation_that_the_upstream_remembers_has_other_placeholders():
    """The old ones stand there for values that are not known here any more."""
    first = forwarded({"input": "a@x.org"}, "responses")
    second = forwarded({"input": "b@x.org", "previous_response_id": "resp_1"}, "responses")
    third = forwarded({"input": "b@x.org", "previous_response_id": "resp_2"}, "responses")
    assert len({first["input"], second["input"], third["input"]}) == 3
    assert second["previous_response_id"] == "resp_1"


def test_a_policy_that_only_logs_forwards_the_bytes_that_came():
    body = b'{"prompt" : "a@x.org",  "x":[1, 2]}'
    fields = read_fields(body)
    config = GuardConfig(redact=(), log=("email",))
    asked = asyncio.run(Guard(config).request("completions", fields))
    assert asked.fields is fields
    assert asked.findings == {"email": 1}


@pytest.mark.parametrize(
    "body", [{"input": [1, 2, 3]}, {"input": ["x", 1]}, {"input": [[1, 2], [3]]}, {"prompt": [464, 2068]}]
)
def test_token_ids_cannot_be_read_and_are_refused_unless_the_policy_lets_them(body):
    with pytest.raises(Unreadable):
        ask(body, "embeddings")
    assert forwarded(body, "embeddings", unreadable="pass") == body


def test_bodies_that_are_not_json_are_refused_unless_the_policy_lets_them():
    with pytest.raises(Unreadable) as refused:
        Guard(GuardConfig()).refuse_unreadable("audio")
    assert refused.value.status == 400
    Guard(GuardConfig(unreadable="pass")).refuse_unreadable("audio")


def broken(self: Scanner, *arguments: object) -> str:
    raise ValueError(f"secret text {MAIL}")


def test_a_detector_that_breaks_fails_the_request_and_tells_nothing(monkeypatch):
    monkeypatch.setattr(Scanner, "replaced", broken)
    with pytest.raises(GuardFailed) as failed:
        ask({"prompt": MAIL})
    assert (failed.value.status, failed.value.code) == (500, "guard_failed")
    assert MAIL not in failed.value.message
    assert failed.value.__cause__ is None


def test_a_text_that_takes_too_long_to_check_is_the_clients_error():
    with pytest.raises(BadRequest, match="timeout_ms") as refused:
        ask({"prompt": "415-555-2671 " * 40_000}, timeout_ms=1)
    assert (refused.value.status, refused.value.code) == (400, "guard_text_too_long")


def test_a_large_body_is_checked_in_another_process():
    async def both() -> tuple[GuardedRequest, GuardedRequest]:
        config = GuardConfig(timeout_ms=60_000)
        offload = Offload(make_settings({"guards": [{"timeout_ms": 60_000}]}))
        fields = read_fields(json.dumps({"prompt": "415-555-2671 me@example.com " * 2_000}).encode())
        guard = Guard(config, offload)
        guard._checked = None  # type: ignore[assignment, method-assign]  # never here
        try:
            return await guard.request("completions", fields), await Guard(config).request(
                "completions", fields
            )
        finally:
            await offload.close()

    there, here = asyncio.run(both())
    assert there.findings == here.findings == {"phone": 2_000, "email": 2_000}
    assert there.fields == here.fields
    assert there.restorer is not None
    answer = json.dumps({"choices": [{"message": {"content": "<PHONE_1> or <EMAIL_1>"}}]}).encode()
    restored = json.loads(there.restorer.answer("chat", answer))
    assert restored["choices"][0]["message"]["content"] == "415-555-2671 or me@example.com"


def test_a_body_that_is_nested_too_deeply_is_the_clients_mistake():
    with pytest.raises(BadRequest):
        ask(b'{"a":' + b"[" * 900 + b"1" + b"]" * 900 + b"}")


def test_whole_answers_that_cannot_be_read_are_held_back_only_where_answers_are_checked():
    asked = ask({"prompt": MAIL})
    assert asked.restorer is not None
    assert asked.restorer.answer("audio", b"\x00<sound>") == b"\x00<sound>"
    checked = ask({"prompt": MAIL}, answers_redact=("email",)).restorer
    assert checked is not None
    with pytest.raises(GuardFailed):
        checked.answer("audio", b"\x00<sound>")


def test_a_key_without_a_policy_has_the_default_one_and_an_unknown_one_fails():
    guards = Guards([GuardConfig(), GuardConfig(name="strict", block=("email",))])
    assert guards.policy("") is guards.policy("default")
    assert guards.policy("strict") is not guards.policy("")
    assert guards.names == ("default", "strict")
    with pytest.raises(GatewayError) as failed:
        guards.policy("strikt")
    assert failed.value.code == "guard_failed"
    assert Guards([GuardConfig(name="strict")]).policy("") is None


def test_patterns_of_the_config_are_kinds_like_the_others():
    config = {
        "patterns": (r"employee_id=\bE-[0-9]{4}\b", "project=(?i:project falcon)"),
        "redact": ("employee_id", "project"),
    }
    asked = ask({"prompt": "E-1234 works on Project Falcon"}, **config)
    assert json.loads(bytes(asked.fields["prompt"])) == "<EMPLOYEE_ID_1> works on <PROJECT_1>"
    assert asked.restorer is not None
    answer = asked.restorer.answer("chat", b'{"text":"< employee id 1 >"}')
    assert answer == b'{"text":"E-1234"}'


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("evil=(a+)+b", "ways"),
        (r"evil=(\w+\s?)*:", "ways"),
        (r"evil=\w+\d+\w+", "ways"),
        ("evil=(a|a)*b", "ways"),
        ("empty=a*", "every position"),
        ("broken=(", "not a regular expression"),
        ("email=x", "already"),
        ("no regex", "name=regex"),
    ],
)
def test_a_pattern_that_could_take_long_or_is_none_is_refused_at_start(pattern, why):
    with pytest.raises(OptionError, match=why):
        Guard(GuardConfig(patterns=(pattern,)))


def test_a_kind_or_a_region_that_nobody_knows_is_refused_at_start():
    with pytest.raises(OptionError, match="emial"):
        GuardConfig(redact=("emial",))
    with pytest.raises(OptionError, match="XY"):
        Guard(GuardConfig(phone_regions=("XY",)))
