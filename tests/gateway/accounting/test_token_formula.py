"""Token counts by the formula: near the true ones, slightly high, and fast for input of any size."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ridgeline.gateway.accounting import token_formula
from ridgeline.gateway.accounting.token_formula import (
    TOKENS_PER_PART,
    answer_tokens,
    answer_tokens_so_far,
    prompt_tokens,
    text_tokens,
    texts_of,
    unseen_tokens,
)
from ridgeline.gateway.body import raw, read_fields
from tests.models.tokenizer_corpus import published_tokenizer

BLOB = base64.b64encode(bytes(range(256)) * 60).decode()
TEXTS = {
    "prose": "The gateway asks servers for answers and books what they used, whole or streamed. " * 20,
    "code": "def add(first: int, second: int) -> int:\n    return first + second  # the sum\n\n" * 20,
    "records": json.dumps([{"id": number, "name": f"item {number}", "price": 9.5} for number in range(50)]),
    "Russian": "Шлюз спрашивает серверы и записывает, сколько они использовали. " * 20,
    "Chinese": "网关向服务器请求回答,并记录它们使用了多少。" * 20,
}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("name", ["llama3_2", "gemma3"])
def test_the_formula_is_near_published_tokenizers_and_rather_high(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(published_tokenizer(name) / "tokenizer.json"))
    for kind, text in TEXTS.items():
        true = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert 0.8 <= text_tokens(text.encode()) / true <= 2.0, kind


@pytest.mark.parametrize("ascii_only", [False, True], ids=["utf8", "escaped"])
def test_characters_count_the_same_however_json_writes_them(ascii_only: bool) -> None:
    for text in TEXTS.values():
        body = json.dumps(user(text), ensure_ascii=ascii_only).encode()
        plain = text_tokens(text.encode())
        assert plain <= prompt_tokens(read_fields(body)) <= 1.3 * plain + 20


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (user([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BLOB}"}}]), 1),
        (user([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]), 1),
        (
            user(
                [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BLOB}}] * 2
            ),
            2,
        ),
        (user([{"type": "input_audio", "input_audio": {"data": BLOB, "format": "wav"}}]), 1),
        (user([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BLOB * 100}"}}]), 1),
    ],
)
def test_a_picture_counts_as_a_part_and_not_as_its_bytes(prompt: dict[str, Any], tokens: int) -> None:
    found = prompt_tokens({name: raw(value) for name, value in prompt.items()})
    assert tokens * TOKENS_PER_PART <= found <= tokens * TOKENS_PER_PART + 1000


@pytest.mark.parametrize("ids", [[5, 6, 7], [[5, 6], [7]]])
def test_token_ids_count_as_themselves(ids: list[Any]) -> None:
    assert prompt_tokens({"prompt": raw(ids)}) == 3


def test_a_long_text_counts_by_its_samples_as_it_would_whole() -> None:
    text = TEXTS["prose"] * 400
    assert text_tokens(text.encode()) == pytest.approx(prompt_tokens({"input": raw(text)}), rel=0.02)


def test_a_text_of_marks_without_a_blob_is_read_once() -> None:
    value = msgspec.Raw(b"[" + b'"data",' * 35_000 + b'""]')
    begun = time.thread_time()
    prompt_tokens(dict.fromkeys(("messages", "system", "input", "tools"), value))
    assert time.thread_time() - begun < 3  # about 0.1 s; with a scan to the end for each mark 10 s


def test_an_answer_that_never_came_is_bounded_by_its_time_and_its_limit() -> None:
    assert unseen_tokens(2.0, None, 3) == 600
    assert unseen_tokens(2.0, 50, 3) == 150
    assert unseen_tokens(-1.0, None) == 0


PARTS = (
    '"text": "',
    '"content":"',
    '","',
    "word ",
    "\\\\",
    '\\"',
    "\\n",
    "\\u0434",
    "7",
    "д",
    "{",
    ": ",
    "x" * 400,
)


@given(parts=st.lists(st.sampled_from(PARTS), max_size=200))
@example(parts=["x" * 287, '"text": "', "\\u0434"])  # the first piece ends within the text's first escape
def test_an_answer_weighs_the_same_in_steps(parts: list[str]) -> None:
    body = "".join(parts).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_formula, "PIECE_BYTES", 300)
        steps = list(answer_tokens_so_far(body))
    found = steps[-1] if steps else 0
    has_text = any(text_tokens(text) for text in texts_of(body))
    # Sums of fractions differ in their last bit; without any text each piece is rounded up.
    assert abs(found - answer_tokens(body)) <= (1 if has_text else len(steps))
