"""Small tokenizers in Hugging Face layout, for checkpoints that have none."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_letters(directory: Path, size: int) -> None:
    """Byte-level, without merges: `size` tokens at most, the rest of the vocabulary stays unnamed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 4]
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
