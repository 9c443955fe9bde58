"""TokenizerCounts: counts the tokens of a request and its answer with the model's tokenizer.

Parsing and encoding hold the interpreter's lock. So a thread of the worker counts small inputs only, and an
offload process counts large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ridgeline.gateway.accounting.token_formula import PROMPT_FIELDS, TOKENS_PER_PART, texts_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS_PER_MESSAGE = 4  # of a chat template
_LABELS = frozenset((
    "role", "type", "id", "tool_call_id", "tool_use_id", "call_id", "media_type", "format", "detail",
))  # fmt: skip
_SCHEMAS = frozenset({"tools", "functions", "response_format", "text"})
_BLOBS = frozenset({"data", "url", "image_url", "file_data"})


class TokenizerCounts:
    """Each tokenizer is loaded once."""

    def __init__(self) -> None:
        self._tokenizers: dict[Path, Tokenizer] = {}

    def count(
        self, file: Path, fields: Mapping[str, bytes], answer: bytes | None, texts: Sequence[bytes]
    ) -> tuple[int, int]:
        """Input and output tokens. texts: those of a stream, read where no whole answer is given."""
        tokenizer = self._tokenizers.get(file)
        if tokenizer is None:
            tokenizer = self._tokenizers[file] = _load(file)

        def count(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False).ids)

        tokens_in = sum(
            count(one) if isinstance(one, str) else one
            for name in PROMPT_FIELDS
            if name in fields
            for one in _counted_field(name, fields[name])
        )
        written = texts if answer is None else texts_of(answer)
        return tokens_in, count("".join(unescaped(text) for text in written))


def unescaped(text: bytes) -> str:
    """A string of JSON without its quotes, cut anywhere."""
    try:
        return str(msgspec.json.decode(b'"' + text + b'"'))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text.decode("utf-8", "replace")


def _load(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file / "tokenizer.json" if file.is_dir() else file))


def _counted_field(name: str, value: bytes) -> Iterator[str | int]:
    if name in _SCHEMAS:
        return iter([value.decode("utf-8", "replace")])  # its names are read by the model too
    return _counted(msgspec.json.decode(value))


def _counted(value: object, name: str = "") -> Iterator[str | int]:
    """Texts of a prompt, and tokens of images and audio."""
    if isinstance(value, str):
        if name in _BLOBS:
            yield TOKENS_PER_PART
        elif name not in _LABELS:
            yield value
    elif isinstance(value, int | float):
        yield 1  # a token id, or a number of a schema
    elif isinstance(value, list):
        for one in value:
            yield from _counted(one, name)
    elif isinstance(value, dict):
        if "role" in value:
            yield TOKENS_PER_MESSAGE
        for key, one in value.items():
            yield from _counted(one, key)
