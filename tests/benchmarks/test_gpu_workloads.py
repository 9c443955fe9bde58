"""The GPU benchmark does the peers' work, and its physical limit is the arithmetic it says it is."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

from benchmarks.gpu import limits, workloads
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.telemetry.stats import StepRecord
from tests.conftest import SHARED_DATA

THEIRS = SHARED_DATA.parent / "bench" / "gpu_workloads.py"


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """The generator that the peers' figures were measured with, kept beside the checkout."""
    if not THEIRS.is_file():
        pytest.skip(f"{THEIRS} is not there; the workloads are not compared with it")
    spec = importlib.util.spec_from_file_location("peers_gpu_workloads", THEIRS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cases_are_theirs(theirs):
    assert list(workloads.CASES) == theirs.ALL


@pytest.mark.parametrize("case", workloads.CASES)
def test_the_requests_are_theirs(theirs, case):
    assert workloads.workload(case) == theirs.workload(case)


@pytest.mark.parametrize("shape", workloads.SHAPES)
def test_the_shapes_are_theirs(theirs, shape):
    known = theirs.SHAPES[shape]
    assert {name: known[name] for name in workloads.SHAPES[shape]} == workloads.SHAPES[shape]


def test_every_peers_figure_is_of_a_case_with_a_unit():
    assert set(workloads.UNITS) == set(workloads.CASES)
    for shape, figures in workloads.PEERS.items():
        assert shape in workloads.SHAPES
        assert set(figures) <= set(workloads.CASES)


def record(**counts: int) -> StepRecord:
    nothing = {"prefill_tokens": 0, "prefill_rows": 0, "prefill_context_product": 0, "decode_batch": 0}
    times = {"step_id": 1, "start": 0.0, "wall_s": 1.0, "schedule_s": 0.0}
    return StepRecord(**{**nothing, "decode_context": 0, **times, **counts})  # type: ignore[arg-type]


@pytest.fixture
def tiny(tmp_path):
    """4 heads of 8 over 2 KV heads, hidden 16, ffn 24, 3 layers, 50 tokens; untied."""
    shape = {
        **workloads.SHAPES["qwen3-8b"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return read_spec(tmp_path)


# Per layer: q 32·16, k and v 16·16 each, o 16·32, gate, up and down 16·24 each; three layers. Head 50·16.
MATRICES = 3 * (32 * 16 + 2 * 16 * 16 + 16 * 32 + 3 * 16 * 24)
KV_BYTES = 3 * 2 * 2 * 8 * 2  # per token: layers, key and value, heads, head size, bf16


def test_a_small_decode_step_is_limited_by_what_it_reads(tiny):
    step = record(decode_batch=2, decode_context=300)
    expected = (2 * (MATRICES + 50 * 16) + 300 * KV_BYTES) / limits.READ_BYTES_PER_S
    assert limits.step_limit_seconds(tiny, step) == pytest.approx(expected, rel=1e-9)


def test_a_shared_prefix_need_be_read_once(tiny):
    step = record(decode_batch=3, decode_context=300)
    expected = (2 * (MATRICES + 50 * 16) + (300 - 2 * 90) * KV_BYTES) / limits.READ_BYTES_PER_S
    assert limits.step_limit_seconds(tiny, step, shared_tokens=90) == pytest.approx(expected, rel=1e-9)


def test_a_large_prompt_step_is_limited_by_what_it_multiplies(tiny):
    tokens = 100_000
    step = record(prefill_tokens=tokens, prefill_rows=1, prefill_context_product=tokens * tokens)
    attention = 4 * 4 * 8 * 3 * tokens * tokens / 2  # what lies above the diagonal is not computed
    expected = (tokens * 2 * MATRICES + 2 * 50 * 16 + attention) / limits.FLOPS_PER_S
    assert limits.step_limit_seconds(tiny, step) == pytest.approx(expected, rel=1e-9)


def test_the_limit_of_a_run_is_the_sum_of_its_steps(tiny):
    steps = [record(decode_batch=2, decode_context=300), record(prefill_tokens=64, prefill_rows=1)]
    expected = sum(limits.step_limit_seconds(tiny, step) for step in steps)
    assert limits.limit_seconds(tiny, steps) == pytest.approx(expected, rel=1e-12)
