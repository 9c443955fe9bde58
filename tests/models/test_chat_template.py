"""Chat templates render exactly what transformers renders, refuse in words, and cannot hang the server."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.models.errors import TemplateError
from ridgeline.models.text import template_sandbox
from ridgeline.models.text.chat_template import ChatTemplate

BOS, EOS = "<s>", "</s>"

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a <city> & 'more' — «ça»",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "e.g. Zürich"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": ["integer", "null"]},
            },
            "required": ["city"],
        },
    },
}
CITY_TOOL = {
    "type": "function",
    "function": {
        "name": "population",
        "description": "How many live there",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city"},
                "years": {"type": "array", "items": {"type": "integer"}, "description": "Which years"},
            },
            "required": ["city"],
        },
        "return": {"type": "integer"},
    },
}
TIME_TOOL = {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {}}}


def call(arguments: Any) -> dict[str, Any]:
    return {
        "id": "call00001",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


def asked_for_a_tool(arguments: Any, content: str | None = "") -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": content, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"temp": 21.5}'},
        {"role": "assistant", "content": "21.5 °C."},
        {"role": "user", "content": "Thanks!"},
    ]


USER = {"role": "user", "content": "Hi 👩‍👩‍👧 <|im_end|> {{ 7 * 7 }}\n\n  spaced  "}
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "trois — 三 — ثلاثة"},
]
REASONED = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Two and two.\nSo four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "<think>\nagain\n</think>\n\nYes", "thinking": "Again."},
    {"role": "user", "content": "ok"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]}]

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system and user": {"messages": [{"role": "system", "content": "Sei höflich."}, USER]},
    "turns": {"messages": TURNS},
    "turns, no generation prompt": {"messages": TURNS, "add_generation_prompt": False},
    "ends with the assistant": {"messages": TURNS[:2], "add_generation_prompt": False},
    "reasoning": {"messages": REASONED},
    "thinking off": {"messages": TURNS, "enable_thinking": False, "thinking": False},
    "thinking on": {"messages": TURNS, "enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    "content in parts": {"messages": PARTS},
    "tools offered": {"messages": [USER], "tools": [WEATHER_TOOL, TIME_TOOL]},
    "plain tool offered": {"messages": TURNS, "tools": [CITY_TOOL]},
    "functions as a variable": {"messages": TURNS, "functions": "[]", "datetime": "2026-03-14"},
    "tool result": {"messages": asked_for_a_tool({"city": "Zürich", "days": 2}), "tools": [WEATHER_TOOL]},
    "tool result, null content": {"messages": asked_for_a_tool({"city": "X"}, None), "tools": [WEATHER_TOOL]},
    "tool arguments as text": {"messages": asked_for_a_tool('{"city": "Zürich"}'), "tools": [WEATHER_TOOL]},
    "tool result last": {"messages": asked_for_a_tool({"city": "Bern"})[:4], "tools": [WEATHER_TOOL]},
    "documents": {"messages": [USER], "documents": [{"title": "A", "text": "B"}]},
    "unknown role": {"messages": [{"role": "narrator", "content": "Once."}]},
    "two users in a row": {"messages": [USER, USER]},
}


class FixedDay(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2026, 3, 14, 15, 9, 26, tzinfo=tz)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' renderer, on the same day as ours."""
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", FixedDay)
    monkeypatch.setattr(template_sandbox, "datetime", FixedDay)
    chat_template_utils._compile_jinja_template.cache_clear()

    def render(source: str, **options: Any) -> str:
        options = {"add_generation_prompt": True, "bos_token": BOS, "eos_token": EOS} | options
        rendered, _ = chat_template_utils.render_jinja_template(
            [options.pop("messages")], chat_template=source, **options
        )
        return str(rendered[0])

    return render


def test_every_known_template_renders_as_transformers_renders_it(shared_data: Path, reference: Any) -> None:
    rendered, refused, compared = 0, 0, set()
    files = sorted((shared_data / "chat-templates").glob("*.jinja"))
    for path in files:
        source = path.read_text(encoding="utf-8")
        ours = ChatTemplate(source, bos_token=BOS, eos_token=EOS)
        for name, conversation in CONVERSATIONS.items():
            try:
                expected = reference(source, **conversation)
            except Exception:
                with pytest.raises(TemplateError):
                    ours.render(**conversation)
                refused += 1
            else:
                assert ours.render(**conversation) == expected, f"{path.name}: {name}"
                rendered += 1
                compared.add(path.name)
    assert len(compared) == len(files) >= 60
    assert rendered > 10 * len(compared)
    assert refused > 0


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ tools | tojson(separators=(',', ':')) }}",
        "{{ messages | tojson(ensure_ascii=True, sort_keys=True) }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.length }}{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "  {% if true %}\n    kept\n  {% endif %}\n{{- ' trimmed' }}",
        "{% macro m(a, b='z') %}[{{ a ~ b }}]{% endmacro %}{{ m(1) }}{{ m('x', none) }}{{ undefined_name }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%d %b %Y %H') }} {{ bos_token }} {{ pad_token is defined }} {{ dict(a=1) }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% else %}none{% endfor %}",
        "{% for t in [[1, [2, 3]], 4] recursive %}{{ loop(t) if t is iterable else t }},{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.revindex }}{{ m.content[:2] }}{% endfor %}",
        "{{ messages[0]['content'] | trim | length }}{{ [1, 2] + [3] }}{{ 'ab' * 3 }}{{ 2 ** 5 }}",
        "{{ '%s-%d' % ('x', 3) }}{{ '{:>5}'.format(1) }}{{ 'x'.ljust(3) }}{{ 'x' | center(5) }}",
    ],
)
def test_each_feature_of_the_dialect_renders_as_in_transformers(source: str, reference: Any) -> None:
    conversation = {"messages": REASONED, "tools": [WEATHER_TOOL]}
    ours = ChatTemplate(source, bos_token=BOS, eos_token=EOS)
    assert ours.render(**conversation) == reference(source, **conversation)


# Families without a published template among the shared ones, in their documented formats.
FAMILY_TEMPLATES = {
    "phi-4": (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>",
    ),
    "olmo-2": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        f"{BOS}<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n",
    ),
    "glm-4": (
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else '' }}",
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\n",
    ),
    "internlm2": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        f"{BOS}<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
}


@pytest.mark.parametrize("family", FAMILY_TEMPLATES)
def test_a_familys_documented_format_renders(family: str, reference: Any) -> None:
    source, expected = FAMILY_TEMPLATES[family]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ChatTemplate(source, bos_token=BOS, eos_token=EOS).render(messages=messages) == expected
    assert reference(source, messages=messages) == expected


def test_a_template_that_raises_gives_its_own_message() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render(TURNS)


def test_a_broken_template_is_refused_with_its_line() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("fine\n{% if %}")


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(TemplateError, match="at least one message"):
        ChatTemplate("x").render([])


def test_a_message_that_is_no_object_is_refused_by_its_place() -> None:
    with pytest.raises(TemplateError, match=r"messages\[1\]"):
        ChatTemplate("x").render([USER, "hello"])  # type: ignore[list-item]


def test_tools_choose_the_tool_template_among_named_ones() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools", "rag": "no"})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[WEATHER_TOOL]) == "with tools"


def test_named_templates_without_a_default_are_refused_with_their_names() -> None:
    with pytest.raises(TemplateError, match="rag, tool_use"):
        ChatTemplate({"rag": "a", "tool_use": "b"}).render([USER])


def test_rendering_leaves_the_messages_as_they_were() -> None:
    message = {"role": "assistant", "content": "x", "reasoning": "y"}
    ChatTemplate("{{ messages[0].pop('role') if false }}{{ messages[0].reasoning_content }}").render(
        [message]
    )
    assert message == {"role": "assistant", "content": "x", "reasoning": "y"}


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_the_sandbox_refuses_python_internals(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([USER])


@pytest.fixture
def two_more_gib() -> Iterator[None]:
    """No more memory than that: a bound that fails shall fail a test, not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
DOUBLED = "{% set a = ['x'] %}" + 40 * "{% set a = [a, a] %}"  # a kilobyte of lists; written out, terabytes


@pytest.mark.parametrize(
    "source",
    [
        NESTED + ENDS,
        NESTED + "x" * 1000 + ENDS,
        "{% macro m() %}" + NESTED + "x" * 1000 + ENDS + "{% endmacro %}{% set y = m() %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set s = namespace(t='x') %}{% for i in range(99) %}{% set s.t = s.t ~ s.t %}{% endfor %}",
        "{% set s = namespace(t='x') %}{% for i in range(99) %}{% set s.t = s.t + s.t %}{% endfor %}",
        "{% set s = namespace(t='x') %}{% for i in range(99) %}{% set q %}{{ s.t }}{{ s.t }}{% endset %}"
        "{% set s.t = q %}{% endfor %}",
        "{% for i in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ range(1000000000) | length }}",
        "{{ 'x' * 9999999999 }}",
        "{{ 9999999999 * [1] }}",
        "{{ 9 ** 9999999 }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ messages | tojson(indent=9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ lipsum(n=100000) }}",
        "{{ ('a' * 1000).replace('a', 'b' * 9000000) | length }}",
        "{{ ('a' * 1000) | replace('a', 'b' * 9000000) | length }}",
        "{{ ('a' * 9000).replace('', 'b' * 9000000) | length }}",
        "{{ ('a' * 9000).encode().replace('a'.encode(), ('b' * 9000000).encode()) | length }}",
        "{{ 'x'.encode() * 9999999999 }}",
        "{{ ('b' * 1000000).join(['x'] * 9000) | length }}",
        "{{ (['x'] * 9000) | join('b' * 1000000) | length }}",
        "{{ (['b' * 1000000] * 9000) | join | length }}",
        "{{ ('{0}' * 9000).format('b' * 1000000) | length }}",
        "{{ ('{:9999999}' * 9000).format(1) | length }}",
        "{{ ('%9999999d' * 9000) % 1 }}",
        "{{ ('\t' * 9000).expandtabs(1000000) | length }}",
        "{{ ('a' * 9000).translate({97: 'b' * 1000000}) | length }}",
        "{{ ('\nx' * 9000) | indent('b' * 1000000) | length }}",
        "{{ ('x ' * 9000) | wordwrap(1, wrapstring='b' * 1000000) | length }}",
        "{{ (['x'] * 9000) | tojson(indent='b' * 1000000) | length }}",
        "{{ (['x'] * 9000) | tojson(separators=['b' * 1000000, ':']) | length }}",
        "{{ ['b' * 1000000] * 9000 }}",
        "{{ (['b' * 1000000] * 9000) | string | length }}",
        "{{ (['b' * 1000000] * 9000) | tojson | length }}",
        "{{ (['b' * 1000000] * 9000) ~ 'x' }}",
        "{{ (['x'] * 1000) | map('replace', 'x', 'b' * 9000000) | list | length }}",
        "{{ namespace(a=['b' * 1000000] * 9000) }}",
        DOUBLED + "{{ a }}",
        DOUBLED + "{{ a | tojson | length }}",
        DOUBLED + DOUBLED.replace(" a ", " b ") + "{{ a == b }}",
        "{% set s = namespace(t=[]) %}{% for i in range(99) %}{% set s.t = s.t + [[0] * 9999] %}{% endfor %}",
        "{% set s = namespace(n=9) %}{% for i in range(99) %}{% set s.n = s.n * s.n %}{% endfor %}",
        "{% for i in range(90000) %}{{ ('a' * 9000000) | length }}{% endfor %}",
        "{% set a = 'a' * 30000000 %}{% for i in range(90000) %}{{ 'b' in a }}{% endfor %}",
        "{% set a = 'a' * 30000000 %}{% for i in range(90000) %}{{ a[:] | length }}{% endfor %}",
        "{% for i in range(999) %}{{ range(99999) | map('abs') | list | length }}{% endfor %}",
        "{% for letter in 'a' * 30000000 %}{% endfor %}",
    ],
)
def test_a_template_cannot_hang_or_fill_the_server(source: str, two_more_gib: None) -> None:
    template = ChatTemplate(source)
    began = time.process_time()
    with pytest.raises(TemplateError) as stopped:
        template.render([USER])
    assert time.process_time() - began < 15
    assert "MemoryError" not in str(stopped.value)


def test_a_request_as_large_as_the_server_takes_is_within_the_budget() -> None:
    """Eight megabytes in a thousand messages, through what templates commonly do with each."""
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' and messages | length > loop.index0 %}"
        "{{ '<' ~ m.role ~ '>' + m.content | trim | replace('\n', ' ') }}"
        "{{ m.content.split('x')[-1] }}{{ '%s' % m.content[:9] }}{{ m | tojson }}"
        "{% endif %}{% endfor %}{{ messages | map(attribute='content') | join('|') | length }}"
    )
    messages = [{"role": "user", "content": "line\n" * 1600} for _ in range(1000)]
    began = time.process_time()
    assert template.render(messages).endswith("8000999")
    assert time.process_time() - began < 5


def test_numbers_of_any_size_are_formatted() -> None:
    """Only a width makes a long text of a number."""
    source = (
        "{{ '%d' % 1700000000 }} {{ '{}'.format(1700000000) }} {{ '%s|%5.2f' | format(1700000000, 2.5) }}"
    )
    assert ChatTemplate(source).render([USER]) == "1700000000 1700000000 1700000000| 2.50"


def test_the_budget_is_per_render() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}done")
    assert {template.render([USER]) for _ in range(10)} == {"done"}


def test_numbers_of_numpy_are_numbers() -> None:
    template = ChatTemplate("{{ whole + 1 }} {{ half }} {{ 'yes' if flag else 'no' }}")
    numbers = {"whole": np.int64(2), "half": np.float32(0.5), "flag": np.bool_(False)}
    assert template.render([USER], **numbers) == "3 0.5 no"
