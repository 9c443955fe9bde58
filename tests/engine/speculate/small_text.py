"""Text for the small vocabulary of the option cases: an end token, the printable ASCII characters, and a few
longer tokens. Stop strings are found in it, and JSON schemas are compiled for it."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ridgeline.engine.grammar import Grammar

END = 0
FIRST, LAST = " ", "~"
LONGER = ('{"', '":', '"x', "12", "\n")
CHARACTERS = [chr(code) for code in range(ord(FIRST), ord(LAST) + 1)]
VOCAB = 1 + len(CHARACTERS) + len(LONGER)
HAS_SCHEMAS = importlib.util.find_spec("llguidance") is not None
_FOLDER = TemporaryDirectory(prefix="small-text-")


def letter(character: str) -> int:
    """Its token."""
    return 1 + CHARACTERS.index(character)


def spelled(text: str) -> tuple[int, ...]:
    return tuple(map(letter, text))


@cache
def tokenizer() -> Any:
    """Text becomes one token a character; the longer tokens are found by models alone."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    from ridgeline.models.text.tokenizer import Tokenizer

    alphabet = {" ": "Ġ", "\n": "Ċ"}
    pieces = ["<end>", *CHARACTERS, *LONGER]
    vocab = {"".join(alphabet.get(each, each) for each in piece): i for i, piece in enumerate(pieces)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<end>"])
    folder = Path(_FOLDER.name)
    built.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder)


@cache
def _compiler(vocab_size: int) -> Any:
    from ridgeline.engine.grammar.compiler import GrammarCompiler

    tokenizer()  # writes its files
    return GrammarCompiler(Path(_FOLDER.name), vocab_size, (END,))


def compiled(grammar: Grammar, vocab_size: int) -> Any:
    return _compiler(vocab_size).compile(grammar)
