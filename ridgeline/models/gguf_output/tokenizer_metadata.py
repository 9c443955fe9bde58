"""A Hugging Face tokenizer as GGUF metadata: the inverse of `text.gguf_tokenizer`.

GGUF files have the vocabulary with its merges or scores, and a name for the rest. The name is found by
encoding: the first whose rules give the same tokens for texts that tell all of them apart. The tokenizer that
is read back must then encode those texts as the original does; if none does, the tokenizer is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.files.gguf_writer import Value
from ridgeline.models.text.gguf_pretokenizers import PRE_TOKENIZATIONS
from ridgeline.models.text.gguf_tokenizer import SPECIAL_TOKEN_IDS, TokenType, read_gguf_tokenizer
from ridgeline.models.text.hf_tokenizer import read_hf_tokenizer
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.models.text.tokenizer_parts import TokenizerParts

_PREFIX = "tokenizer.ggml."
# Digits in runs, contractions in both cases, capitals inside words, marks that compose, scripts without
# spaces, punctuation before letters and line ends, spaces of all kinds: where the known rules differ.
PROBES = (
    "Hello world, it's 2024 and I'LL pay 1,234,567.89 for 12 of them!",
    "camelCaseWords HTTPServer XMLHttpRequest iPhone's DON'T don't we'Ve",
    "def f(x):\n    return x**2  # tab\there\n\n\n\tif x != 3:\r\n        pass\r\n\r\n  ",
    "  leading and trailing spaces   \n \n  \t ",
    "cafe\u0301 A\u030angstro\u0308m e\u0301te\u0301 ﬁne ① ½ ٣٤٥ ２０２４",
    "Ελληνικά, русский текст, עברית, العربية، हिन्दी में लिखा",
    "東京都は日本の首都です。你好，世界！ 안녕하세요 세계 ひらがなカタカナ",
    "naïve façade — “quotes” … €100 §5 ©2024 👩‍👧 🇩🇪 x² H₂O",
    'https://example.com/a_b-c?d=e&f=%20#g a/b\\c {"k": [1, 22, 333, 4444]}',
    "$x_1$ + #hash @user !bang ...dots ---- ==== ((nested)) <tag attr='v'/> \u00a0nbsp\u3000wide",
    "'s 't 'RE 'd'm 'LL ' S 1's 12'3 a1b22c333",
    "x\u0301y q\u0308z7 j\u0303k \u0301a हि नि",
    "ÀÉÎõü ǅungla ʰ ªº ᾼ Ω ß ẞ I\u0307",
)


def describe_tokenizer(directory: Path, vocab_size: int) -> dict[str, Value]:
    """The keys `tokenizer.*` for the tokenizer of this directory. `vocab_size`: rows of the embedding."""
    parts = read_hf_tokenizer(directory)
    original = Tokenizer(parts)
    content = json.loads(parts.backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise UnsupportedModel(
            f"{directory}: tokenizers of type {model['type']} are not written to GGUF files"
        )
    if original.vocab_size > vocab_size:
        raise UnsupportedModel(
            f"{directory}: the tokenizer has {original.vocab_size:,} tokens, the model {vocab_size:,}"
        )
    byte_level = original.spelling is not None and original.spelling.byte_level
    kinds = _Vocabulary(parts.backend, vocab_size, parts.special_tokens.get("unk_token"))
    values: dict[str, Value] = {
        "model": "gpt2" if byte_level else "llama",
        "tokens": kinds.tokens,
        "token_type": [int(kind) for kind in kinds.types],
        "add_bos_token": original.adds_bos,
        "add_eos_token": original.eos_id is not None and original.encode("")[-1:] == [original.eos_id],
        **_special_ids(parts, original),
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if byte_level:
        values |= {"pre": _pre_tokenization(parts.backend, model, directory), "merges": merges}
    else:
        values |= _sentencepiece(original, kinds.tokens, merges)
    metadata = {_PREFIX + key: value for key, value in values.items()} | _templates(parts.chat_template)
    _refuse_difference(metadata, original, directory)
    return metadata


class _Vocabulary:
    """Every id's token and type. Ids without a token, up to the embedding's rows, get a name of their own."""

    def __init__(self, backend: tokenizers.Tokenizer, size: int, unknown: str | None) -> None:
        known = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
        added = backend.get_added_tokens_decoder()
        self.tokens = [known.get(index, f"[PAD{index}]") for index in range(size)]
        self.types = [self._type(index, known, added, unknown) for index in range(size)]

    @staticmethod
    def _type(index: int, known: dict[int, str], added: dict[int, Any], unknown: str | None) -> TokenType:
        if index not in known:
            return TokenType.UNUSED
        if known[index] == unknown:
            return TokenType.UNKNOWN
        if index in added:
            return TokenType.CONTROL if added[index].special else TokenType.USER_DEFINED
        token = known[index]
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return TokenType.BYTE if is_byte else TokenType.NORMAL


def _special_ids(parts: TokenizerParts, tokenizer: Tokenizer) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, key in SPECIAL_TOKEN_IDS.items():
        token = parts.special_tokens.get(name)
        index = None if token is None else parts.backend.token_to_id(token)
        if index is not None:
            found[key] = index
    if "eos_token_id" not in found and tokenizer.eos_id is not None:
        found["eos_token_id"] = tokenizer.eos_id
    return found


def _pre_tokenization(backend: tokenizers.Tokenizer, model: dict[str, Any], directory: Path) -> str:
    """The first name whose rules split the probes as this tokenizer does."""
    expected = [backend.encode(text, add_special_tokens=False).ids for text in PROBES]
    candidate = tokenizers.Tokenizer.from_str(backend.to_str())
    for name, way in PRE_TOKENIZATIONS.items():
        if way.whole_words_first != bool(model.get("ignore_merges")):
            continue
        candidate.pre_tokenizer = way.pre_tokenizer()
        candidate.normalizer = way.normalizer() or normalizers.Sequence([])
        if [candidate.encode(text, add_special_tokens=False).ids for text in PROBES] == expected:
            return name
    raise UnsupportedModel(
        f"{directory}: its tokenizer splits text in a way that no known tokenizer.ggml.pre has; a guess "
        f"would give wrong tokens. Known: {', '.join(PRE_TOKENIZATIONS)}"
    )


def _sentencepiece(original: Tokenizer, tokens: list[str], merges: list[str]) -> dict[str, Value]:
    """Scores in the order of the merges: the reader derives the merges from them again."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    worst = len(merges)
    scores = [-float(ranks.get(token, worst + index)) for index, token in enumerate(tokens)]
    first = original.encode("a", add_special=False)
    prefix = bool(first) and original.decode(first) == "a" and tokens[first[0]].startswith("▁")
    return {"scores": scores, "add_space_prefix": prefix}


def _templates(template: str | dict[str, str] | None) -> dict[str, Value]:
    if template is None:
        return {}
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = {name: text for name, text in template.items() if name != "default"}
    values: dict[str, Value] = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    if named:
        values["tokenizer.chat_templates"] = list(named)
    if "default" in template:
        values["tokenizer.chat_template"] = template["default"]
    return values


def _refuse_difference(metadata: dict[str, Value], original: Tokenizer, directory: Path) -> None:
    rebuilt = Tokenizer(read_gguf_tokenizer(metadata, str(directory)))
    for text in PROBES:
        for marked in (text, _with_specials(text, original)):
            if rebuilt.encode(marked) != original.encode(marked):
                raise UnsupportedModel(
                    f"{directory}: its tokenizer cannot be stated in GGUF metadata: {marked[:40]!r} would "
                    "get other tokens"
                )


def _with_specials(text: str, original: Tokenizer) -> str:
    """The text between two of the tokenizer's special tokens."""
    marks = sorted(original.added_tokens)[:2]
    return text.join(marks) if len(marks) == 2 else text
