"""GGUF files that were cut, altered or made to harm: refused by name, in little time and memory."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from array import array
from datetime import timedelta
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.models.errors import BrokenModel, ModelError
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.readers.gguf_config import spec_from_gguf
from ridgeline.models.text.gguf_tokenizer import read_gguf_tokenizer
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.models.weights.torch_weights import load_weights
from tests.models.tiny_checkpoints import add_value

HIDDEN, HEADS, FFN = 8, 2, 12
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENS = [*LETTERS, "ab", "abc", "<|im_end|>", "<unk>"]
TYPES = [*[1] * 28, 3, 2]
KEYS: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 32,
    "general.type": "model",
    "split.count": 1,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.bos_token_id": 28,
    "tokenizer.ggml.eos_token_id": 28,
    "tokenizer.ggml.unknown_token_id": 29,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages[0].content }}",
    "tokenizer.chat_templates": ["rag"],
    "tokenizer.chat_template.rag": "x",
}
BYTE_LEVEL = {
    **KEYS,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.merges": ["a b", "ab c"],
}
SENTENCEPIECE = {
    **KEYS,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.scores": [-float(index) for index in range(len(TOKENS))],
    "tokenizer.ggml.add_space_prefix": False,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (len(TOKENS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    **{f"blk.0.attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")},
    "blk.0.ffn_gate.weight": (FFN, HIDDEN),
    "blk.0.ffn_up.weight": (FFN, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, FFN),
}
# A value of every type the format has, and the awkward ones of each.
VALUES: list[Any] = [
    *(0, -1, 7, 2**63, 1.5, float("nan"), float("inf"), True, "", "x", "a b c", "{{ 1 }"),
    *([], ["x"], ["x", "x"], ["rag", "nope"], [True] * 30, ["a"] * 30),
    *(array("i"), array("i", [0] * 30), array("d", [float("nan")] * 30), array("Q", [2**63] * 30), bytes(30)),
]


def write(path: Path, keys: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        add_value(writer, key, value)
    for name, shape in SHAPES.items():
        writer.add_tensor(name, np.full(shape, 0.1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("whole")
    return [
        write(directory / "byte_level.gguf", BYTE_LEVEL),
        write(directory / "sentencepiece.gguf", SENTENCEPIECE),
    ]


def read_everything(path: Path) -> None:
    """What starting a server reads: the description, the weights, the tokenizer."""
    load_weights(path, read_spec(path), torch.float32)
    tokenizer = Tokenizer.load(path)
    tokenizer.decode(tokenizer.encode("abc <|im_end|> é"))


def test_the_unharmed_files_are_read(whole: list[Path]) -> None:
    """Else the tests below would be about refusals that have nothing to do with the harm."""
    for path in whole:
        read_everything(path)


@settings(max_examples=400, deadline=timedelta(seconds=5))
@given(seed=st.integers(0, 2**32))
def test_cut_and_altered_bytes_give_only_model_errors(whole: list[Path], seed: int) -> None:
    """A seed chooses the bytes: there is nothing to shrink in thousands of positions."""
    rng = random.Random(seed)
    original = rng.choice(whole)
    content = bytearray(original.read_bytes())
    header = len(content) - 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    for _ in range(rng.choice([1, 1, 2, 8])):
        content[rng.randrange(header)] = rng.choice([0, 1, 4, 8, 9, 0x7F, 0xFF, rng.randrange(256)])
    if rng.random() < 0.2:
        del content[rng.randrange(len(content)) :]
    altered = original.with_name("altered.gguf")
    altered.unlink(missing_ok=True)  # not overwritten: the file before may still be mapped
    altered.write_bytes(content)
    with contextlib.suppress(ModelError):
        read_everything(altered)


@pytest.mark.parametrize("keys", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_a_value_of_the_wrong_type_gives_only_model_errors(keys: dict[str, Any], tmp_path: Path) -> None:
    """Every key with a value of every type."""
    file = GgufFile(write(tmp_path / "whole.gguf", keys))
    metadata = file.metadata
    refused = 0
    for key in metadata:
        for value in VALUES:
            file.metadata = {**metadata, key: value}
            try:
                spec_from_gguf(file)
                Tokenizer(read_gguf_tokenizer(file.metadata, "whole.gguf")).encode("abc")
            except ModelError:
                refused += 1
    assert refused > 0.7 * len(metadata) * len(VALUES)


def claims(count: int, kind: int) -> bytes:
    """A header with one metadata key: an array of `count` items of a type, none of which is there."""
    key = b"k"
    header = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    pair = len(key).to_bytes(8, "little") + key + (9).to_bytes(4, "little")
    return header + pair + kind.to_bytes(4, "little") + count.to_bytes(8, "little")


@pytest.mark.parametrize("kind", range(14))
@pytest.mark.parametrize("count", [1, 2**20, 2**40, 2**63])
def test_a_claimed_array_takes_no_memory_before_it_is_found_missing(
    kind: int, count: int, tmp_path: Path
) -> None:
    path = tmp_path / "claims.gguf"
    path.write_bytes(claims(count, kind))
    tracemalloc.start()
    try:
        with pytest.raises(BrokenModel, match=r"claims\.gguf"):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_array_of_flags_takes_a_byte_each(tmp_path: Path) -> None:
    """As Python objects they would take eight: a file could ask for eight times its own size."""
    path = tmp_path / "flags.gguf"
    path.write_bytes(claims(1 << 20, kind=7) + bytes(1 << 20))
    tracemalloc.start()
    try:
        assert len(GgufFile(path).metadata["k"]) == 1 << 20
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_metadata_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.gguf", {**BYTE_LEVEL, "llama.attention.head_count_kX": 1})
    path.write_bytes(path.read_bytes().replace(b"head_count_kX", b"head_count_kv"))
    with pytest.raises(BrokenModel, match=r"twice\.gguf: has a duplicate metadata key"):
        GgufFile(path)


def test_a_token_too_long_to_derive_merges_from_is_refused(tmp_path: Path) -> None:
    keys = {**SENTENCEPIECE, "tokenizer.ggml.tokens": [*TOKENS[:-3], "a" * 1_000_000, *TOKENS[-2:]]}
    with pytest.raises(BrokenModel, match=r"long\.gguf: the vocabulary has a token of 1,000,000 characters"):
        Tokenizer.load(write(tmp_path / "long.gguf", keys))
