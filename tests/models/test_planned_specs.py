"""The shape of every published config at hand has the published number of parameters, or is refused."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ridgeline.models.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from ridgeline.models.files.registry import resolve
from ridgeline.models.spec.cache_layout import CacheGroup, CacheLayout
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.find_spec import find_spec
from ridgeline.models.spec.mixers import Attention, CompressedAttention, LatentAttention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision, bytes_of
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.recurrences import LinearAttention, Mamba2

CONFIGS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "configs"
NAMES = sorted(
    path.name.removesuffix("_config.json")
    for path in CONFIGS.glob("*_config.json")
    if not path.name.endswith("_hf_quant_config.json")
)
needs_configs = pytest.mark.skipif(not NAMES, reason=f"{CONFIGS} is not there")

# What a published figure counts.
LANGUAGE = "language model"
TOWER = "with its vision tower"
CHECKPOINT = "with prediction heads and vision tower, their own copies of embeddings and LM head"

SAFETENSORS = "safetensors total on Hugging Face"
MODULE = "the reference module of this config, whose weights are the checkpoint's"


class Published(NamedTuple):
    parameters: float
    counts: str
    source: str


# The most exact figure there is: the checkpoint's own total, else the model card's or the report's.
PUBLISHED = {
    "Qwen--Qwen3-0.6B": Published(596_049_920, LANGUAGE, MODULE),
    "Qwen--Qwen3-1.7B": Published(1_720_574_976, LANGUAGE, MODULE),
    "Qwen--Qwen3-8B": Published(8_190_735_360, LANGUAGE, MODULE),
    "Qwen--Qwen3-32B*": Published(32_762_123_264, LANGUAGE, MODULE),
    "Qwen--Qwen3-30B-A3B*": Published(30_532_122_624, LANGUAGE, SAFETENSORS),
    "*--Qwen3-235B-A22B*": Published(235_093_634_560, LANGUAGE, SAFETENSORS),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": Published(480_154_875_392, LANGUAGE, SAFETENSORS),
    "Qwen--Qwen3-VL-2B-*": Published(2_127_532_032, TOWER, MODULE),
    "Qwen--Qwen3-VL-4B-*": Published(4_437_815_808, TOWER, MODULE),
    "Qwen--Qwen3-VL-8B-*": Published(8_767_123_696, TOWER, MODULE),
    "Qwen--Qwen3-VL-32B-*": Published(33_357_390_064, TOWER, MODULE),
    "Qwen--Qwen3-VL-30B-*": Published(31_070_754_032, TOWER, MODULE),
    "Qwen--Qwen3-VL-235B-*": Published(235_670_022_896, TOWER, MODULE),
    "*--Qwen3.[56]-27B*": Published(27e9, LANGUAGE, "model card"),
    "*--Qwen3.[56]-35B-A3B*": Published(35e9, TOWER, "model card"),
    "*--Qwen3.5-122B-A10B*": Published(122e9, TOWER, "model card"),
    "*--Qwen3.5-397B-A17B*": Published(397e9, TOWER, "model card"),
    "meta-llama--Meta-Llama-3.1-8B": Published(8_030_261_248, LANGUAGE, SAFETENSORS),
    "*--*Llama-3.1-70B*": Published(70_553_706_496, LANGUAGE, SAFETENSORS),
    "meta-llama--Meta-Llama-3.1-405B": Published(405_853_388_800, LANGUAGE, SAFETENSORS),
    "meta-llama--Llama-4-Scout-*": Published(108_641_793_536, LANGUAGE, f"{SAFETENSORS}, tower included"),
    "meta-llama--Llama-4-Maverick-*": Published(400e9, LANGUAGE, "model card"),
    "mistralai--Mixtral-8x7B-v0.1": Published(46_702_792_704, LANGUAGE, SAFETENSORS),
    "mistralai--Mixtral-8x22B-v0.1": Published(140_620_634_112, LANGUAGE, SAFETENSORS),
    "deepseek-ai--DeepSeek-R1": Published(684_489_845_504, CHECKPOINT, SAFETENSORS),
    "*--DeepSeek-V3": Published(671e9, LANGUAGE, "technical report, arXiv 2412.19437"),
    "*--DeepSeek-V3.1*": Published(671e9, LANGUAGE, "model card"),
    "*--DeepSeek-V3.2*": Published(685_355_329_792, CHECKPOINT, SAFETENSORS),
    "*--DeepSeek-V4-Flash*": Published(290_944_616_402, CHECKPOINT, SAFETENSORS),
    "*--DeepSeek-V4-Pro*": Published(1_598_839_674_782, CHECKPOINT, SAFETENSORS),
    "moonshotai--Kimi-K2-Instruct": Published(1_026_408_235_864, LANGUAGE, SAFETENSORS),
    "*--Kimi-K2.*": Published(1_026_879_353_328, TOWER, MODULE),
    "moonshotai--Kimi-K3": Published(2.78e12, LANGUAGE, "technical report"),
    "*--GLM-5-*": Published(753_864_139_008, CHECKPOINT, SAFETENSORS),
    "*--GLM-5": Published(753_864_139_008, CHECKPOINT, SAFETENSORS),
    "*--GLM-5.1*": Published(753_864_139_008, CHECKPOINT, SAFETENSORS),
    "*--GLM-5.2*": Published(753_329_940_480, CHECKPOINT, SAFETENSORS),
    "openai--gpt-oss-20b": Published(20_914_757_184, LANGUAGE, SAFETENSORS),
    "openai--gpt-oss-120b": Published(116_829_156_672, LANGUAGE, SAFETENSORS),
    "*--[gG]emma-4-26B-A4B*": Published(25.2e9, LANGUAGE, "model card"),
    "*--Gemma-4-31B-*": Published(30.7e9, LANGUAGE, "model card"),
    "*--MiniMax-M2.*": Published(228_689_764_864, LANGUAGE, SAFETENSORS),
    "MiniMaxAI--MiniMax-M3": Published(428e9, LANGUAGE, "model card, tower included"),
    "XiaomiMiMo--MiMo-7B-Base": Published(7.83e9, CHECKPOINT, "model size on Hugging Face"),
    "XiaomiMiMo--MiMo-V2-Flash": Published(309e9, LANGUAGE, "model card"),
    "stepfun-ai--Step-3.7-Flash*": Published(196e9, LANGUAGE, "card of Step-3.5-Flash, the same backbone"),
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": Published(49_867_145_216, LANGUAGE, SAFETENSORS),
    "nvidia--NVIDIA-Nemotron-3-Nano-*": Published(31_577_937_344, LANGUAGE, SAFETENSORS),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-*": Published(31_577_937_344, LANGUAGE, SAFETENSORS),
    "nvidia--NVIDIA-Nemotron-3-Super-*": Published(123_611_012_096, CHECKPOINT, SAFETENSORS),
    "nvidia--NVIDIA-Nemotron-3-Ultra-*": Published(550e9, LANGUAGE, "model card"),
    "nvidia--Nemotron-H-56B-Base-8K": Published(56e9, LANGUAGE, "model card"),
}
# Published numbers of parameters that a token passes, with whatever each publisher counts among them.
ACTIVE = {
    "deepseek-ai--DeepSeek-V3": 37e9,
    "deepseek-ai--DeepSeek-V4-Pro": 49e9,
    "deepseek-ai--DeepSeek-V4-Flash": 13e9,
    "moonshotai--Kimi-K2-Instruct": 32e9,
    "moonshotai--Kimi-K3": 104e9,
    "Qwen--Qwen3.5-397B-A17B": 17e9,
    "Qwen--Qwen3-235B-A22B": 22e9,
    "openai--gpt-oss-120b": 5.1e9,
    "zai-org--GLM-5": 40e9,
    "google--gemma-4-26B-A4B": 3.8e9,
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": 17e9,
    "XiaomiMiMo--MiMo-V2-Flash": 15e9,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 12.7e9,
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 55e9,
    "MiniMaxAI--MiniMax-M3": 23e9,
}


def shape_named(name: str) -> ModelSpec:
    return find_spec(CONFIGS / f"{name}_config.json")


def published(name: str) -> list[Published]:
    return [row for pattern, row in PUBLISHED.items() if fnmatch(name, pattern)]


def counted(shape: ModelSpec, what: str) -> int:
    extras = {extra.name: extra.parameters for extra in shape.extra_parameters}
    if what == LANGUAGE:
        return shape.parameters
    if what == TOWER:
        return shape.parameters + extras["vision tower"]
    copies = (
        2 * shape.vocab_size * shape.hidden_size
        if shape.family.startswith(("deepseek_v3", "deepseek_v32"))
        else 0
    )
    return shape.parameters + sum(extras.values()) + copies  # with towers and further heads


@needs_configs
def test_every_config_has_exactly_one_published_size() -> None:
    assert [name for name in NAMES if len(published(name)) != 1] == []


@pytest.mark.parametrize("name", NAMES or [pytest.param("", marks=pytest.mark.skip(reason="no configs"))])
def test_parameters_are_within_one_percent_of_the_published_size(name: str) -> None:
    shape, row = shape_named(name), published(name)[0]
    ours = counted(shape, row.counts)
    assert ours == pytest.approx(row.parameters, rel=0.01)
    if row.source in (SAFETENSORS, MODULE):
        # All but corrections of routers and block scales, which checkpoints count too.
        assert ours == pytest.approx(row.parameters, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in ACTIVE if name in NAMES])
def test_active_parameters_are_what_publishers_say_with_or_without_the_embeddings(name: str) -> None:
    shape = shape_named(name)
    low, high = shape.active_parameters - shape.embedding_parameters, shape.active_parameters
    assert 0.97 * low <= ACTIVE[name] <= 1.03 * high


@needs_configs
def test_the_caches_and_work_of_deepseek_v4_shrink_as_its_report_says() -> None:
    """At a million tokens: 10 % of the cache and 27 % of the work of V3.2 (Pro), 7 % and 10 % (Flash)."""
    before, million = shape_named("deepseek-ai--DeepSeek-V3.2"), 1 << 20
    for name, cache, work in (("V4-Pro", 0.10, 0.27), ("V4-Flash", 0.07, 0.10)):
        shape = shape_named(f"deepseek-ai--DeepSeek-{name}")
        assert CacheLayout.of(shape, 1).kept(million) / CacheLayout.of(before, 1).kept(
            million
        ) == pytest.approx(cache, abs=0.03)
        assert shape.flops(1, million - 1) / before.flops(1, million - 1) == pytest.approx(work, abs=0.03)


@needs_configs
def test_each_family_keeps_what_its_attention_needs() -> None:
    """Figures worked out by hand from each config, at 16 bits."""
    latent = shape_named("deepseek-ai--DeepSeek-V3")
    assert CacheLayout.of(latent).token_bytes == 61 * (512 + 64) * 2
    sparse = shape_named("deepseek-ai--DeepSeek-V3.2")
    assert CacheLayout.of(sparse).token_bytes == 61 * ((512 + 64) * 2 + 128 + 4)
    assert CacheLayout.of(sparse).read(100_000) == 61 * (2048 * 576 * 2 + 100_000 * 132)
    windowed = shape_named("openai--gpt-oss-120b")
    assert CacheLayout.of(windowed).kept(10_000) == 2 * 8 * 64 * 2 * (18 * 128 + 18 * 10_000)
    assert (
        CacheLayout.of(windowed).kept(10_000, whole_windows=True)
        == 10_000 * CacheLayout.of(windowed).token_bytes
    )
    hybrid = shape_named("Qwen--Qwen3.5-397B-A17B")
    assert CacheLayout.of(hybrid).token_bytes == 15 * 2 * 2 * 256 * 2
    channels = 2 * 16 * 128 + 64 * 128
    assert CacheLayout.of(hybrid).kept(0) == 45 * (64 * 128 * 128 * 4 + channels * 3 * 2)
    mamba = shape_named("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert CacheLayout.of(mamba).token_bytes == 6 * 2 * 2 * 128 * 2
    assert CacheLayout.of(mamba).kept(0) == 23 * (64 * 64 * 128 * 4 + (4096 + 2 * 8 * 128) * 3 * 2)


@needs_configs
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("Qwen--Qwen3-32B-FP8", Precision("fp8", "fp8")),
        ("openai--gpt-oss-120b", Precision("bfloat16", "mxfp4")),
        ("moonshotai--Kimi-K2.5", Precision("bfloat16", "int4")),
        ("moonshotai--Kimi-K3", Precision("bfloat16", "mxfp4")),
        ("nvidia--DeepSeek-V3.1-NVFP4", Precision("nvfp4", "nvfp4", attention="bfloat16")),
        ("nvidia--Gemma-4-31B-IT-NVFP4", Precision("nvfp4", "nvfp4", attention="bfloat16")),
        ("nvidia--Qwen3.6-27B-NVFP4", Precision("nvfp4", "nvfp4", attention="fp8")),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", Precision("nvfp4", "nvfp4")),
        ("zai-org--GLM-5-FP8", Precision("fp8", "fp8")),
        ("deepseek-ai--DeepSeek-V4-Pro", Precision("fp8", "mxfp4")),
        ("nvidia--DeepSeek-V4-Pro-NVFP4", Precision("fp8", "nvfp4")),
    ],
)
def test_what_a_checkpoint_left_unquantized_is_read_from_its_settings(name: str, stored: Precision) -> None:
    assert shape_named(name).stored == stored


SPECIFIED = [
    name for name in NAMES if fnmatch(name, "*Qwen3-[0-9]*") or "Llama-3.1" in name or "Mixtral" in name
]


@pytest.mark.parametrize("name", SPECIFIED)
def test_a_shape_counts_what_its_model_spec_counts(name: str) -> None:
    path = CONFIGS / f"{name}_config.json"
    spec, shape = read_spec(path), find_spec(path)
    assert (shape.parameters, shape.active_parameters) == (spec.parameters, spec.active_parameters)
    assert shape.matmul_parameters == spec.matmul_parameters
    assert CacheLayout.of(shape, 1).token_bytes == CacheLayout.of(spec, 1).token_bytes
    assert CacheLayout.of(shape).read(5_000) == CacheLayout.of(spec).read(5_000)
    assert shape.flops(700, 4_000) == spec.prefill_flops(700, 4_000)
    assert shape.flops(1, 4_999) == spec.decode_flops(5_000)


def test_a_model_of_the_registry_is_read_through_its_gguf_file() -> None:
    try:
        path = resolve("smollm2").path
    except ModelNotFound as missing:
        pytest.skip(str(missing))
    spec, shape = read_spec(path), find_spec("smollm2")
    assert shape.parameters == spec.parameters == 134_515_008
    assert shape.flops(512) == spec.prefill_flops(512)
    assert shape.stored == Precision("gguf:Q4_1", "gguf:Q4_1", "gguf:Q4_1")


@needs_configs
def test_of_a_model_on_the_hub_the_config_alone_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(repo=repo, **options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    write(tmp_path, json.loads((CONFIGS / "openai--gpt-oss-20b_config.json").read_text()))
    assert find_spec("hf:openai/gpt-oss-20b@main").parameters == 20_914_757_184
    assert asked["repo"] == "openai/gpt-oss-20b"
    assert asked["allow_patterns"] == ["config.json", "hf_quant_config.json"]


# ---- arithmetic, without any file ----


def test_a_pass_reads_every_expert_once_the_batch_is_large_and_only_the_chosen_ones_alone() -> None:
    experts = Experts(num=128, per_token=8, size=768)
    assert experts.expected_distinct(1) == pytest.approx(8)
    assert experts.expected_distinct(2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert experts.expected_distinct(10_000) == pytest.approx(128)


def test_latent_attention_is_computed_the_cheaper_way() -> None:
    attention = LatentAttention(128, 1536, 512, 128, 64, 128)
    expanded, absorbed = 2 * 128 * (128 + 64 + 128), 2 * 128 * (2 * 512 + 64)
    assert attention.flops(100, 0) == expanded * 100 * 101 // 2  # a prompt: keys and values are there already
    assert (
        attention.flops(1, 4_000) == absorbed * 4_001
    )  # a decode: expanding the whole cache would cost more


def test_attention_in_chunks_starts_anew_at_each_of_them() -> None:
    attention = Attention(8, 2, 64, window=100, chunked=True)
    pair = 2 * 8 * 2 * 64
    assert attention.flops(250, 0) == pair * (2 * 5_050 + 50 * 51 // 2)
    assert attention.flops(1, 100) == pair
    assert attention.tokens_seen(101) == 1


def test_states_do_not_grow_with_the_context() -> None:
    for kind in (LinearAttention(16, 32, 128, 128, 4), Mamba2(64, 64, 128, 8, 4)):
        assert CacheGroup(kind, 1).kept(10) == CacheGroup(kind, 1).kept(10_000) > 0
        assert kind.flops(7, 0) == 7 * kind.flops(1, 1_000)


def test_compressed_attention_keeps_a_window_and_one_entry_for_every_few_tokens() -> None:
    attention = CompressedAttention(64, 512, 1024, window=128, ratio=128, output_groups=8, output_rank=1024)
    assert CacheGroup(attention, 1).kept(12_800) == (128 + 100) * 512 * 2
    assert attention.flops(1, 12_799) == 4 * 64 * 512 * (128 + 100)


def test_formats_go_by_the_names_that_others_use_and_unknown_ones_name_the_known() -> None:
    assert Precision.named("fp8_block") == Precision("fp8", "fp8", "bfloat16")
    assert Precision.named("w4a16_mxfp4") == Precision("bfloat16", "mxfp4")
    assert Precision.named("bf16").rest == "bfloat16"
    assert bytes_of("nvfp4") == 0.5625
    assert str(Precision("nvfp4", "nvfp4", attention="bf16")) == "nvfp4, attention bfloat16"
    with pytest.raises(ValueError, match=r"fp9.*use one of.*nvfp4"):
        Precision.named("fp9")


# ---- refusals ----


def write(directory: Path, config: dict[str, Any]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_type_the_planner_does_not_know_is_refused_with_those_it_knows(tmp_path: Path) -> None:
    path = write(tmp_path, {"model_type": "rwkv", "hidden_size": 8})
    with pytest.raises(UnsupportedModel, match=r"does not support model type 'rwkv'.*qwen3_5_moe"):
        find_spec(path)


def test_a_name_that_is_no_file_and_no_model_is_refused_with_what_would_be_taken() -> None:
    with pytest.raises(ModelNotFound, match=r"no/such/config\.json: no such file or model; give"):
        find_spec("no/such/config.json")


@needs_configs
@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("google--gemma-4-26B-A4B", {"hidden_size_per_layer_input": 256}, "separate embeddings"),
        ("google--gemma-4-26B-A4B", {"num_kv_shared_layers": 20}, "layers that share a cache"),
        ("MiniMaxAI--MiniMax-M2.5", {"qk_norm_type": "per_head"}, "qk_norm_type is not per_layer"),
        ("Qwen--Qwen3.5-27B", {"mamba_ssm_dtype": "fp4"}, "mamba_ssm_dtype is 'fp4'; supported: float32"),
        ("Qwen--Qwen3-8B", {"torch_dtype": "float7"}, "weights are stored as 'float7'"),
        (
            "nvidia--Llama-3_3-Nemotron-Super-49B-v1",
            {"block_configs": [{"attention": {"replace_with_linear": True}, "ffn": {}}] * 80},
            r"block_configs\[0\].attention.replace_with_linear",
        ),
    ],
)
def test_what_a_family_does_not_count_is_refused_by_its_key(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = json.loads((CONFIGS / f"{name}_config.json").read_text())
    config.get("text_config", config).update(changes)
    with pytest.raises(UnsupportedModel, match=reason):
        find_spec(write(tmp_path, config))


ONE_OF_EACH = [
    *("deepseek-ai--DeepSeek-V3.2", "deepseek-ai--DeepSeek-V4-Flash", "moonshotai--Kimi-K2.5"),
    *(
        "moonshotai--Kimi-K3",
        "Qwen--Qwen3.5-35B-A3B",
        "Qwen--Qwen3-VL-2B-Instruct",
        "google--gemma-4-26B-A4B",
    ),
    *(
        "openai--gpt-oss-20b",
        "MiniMaxAI--MiniMax-M3",
        "XiaomiMiMo--MiMo-V2-Flash",
        "stepfun-ai--Step-3.7-Flash",
    ),
    *("meta-llama--Llama-4-Scout-17B-16E-Instruct", "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8"),
    *("Qwen--Qwen3-32B-FP8", "nvidia--Llama-3_3-Nemotron-Super-49B-v1"),
]


@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name in NAMES])
def test_no_value_of_any_key_raises_anything_but_a_model_error(name: str, tmp_path: Path) -> None:
    """Every key of the config, of its language model and of its tower, takes a value it should not have."""
    config = json.loads((CONFIGS / f"{name}_config.json").read_text())
    refused = 0
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        for key, before in list(part.items()):
            part[key] = -1 if isinstance(before, list | dict) else "x" if isinstance(before, str) else []
            try:
                find_spec(write(tmp_path, config)).flops(10, 100)
            except ModelError:
                refused += 1
            part[key] = before
    assert refused >= 8


@needs_configs
@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("openai--gpt-oss-20b", {"num_experts_per_tok": 33}, "a token cannot use 33 of 32 experts"),
        ("deepseek-ai--DeepSeek-V3", {"kv_lora_rank": None}, "kv_lora_rank is null; an integer was expected"),
        ("deepseek-ai--DeepSeek-V4-Pro", {"compress_ratios": [4, 4]}, "2 entries for 61 layers and 1"),
        ("Qwen--Qwen3.5-27B", {"layer_types": ["full_attention"]}, "1 entries for 64 layers"),
        ("openai--gpt-oss-20b", {"layer_types": ["full_attention"]}, "1 entries for 24 layers"),
        ("moonshotai--Kimi-K3", {"num_hidden_layers": 94}, "do not name each of 94 layers"),
        ("XiaomiMiMo--MiMo-V2-Flash", {"moe_layer_freq": [2] * 48}, "must contain 0 or 1"),
        ("nvidia--Nemotron-H-56B-Base-8K", {"hybrid_override_pattern": "M?"}, "118 layers, but"),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"num_hidden_layers": 10**9}, "no model has more"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused_by_its_key(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = json.loads((CONFIGS / f"{name}_config.json").read_text())
    config.get("text_config", config).update(changes)
    with pytest.raises(BrokenModel, match=reason):
        find_spec(write(tmp_path, config))
