"""Which format each published template speaks, and that our parser reads the calls it writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.models.text.chat_template import ChatTemplate
from ridgeline.server.answering.model_formats import PROMPT_TAIL, ModelFormats, formats_of, needs_special
from ridgeline.server.config import ServerConfig
from ridgeline.server.parsing.events import Tool, joined
from ridgeline.server.parsing.format_table import TOOL_FORMATS, ToolFormat, detect
from ridgeline.server.parsing.reasoning import REASONING_FORMATS
from ridgeline.web.answer_parts import CallArguments, CallStart
from tests.server.parsing.texts import NOW, WEATHER

TEMPLATES = Path(__file__).parents[4] / "shared" / "data" / "chat-templates"

needs_templates = pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"{TEMPLATES} is not here")

# The format of calls and of reasoning; None: no parser reads it.
SPOKEN: dict[str, tuple[str | None, str | None]] = {
    "Apertus-8B-Instruct": (None, None),
    "Apriel-1.6-15b-Thinker-fixed": (None, None),
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "ByteDance-Seed-OSS": (None, None),
    "Cohere2MoE": (None, None),
    "CohereForAI-c4ai-command-r-plus-tool_use": (None, None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (None, None),
    "GLM-4.6": (None, "think"),
    "GLM-4.7-Flash": (None, "think"),
    "GigaChat3-10B-A1.8B": (None, None),
    "GigaChat3.1-10B-A1.8B": (None, None),
    "HuggingFaceTB-SmolLM3-3B": ("json", "think"),
    "Kimi-K2-Instruct": (None, None),
    "Kimi-K2-Thinking": (None, "think"),
    "Kimi-K3": (None, None),
    "LFM2-8B-A1B": (None, None),
    "LFM2.5-8B-A1B": (None, "think"),
    "LFM2.5-Instruct": (None, "think"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": (None, None),
    "MiniMax-M2": (None, "think"),
    "MiniMax-M3": (None, None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen_xml", "think"),
    "NVIDIA-Nemotron-Nano-v2": (None, "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen_xml", None),
    "Qwen3.5-4B": ("qwen_xml", "think"),
    "Reka-Edge": ("hermes", "think"),
    "StepFun3.5-Flash": ("qwen_xml", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("dsml", "think"),
    "deepseek-ai-DeepSeek-V4": ("dsml", "think"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("dsml", "think"),
    "fireworks-ai-llama-3-firefunction-v2": (None, None),
    "google-gemma-2-2b-it": ("json", None),
    "google-gemma-4-31B-it": ("gemma", "gemma"),
    "google-gemma-4-31B-it-interleaved": ("gemma", "gemma"),
    "ibm-granite-granite-3.3-2B-Instruct": (None, None),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "llama-cpp-deepseek-r1": ("deepseek", "think"),
    "llama-cpp-rwkv-world": ("json", "think"),
    "meetkai-functionary-medium-v3.1": (None, None),
    "meetkai-functionary-medium-v3.2": (None, None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", None),
    "microsoft-Phi-3.5-mini-instruct": ("json", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": (None, None),
    "muse-glimmer": (None, None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "openbmb-MiniCPM5-1B": (None, "think"),
    "poolside-Laguna-S-2.1": (None, "think"),
    "poolside-Laguna-XS-2.1": (None, "think"),
    "poolside-Laguna-XS.2": (None, "think"),
    "tencent-Hy3": (None, None),
    "unsloth-Apriel-1.5": (None, None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "upstage-Solar-Open-100B": (None, None),
}
READ = sorted(name for name, (spoken, _) in SPOKEN.items() if spoken is not None)

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'São "Paulo" {x}', "days": 3, "where": {"lat": 1.5}, "metric": True}),
    ("now", {}),
]
QUESTION = "Which weather is it now?"


def conversation() -> list[dict[str, Any]]:
    calls = [
        {
            "id": f"call_{index:024x}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given)},
        }
        for index, (name, given) in enumerate(CALLS)
    ]
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "noon"},
    ]


def source_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def rendered(name: str, spoken: ToolFormat, tools: tuple[Tool, ...] = (WEATHER, NOW)) -> str:
    template = ChatTemplate(source_of(name), bos_token="<s>", eos_token="</s>")
    messages, shown = spoken.prepare(conversation(), tools)
    return template.render(messages, shown)


def calls_in(spoken: ToolFormat, text: str) -> list[tuple[str, Any]]:
    numbers = itertools.count()
    parser = spoken.parser((WEATHER, NOW), None, False, lambda: str(next(numbers)))
    events = joined(parser.feed(text) + parser.finish())
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
    assert len(names) == len(arguments)
    return list(zip(names, arguments, strict=True))


@needs_templates
def test_the_table_names_every_template() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(SPOKEN)


@needs_templates
@pytest.mark.parametrize("name", sorted(SPOKEN))
def test_the_template_says_which_formats_the_model_speaks(name: str) -> None:
    spoken, reasoning = detect(source_of(name))
    assert (spoken and spoken.name, reasoning and reasoning.name) == SPOKEN[name]


@needs_templates
@pytest.mark.parametrize("name", READ)
def test_calls_that_a_template_writes_are_read_back(name: str) -> None:
    spoken, _ = detect(source_of(name))
    assert spoken is not None
    answer = rendered(name, spoken).rpartition(QUESTION)[2]
    assert calls_in(spoken, answer.replace("Assistant: ", "\n")) == CALLS  # RWKV's answers begin in that line


@needs_templates
@pytest.mark.parametrize("name", READ)
def test_the_prompt_shows_tools_and_both_results(name: str) -> None:
    spoken, _ = detect(source_of(name))
    assert spoken is not None
    prompt = rendered(name, spoken)
    after = prompt.rpartition(QUESTION)[2]
    assert "Weather of a city" in prompt
    assert after.index("sunny") < after.index("noon")


@needs_templates
@pytest.mark.parametrize(
    ("name", "variables", "opened"),
    [
        ("Qwen3.5-4B", {}, True),
        ("Qwen3.5-4B", {"enable_thinking": False}, False),
        ("Qwen-Qwen3-0.6B", {}, False),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, True),
        ("deepseek-ai-DeepSeek-V3.1", {}, False),
        ("deepseek-ai-DeepSeek-V4", {}, False),
        ("llama-cpp-deepseek-r1", {}, True),
        ("openai-gpt-oss-120b", {}, False),
        ("google-gemma-4-31B-it", {}, False),
        ("meta-llama-Llama-3.1-8B-Instruct", {}, False),
    ],
)
def test_the_end_of_the_prompt_says_whether_reasoning_has_begun(
    name: str, variables: dict[str, Any], opened: bool
) -> None:
    template = ChatTemplate(source_of(name), bos_token="<s>", eos_token="</s>")
    prompt = template.render([{"role": "user", "content": "What is <think>?"}], **variables)
    _, reasoning = detect(source_of(name))
    assert (reasoning is not None and reasoning.opened_by(prompt[-PROMPT_TAIL:])) is opened


def test_a_template_that_knows_no_tools_is_taught_them() -> None:
    source = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    spoken, reasoning = detect(source)
    assert spoken is not None
    assert (spoken.name, reasoning) == ("json", None)
    messages, shown = spoken.prepare(
        [{"role": "system", "content": "Be brief."}, *conversation()], (WEATHER, NOW)
    )
    prompt = ChatTemplate(source).render(messages, shown)
    assert shown is None
    assert prompt.startswith("[system] Be brief.\n\nYou can call functions.")
    assert '{"name": "get_weather", "description": "Weather of a city", "parameters": {' in prompt
    assert "[user] Result of get_weather:\nsunny\n\nResult of now:\nnoon" in prompt
    assert calls_in(spoken, prompt.partition("[assistant] ")[2].partition("[user]")[0]) == CALLS


def test_a_template_whose_calls_nobody_reads_has_no_format() -> None:
    assert detect("{% if tools %}<|tools|>{{ tools }}{% endif %}") == (None, None)


@needs_templates
def test_content_beside_reasoning_and_calls_is_not_lost_where_the_template_refuses_it() -> None:
    spoken, _ = detect(source_of("openai-gpt-oss-120b"))
    assert spoken is not None
    messages = conversation()
    messages[1] |= {"content": "I will look.", "reasoning_content": "What time is it?"}
    prepared, shown = spoken.prepare(messages, (WEATHER, NOW))
    prompt = ChatTemplate(source_of("openai-gpt-oss-120b")).render(prepared, shown)
    assert "analysis<|message|>What time is it?\nI will look.<|end|>" in prompt


def test_marks_that_a_tokenizer_calls_special_must_be_shown() -> None:
    hermes = ModelFormats(TOOL_FORMATS["hermes"])
    assert not needs_special(Marked(special=["<|im_end|>"], plain=["<tool_call>"]), hermes)
    assert needs_special(Marked(special=["<|im_end|>", "<tool_call>"]), hermes)


class Marked:
    """As much of a tokenizer as says which of its tokens are special."""

    def __init__(self, special: list[str], plain: list[str] | None = None) -> None:
        self.added_tokens = {text: id for id, text in enumerate([*special, *(plain or [])])}
        self.special_ids = frozenset(range(len(special)))


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_half_a_character_that_a_model_wrote_does_not_reach_the_tokenizer(name: str) -> None:
    function = {"name": "weather", "arguments": '{"city": "\\ud800"}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    messages, _ = TOOL_FORMATS[name].prepare([{"role": "user", "content": "?"}, called], (WEATHER,))
    json.dumps(messages, ensure_ascii=False).encode()


def test_messages_are_not_changed_in_place() -> None:
    for spoken in TOOL_FORMATS.values():
        messages = conversation()
        spoken.prepare(messages, (WEATHER, NOW))
        assert messages == conversation()


def test_a_reasoning_parser_has_vllms_name_too() -> None:
    bare: Any = SimpleNamespace(chat_template=None)
    for name, ours in (("deepseek_r1", "think"), ("openai_gptoss", "harmony"), ("think", "think")):
        assert formats_of(bare, ServerConfig(reasoning_parser=name)).reasoning is REASONING_FORMATS[ours]
