from dataclasses import replace

import msgspec
import pytest

from ridgeline.lab.evaluate.verdicts import CheckSummary, QualityVerdict, ServedFormat
from ridgeline.lab.model_identity import ModelIdentity
from ridgeline.lab.plan import decision_gates
from ridgeline.lab.plan.break_even import BreakEven, break_even, hourly_profile
from ridgeline.lab.plan.prices import Offer
from ridgeline.lab.plan.quantization.figures import FormatFigures, FormatQuality
from ridgeline.lab.plan.sharing import Sharing
from ridgeline.lab.traffic.request import PlannedRequest, Traffic


def even(usd_per_hour: float) -> BreakEven:
    hour = Traffic("hour", tuple(PlannedRequest(float(s), 1000, 500) for s in range(3601)))
    offer = Offer("host", "model", input=1.0, output=2.0)  # $7.20 for such an hour
    return break_even(
        hourly_profile(hour),
        offer,
        cached_share=0.0,
        replica_usd_per_hour=usd_per_hour,
        replica_requests_per_s=1.2,
    )


@pytest.mark.parametrize(("usd_per_hour", "verdict"), [(2.0, "dedicated"), (7.0, "either"), (20.0, "hosted")])
def test_who_is_clearly_cheaper_wins_and_what_is_close_is_called_close(
    usd_per_hour: float, verdict: str
) -> None:
    decision = decision_gates.hosted_or_dedicated(even(usd_per_hour))
    assert decision.verdict == verdict
    assert decision.figures["own_usd_month"] == pytest.approx(usd_per_hour * 730)


def test_without_a_price_the_question_stays_open_and_says_why() -> None:
    decision = decision_gates.hosted_or_dedicated(None, "no price of a GPU hour")
    assert (decision.verdict, "no price of a GPU hour" in decision.reason) == ("open", True)


BF16 = FormatFigures("bfloat16", gpus=8, usd_month=8.0, per_gpu=5.0)
FP8 = FormatFigures("fp8", gpus=4, usd_month=4.0, per_gpu=9.0, quality=FormatQuality("not gated", "gate it"))


def test_quantizing_is_asked_for_where_it_saves_gpus_and_not_where_it_does_not() -> None:
    assert decision_gates.quantize(BF16, BF16, (FP8,)).verdict == "worth a trial: fp8"
    assert decision_gates.quantize(BF16, BF16, (replace(FP8, gpus=8),)).verdict == "no"
    assert decision_gates.quantize(BF16, BF16, ()).verdict == "no"


def test_a_format_whose_gate_failed_is_out_and_one_that_passed_is_named() -> None:
    served = ServedFormat(ModelIdentity("m", content="one"), "fp8", "bfloat16", "vllm")
    checks = [CheckSummary("gsm8k", "worse", 200, "20 lost")]
    verdict = QualityVerdict("a", "b", served, False, checks, 0.0, 1.0, "2026-11-18T10:00:00")
    failed = replace(FP8, quality=FormatQuality("failed", "gate it", verdict, "content"))
    decision = decision_gates.quantize(BF16, BF16, (failed,))
    assert decision.verdict == "no"
    assert "fp8 is out: its quality gate FAILED on 2026-11-18: gsm8k worse (200 items)" in decision.reason
    assert decision.figures["fp8_gate_passed"] == 0
    passed = FormatQuality("passed", "gate it", msgspec.structs.replace(verdict, passed=True), "content")
    decision = decision_gates.quantize(BF16, replace(FP8, quality=passed), ())
    assert (decision.verdict, decision.figures["fp8_gate_passed"]) == ("yes: fp8", 1)
    assert "its quality gate passed on 2026-11-18" in decision.reason


def test_quantizing_is_decided_where_nothing_else_does() -> None:
    unfit = FormatFigures("bfloat16", None, None, None, why="weights of 1.3 TB")
    decision = decision_gates.quantize(unfit, FP8, (FP8,))
    assert decision.verdict == "yes: fp8"
    assert "1.3 TB" in decision.reason
    assert "fp8 is not gated" in decision.reason


def test_the_prefix_cache_is_judged_by_what_it_would_still_hold() -> None:
    ideal = Sharing(True, 1_000_000, 400_000)
    assert decision_gates.prefix_cache(ideal, ideal, 1e-4).verdict == "on: it pays"
    assert decision_gates.prefix_cache(ideal, Sharing(True, 1_000_000, 20_000), 1e-4).verdict.startswith(
        "on, little effect"
    )
    assert decision_gates.prefix_cache(Sharing(False, 1, 0), Sharing(False, 1, 0), 1e-4).verdict == "on"
    assert decision_gates.prefix_cache(ideal, ideal, 1e-4).figures["saved_prefill_s"] == pytest.approx(40.0)


def test_speculation_is_off_where_the_batch_fills_the_arithmetic() -> None:
    full = decision_gates.speculate(batch=64, ridge_batch=300, engine_can=False, tpot_is_tight=True)
    assert full.verdict == "no"
    room = decision_gates.speculate(batch=8, ridge_batch=300, engine_can=False, tpot_is_tight=True)
    assert room.verdict == "worth a trial"
    told = decision_gates.speculate(
        batch=8, ridge_batch=300, engine_can=True, tpot_is_tight=True, tpot_ms=10.0
    )
    expected = 10.0 / decision_gates.expected_gain(8, 300)
    assert told.figures["expected_tpot_ms"] == pytest.approx(expected)
    assert f"TPOT {expected:.3g} ms instead of 10 where" in told.reason
    met = decision_gates.speculate(batch=8, ridge_batch=300, engine_can=False, tpot_is_tight=False)
    assert met.verdict == "not needed"


@pytest.mark.parametrize(
    ("tokens", "parameters", "ratio", "gpus", "verdict"),
    [
        (2e9, 671e9, 12.0, 16, "yes"),
        (3e8, 671e9, 12.0, 16, "worth a trial"),
        (5e7, 671e9, 12.0, 16, "no"),
        (2e9, 8e9, 12.0, 16, "no"),
        (2e9, 671e9, 1.0, 16, "no"),
        (2e9, 671e9, 12.0, 1, "no"),
    ],
)
def test_disaggregation_takes_all_of_its_gates(
    tokens: float, parameters: float, ratio: float, gpus: int, verdict: str
) -> None:
    decision = decision_gates.disaggregate(
        tokens_per_day=tokens,
        parameters=int(parameters),
        input_per_output=ratio,
        gpus=gpus,
        link_bytes_per_s=50e9,
    )
    assert decision.verdict == verdict


@pytest.mark.parametrize(
    ("gpus", "replica_gpus", "link", "against"),
    [
        (8, 8, 50e9, "8 GPUs, and one replica takes 8 (from two replicas on)"),
        (16, 8, 3e9, "a link of 3 GB/s a chip between replicas (from 25 on)"),
        (16, 8, None, "a link of 0 GB/s a chip between replicas (from 25 on)"),
    ],
)
def test_disaggregation_takes_two_replicas_and_a_fast_link_between_them(
    gpus: int, replica_gpus: int, link: float | None, against: str
) -> None:
    decision = decision_gates.disaggregate(
        tokens_per_day=3e8,
        parameters=int(671e9),
        input_per_output=12.0,
        gpus=gpus,
        replica_gpus=replica_gpus,
        link_bytes_per_s=link,
    )
    assert (decision.verdict, decision.reason) == ("no", against)


def test_a_trial_of_disaggregation_says_that_our_engine_cannot_yet() -> None:
    decision = decision_gates.disaggregate(
        tokens_per_day=3e8,
        parameters=int(671e9),
        input_per_output=12.0,
        gpus=16,
        replica_gpus=8,
        link_bytes_per_s=50e9,
        engine_can=False,
    )
    assert decision.verdict == "worth a trial"
    assert decision.reason.endswith("this engine cannot do it yet")
