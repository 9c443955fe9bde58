"""Streamed weights are the loaded ones, bit for bit, whatever the chunks; and a bad file is named as ever."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights import stream as weights_stream
from ridgeline.models.weights.layout import pieces
from ridgeline.models.weights.stream import stream_weights
from ridgeline.models.weights.torch_weights import DecoderWeights, LayerWeights, Weight, Weights, load_weights
from tests.models.test_weights import assert_same, rewrite
from tests.models.tiny_checkpoints import packed_as, tiny_model, write_gguf

CHUNK_BYTES = 1000  # no divisor of any tensor: every one of them begins and ends inside a chunk


def stream(path: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Weights:
    settings = {"device": "cpu", "readers": 3, "chunk_bytes": CHUNK_BYTES, **more}
    return stream_weights(path, read_spec(path), dtype, **settings)


def stored_as(directory: Path, dtype: torch.dtype) -> None:
    file = directory / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_weights_are_the_loaded_ones(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    assert_same(stream(tmp_path, dtype), load_weights(tmp_path, read_spec(tmp_path), dtype))


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stored_type_becomes_every_dtype_as_the_loader_has_it(
    checkpoint: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    stored_as(checkpoint, stored)
    assert_same(stream(checkpoint, dtype), load_weights(checkpoint, read_spec(checkpoint), dtype))


@pytest.mark.parametrize(("readers", "chunk_bytes"), [(1, 256), (8, 1 << 24)])
def test_readers_and_chunks_change_nothing(checkpoint: Path, readers: int, chunk_bytes: int) -> None:
    loaded = load_weights(checkpoint, read_spec(checkpoint), torch.float32)
    assert_same(stream(checkpoint, readers=readers, chunk_bytes=chunk_bytes), loaded)


def test_shards_are_streamed_as_one_file_is(checkpoint: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    tiny_model("llama").save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert_same(stream(sharded), stream(checkpoint))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    weights = stream(tmp_path)
    assert weights.lm_head is weights.embed


def test_a_gguf_file_goes_the_way_of_the_loader(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama"), file, packed_as(GGMLQuantizationType.Q8_0))
    assert_same(stream(file), load_weights(file, read_spec(file), torch.float32))


def test_progress_counts_every_element_once_in_the_callers_thread(checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    threads = set()

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        threads.add(threading.current_thread())

    stream(checkpoint, progress=progress)
    total = sum(math.prod(piece.shape) for piece in pieces(read_spec(checkpoint)))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total)
    assert {all_of_it for _, all_of_it in calls} == {total}
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("model.norm.weight", None, "1 tensors are missing: model.norm.weight"),
        ("model.extra.weight", torch.ones(3), "do not belong to a llama model"),
        ("model.norm.weight", torch.ones(63), r"has shape \[63\]"),
        (
            "model.norm.weight",
            torch.full((64,), float("nan")),
            "model.norm.weight contains values that are not",
        ),
        (
            "lm_head.weight",
            torch.full((131, 64), float("inf")),
            "lm_head.weight contains values that are not",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    checkpoint: Path, name: str, tensor: torch.Tensor | None, complaint: str
) -> None:
    rewrite(checkpoint, {name: tensor})
    with pytest.raises(BrokenModel, match=complaint):
        stream(checkpoint)


def test_large_finite_values_are_no_corruption(checkpoint: Path) -> None:
    """Their sum in float32 is not finite, each of them is."""
    shape = load_file(checkpoint / "model.safetensors")["lm_head.weight"].shape
    rewrite(checkpoint, {"lm_head.weight": torch.full(shape, 3e38)})
    assert stream(checkpoint).lm_head.tensor[0, 0].item() == pytest.approx(3e38)


def test_values_too_large_for_the_dtype_are_refused_with_its_name(checkpoint: Path) -> None:
    rewrite(checkpoint, {"model.norm.weight": torch.full((64,), 1e6)})  # a norm: float32 all the same
    stream(checkpoint, torch.float16)
    shape = load_file(checkpoint / "model.safetensors")["lm_head.weight"].shape
    rewrite(checkpoint, {"lm_head.weight": torch.full(shape, 1e6)})
    with pytest.raises(BrokenModel, match=r"lm_head.weight .* not finite in float16"):
        stream(checkpoint, torch.float16)


def test_eight_bit_floats_are_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})
    with pytest.raises(UnsupportedModel, match="F8_E4M3"):
        stream(checkpoint)


def test_a_file_cut_while_it_is_read_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = checkpoint / "model.safetensors"
    real, calls = os.preadv, []

    def preadv(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 5:
            os.truncate(file, 5000)
        return real(*arguments)

    monkeypatch.setattr(weights_stream.os, "preadv", preadv)
    with pytest.raises(BrokenModel, match=r"model\.safetensors: .*while it was read.*truncated or altered"):
        stream(checkpoint, readers=2, chunk_bytes=256)


def test_an_error_of_the_disk_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.preadv, []

    def preadv(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 5:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(weights_stream.os, "preadv", preadv)
    with pytest.raises(BrokenModel, match=r"model\.safetensors: cannot be read: Input/output error"):
        stream(checkpoint)


def test_reads_that_come_short_are_gone_on_with(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(weights_stream.os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:100]], at))
    assert_same(stream(checkpoint), load_weights(checkpoint, read_spec(checkpoint), torch.float32))


def test_an_interrupted_load_closes_its_file_after_the_last_reader_has_ended(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, readers_at_close = os.close, []

    def close(descriptor: int) -> None:
        readers_at_close.append([t for t in threading.enumerate() if t.name.startswith("weights-")])
        real(descriptor)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights_stream.os, "close", close)
    with pytest.raises(KeyboardInterrupt):
        stream(checkpoint, progress=interrupt, chunk_bytes=256)
    assert readers_at_close == [[]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_streamed_weights_are_those_loaded_on_the_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    """Through pinned memory and streams; from float32, so that one of the dtypes is converted there."""
    tiny_model("gemma3").save_pretrained(tmp_path)
    for chunk_bytes in (CHUNK_BYTES, 1 << 20):
        there = stream(tmp_path, dtype, device="cuda", chunk_bytes=chunk_bytes)
        here = load_weights(tmp_path, read_spec(tmp_path), dtype)
        assert there.embed.device.type == "cuda"
        assert_same(_on_cpu(there), here)
    rewrite(tmp_path, {"model.norm.weight": torch.full((64,), float("nan"))})
    with pytest.raises(BrokenModel, match=r"model\.norm\.weight contains values that are not finite"):
        stream(tmp_path, dtype, device="cuda")


def _on_cpu(weights: Weights) -> Weights:
    def copied(value: Any) -> Any:
        if isinstance(value, Weight):
            return replace(value, parts={name: part.cpu() for name, part in value.parts.items()})
        return value.cpu() if isinstance(value, torch.Tensor) else value

    def moved(owner: Any) -> dict[str, Any]:
        return {field.name: copied(getattr(owner, field.name)) for field in fields(owner)}

    layers = [LayerWeights(**moved(layer)) for layer in weights.layers]
    return DecoderWeights(**{**moved(weights), "layers": layers})
