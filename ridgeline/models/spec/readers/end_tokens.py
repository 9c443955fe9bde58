"""The tokens that end a generation, beyond those in config.json. Read for ModelSpec.eos_ids, where the engine
stops. GGUF files and fine-tuned directories often name the end of a turn only in the tokenizer's own files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.models.files.config_values import ConfigValues, read_json_object

CONTROL = 3  # token type of control tokens, which are not text
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
        "<|END_OF_TURN_TOKEN|>",
        "<|return|>",
        "<|call|>",
        "<｜end▁of▁sentence｜>",
    }
)
# If both of these exist, <|end|> closes only one message of several.
HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})


def gguf_end_ids(values: ConfigValues) -> tuple[int, ...]:
    """The ids named in the file (text, turn, message), then the control tokens known to end a turn.

    `values` are the keys below tokenizer.ggml.
    """
    named = [values.optional_integer(f"{end}_token_id", minimum=0) for end in ("eos", "eot", "eom")]
    tokens, types = values.optional_texts("tokens"), values.numbers("token_type", whole=True)
    found: dict[str, int] = {}
    if tokens is not None and types is not None:
        controls = [index for index, kind in enumerate(types) if kind == CONTROL and index < len(tokens)]
        found = {tokens[index]: index for index in controls if tokens[index] in KNOWN_ENDS}
    if found.keys() >= HARMONY_ENDS:
        found.pop("<|end|>", None)
    ids = [index for index in named if index is not None] + sorted(found.values())
    return tuple(dict.fromkeys(ids))


def hf_end_id(directory: Path) -> int | None:
    """The end token of tokenizer_config.json, as its id in tokenizer.json; None if there is none."""
    text = token_text(read_tokenizer_config(directory).get("eos_token"))
    vocabulary = directory / "tokenizer.json"
    if text is None or not vocabulary.is_file():
        return None
    added = read_json_object(vocabulary).get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    index = next((token.get("id") for token in tokens if token.get("content") == text), None)
    return index if isinstance(index, int) else None


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; older directories have the special tokens in a separate file."""
    config = _read_if_there(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_if_there(directory / "special_tokens_map.json")
    return config


def token_text(value: Any) -> str | None:
    """A token is given as its text, or as an object with the text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
