"""Which tokens end a generation, read off GGUF metadata: one rule for the engine and for the tokenizer."""

from __future__ import annotations

from ridgeline.models.config_values import ConfigValues

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


def gguf_end_ids(values: ConfigValues) -> tuple[int, ...]:
    """The ids the file names (text, turn, message), then the control tokens known to end a turn.

    `values` are the keys below tokenizer.ggml.
    """
    named = [values.optional_integer(f"{end}_token_id", minimum=0) for end in ("eos", "eot", "eom")]
    tokens, types = values.optional_texts("tokens"), values.array("token_type", whole=True)
    found: dict[str, int] = {}
    if tokens is not None and types is not None:
        controls = (types[: len(tokens)] == CONTROL).nonzero()[0].tolist()
        found = {tokens[index]: index for index in controls if tokens[index] in KNOWN_ENDS}
    if found.keys() >= HARMONY_ENDS:
        found.pop("<|end|>", None)
    ids = [index for index in named if index is not None] + sorted(found.values())
    return tuple(dict.fromkeys(ids))
