"""Which tokens end a generation, read off GGUF metadata: one rule for the engine and for the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTROL = 3  # the token type of tokens that are not text
# Control tokens that end a text or a turn, for files that name only one end token (or the base model's).
KNOWN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<｜end▁of▁sentence｜>",
    }
)
# Where both of these are there, <|end|> only closes one message of several.
HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})


def gguf_end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids the file names (text, turn, message), then the control tokens known to end a turn."""
    named = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type")
    found: dict[str, int] = {}
    if types is not None:
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        controls = [index for index, kind in enumerate(types) if kind == CONTROL and index < len(tokens)]
        found = {tokens[index]: index for index in controls if tokens[index] in KNOWN_ENDS}
    if found.keys() >= HARMONY_ENDS:
        found.pop("<|end|>", None)
    ids = [index for index in named if isinstance(index, int)] + sorted(found.values())
    return tuple(dict.fromkeys(ids))
