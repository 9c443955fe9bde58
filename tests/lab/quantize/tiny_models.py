"""Tiny checkpoints with a tokenizer of whole words, text in these words, and models with outlier channels."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers

from tests.models.tiny_checkpoints import tiny_model

OUTLIERS = (3, 17, 40)
FACTOR = 30.0


def save_tiny(name: str, folder: Path, *, outliers: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A family's tiny model. outliers: some channels after each norm are 30 times as large."""
    model = tiny_model(name).to(dtype)
    model.save_pretrained(folder)
    if outliers:
        _add_outliers(folder)
    save_tokenizer(folder, model.config.get_text_config().vocab_size)
    return folder


def _add_outliers(folder: Path) -> None:
    """Large weights of a norm, and readers whose columns are as much smaller: the outputs stay ordinary."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[list(OUTLIERS)] *= FACTOR
    save_file(tensors, file, metadata={"format": "pt"})


def save_tokenizer(folder: Path, vocab: int) -> None:
    """Token n is the word `wn`."""
    words = {f"w{number}": number for number in range(vocab)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))


def text_of(tokens: Iterable[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def save_text(path: Path, vocab: int, tokens: int, seed: int = 0) -> Path:
    """Words of unequal frequency: some inputs matter more than others."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocab - 2)
    drawn = random.choice(np.arange(3, vocab), tokens, p=weights / weights.sum())
    path.write_text(text_of(drawn.tolist()))
    return path
