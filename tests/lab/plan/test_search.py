"""The search over splits: experts kept whole, links reached, and a nearest that would really do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.plan import search
from ridgeline.lab.plan.demand import read_demand
from ridgeline.lab.slo import parse_slo
from ridgeline.lab.traffic.source import TrafficOptions
from ridgeline.models.spec.model_spec import ModelSpec
from tests.lab.plan.known_specs import deepseek_v3, llama_8b, llama_70b, qwen3_30b_a3b

DEMAND = read_demand(TrafficOptions(input="1000", output="200", rate=1.0, requests=20))
SLO = parse_slo("ttft_p90=60s,tpot_p90=10s")


def candidates(shape: ModelSpec, hardware: str, gpus_max: int, precision: str = "bfloat16", slo: str = ""):  # type: ignore[no-untyped-def]
    return search.candidates(
        shape,
        find_chip(hardware),
        DEMAND,
        parse_slo(slo) if slo else SLO,
        backend="vllm",
        precisions=[precision],
        kv_precision="bfloat16",
        gpus_max=gpus_max,
    )


def test_experts_whose_slices_would_be_thin_stay_whole_on_each_chip() -> None:
    found, _ = candidates(qwen3_30b_a3b(), "l4", 8)
    assert {candidate.deployment.tp: candidate.deployment.ep for candidate in found}[4] == 4
    assert all(candidate.gpus == candidate.deployment.tp * candidate.deployment.pp for candidate in found)


def test_tensor_parallel_reaches_as_far_as_the_fast_link() -> None:
    found, _ = candidates(deepseek_v3(), "gb200", 8, "fp8")
    assert (8, 1) in {(candidate.deployment.tp, candidate.deployment.pp) for candidate in found}


@pytest.mark.parametrize(("shape", "hardware"), [(llama_70b(), "l4"), (deepseek_v3(), "h100")])
def test_the_number_of_chips_that_a_refusal_names_does(shape: ModelSpec, hardware: str) -> None:
    found, refused = candidates(shape, hardware, 1)
    assert found == []
    said = re.search(r"Nearest: --gpus-max (\d+)", str(search.refuse_all(refused, SLO, 1)))
    assert said
    assert candidates(shape, hardware, int(said[1]))[0]
    assert not candidates(shape, hardware, int(said[1]) - 1)[0]


def test_the_cache_of_one_long_request_is_named_where_it_is_what_does_not_fit() -> None:
    long = read_demand(TrafficOptions(input="120000", output="10", rate=1.0, requests=2))
    small = replace(find_chip("l4"), memory_bytes=26 * 10**9)
    outcome = search.consider(search.Deployment(llama_8b(), small, "vllm"), long, SLO)
    assert isinstance(outcome, search.RejectedCandidate)
    assert "one request of the mean length takes 15.7 GB" in outcome.why


def test_of_two_limits_on_the_same_metric_the_tighter_is_the_one_that_binds() -> None:
    slo = "tpot_p99=10s,tpot_p50=1ms"
    _, refused = candidates(llama_8b(), "h200", 1, slo=slo)
    assert str(search.refuse_all(refused, parse_slo(slo), 1)).startswith("tpot_p50=1ms cannot be met")
