"""A tiny random model with Qwen's marks, which thinks before it answers, written as a checkpoint.

Its text is nonsense: whatever is right about the form of its answers is the grammar's and the parser's
doing.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """\
{% if tools %}{{ tools | tojson }} <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>{% endif %}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{% endif %}"""


def save_thinker(folder: Path, padding: int = 0) -> None:
    """padding: rows of the embedding behind the last token"""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, "tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(1)
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("<|im_end|>")
    config = LlamaConfig(
        vocab_size=size + padding,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=end,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
