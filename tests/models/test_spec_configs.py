"""Every published config at hand is read with the right totals, or refused with its true reason."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.read_spec import read_spec

CONFIGS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "configs"
NAMES = sorted(
    path.name.removesuffix("_config.json")
    for path in CONFIGS.glob("*_config.json")
    if not path.name.endswith("_hf_quant_config.json")
)

# name → (parameters, active parameters, weight format). The totals are those of the reference modules of
# these configs, built on the meta device.
READ = {
    "Qwen--Qwen3-0.6B": (596_049_920, 596_049_920, "bfloat16"),
    "Qwen--Qwen3-1.7B": (1_720_574_976, 1_720_574_976, "bfloat16"),
    "Qwen--Qwen3-8B": (8_190_735_360, 8_190_735_360, "bfloat16"),
    "Qwen--Qwen3-32B": (32_762_123_264, 32_762_123_264, "bfloat16"),
    "Qwen--Qwen3-32B-FP8": (32_762_123_264, 32_762_123_264, "fp8"),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": (32_762_123_264, 32_762_123_264, "fp8"),
    "Qwen--Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704, "bfloat16"),
    "Qwen--Qwen3-30B-A3B-FP8": (30_532_122_624, 3_353_032_704, "fp8"),
    "Qwen--Qwen3-235B-A22B": (235_093_634_560, 22_190_763_520, "bfloat16"),
    "Qwen--Qwen3-235B-A22B-FP8": (235_093_634_560, 22_190_763_520, "fp8"),
    "nvidia--Qwen3-235B-A22B-NVFP4": (235_093_634_560, 22_190_763_520, "nvfp4"),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (480_154_875_392, 35_474_765_312, "bfloat16"),
    "meta-llama--Meta-Llama-3.1-8B": (8_030_261_248, 8_030_261_248, "bfloat16"),
    "meta-llama--Meta-Llama-3.1-70B": (70_553_706_496, 70_553_706_496, "bfloat16"),
    "meta-llama--Meta-Llama-3.1-405B": (405_853_388_800, 405_853_388_800, "bfloat16"),
    "nvidia--Llama-3.1-70B-Instruct-FP8": (70_553_706_496, 70_553_706_496, "fp8"),
    "mistralai--Mixtral-8x7B-v0.1": (46_702_792_704, 12_879_925_248, "bfloat16"),
    "mistralai--Mixtral-8x22B-v0.1": (140_620_634_112, 39_152_031_744, "bfloat16"),
    "XiaomiMiMo--MiMo-7B-Base": (7_622_619_136, 7_622_619_136, "bfloat16"),
    "openai--gpt-oss-20b": (20_914_757_184, 4_187_440_704, "mxfp4"),
    "openai--gpt-oss-120b": (116_829_156_672, 5_711_982_912, "mxfp4"),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (107_769_861_120, 17_172_894_720, "bfloat16"),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (400_711_848_960, 17_184_691_200, "bfloat16"),
}

# pattern → the words the refusal must hold.
REFUSED = {
    "*MiniMax-M2*": "QK-norm over whole projections",
    "*MiniMax-M3*": "sparse attention",
    "*Qwen3-VL-*": "a vision tower",
    "*Qwen3.5-*": "linear attention layers",
    "*Qwen3.6-*": "linear attention layers",
    "*MiMo-V2*": "attention sinks",
    "*DeepSeek-R1": "multi-head latent attention",
    "*DeepSeek-V3*": "multi-head latent attention",
    "*DeepSeek-V4*": "compressed attention",
    "*[gG]emma-4-*": "head shapes that differ between layers",
    "*Kimi-K2*": "multi-head latent attention",
    "*Kimi-K3*": "linear attention layers",
    "*GLM-5*": "multi-head latent attention",
    "*Nemotron-Super-49B*": "blocks that differ from layer to layer",
    "*Nemotron-3*": "Mamba",
    "*Nemotron-H*": "Mamba",
    "*Step-3.7*": "'step3p7'",
}


def checkpoint(name: str, directory: Path) -> Path:
    """The config of that name, and its quantization if it has one, laid out as in a checkpoint."""
    shutil.copy(CONFIGS / f"{name}_config.json", directory / "config.json")
    quantization = CONFIGS / f"{name}_hf_quant_config.json"
    if quantization.is_file():
        shutil.copy(quantization, directory / "hf_quant_config.json")
    return directory


def refusals_of(name: str) -> list[str]:
    return [words for pattern, words in REFUSED.items() if fnmatch(name, pattern)]


@pytest.mark.skipif(not NAMES, reason=f"{CONFIGS} is not there")
def test_there_is_exactly_one_expectation_for_every_file() -> None:
    assert [name for name in NAMES if (name in READ) + len(refusals_of(name)) != 1] == []
    quantizations = {path.name.removesuffix("_hf_quant_config.json") for path in CONFIGS.glob("*_hf_quant_*")}
    assert quantizations <= set(NAMES)
    assert set(READ) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES or [pytest.param("", marks=pytest.mark.skip(reason="no configs"))])
def test_a_published_config_is_read_right_or_refused_for_its_true_reason(name: str, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path)
    if name in READ:
        spec = read_spec(path)
        assert (spec.parameters, spec.active_parameters, spec.weight_format) == READ[name]
        assert spec.notes == ()
        # The end tokens of these are in generation_config.json.
        assert spec.eos_ids or "Llama-4" in name or "MiMo" in name
    else:
        with pytest.raises(UnsupportedModel) as refusal:
            read_spec(path)
        assert refusals_of(name)[0] in str(refusal.value)
        assert "nearest supported family is" in str(refusal.value) or "has only keys of" in str(refusal.value)
        assert "ridgeline models support" in str(refusal.value)


@pytest.mark.parametrize("name", [name for name in READ if name in NAMES])
def test_what_is_read_is_servable_quantized_or_not(name: str, tmp_path: Path) -> None:
    check_servable(read_spec(checkpoint(name, tmp_path)))


@pytest.mark.skipif(not NAMES, reason=f"{CONFIGS} is not there")
def test_the_details_of_a_known_config_are_all_there(tmp_path: Path) -> None:
    spec = read_spec(checkpoint("nvidia--Llama-3.1-70B-Instruct-FP8", tmp_path))
    assert (spec.num_layers, spec.hidden_size, spec.ffn_size) == (80, 8192, 28672)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (64, 8, 128)
    assert (spec.vocab_size, spec.max_context, spec.tied_embeddings) == (128_256, 131_072, False)
    assert (spec.bos_id, spec.eos_ids, spec.pad_id) == (128_000, (128_001, 128_008, 128_009), None)
    rope = spec.attentions[0].rope
    assert rope.theta == 500_000.0
    assert rope.scaling is not None
    assert (rope.scaling.kind, rope.scaling.factor, rope.scaling.original_context) == ("llama3", 8.0, 8192)
    assert (rope.scaling.low_freq_factor, rope.scaling.high_freq_factor) == (1.0, 4.0)
    assert CacheLayout.of(spec).token_bytes == 327_680
