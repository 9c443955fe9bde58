"""One client's large body must not block the event loop, which carries all streams."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from ridgeline.models.text.chat_template import ChatTemplate
from tests.server.scripted_client import ByteTokenizer, say
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage

WORDS = "word " * 4000
SMALL = {"role": "user", "content": ""}


class WatchedTokenizer(ByteTokenizer):
    """Remembers which threads did its work."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        self.threads.add(threading.current_thread())
        return super().encode(text, add_special)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        self.threads.add(threading.current_thread())
        return super().decode(ids, skip_special)

    def token_bytes(self, id: int) -> bytes:
        self.threads.add(threading.current_thread())
        return super().token_bytes(id)


def watched(max_context: int = 100_000) -> tuple[Stage, WatchedTokenizer]:
    stage = Stage(say("ok"))
    tokenizer = WatchedTokenizer()
    stage.client.tokenizer = tokenizer
    stage.client.hello = msgspec.structs.replace(stage.client.hello, max_context=max_context)
    return stage, tokenizer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": WORDS}]}),
        (CHAT, {"messages": [SMALL] * 2000}),
        (CHAT, {**HELLO, "chat_template_kwargs": {"x": WORDS}}),
        (COMPLETIONS, {"prompt": WORDS}),
        (COMPLETIONS, {"prompt": ["a"] * 1000, "user": WORDS}),
        (COMPLETIONS, {"prompt": [97] * 10_000, "echo": True}),
        ("/tokenize", {"prompt": WORDS, "return_token_strs": True}),
        ("/detokenize", {"tokens": [97] * 10_000}),
    ],
    ids=[
        "long message",
        "many small messages",
        "template variables",
        "long text",
        "many texts",
        "echoed ids",
        "tokenize",
        "detokenize",
    ],
)
async def test_a_large_body_is_prepared_off_the_loop(path: str, body: dict[str, Any]) -> None:
    stage, tokenizer = watched()
    assert (await stage.post(path, body)).status_code == 200
    assert tokenizer.threads
    assert threading.current_thread() not in tokenizer.threads


async def test_a_small_body_is_prepared_at_once() -> None:
    stage, tokenizer = watched()
    assert (await stage.post(CHAT, HELLO)).status_code == 200
    assert tokenizer.threads == {threading.current_thread()}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_many_logprobs_are_written_off_the_loop(stream: bool) -> None:
    stage, tokenizer = watched()
    ids = [97] * 500
    body = {"prompt": ids, "prompt_logprobs": 5, "max_tokens": 2, "stream": stream}
    response = await stage.post(COMPLETIONS, body)
    assert response.status_code == 200
    assert response.text.count('"rank":1') == len(ids) - 1
    assert threading.current_thread() not in tokenizer.threads


async def test_a_long_prompt_reaches_the_engine_whole() -> None:
    stage, _ = watched()
    await stage.post(CHAT, {"messages": [{"role": "user", "content": WORDS}]})
    assert WORDS in stage.client.tokenizer.decode(stage.client.asked[0]["prompt"])


async def test_template_variables_nested_too_deeply_are_refused(stage: Stage) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    stage.client.tokenizer.render_chat = lambda messages, tools, **variables: template.render(
        messages, **variables
    ).encode()
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    response = await stage.post(CHAT, {**HELLO, "chat_template_kwargs": {"x": deep}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert stage.client.asked == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 1_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "x" * 1_000_000]}, "prompt[1]"),
    ],
)
async def test_text_that_no_context_could_hold_is_not_encoded(
    path: str, body: dict[str, Any], param: str
) -> None:
    stage, tokenizer = watched(max_context=1000)
    response = await stage.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert len(tokenizer.threads) <= (param == "prompt[1]")
