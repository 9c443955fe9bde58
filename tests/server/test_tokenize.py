"""/tokenize, /detokenize and /apply_template."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.scripted_client import BEGIN, END, MAX_CONTEXT, VOCAB_SIZE
from tests.server.stage import HELLO, Stage


async def test_text_becomes_ids_and_strings(stage: Stage) -> None:
    body = {"prompt": "aé", "return_token_strs": True}
    assert (await stage.post("/tokenize", body)).json() == {
        "count": 4,
        "max_model_len": MAX_CONTEXT,
        "tokens": [BEGIN, 97, 0xC3, 0xA9],
        "token_strs": ["<s>", "a", "\\xc3", "\\xa9"],
    }
    plain = (await stage.post("/tokenize", {"prompt": "a", "add_special_tokens": False})).json()
    assert plain == {"count": 1, "max_model_len": MAX_CONTEXT, "tokens": [97]}


async def test_messages_become_the_ids_that_chat_sends_to_the_engine(stage: Stage) -> None:
    tokens = (await stage.post("/tokenize", {"messages": HELLO["messages"]})).json()["tokens"]
    await stage.post(body=HELLO)
    assert tokens == stage.client.asked[0]["prompt"]


async def test_a_template_is_applied_as_chat_applies_it(stage: Stage) -> None:
    body = {"messages": HELLO["messages"], "return_tokens": True}
    rendered = (await stage.post("/apply_template", body)).json()
    await stage.post(body=HELLO)
    assert rendered["tokens"] == stage.client.asked[0]["prompt"]
    assert rendered["prompt"] == stage.client.tokenizer.decode(rendered["tokens"], skip_special=False)
    plain = {"messages": HELLO["messages"], "add_generation_prompt": False}
    shorter = (await stage.post("/apply_template", plain)).json()
    assert set(shorter) == {"prompt"}
    assert rendered["prompt"].startswith(shorter["prompt"])
    assert rendered["prompt"] != shorter["prompt"]


async def test_ids_become_text_with_special_tokens_unless_told_otherwise(stage: Stage) -> None:
    ids = [BEGIN, 97, 0xC3, 0xA9, END]
    assert (await stage.post("/detokenize", {"tokens": ids})).json() == {"prompt": "<s>aé</s>"}
    skipped = await stage.post("/detokenize", {"tokens": ids, "skip_special_tokens": True})
    assert skipped.json() == {"prompt": "aé"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO["messages"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"content": "a"}, "content"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/apply_template", {}, "messages"),
        ("/apply_template", {"messages": []}, "messages"),
        ("/apply_template", {"messages": [{"role": "x", "content": "y"}]}, "messages[0].role"),
        ("/apply_template", {**HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        ("/apply_template", {**HELLO, "tools": [{"type": "x"}]}, "tools[0].type"),
    ],
)
async def test_bad_input_is_refused_by_name(
    stage: Stage, path: str, body: dict[str, Any], param: str
) -> None:
    response = await stage.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
