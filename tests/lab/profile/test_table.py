"""The table of a profile: shares above the limit are marked, and explained under it."""

from __future__ import annotations

from ridgeline.lab.profile.rows import OperatorRow
from ridgeline.lab.profile.run import PhaseProfile
from ridgeline.lab.profile.table import operator_lines
from ridgeline.lab.profile.work import Work


def lines(*rows: OperatorRow) -> list[str]:
    phase = PhaseProfile(
        "decode",
        steps=1,
        tokens_per_step=1,
        step_s=0.01,
        watched_step_s=None,
        operators=list(rows),
        step_seconds=0.01,
        counted=[],
        measured_by="",
        idle_share=None,
        schedule_share=None,
        functions=[],
        samples=0,
        files=[],
    )
    return list(operator_lines(phase, read_bytes_per_s=40e9, flops_per_s=900e9))


def test_shares_above_the_limit_are_explained_under_the_table() -> None:
    _, slow, fast, *notes = lines(
        OperatorRow("attention", 0.001, work=Work(20e6, 0.5e9)),
        OperatorRow("LM head", 0.001, work=Work(50e6, 1e9)),
    )
    assert "50%" in slow
    assert "*" not in slow
    assert "125%*" in fast
    assert "111%*" in fast
    assert notes[0].startswith("  * above 100 % of reading: the bytes fit a processor cache")
    assert notes[2].startswith("  * above 100 % of multiplying: time in which the sampled thread waits")


def test_a_table_within_the_limits_has_no_note() -> None:
    assert len(lines(OperatorRow("attention", 0.001, work=Work(20e6, 0.5e9)))) == 2
