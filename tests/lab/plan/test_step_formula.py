"""Step, TPOT and TTFT from first principles: what must hold whatever the constants are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.engine.schedule.step import StepWork
from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.perfmodel.constants import shipped
from ridgeline.lab.perfmodel.intervals import unlike
from ridgeline.lab.perfmodel.measured import read_points
from ridgeline.lab.perfmodel.step_formula import (
    Deployment,
    closed_loop,
    engine_constants,
    predict_tpot,
    predict_ttft,
    step_seconds,
    tpot_seconds,
)
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision

DENSE_LAYER = LayerSpec(Attention(heads=32, kv_heads=8, head_dim=128), Dense(14336))
EXPERT_LAYER = LayerSpec(
    Attention(heads=32, kv_heads=8, head_dim=128), Experts(num=64, per_token=4, size=2048)
)


def shape(layer: LayerSpec, layers: int = 32) -> ModelSpec:
    return ModelSpec(
        name="made up",
        family="llama",
        hidden_size=4096,
        vocab_size=128256,
        max_context=131072,
        tied_embeddings=False,
        layers=(layer,) * layers,
        weight_format="bfloat16",
        stored=Precision.named("bfloat16"),
    )


DENSE = Deployment(shape(DENSE_LAYER), find_chip("h200"), backend="vllm")
MIXTURE = Deployment(shape(EXPERT_LAYER), find_chip("h200"), backend="sglang")


def test_no_prediction_is_faster_than_memory_and_arithmetic_allow() -> None:
    for deployment in (DENSE, MIXTURE, replace(DENSE, tp=4), replace(DENSE, precision="fp8")):
        for batch in (1, 16, 256):
            work = deployment.decode(batch, 1024)
            read = work.linear_bytes + work.expert_bytes + work.cache_bytes
            least = read / deployment.chip.bytes_per_s
            assert predict_tpot(deployment, batch, 1024, 1).mid > least
            assert step_seconds(deployment, 0, 0, batch, batch * 1024) > least


def test_more_requests_longer_contexts_and_shorter_outputs_take_longer() -> None:
    for deployment in (DENSE, MIXTURE):
        base = predict_tpot(deployment, 16, 1024, 512).mid
        assert predict_tpot(deployment, 32, 1024, 512).mid > base
        assert predict_tpot(deployment, 16, 4096, 512).mid > base
        assert predict_tpot(deployment, 16, 1024, 64).mid > base  # prompts of the others come more often
        assert predict_ttft(deployment, 16, 4096, 512).mid > predict_ttft(deployment, 16, 1024, 512).mid


def test_a_mixture_reads_no_more_experts_than_its_tokens_hit() -> None:
    one, many = MIXTURE.decode(1, 1), MIXTURE.decode(4096, 1)
    assert one.expert_bytes == pytest.approx(many.expert_bytes * 4 / 64, rel=1e-6)


def test_chips_share_weights_by_tp_and_experts_by_all_of_them() -> None:
    spread = replace(MIXTURE, tp=1, attention_dp=8, ep=8)
    assert spread.gpus == 8
    assert spread.linear_bytes == MIXTURE.linear_bytes
    assert spread.decode(64, 1).expert_bytes == pytest.approx(MIXTURE.decode(64, 1).expert_bytes / 8)
    assert spread.decode(64, 100).cache_bytes == pytest.approx(MIXTURE.decode(64, 100).cache_bytes / 8)
    assert replace(MIXTURE, tp=8).linear_bytes == pytest.approx(MIXTURE.linear_bytes / 8)


def test_keys_and_values_are_repeated_where_tp_exceeds_their_heads() -> None:
    assert replace(DENSE, tp=16).kept_bytes(1000) == replace(DENSE, tp=8).kept_bytes(1000)


def test_what_does_not_fit_the_cache_waits() -> None:
    fits = DENSE.running(10_000, 8192)
    assert 100 < fits < 200  # 141 GiB less 16 GB of weights, 1 GiB a sequence
    assert DENSE.running(8, 8192) == 8
    assert predict_tpot(DENSE, 5000, 8000, 512).mid == pytest.approx(predict_tpot(DENSE, 500, 8000, 512).mid)
    assert predict_ttft(DENSE, 5000, 8000, 512).mid > predict_ttft(DENSE, 500, 8000, 512).mid


def test_pipeline_stages_do_not_shorten_a_token_but_share_prompts_and_memory() -> None:
    staged = replace(DENSE, pp=2)
    assert step_seconds(staged, 0, 0, 1, 1024) >= step_seconds(DENSE, 0, 0, 1, 1024)
    assert staged.all_bytes == pytest.approx(DENSE.all_bytes / 2)
    assert staged.prefill(1024).linear_flops == pytest.approx(DENSE.prefill(1024).linear_flops / 2)


def test_a_step_takes_the_work_as_the_engine_counts_it() -> None:
    decode = StepWork(decode_batch=8, decode_context=8 * 1000)
    mixed = decode._replace(prefill_tokens=512, prefill_rows=1, prefill_context_product=512 * 512)
    deeper = mixed._replace(prefill_context_product=512 * (512 + 32_768))

    def seconds(work: StepWork) -> float:
        return step_seconds(
            DENSE,
            work.prefill_tokens,
            work.prefill_context_product,
            work.decode_batch,
            work.decode_context,
            work.prefill_rows,
        )

    assert seconds(decode) < seconds(mixed) < seconds(deeper)


def test_equal_prompts_in_one_step_cost_what_they_cost_one_by_one() -> None:
    together = DENSE.prefill(2048, rows=4)
    alone = DENSE.prefill(512)
    assert together.attention_flops == pytest.approx(4 * alone.attention_flops)


def test_tpot_is_the_decode_step_where_no_prompt_interferes() -> None:
    loop = closed_loop(DENSE, 16, 1024, 512, disaggregated=True)
    step = step_seconds(DENSE, 0, 0, 16, 16 * (1024 + 256))
    assert tpot_seconds(loop, engine_constants(DENSE)) == pytest.approx(step)


def test_intervals_widen_outside_what_was_measured_and_say_why() -> None:
    def ratio(deployment: Deployment, isl: int) -> float:
        found = predict_tpot(deployment, 16, isl, 512)
        assert found.low < found.mid < found.high
        return math.log(found.high / found.low)

    assert ratio(DENSE, 1024) == pytest.approx(2 * shipped().tpot.dense)
    assert unlike(DENSE, 16, 1024, 512) == []
    assert ratio(DENSE, 120_000) > 1.3 * ratio(DENSE, 1024)
    assert any("prompts of 120,000 tokens" in words for words in unlike(DENSE, 16, 120_000, 512))


def test_the_intervals_of_our_own_engine_are_wider_and_said_to_be() -> None:
    ours = replace(DENSE, backend="ridgeline")
    theirs, own = (predict_tpot(deployment, 16, 1024, 512) for deployment in (DENSE, ours))
    assert own.high / own.low > theirs.high / theirs.low
    assert any("this engine" in words for words in unlike(ours, 16, 1024, 512))


def test_unknown_engines_and_empty_groups_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="unknown engine 'tgi'"):
        replace(DENSE, backend="tgi")
    with pytest.raises(BadInput, match="tp must be at least 1"):
        replace(DENSE, tp=0)


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="0 out"):
        predict_tpot(DENSE, 16, 1024, 0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("meta-llama/Llama-9,vllm,agg", "no column or no model 'meta-llama/Llama-9'"),
        ("Qwen/Qwen3-32B,vllm,agg", "no column"),
    ],
)
def test_a_broken_row_of_measured_points_is_reported_by_line(tmp_path: Path, row: str, reason: str) -> None:
    table = tmp_path / "measured-serving" / "serving_points.csv"
    table.parent.mkdir()
    table.write_text(f"model_path,backend,mode\n{row}\n")
    with pytest.raises(BadInput, match=rf"serving_points.csv:2: .*{reason}"):
        read_points(tmp_path)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"serving_points\.csv: cannot be read"):
        read_points(tmp_path)


def test_every_constant_is_positive_and_has_a_provenance() -> None:
    constants = shipped()
    assert set(constants.provenance) == set(constants.engines)
    for engine in constants.engines:
        assert all(value >= 0 for value in vars(constants.coefficients(engine)).values())
