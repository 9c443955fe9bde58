"""The shards of several processes make the whole: fused, interleaved, stacked, transposed, quantized."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights import stream, torch_weights
from ridgeline.models.weights.layout import pieces
from ridgeline.models.weights.shards import WHOLE, Rank, piece_range
from ridgeline.models.weights.stream import stream_weights
from ridgeline.models.weights.torch_weights import (
    EXPERT_MATRICES,
    MXFP4,
    Weight,
    Weights,
    load_weights,
    tensors_of,
)
from ridgeline.ops.mxfp4 import expanded
from tests.models.tiny_checkpoints import packed_as, tiny_model, write_gguf

# Fused rows, rows by KV head, alternating and transposed rows, rotated pairs, experts one by one and stacked.
FAMILIES = ("llama", "phi3", "gpt-neox", "gpt2", "glm4", "olmo2", "mixtral", "qwen2-moe", "gpt-oss")
# The vectors of a layer that are split, and those that process 0 alone holds.
VECTORS = {
    "llama-tied-biased": ({"qkv_bias", "gate_up_bias"}, {"o_bias", "down_bias"}),
    "gpt2": ({"qkv_bias", "up_bias"}, {"o_bias", "down_bias"}),
    "olmo2": ({"q_norm", "k_norm"}, set()),
    "qwen3": (set(), set()),
    "phimoe-published": ({"qkv_bias", "lm_head_bias"}, {"o_bias"}),
    "gpt-oss": ({"qkv_bias", "sinks", "experts_gate_up_bias"}, {"o_bias", "experts_down_bias"}),
}


def parts_of(weights: Weights) -> dict[str, Any]:
    owners = {"": weights, **{f"{number}.": layer for number, layer in enumerate(weights.layers)}}
    return {
        prefix + field.name: getattr(owner, field.name)
        for prefix, owner in owners.items()
        for field in fields(owner)
        if field.name not in ("layers", "rope_divisors") and getattr(owner, field.name) is not None
    }


def joined(shards: list[Weight]) -> torch.Tensor:
    """The full matrix from what each process holds, by the ranges that it states."""
    assert len({(shard.shard.axis, len(shard.shard.ranges)) for shard in shards}) == 1
    dim = -2 if shards[0].shard.axis == "rows" else -1
    size = max(end for shard in shards for _, end in shard.shard.ranges)
    shape = list(shards[0].tensor.shape)
    shape[dim] = size
    whole = torch.full(shape, float("nan"))
    for shard in shards:
        held = shard.tensor.split([end - begin for begin, end in shard.shard.ranges], dim)
        for (begin, end), part in zip(shard.shard.ranges, held, strict=True):
            whole.narrow(dim, begin, end - begin).copy_(part)
    return whole


def assert_joined(spec: ModelSpec, whole: Weights, shards: list[Weights]) -> None:
    expected, found = parts_of(whole), [parts_of(shard) for shard in shards]
    for name, value in expected.items():
        if not isinstance(value, Weight):
            continue
        held = [parts[name] for parts in found]
        if held[0].shard is not WHOLE:
            assert all(part.tensor.numel() < value.tensor.numel() for part in held), name
            assert torch.equal(joined(held), value.tensor), name
        else:
            assert all(torch.equal(part.tensor, value.tensor) for part in held), name
    for number, parts in enumerate(found):
        vectors = {name: part for name, part in parts.items() if not isinstance(part, Weight)}
        wanted = vector_shards(spec, expected, Rank(number, len(shards)))
        assert vectors.keys() == wanted.keys()
        assert all(torch.equal(vectors[name], wanted[name]) for name in wanted)


def vector_shards(spec: ModelSpec, whole: dict[str, Any], rank: Rank) -> dict[str, torch.Tensor]:
    """The vectors that a process holds: the ranges of their pieces, cut out of the whole ones."""
    rows: dict[str, list[torch.Tensor]] = {}
    stacked = set()
    for piece in pieces(spec):
        name = piece.field if piece.layer is None else f"{piece.layer}.{piece.field}"
        _, (begin, end) = piece_range(piece, spec, rank)
        if isinstance(whole[name], Weight) or begin == end:
            continue
        full = whole[name] if piece.expert is None else whole[name][piece.expert]
        rows.setdefault(name, []).append(full[piece.first_row + begin : piece.first_row + end])
        if piece.expert is not None:
            stacked.add(name)
    held = {name: torch.cat(parts) for name, parts in rows.items()}
    return {name: held[name].view(len(whole[name]), -1) if name in stacked else held[name] for name in held}


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_of_a_checkpoint_make_the_whole(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    whole = load_weights(tmp_path, spec, torch.float32)
    shards = [load_weights(tmp_path, spec, torch.float32, rank=Rank(number, 2)) for number in range(2)]
    assert_joined(spec, whole, shards)
    split = {name.partition(".")[2] for name, part in parts_of(shards[0]).items() if is_split(part)}
    assert {"qkv", "o"} <= split
    assert "router" not in split


def is_split(part: Any) -> bool:
    return isinstance(part, Weight) and part.shard is not WHOLE


@pytest.mark.parametrize("family", VECTORS)
def test_vectors_are_split_with_their_rows_and_added_once(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    whole = load_weights(tmp_path, spec, torch.float32)
    shards = [load_weights(tmp_path, spec, torch.float32, rank=Rank(number, 2)) for number in range(2)]
    assert_joined(spec, whole, shards)
    full, first, second = (parts_of(weights) for weights in (whole, *shards))
    vectors = {name for name, part in full.items() if not isinstance(part, Weight)}
    split, once = VECTORS[family]
    for name in vectors:
        field = name.rpartition(".")[2]
        assert (first[name].shape != full[name].shape) == (field in split), name
        assert (name not in second) == (field in once), name
    assert split | once <= {name.rpartition(".")[2] for name in vectors}


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "gpt-oss"])
def test_streamed_shards_are_the_loaded_ones(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    for number in range(2):
        rank = Rank(number, 2)
        streamed = stream_weights(tmp_path, spec, torch.float32, device="cpu", rank=rank, chunk_bytes=1000)
        loaded = parts_of(load_weights(tmp_path, spec, torch.float32, rank=rank))
        assert parts_of(streamed).keys() == loaded.keys()
        for name, part in parts_of(streamed).items():
            one, other = (each.tensor if isinstance(each, Weight) else each for each in (part, loaded[name]))
            assert torch.equal(one, other), name


def test_streamed_shards_of_stored_experts_have_the_values_of_expanded_ones(tmp_path: Path) -> None:
    tiny_model("gpt-oss-mxfp4-wide").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    for number in range(2):
        rank = Rank(number, 2)
        stored = stream_weights(
            tmp_path, spec, torch.float32, device="cpu", rank=rank, stored_experts=True, chunk_bytes=1000
        )
        plain = load_weights(tmp_path, spec, torch.float32, rank=rank)
        for ours, theirs in zip(stored.layers, plain.layers, strict=True):
            for name in EXPERT_MATRICES:
                mine, other = getattr(ours, name), getattr(theirs, name)
                assert (mine.format, mine.shard) == (MXFP4, other.shard)
                assert mine.shard is not WHOLE
                assert torch.equal(expanded(mine.stored), other.tensor), name


def test_a_decoder_refuses_shards(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    shard = load_weights(tmp_path, spec, torch.float32, rank=Rank(1, 2))
    with pytest.raises(ValueError, match="embed is a shard \\(its rows of rank 1 of 2\\)"):
        tensors_of(shard)
    whole = load_weights(tmp_path, spec, torch.float32)
    whole.layers[2] = replace(whole.layers[2], o=shard.layers[2].o)
    with pytest.raises(ValueError, match="o of layer 2 is a shard \\(its columns"):
        tensors_of(whole)


def test_biases_and_norms_of_split_rows_are_split_with_them(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    whole = load_weights(tmp_path, spec, torch.float32)
    shards = [load_weights(tmp_path, spec, torch.float32, rank=Rank(number, 2)) for number in range(2)]
    for number, layer in enumerate(whole.layers):
        held = [shard.layers[number] for shard in shards]
        full = torch.full_like(layer.qkv_bias, float("nan"))
        for part in held:
            at = 0
            for begin, end in part.qkv.shard.ranges:
                full[begin:end] = part.qkv_bias[at : (at := at + end - begin)]
        assert torch.equal(full, layer.qkv_bias)
        assert all(torch.equal(part.attn_norm, layer.attn_norm) for part in held)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_shards_of_quantized_blocks_make_the_whole(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    write_gguf(tiny_model("qwen3-wide"), tmp_path / "tiny.gguf", packed_as(kind))
    spec = read_spec(tmp_path / "tiny.gguf")
    whole = load_weights(tmp_path / "tiny.gguf", spec, torch.float32)
    shards = [
        load_weights(tmp_path / "tiny.gguf", spec, torch.float32, rank=Rank(number, 2)) for number in range(2)
    ]
    assert_joined(spec, whole, shards)


def test_several_processes_share_a_kv_head_where_there_are_fewer_heads(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert (spec.num_heads, spec.num_kv_heads) == (4, 2)
    held = [load_weights(tmp_path, spec, torch.float32, rank=Rank(number, 4)) for number in range(4)]
    ranges = [shard.layers[0].qkv.shard.ranges for shard in held]
    assert ranges[0][1:] == ranges[1][1:] != ranges[2][1:] == ranges[3][1:]
    assert len({one[0] for one in ranges}) == 4


@pytest.mark.parametrize("load", [load_weights, partial(stream_weights, device="cpu")])
def test_heads_that_cannot_be_split_are_refused_with_the_numbers_that_can(load: Any, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    refusal = (
        r"the query heads of layer 0 \(4\) cannot be split over 3 processes; it can be split over 2 or 4$"
    )
    with pytest.raises(UnsupportedModel, match=refusal):
        load(tmp_path, spec, torch.float32, rank=Rank(0, 3))


def test_columns_that_cut_a_quantized_block_are_refused(tmp_path: Path) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", packed_as(GGMLQuantizationType.Q8_0))
    spec = read_spec(tmp_path / "tiny.gguf")
    refusal = (
        "96 columns of tensor blk.0.ffn_down.weight are stored in blocks of 32 and cannot be split over 2 "
        "processes; use one process, or use a file with 16-bit weights"
    )
    with pytest.raises(UnsupportedModel, match=refusal):
        load_weights(tmp_path / "tiny.gguf", spec, torch.float32, rank=Rank(0, 2))


@pytest.mark.parametrize(
    ("family", "world", "refusal"),
    [
        ("gpt-oss-mxfp4", 2, "blocks of 32 and cannot be split over 2 processes; use one process"),
        ("gpt-oss-mxfp4-wide", 3, "cannot be split over 3 processes; it can be split over 2 or 4"),
    ],
)
def test_shards_are_refused_before_anything_is_allocated(
    family: str, world: int, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were allocated before the refusal")

    for loader in (stream, torch_weights):
        monkeypatch.setattr(loader, "allocate_weights", too_late)
    for load in (load_weights, partial(stream_weights, device="cpu", stored_experts=True)):
        with pytest.raises(UnsupportedModel, match=refusal):
            load(tmp_path, spec, torch.float32, rank=Rank(0, world))


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Rank(2, 2)
