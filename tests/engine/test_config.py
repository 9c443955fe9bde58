"""Settings that make no sense are refused where they are made, by the name of their flag."""

from dataclasses import fields

import pytest

from ridgeline import LLM
from ridgeline.engine.config import EngineConfig, engine_config
from ridgeline.engine.errors import InvalidConfig
from ridgeline.models.spec.coverage import WEIGHT_FORMATS
from ridgeline.options import options_of


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("step_tokens", 0),
        ("block_size", 0),
        ("max_context", 1),
        ("kv_tokens", -16),
        ("kv_memory_gib", -1.0),
        ("prefill_chunk", 0),
        ("max_running", 0),
        ("max_waiting", -1),
        ("threads", -1),
        ("step_ring", 0),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.5),
        ("memory_fraction", float("nan")),
    ],
)
def test_a_value_that_makes_no_sense_names_its_flag(setting, value):
    with pytest.raises(InvalidConfig, match="--" + setting.replace("_", "-")):
        EngineConfig(**{setting: value})


def test_every_number_is_bounded():
    """A new numeric setting finds its place among the bounds, or this says so."""
    for field in fields(EngineConfig):
        if str(field.type).removesuffix(" | None") in ("int", "float"):
            with pytest.raises(InvalidConfig):
                EngineConfig(**{field.name: -1})


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (
            {"backend": "native", "weights": "float16"},
            "use --weights float32, bfloat16, int8, int8-channel or int4",
        ),
        ({"backend": "native", "block_size": 32}, "--block-size 32"),
        (
            {"backend": "torch", "weights": "int8"},
            "--weights int8 .*use --weights float32, bfloat16 or float16",
        ),
        ({"backend": "torch", "kv_dtype": "int8"}, "--kv-dtype int8"),
        ({"backend": "torch", "deterministic": True}, "--deterministic"),
        (
            {"load_format": "dummy", "weights": "int8-channel"},
            "--weights int8-channel is for the native backend and --load-format",
        ),
        ({"backend": "cuda", "weights": "int8-channel"}, "--weights int8-channel is for the native backend"),
        ({"backend": "cuda", "kv_dtype": "int4"}, "--kv-dtype int4 is for the native backend"),
        ({"backend": "native", "kv_dtype": "fp8"}, "--kv-dtype fp8 is for the cuda backend"),
        ({"backend": "native", "weights": "fp8"}, "--weights fp8 is for the cuda backend"),
        ({"backend": "native", "quantization_keep": ("ffn",)}, "--quantization-keep is for the cuda backend"),
        ({"backend": "cuda", "block_size": 32}, "--block-size 32 .* blocks of 16 tokens"),
        ({"backend": "native", "load_format": "dummy"}, "--load-format dummy is for the torch and cuda"),
    ],
)
def test_settings_of_one_backend_are_refused_with_the_other(settings, flag):
    with pytest.raises(InvalidConfig, match=flag):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "cuda", "weights": "float16", "deterministic": True, "load_format": "dummy"},
        {
            "backend": "cuda",
            "weights": "fp8",
            "kv_dtype": "int8",
            "quantization_keep": ("layers.0", "lm_head"),
        },
        {"backend": "cuda", "overlap": False, "cuda_graphs": False},
        {"backend": "torch", "load_format": "dummy", "weights": "bfloat16"},
        {"backend": "native", "deterministic": True, "kv_dtype": "int8"},
        {"backend": "native", "overlap": False, "cuda_graphs": False},
        {"backend": "torch", "overlap": False, "cuda_graphs": False},
    ],
)
def test_what_a_backend_knows_it_takes(settings):
    assert EngineConfig(**settings).unknown_to(settings["backend"]) is None


def test_every_format_of_the_flag_is_computed_by_a_backend_and_the_other_way_round():
    (weights,) = [option for option in options_of(EngineConfig) if option.name == "weights"]
    assert set(weights.choices) == {"auto", *(name for names in WEIGHT_FORMATS.values() for name in names)}


def test_dtype_is_the_older_name_of_weights():
    assert engine_config("m", {"dtype": "float16"}) == EngineConfig(model="m", weights="float16")
    with pytest.raises(InvalidConfig, match="dtype and weights are one setting"):
        engine_config("m", {"dtype": "float16", "weights": "float16"})


def test_the_smallest_context_starts_and_answers(smollm2_path):
    llm = LLM(str(smollm2_path), max_context=2, kv_tokens=16)
    assert len(llm.generate([[5]])[0].completions[0].tokens) == 1
