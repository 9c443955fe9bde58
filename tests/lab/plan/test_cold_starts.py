"""A plan shows the recorded starts of its model on its hardware, and those of no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ridgeline.lab.plan.plan_types import Plan
from ridgeline.lab.plan.reports.cold_starts import cold_start_head, cold_start_rows, starts_of, weights_note
from ridgeline.replica.cold_starts import ColdStart
from ridgeline.replica.messages import WeightsFrom

CPU = SimpleNamespace(name="cpu", title="AMD EPYC 9555, 2 threads, avx512")
H200 = SimpleNamespace(name="h200", title="NVIDIA H200 SXM")


def plan(name: str, chip: Any) -> Plan:
    return cast(Plan, SimpleNamespace(request=SimpleNamespace(name=name, chip=chip)))


def start(
    source: str, hardware: str, total: float, weights: WeightsFrom | None = None, **more: float
) -> ColdStart:
    return ColdStart(
        1_795_000_000.0, source, hardware, "local", {"import": 2.0, **more, "total": total}, weights
    )


STARTS = [
    start("smollm2", "AMD EPYC 9555", 9.0),
    start("smollm2-135m", "AMD EPYC 9555", 5.0, WeightsFrom("peer a", 98_000_000, 0.5, 1.25e9), fetch=0.5),
    start("smollm2-135m", "AMD EPYC 7", 99.0),
    start("hf:Qwen/Qwen3-8B@main", "NVIDIA H200", 40.0),
    start("/models/my-model.gguf", "NVIDIA H200", 7.0),
]


def test_only_starts_of_the_same_model_and_hardware_count() -> None:
    def totals(name: str, chip: Any) -> list[float]:
        return [one.segments["total"] for one in starts_of(plan(name, chip), lambda: STARTS)]

    assert totals("smollm2-135m", CPU) == [9.0, 5.0]
    assert totals("Qwen/Qwen3-8B", H200) == [40.0]
    assert totals("my-model", H200) == [7.0]
    assert totals("smollm2-135m", H200) == []


def test_segments_stand_with_their_spread_and_the_weights_source() -> None:
    starts = starts_of(plan("smollm2-135m", CPU), lambda: STARTS)
    assert cold_start_rows(starts) == [
        ["segment", "median", "least", "most", "starts"],
        ["import", "2.00 s", "2.00 s", "2.00 s", "2"],
        ["fetch", "0.50 s", "0.50 s", "0.50 s", "1"],
        ["total", "7.00 s", "5.00 s", "9.00 s", "2"],
    ]
    assert cold_start_head(starts) == (
        "Cold start of a replica: 2 recorded starts on local, the last on 2026-11-18"
    )
    assert weights_note(starts) == "weights of the last start: 98 MB from peer a at 196 of 1250 MB/s"
    assert weights_note(starts[:1]) == ""
