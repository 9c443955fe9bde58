"""lint-prompts: what is shared, what breaks it, and what putting it last would give."""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli.main import main
from ridgeline.options import OptionError
from ridgeline.web.prompt_files import Prompt, read_requests, read_template
from ridgeline.web.prompt_lint import lint, lint_template
from tests.conftest import LiveServer

RULES = (
    "You answer customers of a small shop that sells tea. Be brief, be kind, and never promise a date. " * 6
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Looks up the {name} of an order. " * 4}}
    for name in ("price", "state", "address")
]


def chat(system: str, question: str = "Where is my order?", **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        **more,
    }


def written(folder: Path, *bodies: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps(body) for body in bodies) + "\n\n")
    return path


def linted(folder: Path, *bodies: Any, **options: Any) -> Any:
    return lint(list(read_requests(written(folder, *bodies))), **options)


def test_prompts_with_a_common_beginning_share_it_in_whole_blocks(tmp_path: Path) -> None:
    report = linted(tmp_path, *[chat(RULES, f"Question {number}?") for number in range(5)])
    one = len("system: " + RULES + "\nuser: Question 0?\n")
    assert report.requests == 5
    assert report.tokens == 5 * one // 4
    prefix = len("system: " + RULES + "\nuser: Question ")
    assert report.tokens_shared == 4 * (prefix // 64 * 64) // 4
    assert report.breakers == ()  # the question itself is nothing that could come later


def _word(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghij", k=6))


VARIABLES = {
    "timestamp": lambda draw: (
        f"2026-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}T{draw.randint(10, 23)}:00:00Z"
    ),
    "uuid": lambda draw: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
    "number": lambda draw: str(draw.randint(100, 9999)),
    "name": lambda draw: f"{_word(draw).title()} {_word(draw).title()}",
    "e-mail": lambda draw: f"{_word(draw)}@{_word(draw)}.org",
}


@pytest.mark.parametrize("kind", VARIABLES)
def test_a_variable_at_the_front_is_found_and_named(kind: str, tmp_path: Path) -> None:
    draw = random.Random(3)
    bodies = [chat(f"For: {VARIABLES[kind](draw)}.\n{RULES}") for _ in range(20)]
    report = linted(tmp_path, *bodies)
    assert report.breakers[0].kind == kind
    assert report.breakers[0].where == "system"
    assert report.breakers[0].at_token < 8
    assert report.share < 0.5
    assert report.share_ideal > 0.75
    moved = [chat(f"{RULES}\n", f"For: {VARIABLES[kind](draw)}. Where is my order?") for _ in range(20)]
    after = linted(tmp_path, *moved)
    assert after.share > 0.75  # what was promised is what is had
    assert abs(after.share - report.share_ideal) < 0.12


def test_tools_in_another_order_are_told_from_keys_in_another_order(tmp_path: Path) -> None:
    turned = linted(tmp_path, chat(RULES, tools=TOOLS), chat(RULES, tools=TOOLS[::-1]))
    assert [breaker.kind for breaker in turned.breakers] == ["tool order"]
    assert turned.breakers[0].where == "tools"
    assert turned.share_ideal > turned.share + 0.3
    keys = [{"function": tool["function"], "type": "function"} for tool in TOOLS]
    mixed = linted(tmp_path, chat(RULES, tools=TOOLS), chat(RULES, tools=keys))
    assert [breaker.kind for breaker in mixed.breakers] == ["JSON key order"]
    content = {"a": RULES, "b": 1}
    other = dict(reversed(content.items()))
    messages = linted(tmp_path, chat(json.dumps(content)), chat(json.dumps(other)))
    assert [breaker.kind for breaker in messages.breakers] == ["JSON key order"]


def test_tokens_are_counted_by_whatever_encodes(tmp_path: Path) -> None:
    def words(prompt: Prompt) -> list[int]:
        return [hash(word) for word in prompt.text.split()]

    report = linted(tmp_path, chat(RULES, "one"), chat(RULES, "two"), encode=words)
    whole = len(("system: " + RULES + " user: one").split())
    assert (report.tokens, report.measured_in) == (2 * whole, "tokens")
    assert report.tokens_shared == (whole - 1) // 16 * 16


@settings(max_examples=80)
@given(st.lists(st.text("ab", max_size=400), min_size=1, max_size=6))
def test_sharing_is_that_of_the_longest_earlier_prefix(texts: list[str]) -> None:
    prompts = [_plain(text) for text in texts]
    expected = 0
    for number, prompt in enumerate(prompts):
        best = max((_prefix(prompt.text, other.text) for other in prompts[:number]), default=0)
        expected += best // 64 * 64
    report = lint(prompts)
    assert report.tokens_shared == expected // 4
    assert report.tokens_shared <= report.tokens_shared_ideal <= report.tokens


def _plain(text: str) -> Prompt:
    from ridgeline.web.prompt_files import Piece

    return Prompt("x", (Piece("prompt", text, text),), {})


def _prefix(one: str, other: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_every_kind_of_request_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"custom_id": "1", "body": chat("s")},
        {"prompt": "p"},
        {"prompt": ["p", "q"]},
        {"input": "i", "instructions": "be"},
        {
            "system": [{"type": "text", "text": "s"}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}],
        },
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
    )
    texts = [prompt.text for prompt in read_requests(path)]
    assert texts[:5] == ["system: s\nuser: Where is my order?\n", "p\n", "p\nq\n", "be\ni\n", "s\nuser: t\n"]
    assert "tool_calls" in texts[5]


@pytest.mark.parametrize("line", ["{", "[]", "1", '{"tools": [{}]}', "{}", "[" * 100_000])
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(OptionError, match=r"bad\.jsonl:2"):
        list(read_requests(path))


def test_a_template_is_shareable_up_to_its_first_variable(tmp_path: Path) -> None:
    path = tmp_path / "answer.jinja"
    path.write_text("x" * 80 + "{{ current_date }}" + "y" * 320)
    report = lint_template(read_template(path))
    assert (report.tokens, report.tokens_before) == (100, 20)
    assert (report.breaker, report.called) == ("timestamp", "{{ current_date }}")
    path.write_text('Answer as JSON like {"a": 1}.')
    assert lint_template(read_template(path)).share == 1.0


def test_the_verb_prints_a_table_or_json_and_fails_below_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, *[chat(f"It is 2026-11-{day:02d}.\n{RULES}") for day in range(10, 30)])
    assert main(["lint-prompts", str(path)]) == 0
    table = capsys.readouterr().out
    assert "20 requests" in table
    assert "timestamp" in table
    assert main(["lint-prompts", str(path), "--json", "--fail-under", "80"]) == 1
    answer = capsys.readouterr()
    report = json.loads(answer.out)
    assert report["requests"]["share_ideal"] > 0.75 > report["share"]
    assert "--fail-under 80" in answer.err
    (tmp_path / "greeting.txt").write_text("Hello {name}, welcome to the shop.")
    assert main(["lint-prompts", str(tmp_path), "--fail-under", "0"]) == 0
    assert "{name} (name)" in capsys.readouterr().out
    assert main(["lint-prompts", str(tmp_path / "none.jsonl")]) != 0
    assert main(["lint-prompts", str(path), "--tokenizer", str(path)]) == 2


def test_a_servers_own_template_and_tokens_count(
    tmp_path: Path, live_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """It puts the system prompt before the tools: what varies in it makes all of them new."""
    bodies = [chat(f"Now: 10:{minute}.\n{RULES}", tools=TOOLS) for minute in (11, 32, 53)]
    path = written(tmp_path, *bodies)
    assert main(["lint-prompts", str(path), "--url", live_server.base_url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["requests"]
    assert report["measured_in"] == "tokens"
    assert [breaker["where"] for breaker in report["breakers"]] == ["system"]
    assert report["breakers"][0]["at_token"] < 30
    assert report["share_ideal"] > 0.55 > 0.1 > report["share"]
    assert main(["lint-prompts", str(path), "--url", "http://127.0.0.1:1"]) == 1
    assert "ridgeline serve" in capsys.readouterr().err
