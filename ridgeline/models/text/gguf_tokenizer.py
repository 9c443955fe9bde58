"""A tokenizer rebuilt from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

GGUF files have no tokenizer.json, only the vocabulary with its merges or scores. Called by `Tokenizer.load`.
Nothing is guessed: an unknown pre-tokenizer or model is rejected by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, isnan
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.text.detokenizer import SPACE_MARK
from ridgeline.models.text.gguf_pretokenizers import PRE_TOKENIZATIONS, PreTokenization
from ridgeline.models.text.tokenizer_parts import TokenizerParts

# Deriving merges takes time quadratic in a piece's length; the longest published token has 256.
MAX_TOKEN_CHARACTERS = 4096


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TOKEN_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "mask_token": "mask_token_id",
}


def read_gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> TokenizerParts:
    """`source` is the file's name, for messages."""
    return _Reader(metadata, source).parts()


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._values = ConfigValues.below("tokenizer.ggml.", metadata, source)
        self._templates = ConfigValues.below("tokenizer.", metadata, source)
        self._model = self._values.text("model")
        self._tokens = list(self._texts("tokens"))
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            raise BrokenModel(f"{source}: the vocabulary contains a token twice")
        longest = max(map(len, self._tokens), default=0)
        if longest > MAX_TOKEN_CHARACTERS:
            raise BrokenModel(f"{source}: the vocabulary has a token of {longest:,} characters")
        self._types = self._token_types()

    def parts(self) -> TokenizerParts:
        if self._model == "gpt2":
            way = self._pre_tokenization()
            backend, adds_bos = self._byte_level_bpe(way), way.adds_bos
        elif self._model == "llama":
            backend, adds_bos = self._sentencepiece_bpe(), True
        else:
            raise UnsupportedModel(f"{self._source}: tokenizer model {self._model!r}; supported: gpt2, llama")
        self._add_marked_tokens(backend)
        special_tokens = self._special_tokens()
        return TokenizerParts(
            backend=backend,
            special_tokens=special_tokens,
            add_bos=self._values.flag("add_bos_token", adds_bos) and "bos_token" in special_tokens,
            add_eos=self._values.flag("add_eos_token", False) and "eos_token" in special_tokens,
            chat_template=self._chat_template(),
        )

    # ---- byte-level BPE ----

    def _pre_tokenization(self) -> PreTokenization:
        name = self._values.optional_text("pre")
        if name not in PRE_TOKENIZATIONS:
            known = ", ".join(PRE_TOKENIZATIONS)
            raise UnsupportedModel(
                f"{self._source}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is unknown, and a guess "
                f"would give wrong tokens; known: {known}. Use the model's original directory instead"
            )
        return PRE_TOKENIZATIONS[name]

    def _byte_level_bpe(self, way: PreTokenization) -> tokenizers.Tokenizer:
        merges = self._merge_pairs(self._texts("merges"))
        backend = self._backend(merges, ignore_merges=way.whole_words_first)
        normalizer = way.normalizer()
        if normalizer is not None:
            backend.normalizer = normalizer
        backend.pre_tokenizer = way.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _merge_pairs(self, merges: Iterable[str]) -> list[tuple[str, str]]:
        """Reuses the vocabulary's own strings: new ones would be half of the memory that loading takes."""
        own = {token: token for token in self._tokens if token}
        pairs = []
        for merge in merges:
            left, _, right = merge.partition(" ")
            try:
                pairs.append((own[left], own[right]))
            except KeyError:
                raise BrokenModel(
                    f"{self._source}: {merge!r} in tokenizer.ggml.merges is not a pair of tokens"
                ) from None
        return pairs

    # ---- SentencePiece BPE ----

    def _sentencepiece_bpe(self) -> tokenizers.Tokenizer:
        if self._values.flag("remove_extra_whitespaces", False):
            raise UnsupportedModel(
                f"{self._source}: the tokenizer removes extra spaces, which is not supported"
            )
        unknown = self._special_tokens().get("unk_token")
        has_bytes = TokenType.BYTE in self._types
        if unknown is None and not has_bytes:
            raise BrokenModel(f"{self._source}: the vocabulary has neither byte tokens nor an unknown token")
        merges = list(self._score_merges())
        backend = self._backend(merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
        marks = normalizers.Replace(" ", SPACE_MARK)
        steps: list[decoders.Decoder] = [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if self._values.flag("add_space_prefix", True):
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks])
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            backend.normalizer = marks
        backend.decoder = decoders.Sequence(steps)
        return backend

    def _score_merges(self) -> Iterator[tuple[str, str]]:
        """Every split of a piece into two others, best score first: the order in which SentencePiece merges.

        Control, byte and user-defined tokens are excluded: text never merges into them.
        """
        scores = self._values.numbers("scores")
        if scores is None:
            raise self._lacks("scores")
        if len(scores) != len(self._tokens):
            raise BrokenModel(f"{self._source}: {len(scores)} scores for {len(self._tokens)} tokens")
        # A separate dictionary, to pair the vocabulary's own strings and not the slices that find them.
        pieces = {piece: piece for piece in self._of_types(TokenType.NORMAL, TokenType.UNUSED)}
        worst_last = [inf if isnan(score) else -score for score in scores]
        for index in sorted(range(len(scores)), key=worst_last.__getitem__):
            piece = self._tokens[index]
            if piece not in pieces:
                continue
            for cut in range(len(piece) - 1, 0, -1):
                left, right = piece[:cut], piece[cut:]
                if left in pieces and right in pieces:
                    yield pieces[left], pieces[right]

    # ---- both ----

    def _backend(self, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer(BPE(vocab=self._ids, merges=merges, **options))
        except Exception as error:  # the library raises bare Exceptions
            raise BrokenModel(
                f"{self._source}: the vocabulary and its merges do not match: {error}"
            ) from error

    def _add_marked_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Tokens that are matched whole in the text, before any merging."""
        special = self._of_types(TokenType.CONTROL, TokenType.UNKNOWN)
        plain = self._of_types(TokenType.USER_DEFINED)
        # Gemma's runs of spaces are such tokens; SentencePiece finds them after spaces became marks, so that
        # a mark in the text counts too. Not with a prefix space: it would become part of the token.
        normalized = self._model == "llama" and not self._values.flag("add_space_prefix", True)
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        backend.add_tokens([AddedToken(token, special=False, normalized=normalized) for token in plain])

    def _of_types(self, *types: TokenType) -> list[str]:
        return [token for token, kind in zip(self._tokens, self._types, strict=True) if kind in types]

    def _special_tokens(self) -> dict[str, str]:
        ids = {name: self._token_id(key) for name, key in SPECIAL_TOKEN_IDS.items()}
        return {name: self._tokens[index] for name, index in ids.items() if index is not None}

    def _token_id(self, key: str) -> int | None:
        index = self._values.optional_integer(key, minimum=0)
        if index is not None and index >= len(self._tokens):
            raise BrokenModel(
                f"{self._source}: {key} is {index}, but the vocabulary has {len(self._tokens)} tokens"
            )
        return index

    def _token_types(self) -> Sequence[float]:
        types = self._values.numbers("token_type", whole=True)
        if types is None:
            return [TokenType.NORMAL] * len(self._tokens)
        if len(types) != len(self._tokens):
            raise BrokenModel(f"{self._source}: {len(types)} token types for {len(self._tokens)} tokens")
        return types

    def _chat_template(self) -> str | dict[str, str] | None:
        default = self._templates.optional_text("chat_template")
        names = self._templates.optional_texts("chat_templates") or []
        named = {name: self._templates.text(f"chat_template.{name}") for name in names}
        if not named:
            return default
        return named if default is None else {"default": default, **named}

    def _texts(self, key: str) -> Sequence[str]:
        texts = self._values.optional_texts(key)
        if texts is None:
            raise self._lacks(key)
        return texts

    def _lacks(self, key: str) -> BrokenModel:
        return BrokenModel(f"{self._source}: has no tokenizer.ggml.{key}, so text cannot be tokenized")
