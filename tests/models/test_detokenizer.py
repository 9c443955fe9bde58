"""Streamed text joined is the whole text, whatever the tokens and wherever the stream is split."""

from __future__ import annotations

import codecs
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.text.detokenizer import IncrementalDetokenizer, TokenSpelling, spelling_of
from ridgeline.models.text.gguf_tokenizer import read_gguf_tokenizer
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.models.text.tokenizer_parts import TokenizerParts
from tests.models import tiny_sentencepiece
from tests.models.tokenizer_corpus import CORPUS, SMOLLM2_UNWRITABLE


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    model = tiny_sentencepiece.train(prefix_space=True, user_defined=[])
    return Tokenizer(read_gguf_tokenizer(tiny_sentencepiece.gguf_metadata(model, True, []), "tiny.gguf"))


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pushed = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(borders)]
    return [*pushed, detokenizer.finish()]


def as_written(text: str, tokenizer: Tokenizer) -> str:
    """SentencePiece cannot tell its own space mark from a space."""
    assert tokenizer.spelling is not None
    return text if tokenizer.spelling.byte_level else text.replace("▁", " ")


CUTS = st.lists(st.integers(0, 1000), max_size=50)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49300), max_size=60), cuts=CUTS, skip=st.booleans())
def test_any_tokens_of_smollm2_stream_as_they_decode(
    smollm2: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    whole = smollm2._backend.decode(ids, skip_special_tokens=skip)
    assert smollm2.decode(ids, skip) == whole
    assert "".join(stream(smollm2, ids, cuts, skip)) == whole


# Mostly byte tokens, so that characters are split and broken in every way.
@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 720), st.integers(3, 258)), max_size=60),
    cuts=CUTS,
    skip=st.booleans(),
)
def test_any_tokens_of_a_sentencepiece_vocabulary_stream_as_they_decode(
    sentencepiece: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    assert "".join(stream(sentencepiece, ids, cuts, skip)) == sentencepiece.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40), cuts=CUTS)
def test_text_streams_without_a_broken_character(
    smollm2: Tokenizer, sentencepiece: Tokenizer, text: str, cuts: list[int]
) -> None:
    text = SMOLLM2_UNWRITABLE.sub("", text).replace("\ufffd", "?")
    for tokenizer in (smollm2, sentencepiece):
        pieces = stream(tokenizer, tokenizer.encode(text, allow_special=False), cuts)
        assert "".join(pieces) == as_written(text, tokenizer)
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


def test_the_corpus_streams_token_by_token(smollm2: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (smollm2, sentencepiece):
        for text in CORPUS:
            ids = tokenizer.encode(text, add_special=False, allow_special=False)
            assert "".join(stream(tokenizer, ids, list(range(len(ids))))) == as_written(text, tokenizer)


def test_a_character_comes_out_with_its_last_byte(smollm2: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm2)
    ids = smollm2.encode("🧿")
    assert len(ids) > 1
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["🧿"]


def test_a_character_never_completed_comes_out_at_the_end(smollm2: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm2)
    half = smollm2.encode("🧿")[:-1]
    assert detokenizer.push(half) == ""
    assert detokenizer.finish() == smollm2.decode(half) != ""


def test_only_the_first_space_of_a_prefix_vocabulary_is_dropped(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("  abc abc", add_special=False)
    pieces = stream(sentencepiece, ids, list(range(len(ids))))
    assert "".join(pieces) == "  abc abc"
    assert sentencepiece.decode(sentencepiece.encode("abc")) == "abc"


class CountingDecoder:
    """The real incremental decoder; counts the bytes it is given."""

    def __init__(self, decoder: codecs.IncrementalDecoder) -> None:
        self._decoder = decoder
        self.bytes_given = 0

    def decode(self, data: bytes, final: bool = False) -> str:
        self.bytes_given += len(data)
        return self._decoder.decode(data, final)

    def getstate(self) -> tuple[bytes, int]:
        return self._decoder.getstate()


@pytest.mark.parametrize("text", ["one two three ", "🦊 → 日本語 ", "a🧜🏽‍♀️b"])
def test_the_work_per_token_does_not_grow_with_the_text(smollm2: Tokenizer, text: str) -> None:
    """Ten thousand tokens: every byte is decoded once at most, and no more is kept than half a character."""
    once = smollm2.encode(text)
    ids = (once * (10_000 // len(once) + 1))[:10_000]
    detokenizer = IncrementalDetokenizer(smollm2)
    counting = detokenizer._decoder = CountingDecoder(detokenizer._decoder)
    pieces = []
    for token in ids:
        before = counting.bytes_given
        pieces.append(detokenizer.push_one(token))
        assert counting.bytes_given - before <= len(smollm2.token_bytes(token))
        assert len(counting.getstate()[0]) < 4
    assert "".join(pieces) + detokenizer.finish() == smollm2.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "spelling"),
    [
        (None, None),
        ({"type": "ByteLevel"}, TokenSpelling(byte_level=True)),
        ({"type": "WordPiece"}, None),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, TokenSpelling(byte_level=True)),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}]}, None),
    ],
)
def test_only_decoders_made_of_bytes_are_streamed(decoder: dict[str, object], spelling: object) -> None:
    assert spelling_of(decoder) == spelling


def test_another_kind_of_vocabulary_decodes_but_is_refused_for_streaming() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(TokenizerParts(backend, {}, None, None, None))
    assert tokenizer.decode([1, 2]) == "playing"
    with pytest.raises(UnsupportedModel, match="streamed"):
        IncrementalDetokenizer(tokenizer)
