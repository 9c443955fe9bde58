"""Thousands of bytes altered at random in a small quantized GGUF: it loads to finite weights, or is refused.

The seeds are fixed, so a failure names the file that shows it again. Deliberate harms are in
test_gguf_hostile and test_gguf_tensor_table; here the damage is random.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from ridgeline.models.errors import ModelError
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.layout import pieces
from ridgeline.models.weights.packed import load_packed
from ridgeline.models.weights.torch_weights import load_weights, target_rows
from ridgeline.ops.cpu.library import NativeDecoder, unpack
from tests.models.test_dequant import random_blocks

SIZE, VOCAB = 256, 16
ROWS = {
    "token_embd.weight": ("Q5_1", VOCAB),
    "output.weight": ("Q8_0", VOCAB),
    "blk.0.attn_q.weight": ("Q4_0", SIZE),
    "blk.0.attn_k.weight": ("Q4_1", SIZE),
    "blk.0.attn_v.weight": ("Q5_0", SIZE),
    "blk.0.attn_output.weight": ("Q8_0", SIZE),
    "blk.0.ffn_gate.weight": ("Q4_K", SIZE),
    "blk.0.ffn_up.weight": ("Q5_K", SIZE),
    "blk.0.ffn_down.weight": ("Q6_K", SIZE),
}
NORMS = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")
FILES_PER_HARM = 150
# Numbers at which counts, sizes and offsets go wrong; and halves and floats that are not finite.
AWKWARD = [
    number.to_bytes(8, "little")
    for number in (0, 1, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)
]
NOT_FINITE = [b"\x00\x7e", b"\x00\x7c", b"\x00\xfc", b"\xff\xff", b"\x00\x00\x80\x7f", b"\x00\x00\xc0\xff"]

Harm = Callable[[bytearray, random.Random, int], None]
Loader = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    writer.add_eos_token_id(1)
    for name in NORMS:
        writer.add_tensor(name, np.ones(SIZE, np.float32))
    for seed, (name, (kind, rows)) in enumerate(ROWS.items()):
        quantization = GGMLQuantizationType[kind]
        elements, _ = gguf.GGML_QUANT_SIZES[quantization]
        blocks = random_blocks(kind, rows * SIZE // elements, seed)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def flip_bits(content: bytearray, rng: random.Random, header: int) -> None:
    for _ in range(rng.choice([1, 2, 8])):
        content[rng.randrange(header)] ^= 1 << rng.randrange(8)


def overwrite_numbers(content: bytearray, rng: random.Random, header: int) -> None:
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(4, header - 8)
        content[at : at + 8] = rng.choice(AWKWARD)


def overwrite_the_tensor_table(content: bytearray, rng: random.Random, header: int) -> None:
    """The last sixth of the header: names, dimensions, types, offsets."""
    at = rng.randrange(header * 5 // 6, header - 8)
    content[at : at + 8] = rng.choice([*AWKWARD, rng.randbytes(8)])


def move_a_piece(content: bytearray, rng: random.Random, header: int) -> None:
    begin, length, to = rng.randrange(header), rng.randrange(1, 200), rng.randrange(header)
    content[to : to + length] = content[begin : begin + length]


def cut_out_or_insert(content: bytearray, rng: random.Random, header: int) -> None:
    at, length = rng.randrange(header), rng.choice([1, 8, 32, 1000])
    if rng.random() < 0.5:
        del content[at : at + length]
    else:
        content[at:at] = rng.randbytes(length)


def truncate(content: bytearray, rng: random.Random, header: int) -> None:
    del content[rng.choice([rng.randrange(header), rng.randrange(len(content))]) :]


def overwrite_data(content: bytearray, rng: random.Random, header: int) -> None:
    """Anywhere in the tensors: quants, or scales that become NaN or infinite."""
    for _ in range(rng.choice([1, 4, 64])):
        at = rng.randrange(header, len(content) - 4) & ~1  # the halves of every type lie at even bytes
        piece = rng.choice(NOT_FINITE)
        content[at : at + len(piece)] = piece


HARMS: list[Harm] = [
    flip_bits,
    overwrite_numbers,
    overwrite_the_tensor_table,
    move_a_piece,
    cut_out_or_insert,
    truncate,
    overwrite_data,
]


def altered_files(whole: Path, harm: Harm) -> list[Path]:
    original = whole.read_bytes()
    header = min(tensor.offset for tensor in GgufFile(whole).tensors.values())
    files = []
    for seed in range(FILES_PER_HARM):
        content = bytearray(original)
        harm(content, random.Random(seed), header)
        files.append(whole.with_name(f"{harm.__name__}-{seed}.gguf"))
        files[-1].write_bytes(content)
    return files


def load_floats(path: Path) -> None:
    """As the torch backend reads it: every tensor has the shape the description gives it, and is finite."""
    spec = read_spec(path)
    weights = load_weights(path, spec, torch.float32)
    for piece in pieces(spec):
        values = target_rows(weights, piece)
        assert tuple(values.shape) == piece.shape, f"{path.name}: {piece.role}"
        assert torch.isfinite(values).all(), f"{path.name}: {piece.role}"


def load_packed_and_compute(path: Path) -> None:
    """As the native backend reads it: every matrix is finite, and kernels can compute a step with them."""
    spec = read_spec(path)
    packed = load_packed(path, spec, keep=False)
    names = ("qkv", "output", "gate_up", "down")
    matrices = [packed.matrix(layer, name) for layer in range(spec.num_layers) for name in names]
    for matrix in [packed.embedding, *matrices]:
        assert np.isfinite(unpack(matrix)).all(), f"{path.name}: {matrix.n} x {matrix.k}"
    context = min(spec.max_context, 32)
    decoder = NativeDecoder(packed.table(max_context=context, num_blocks=2, max_step_tokens=4), threads=1)
    tokens = min(context, 4)
    each = np.arange(tokens, dtype=np.int32)
    ends, blocks = np.array([0, tokens], np.int32), np.array([[1]], np.int32)
    assert decoder.execute(each, each, ends, blocks, each[-1:]).shape == (1, spec.vocab_size)


LOADERS = [load_floats, load_packed_and_compute]


def refusal(load: Loader, path: Path) -> str | None:
    try:
        load(path)
    except ModelError as error:
        return str(error)
    finally:
        path.unlink()
    return None


@pytest.mark.parametrize("load", LOADERS)
def test_the_unharmed_file_is_loaded(load: Loader, whole: Path) -> None:
    load(whole)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("harm", HARMS)
def test_an_altered_file_loads_whole_or_is_refused_by_name(load: Loader, harm: Harm, whole: Path) -> None:
    reasons = {path.stem: refusal(load, path) for path in altered_files(whole, harm)}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    assert len(refused) > FILES_PER_HARM // 10, "the harm is too harmless to test anything"
    for name, reason in refused.items():
        assert name in reason
        assert len(reason) < 2000, f"{name}: {len(reason)} characters"


@pytest.mark.parametrize("harm", [overwrite_numbers, overwrite_the_tensor_table])
def test_an_altered_file_takes_no_more_memory_than_a_whole_one(whole: Path, harm: Harm) -> None:
    """Counts and lengths are claims: memory follows what is there."""
    for path in altered_files(whole, harm):
        tracemalloc.start()
        try:
            GgufFile(path)
        except ModelError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            path.unlink()
        assert peak < 1 << 20, f"{path.name}: {peak} bytes"
