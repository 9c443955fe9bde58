"""The parts of a tokenizer, as read from a model's files; `Tokenizer` is built from them.

Made by `hf_tokenizer` (a directory with tokenizer.json) and `gguf_tokenizer` (GGUF metadata).
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """`add_bos` and `add_eos` None: the backend's own post-processor decides."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, … : the names used in templates
    add_bos: bool | None
    add_eos: bool | None
    chat_template: str | dict[str, str] | None
