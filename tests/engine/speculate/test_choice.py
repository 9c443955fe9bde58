"""Which drafter an engine gets, what it says about it, and that a failing drafter ends only speculation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.start.speculation_choice import choose_speculation
from ridgeline.telemetry.metrics import ServerMetrics
from ridgeline.telemetry.stats import EngineStats
from tests.engine.speculate.test_draft_lengths import copied, small_model
from tests.engine.speculate.timed_engine import generate

DOCS = Path(__file__).resolve().parents[3] / "docs" / "speculation.md"


@pytest.mark.parametrize(
    ("option", "backend", "drafter"),
    [
        ("auto", "native", None),
        ("auto", "torch", None),
        ("auto", "cuda", None),
        ("off", "native", None),
        ("off", "cuda", None),
        ("ngram", "native", "ngram"),
        ("suffix", "torch", "suffix"),
    ],
)
def test_the_drafter_of_an_engine(option, backend, drafter):
    speculation, notes = choose_speculation(EngineConfig(speculate=option), backend, 100)
    assert (speculation and speculation.drafter.name) == drafter
    if drafter is not None:
        assert f"speculation {drafter}" in notes[0]
    elif option == "auto" and backend == "cuda":
        assert "speculation off" in notes[0]
    else:
        assert notes == ()


@pytest.mark.parametrize("option", ["ngram", "suffix"])
def test_a_gpu_refuses_guesses_that_it_cannot_verify(option):
    with pytest.raises(InvalidConfig, match=f"--speculate {option} is for the native and torch backends"):
        choose_speculation(EngineConfig(speculate=option), "cuda", 100)


class Broken:
    name = "broken"

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        (seq,) = seqs
        if seq.num_output > 20:
            raise ZeroDivisionError("a bug")
        return [Draft([seq.tokens[-37]] if len(seq.tokens) > 37 else [], 20)]

    def forget(self, seq: Sequence) -> None:
        pass


def test_an_error_of_a_drafter_ends_speculation_alone(caplog):
    _, core = generate(copied, small_model, Broken(), tokens=60)
    assert core.speculation is None
    assert core.scheduler.counters.output_tokens == 60
    assert "speculation failed" in caplog.text


def test_its_figures_are_exposed_while_it_is_on():
    from ridgeline.engine.speculate.suffix import SuffixDrafter

    _, core = generate(copied, small_model, SuffixDrafter(), tokens=200)
    metrics = ServerMetrics("m")
    text = metrics.render(core.stats())[0].decode()
    stats = core.stats().speculation
    labels = 'drafter="suffix",model_name="m"'
    assert f"ridgeline:spec_decode_num_draft_tokens_total{{{labels}}} {float(stats.drafted)}" in text
    assert f'spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}}' in text
    assert 'reason="load"' in text
    assert "spec_decode_measured_gain" in text
    exposed = set(re.findall(r"^# TYPE ridgeline:(spec_decode\S+)", text, flags=re.M))
    assert exposed == set(re.findall(r"^\| `ridgeline:(spec_decode\w+)`", DOCS.read_text(), flags=re.M))
    assert "spec_decode" not in metrics.render(EngineStats())[0].decode()
