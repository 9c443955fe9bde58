"""Tokenizers rebuilt from GGUF metadata: as SentencePiece and transformers encode, or refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from ridgeline.models.errors import BrokenModel, TemplateError, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.readers.end_tokens import gguf_end_ids
from ridgeline.models.text.gguf_pretokenizers import PRE_TOKENIZATIONS
from ridgeline.models.text.gguf_tokenizer import TokenType, read_gguf_tokenizer
from ridgeline.models.text.tokenizer import Tokenizer
from tests.models import tiny_sentencepiece
from tests.models.tokenizer_corpus import CORPUS, SMOLLM2_UNWRITABLE, random_texts

PIECES = [*"abcdeé .\n1", "  ", "東", "京", "x", "Ω", "👩‍👧", "\n\n", "<think>", "▁", "▁ ", "<s>", "２"]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


class Rebuilt:
    """A trained SentencePiece model and the tokenizer rebuilt from its vocabulary."""

    def __init__(self, prefix_space: bool, user_defined: list[str]) -> None:
        self.prefix_space = prefix_space
        self.real: SentencePieceProcessor = tiny_sentencepiece.train(prefix_space, user_defined)
        metadata = tiny_sentencepiece.gguf_metadata(self.real, prefix_space, user_defined)
        self.ours = Tokenizer(read_gguf_tokenizer(metadata, "tiny.gguf"))


@pytest.fixture(scope="module", params=["prefix space", "user-defined tokens"])
def rebuilt(request: pytest.FixtureRequest) -> Rebuilt:
    if request.param == "prefix space":
        return Rebuilt(prefix_space=True, user_defined=[])
    return Rebuilt(prefix_space=False, user_defined=tiny_sentencepiece.USER_DEFINED)


def test_a_sentencepiece_vocabulary_encodes_as_sentencepiece_itself(rebuilt: Rebuilt) -> None:
    rng = random.Random(1)
    # Control tokens are text to SentencePiece, and tokens to us.
    pieces = [piece for piece in PIECES if piece != "<s>"] + tiny_sentencepiece.words(seed=0)
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 30))) for _ in range(1500)]
    for text in texts + [text for text in CORPUS if "<s>" not in text]:
        assert rebuilt.ours.encode(text, add_special=False) == rebuilt.real.encode(text), repr(text)


def test_a_sentencepiece_vocabulary_decodes_as_sentencepiece_itself(rebuilt: Rebuilt) -> None:
    rng = random.Random(2)
    space = rebuilt.real.piece_to_id("<0x20>")
    for _ in range(1500):
        ids = [rng.randrange(3, rebuilt.ours.vocab_size) for _ in range(rng.randint(0, 20))]
        if ids and ids[0] == space:
            continue  # a space written as a byte: dropped as the prefix space here, kept there
        assert rebuilt.ours.decode(ids) == rebuilt.real.decode(ids)


def test_bos_is_added_once_and_control_tokens_are_recognised(rebuilt: Rebuilt) -> None:
    assert rebuilt.ours.adds_bos
    assert rebuilt.ours.encode("abc")[0] == rebuilt.real.bos_id()
    assert rebuilt.ours.encode("abc", add_special=False) == rebuilt.ours.encode("abc")[1:]
    assert rebuilt.ours.encode("<s>", add_special=False) == [rebuilt.real.bos_id()]
    assert rebuilt.real.bos_id() not in rebuilt.ours.encode("<s>", add_special=False, allow_special=False)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_survives_the_round_trip_through_smollm2(smollm2: Tokenizer, text: str) -> None:
    text = SMOLLM2_UNWRITABLE.sub("", text)
    assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


def test_smollm2_leaves_out_what_its_vocabulary_cannot_write(smollm2: Tokenizer) -> None:
    """As its own tokenizer.json does: six control characters and some unassigned planes have no token."""
    assert smollm2.decode(smollm2.encode("a\x04b\x1dc")) == "abc"


def test_the_corpus_survives_the_round_trip_through_smollm2(smollm2: Tokenizer) -> None:
    for text in CORPUS + random_texts(500, seed=11):
        assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


def test_smollm2_encodes_as_transformers_does_where_no_digits_are(
    smollm2: Tokenizer, smollm2_path: Path
) -> None:
    """transformers reads this file's vocabulary but not its rule that every digit stands alone."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    texts = [text for text in CORPUS + random_texts(500, seed=5) if not any(map(str.isnumeric, text))]
    assert len(texts) > 100
    for text in texts:
        assert smollm2.encode(text) == theirs.encode(text, add_special_tokens=False), repr(text)


def test_smollm2_takes_every_digit_alone(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("call 2024 or 99,5 ½٣")
    assert [smollm2.token_text(i) for i in ids] == [
        *("call", " ", "2", "0", "2", "4", " or", " ", "9", "9", ",", "5", " "),
        *(smollm2.token_text(i) for i in smollm2.encode("½")),
        *(smollm2.token_text(i) for i in smollm2.encode("٣")),
    ]


def test_smollm2_renders_and_encodes_a_chat_by_one_path(smollm2: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = smollm2.render_chat(messages)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode_chat(messages)
    assert ids == smollm2.encode(text, add_special=False)
    assert ids.count(smollm2.encode("<|im_start|>")[0]) == 3


def test_smollm2_knows_its_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id) == (49152, 1, 2)
    assert smollm2.adds_bos is False
    assert smollm2.token_text(0) == "<|endoftext|>"
    assert {0, 1, 2} <= smollm2.special_ids
    assert smollm2.token_bytes(49152) == b""
    assert smollm2.token_bytes(-1) == b""


# ---- small vocabularies, made by hand ----


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<|im_end|>", "<|end|>", "<think>", "[PAD6]"],
        "token_type": [
            1,
            1,
            1,
            TokenType.CONTROL,
            TokenType.CONTROL,
            TokenType.USER_DEFINED,
            TokenType.UNUSED,
        ],
        "merges": ["a b"],
        "eos_token_id": 3,
    }
    fields |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def read(**changes: Any) -> Tokenizer:
    return Tokenizer(read_gguf_tokenizer(byte_level_metadata(**changes), "small.gguf"))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("gpt-2", "olmo"), "It|'|S| 12345|\n| ok|/|Cafe"),
        (("starcoder", "refact", "command-r"), "It|'|S| |1|2|3|4|5|\n| ok|/|Cafe"),
        (
            ("llama-bpe", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
            "It|'S| |123|45|\n| ok|/Cafe",
        ),
        (("gpt-4o",), "It'S| |123|45|\n| ok|/Cafe"),
    ],
)
def test_text_is_split_into_the_words_of_the_family(names: tuple[str, ...], words: str) -> None:
    text = "It'S 12345\n ok/Cafe"
    for name in names:
        pieces = PRE_TOKENIZATIONS[name].pre_tokenizer().pre_tokenize_str(text)
        assert "|".join(text[start:end] for _, (start, end) in pieces) == words, name


def test_token_types_decide_what_is_matched_whole() -> None:
    tokenizer = read()
    assert tokenizer.encode("abba<think>ab<|im_end|>") == [2, 1, 0, 5, 2, 3]
    assert tokenizer.decode([2, 5, 3]) == "ab<think>"
    assert tokenizer.special_ids == {3, 4}


def end_ids(**changes: Any) -> tuple[int, ...]:
    return gguf_end_ids(ConfigValues.below("tokenizer.ggml.", byte_level_metadata(**changes), "small.gguf"))


def test_every_token_that_ends_a_turn_is_an_end() -> None:
    assert end_ids() == (3, 4)
    assert end_ids(eot_token_id=2) == (3, 2, 4)


def test_a_message_end_is_no_end_where_others_are_named() -> None:
    tokens = ["a", "b", "ab", "<|return|>", "<|end|>", "<|call|>", "x"]
    types = [1, 1, 1, *[int(TokenType.CONTROL)] * 3, 1]
    assert end_ids(tokens=tokens, token_type=types) == (3, 5)


def test_bos_and_eos_are_added_where_the_file_says() -> None:
    assert read(bos_token_id=4, add_bos_token=True, add_eos_token=True).encode("ab") == [4, 2, 3]
    assert read(bos_token_id=4, add_bos_token=True).encode("ab", add_special=False) == [2]
    assert read(pre="llama-bpe", bos_token_id=4).encode("ab") == [4, 2]  # the family's habit


def test_named_templates_are_read() -> None:
    metadata = byte_level_metadata() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = Tokenizer(read_gguf_tokenizer(metadata, "small.gguf"))
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(message) == "plain"
    assert tokenizer.render_chat(message, tools=[]) == "tools"


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(TemplateError, match=r"chat_template\.jinja"):
        read().encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "klingon"}, UnsupportedModel, "'klingon'"),
        ({"pre": None}, UnsupportedModel, "None"),
        ({"model": "rwkv"}, UnsupportedModel, "'rwkv'"),
        ({"model": None}, BrokenModel, r"tokenizer\.ggml\.model"),
        ({"tokens": None}, BrokenModel, r"tokenizer\.ggml\.tokens"),
        ({"merges": None}, BrokenModel, r"tokenizer\.ggml\.merges"),
        ({"merges": ["ab"]}, BrokenModel, "'ab'"),
        ({"merges": ["a z"]}, BrokenModel, "'a z'"),
        ({"tokens": ["a", "b", "ab", "<|im_end|>", "", "c", "d"], "merges": ["a "]}, BrokenModel, "'a '"),
        ({"merges": ["b a"]}, BrokenModel, "do not match"),
        ({"tokens": ["a"] * 7}, BrokenModel, "twice"),
        ({"token_type": [1]}, BrokenModel, "1 token types for 7"),
        ({"eos_token_id": 7}, BrokenModel, "eos_token_id is 7"),
        ({"model": "llama", "scores": [0.0]}, BrokenModel, "unknown token"),
        ({"model": "llama", "scores": [0.0], "unknown_token_id": 0}, BrokenModel, "1 scores for 7"),
        ({"model": "llama", "remove_extra_whitespaces": True}, UnsupportedModel, "extra spaces"),
    ],
)
def test_broken_or_unknown_metadata_is_refused_with_the_file_and_the_reason(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        read(**changes)
    assert str(raised.value).startswith("small.gguf: ")
