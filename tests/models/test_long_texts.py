"""Texts of megabytes: found too long from their first pieces, without encoding the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.models.text import tokenizer as module
from ridgeline.models.text.tokenizer import PIECE_CHARACTERS, Tokenizer
from tests.conftest import LiveServer
from tests.patience import PATIENCE_S

MEGABYTES = {  # each 7.6 MB as UTF-8, just below what a body may have
    "emoji": "😀🎉👩" * 630_000,
    "Chinese": "漢字仮名交じり文" * 316_000,
    "accents": "é" * 3_800_000,
    "words": "hello world " * 630_000,
}


class Counted:
    """A backend that counts the characters it encodes."""

    def __init__(self, backend: Any) -> None:
        self.characters = 0
        self._backend = backend

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.mark.parametrize("text", MEGABYTES.values(), ids=MEGABYTES)
def test_a_text_that_cannot_fit_is_known_from_its_first_pieces(
    tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", counted)
    tokens = tokenizer.tokens_beyond(text, 8192)
    assert counted.characters <= 4 * PIECE_CHARACTERS
    sample = text[: 10 * PIECE_CHARACTERS]
    ids = counted.encode_batch_fast([sample], add_special_tokens=False)[0]
    assert tokens == pytest.approx(len(ids) * len(text) / len(sample), rel=0.05)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=400), st.integers(1, 8), st.integers(1, 200))
def test_a_text_that_fits_is_never_found_too_long(
    smollm2_path: Path, text: str, repeats: int, limit: int
) -> None:
    tokenizer = _loaded(smollm2_path)
    text *= repeats
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARACTERS", 64)
        tokens = tokenizer.tokens_beyond(text, limit)
    if tokens is not None:
        assert len(tokenizer.encode(text)) > limit


_kept: dict[Path, Tokenizer] = {}


def _loaded(path: Path) -> Tokenizer:
    if path not in _kept:
        _kept[path] = Tokenizer.load(path)
    return _kept[path]


def test_a_short_text_is_not_looked_at(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", counted)
    assert tokenizer.tokens_beyond("x " * (PIECE_CHARACTERS // 2), 10) is None
    assert tokenizer.tokens_beyond("😀" * 30_000, 131_072) is None  # at most 4 tokens each
    assert counted.characters == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_megabytes_of_emoji_are_refused_by_a_real_server(live_server: LiveServer, path: str) -> None:
    text = MEGABYTES["emoji"]
    message = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "model": "smollm2-135m"}
    body = message if "chat" in path or "messages" in path else {"prompt": text}
    answer = httpx.post(live_server.base_url + path, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    numbers = [int(number) for number in re.findall(r"\d{7,}", answer.json()["error"]["message"])]
    assert pytest.approx(3 * len(text), rel=0.05) in numbers, answer.text
