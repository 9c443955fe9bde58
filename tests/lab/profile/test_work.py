"""The bytes and FLOPs of operators add up to what the model's description says of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.lab.profile.step_trace import write_trace
from ridgeline.lab.profile.work import MATRICES, Steps, idle_share, matrix_parameters, work_of
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.telemetry.stats import StepRecord
from tests.models.specs import decoder_spec

ROPE = RopeSpec(10_000.0, 16)
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 96,
    "vocab_size": 130,
    "max_context": 512,
}
SPEC = decoder_spec(**SMALL, layers=[(ROPE, None)] * 3)
WINDOWED = decoder_spec(**SMALL, layers=[(ROPE, None), (ROPE, 32), (ROPE, None)])
WEIGHTS = dict.fromkeys(MATRICES, 1000.0)
KV_BYTES = 7.0


def record(**figures: float) -> StepRecord:
    empty = {"step_id": 0, "start": 0.0, "prefill_tokens": 0, "prefill_rows": 0, "prefill_context_product": 0}
    empty |= {"decode_batch": 0, "decode_context": 0, "wall_s": 0.0, "schedule_s": 0.0}
    return StepRecord(**(empty | figures))


def prompt(tokens: int, before: int = 0) -> StepRecord:
    return record(prefill_tokens=tokens, prefill_rows=1, prefill_context_product=tokens * (before + tokens))


def test_the_matrices_are_all_that_a_token_is_multiplied_with() -> None:
    parameters = matrix_parameters(SPEC)
    assert sum(parameters.values()) - parameters["lm_head"] == SPEC.matmul_parameters
    assert parameters["gate_up"] == 2 * parameters["down"]


@pytest.mark.parametrize("spec", [SPEC, WINDOWED])
@pytest.mark.parametrize("before", [0, 100])
def test_a_prompt_takes_the_flops_that_the_model_says(spec: ModelSpec, before: int) -> None:
    work = work_of(Steps((prompt(60, before),), 1, 1), spec, WEIGHTS, KV_BYTES)
    assert sum(part.flops for part in work.values()) == pytest.approx(spec.prefill_flops(60, before))


@pytest.mark.parametrize("spec", [SPEC, WINDOWED])
def test_a_decode_takes_the_flops_and_reads_the_kv_that_the_model_says(spec: ModelSpec) -> None:
    steps = Steps((record(decode_batch=4, decode_context=4 * 90),) * 2, samples=8, sampling_steps=2)
    work = work_of(steps, spec, WEIGHTS, KV_BYTES)
    assert sum(part.flops for part in work.values()) == pytest.approx(8 * spec.decode_flops(90))
    tokens_read = 8 * spec.kv_tokens_seen(90) / spec.num_layers
    assert work["attention"].bytes == pytest.approx(tokens_read * KV_BYTES)
    assert work["kv_write"].bytes == 8 * KV_BYTES


def test_weights_are_read_once_a_step_and_the_head_only_where_something_is_sampled() -> None:
    work = work_of(Steps((prompt(60), prompt(60, 60), prompt(60, 120)), 1, 1), SPEC, WEIGHTS, KV_BYTES)
    assert work["qkv"].bytes == 3000
    assert work["lm_head"].bytes == 1000
    assert work["lm_head"].flops == SPEC.lm_head_flops


def test_a_chunk_in_a_windowed_layer_reads_no_further_back_than_its_first_token_sees() -> None:
    spec = decoder_spec(**SMALL, layers=[(ROPE, 32)] * 3)
    work = work_of(Steps((prompt(10, 200),), 0, 0), spec, WEIGHTS, KV_BYTES)
    assert work["attention"].bytes == pytest.approx((32 + 10 - 1) * KV_BYTES)


def test_steps_are_a_trace_that_perfetto_reads_without_overlaps(tmp_path: Path) -> None:
    first = record(step_id=1, start=10.0, schedule_s=0.5, wall_s=1.5, busy_s=1.5, decode_batch=4)
    second = record(step_id=2, start=11.0, schedule_s=0.5, wall_s=2.5, busy_s=2.0, prefill_tokens=9)
    path = write_trace(Steps((first, second), 5, 2), "decode", tmp_path / "steps.json")
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    spans = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events]
    assert spans == [
        ("planning 1", 0, 0.5e6),
        ("forward pass 1", pytest.approx(0.5e6), pytest.approx(2e6)),
        ("planning 2", 1e6, 1.5e6),
        ("forward pass 2", pytest.approx(2e6), pytest.approx(4e6)),
    ]
    assert events[1]["args"]["decode_batch"] == 4
    assert events[3]["args"]["prefill_tokens"] == 9


def test_the_idle_share_is_what_no_step_covers() -> None:
    first = record(step_id=1, start=10.0, schedule_s=0.5, wall_s=1.5, busy_s=1.5)
    second = record(step_id=2, start=13.0, schedule_s=0.5, wall_s=2.5, busy_s=2.5)
    assert idle_share([first, second]) == pytest.approx(2 / 6)
    assert idle_share([first]) is None
