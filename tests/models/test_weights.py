"""Loading: both formats give the same weights, and whatever is wrong with a checkpoint is named."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import Weights, load_weights, random_weights, tensors_of
from tests.models.tiny_checkpoints import tiny_model


def load(path: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(path, read_spec(path), dtype)


def assert_same(left: Weights, right: Weights) -> None:
    """Equal bit for bit, tensor by tensor, None where the other is None."""
    one, other = tensors_of(left), tensors_of(right)
    pairs = [(one.embed, other.embed), (one.final_norm, other.final_norm), (one.lm_head, other.lm_head)]
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        pairs += [(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours)]
    for mine, yours in pairs:
        assert (mine is None) == (yours is None)
        if mine is not None:
            assert torch.equal(mine, yours)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny untied Llama in one file, for tests to damage."""
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (with None) remove tensors of model.safetensors."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def test_fused_matrices_hold_q_k_v_and_gate_up_in_order(checkpoint: Path) -> None:
    weights = tensors_of(load(checkpoint))
    stored = load_file(checkpoint / "model.safetensors")
    layer = "model.layers.1."
    qkv = [stored[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
    gate_up = [stored[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(weights.layers[1].qkv, torch.cat(qkv))
    assert torch.equal(weights.layers[1].gate_up, torch.cat(gate_up))
    assert torch.equal(weights.lm_head, stored["lm_head.weight"])


def test_norms_stay_float32_and_gemma_norms_get_their_one(tmp_path: Path) -> None:
    tiny_model("gemma3").save_pretrained(tmp_path)
    weights = tensors_of(load(tmp_path, torch.bfloat16))
    stored = load_file(tmp_path / "model.safetensors")
    layer = weights.layers[0]
    assert layer.qkv.dtype == weights.embed.dtype == torch.bfloat16
    assert layer.q_norm is not None
    assert layer.q_norm.dtype == layer.ffn_norm.dtype == weights.final_norm.dtype == torch.float32
    assert torch.equal(layer.q_norm, 1 + stored["model.layers.0.self_attn.q_norm.weight"])
    assert torch.equal(layer.ffn_norm, 1 + stored["model.layers.0.pre_feedforward_layernorm.weight"])


def test_shards_load_as_one_file_does(checkpoint: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    tiny_model("llama").save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert_same(load(sharded), load(checkpoint))


def test_a_tensor_that_two_shards_hold_is_refused(tmp_path: Path) -> None:
    """Which of the two is meant? Taking the last one read would serve whichever it happens to be."""
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor + 1}, second, metadata={"format": "pt"})
    with pytest.raises(BrokenModel, match=rf"{second.name}: tensor {name} is also in {first.name}"):
        load(tmp_path)


def test_tied_embeddings_are_one_tensor_counted_once(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    weights = load(tmp_path)
    assert weights.lm_head is weights.embed
    assert weights.nbytes == 4 * read_spec(tmp_path).parameters


def test_a_tied_checkpoint_may_store_its_head_if_it_is_the_same(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    embed = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, {"lm_head.weight": embed.clone()})
    load(tmp_path)
    rewrite(tmp_path, {"lm_head.weight": embed + 1})
    with pytest.raises(BrokenModel, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(tmp_path)


def test_the_text_half_of_a_multimodal_checkpoint_is_found_by_its_prefix(tmp_path: Path) -> None:
    tiny_model("gemma3").save_pretrained(tmp_path)
    expected = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    moved: dict[str, torch.Tensor | None] = dict.fromkeys(stored)
    moved |= {
        f"language_{name}".replace("language_model.", "language_model.model."): t
        for name, t in stored.items()
    }
    rewrite(tmp_path, {**moved, "vision_tower.patch.weight": torch.ones(3)})
    assert_same(load(tmp_path), expected)


def test_progress_counts_every_element_once(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    spec = read_spec(checkpoint)
    load_weights(checkpoint, spec, torch.float32, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (spec.parameters, spec.parameters)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_random_weights_have_the_loaded_shapes_and_repeat_with_the_seed(checkpoint: Path) -> None:
    spec = read_spec(checkpoint)
    one, same, other = (random_weights(spec, torch.float32, seed) for seed in (7, 7, 8))
    assert_same(one, same)
    assert not torch.equal(one.embed.tensor, other.embed.tensor)
    assert one.nbytes == load(checkpoint).nbytes


# ---- what is wrong is named ----


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_a_truncated_file_is_refused_by_name(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    spec = read_spec(checkpoint)
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(BrokenModel, match=r"model\.safetensors: .*download it again"):
        load_weights(checkpoint, spec, torch.float32)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    spec = read_spec(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BrokenModel, match=f"{shard.name}: the index lists this shard"):
        load_weights(tmp_path, spec, torch.float32)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not readable JSON"),
        ("[" * 100_000, "is not readable JSON"),
        ("[]", "not a JSON object"),
        ("{}", "is not a safetensors index"),
        ('{"weight_map": []}', "an object was expected"),
        (json.dumps({"weight_map": {"a": ".."}}), "file is missing"),
        (json.dumps({"weight_map": {"a": ""}}), "file is missing"),
        (json.dumps({"weight_map": {"a": 7}}), "file is missing"),
        (json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}), "outside the model's directory"),
    ],
)
def test_a_bad_index_is_refused(checkpoint: Path, content: str, complaint: str) -> None:
    spec = read_spec(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BrokenModel, match=complaint):
        load_weights(checkpoint, spec, torch.float32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"model.layers.0.extra": torch.ones(2)}, r"not belong to a llama model .*: model\.layers\.0\.extra"),
        ({"model.norm.weight": torch.ones(65)}, r"model\.norm\.weight has shape \[65\], .* says \[64\]"),
        (
            {"model.norm.weight": torch.full((64,), torch.nan)},
            r"model\.norm\.weight contains values .* not finite",
        ),
        (
            {"model.norm.weight": torch.full((64,), torch.inf)},
            r"model\.norm\.weight contains values .* not finite",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    checkpoint: Path, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    spec = read_spec(checkpoint)
    rewrite(checkpoint, change)
    with pytest.raises(BrokenModel, match=complaint):
        load_weights(checkpoint, spec, torch.float32)


def test_values_too_large_for_the_dtype_are_refused_with_its_name(checkpoint: Path) -> None:
    rewrite(checkpoint, {"lm_head.weight": torch.full((131, 64), 1e6)})
    load(checkpoint, torch.bfloat16)
    with pytest.raises(BrokenModel, match=r"lm_head\.weight contains values that are not finite in float16"):
        load(checkpoint, torch.float16)


def test_stored_rotary_frequencies_are_ignored(checkpoint: Path) -> None:
    expected = load(checkpoint)
    rewrite(checkpoint, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert_same(load(checkpoint), expected)


def test_eight_bit_floats_without_their_scales_are_refused(checkpoint: Path) -> None:
    spec = read_spec(checkpoint)
    rewrite(checkpoint, {"lm_head.weight": torch.ones(131, 64).to(torch.float8_e4m3fn)})
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight is stored as F8_E4M3"):
        load_weights(checkpoint, spec, torch.float32)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickle_is_refused_with_the_reason(checkpoint: Path, name: str) -> None:
    spec = read_spec(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    for path in (checkpoint, checkpoint / name):
        with pytest.raises(UnsupportedModel, match=f"{name}: is a pickle, and loading a pickle runs code"):
            load_weights(path, spec, torch.float32)


def test_a_directory_without_weights_says_so(checkpoint: Path) -> None:
    spec = read_spec(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(BrokenModel, match="contains no weights"):
        load_weights(checkpoint, spec, torch.float32)
