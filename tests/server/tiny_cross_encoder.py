"""A tiny BERT with one label and its own tokenizer, as transformers saves them; for tests of scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*"abcdefghijklmnopqrstuvwxyz", "cat", "dog", "paris", "is", "in", "france", "where", "?", "."]


def save_cross_encoder(folder: Path) -> Any:
    """The checkpoint in `folder`; returned is the model as transformers computes it."""
    torch.manual_seed(7)
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_attention_heads=2, num_hidden_layers=2,
        intermediate_size=48, max_position_embeddings=24, num_labels=1,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    for parameter in model.parameters():  # as transformers starts them, all scores would be nearly equal
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    settings = {**names, "tokenizer_class": "BertTokenizer", "model_max_length": 24}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model
