"""A last message that is continued: the prompt ends with it, exactly, in every template that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.models.errors import TemplateError
from ridgeline.models.text.chat_template import ChatTemplate
from ridgeline.server.answering.prompts import rendered_chat
from ridgeline.server.errors import BadRequest
from ridgeline.server.openai_api.request_bodies import ChatRequest, Message
from tests.server.stage import CHAT, HELLO, Stage

SAID = "The answer is ("
TURNS: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": SAID}]


class Templated:
    """A tokenizer as far as rendering goes."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")

    def render_chat(self, messages: Any, tools: Any = None, **variables: Any) -> str:
        return self._template.render(messages, tools=tools, **variables)


def continued(tokenizer: Any, turns: list[dict[str, Any]]) -> str:
    messages = [Message(**turn) for turn in turns]
    return rendered_chat(tokenizer, turns, None, ChatRequest(messages=messages, continue_final_message=True))


def test_every_known_template_can_continue_what_the_assistant_said(shared_data: Path) -> None:
    count = 0
    for file in sorted((shared_data / "chat-templates").glob("*.jinja")):
        tokenizer = Templated(file.read_text())
        try:
            whole = tokenizer.render_chat(TURNS, add_generation_prompt=False)
        except TemplateError:
            continue  # one that needs tools
        prompt = continued(tokenizer, TURNS)
        assert prompt.endswith(SAID), file.name
        assert whole.startswith(prompt), file.name
        count += 1
    assert count > 50


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}",
        "{{ messages[0].content }}",
    ],
    ids=["changed", "twice", "left out"],
)
def test_a_template_that_does_not_end_with_it_is_refused(source: str) -> None:
    with pytest.raises(BadRequest, match=r"^messages\[1\]: "):
        continued(Templated(source), TURNS)


async def test_chat_continues_too() -> None:
    stage = Stage()
    response = await stage.post(CHAT, {**HELLO, "messages": TURNS, "continue_final_message": True})
    assert response.status_code == 200, response.text
    assert bytes(stage.client.asked[0]["prompt"][1:]).decode() == f"user: hi\nassistant: {SAID}"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": TURNS, "add_generation_prompt": True}, "add_generation_prompt"),
        ({}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages[0]"),
    ],
)
async def test_what_cannot_be_continued_is_named(fields: dict[str, Any], path: str) -> None:
    response = await Stage().post(CHAT, {**HELLO, **fields, "continue_final_message": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, path)
