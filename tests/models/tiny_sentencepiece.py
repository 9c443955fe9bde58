"""A small SentencePiece model, trained on the spot, and its vocabulary as a GGUF file would carry it."""

from __future__ import annotations

import io
import random
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from ridgeline.models.text.gguf_tokenizer import TokenType

VOCAB_SIZE = 700
LETTERS = "abcdeé"
OTHER_WORDS = ["東京", "привет", "naïve", "aaaa", "    ", "...", "12", "３"]
USER_DEFINED = ["<think>", "\n\n", "▁▁", "▁▁▁"]


def words(seed: int) -> list[str]:
    rng = random.Random(seed)
    made = ["".join(rng.choices(LETTERS, k=rng.randint(1, 7))) for _ in range(300)]
    return made + OTHER_WORDS


def train(prefix_space: bool, user_defined: list[str], byte_fallback: bool = True) -> SentencePieceProcessor:
    rng = random.Random(0)
    vocabulary = words(seed=0)
    sentences = [" ".join(rng.choices(vocabulary, k=rng.randint(1, 14))) for _ in range(2000)]
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=byte_fallback,
        add_dummy_prefix=prefix_space,
        user_defined_symbols=user_defined,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return SentencePieceProcessor(model_proto=model.getvalue())


def gguf_metadata(
    model: SentencePieceProcessor, prefix_space: bool, user_defined: list[str]
) -> dict[str, Any]:
    ids = range(model.vocab_size())
    types = [_token_type(model, index, user_defined) for index in ids]
    pieces = [model.id_to_piece(index) for index in ids]
    fields = {
        "model": "llama",
        # Converters write user-defined tokens as they stand in text, with real spaces.
        "tokens": [
            piece.replace("▁", " ") if kind == TokenType.USER_DEFINED else piece
            for piece, kind in zip(pieces, types, strict=True)
        ],
        "scores": [model.get_score(index) for index in ids],
        "token_type": [int(kind) for kind in types],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        "add_space_prefix": prefix_space,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def _token_type(model: SentencePieceProcessor, index: int, user_defined: list[str]) -> TokenType:
    if model.is_unknown(index):
        return TokenType.UNKNOWN
    if model.is_control(index):
        return TokenType.CONTROL
    if model.is_byte(index):
        return TokenType.BYTE
    if model.id_to_piece(index) in user_defined:
        return TokenType.USER_DEFINED
    return TokenType.NORMAL
