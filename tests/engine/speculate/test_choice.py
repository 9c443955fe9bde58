"""Which drafter an engine gets, what it says about it, and that a failing drafter ends only speculation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.start.drafter import choice as drafter_choice
from ridgeline.engine.start.drafter.choice import SpeculationChoice, choose_speculation
from ridgeline.models.drafters.eagle3 import Eagle3Head, write_head
from ridgeline.models.drafters.eagle3_config import Eagle3Config
from ridgeline.models.files.registry import ResolvedModel
from ridgeline.telemetry.metrics import ServerMetrics
from ridgeline.telemetry.stats import EngineStats
from tests.engine.speculate.test_draft_lengths import copied, small_model
from tests.engine.speculate.timed_engine import generate
from tests.gpu.engines import family

DOCS = Path(__file__).resolve().parents[3] / "docs" / "speculation.md"


SPEC = family("llama", num_layers=4)


def choice(option: str, backend: str, path: Path = Path()) -> SpeculationChoice:
    return choose_speculation(EngineConfig(speculate=option), backend, SPEC, path)


@pytest.mark.parametrize(
    ("option", "backend", "kind"),
    [
        ("auto", "native", "suffix"),
        ("auto", "torch", "off"),
        ("auto", "cuda", "off"),
        ("off", "native", "off"),
        ("off", "cuda", "off"),
        ("ngram", "native", "ngram"),
        ("ngram", "cuda", "ngram"),
        ("suffix", "torch", "suffix"),
        ("suffix", "cuda", "suffix"),
    ],
)
def test_the_drafter_of_an_engine(option, backend, kind):
    chosen = choice(option, backend)
    assert chosen.kind == kind
    if kind != "off":
        assert f"speculation {kind}" in chosen.notes[0]
        assert chosen.build(None, 100, 8, None).drafter.name == kind
    elif option == "auto" and backend == "cuda":
        assert "speculation off" in chosen.notes[0]
    else:
        assert chosen.notes == ()


def test_a_head_is_served_where_hidden_states_are_reported(tmp_path):
    config = Eagle3Config.for_target(SPEC, 60, 4, "small")
    write_head(Eagle3Head(config, torch.arange(60)), tmp_path)
    for backend in ("torch", "cuda"):
        chosen = choice(str(tmp_path), backend)
        assert (chosen.kind, chosen.head) == ("head", config)
        assert "EAGLE-3 head" in chosen.notes[0]
    with pytest.raises(InvalidConfig, match="which the native backend does not report"):
        choice(str(tmp_path), "native")
    with pytest.raises(InvalidConfig, match="it was trained for another model"):
        choose_speculation(
            EngineConfig(speculate=str(tmp_path)), "torch", family("llama", hidden_size=64), Path()
        )


def test_a_draft_model_must_be_there_and_have_the_same_vocabulary(tmp_path, monkeypatch):
    with pytest.raises(InvalidConfig, match="did you mean 'suffix'"):
        EngineConfig(speculate="sufix")
    with pytest.raises(InvalidConfig, match=r"--speculate \./none"):
        choice("./none", "native")
    model = ResolvedModel("other", tmp_path, "directory")
    monkeypatch.setattr(drafter_choice, "resolve", lambda name: model)
    monkeypatch.setattr(drafter_choice, "check_servable", lambda spec: None)
    monkeypatch.setattr(drafter_choice, "read_spec", lambda path: family("llama", vocab_size=77))
    with pytest.raises(InvalidConfig, match="its vocabulary has 77 tokens"):
        choice("./other", "native")
    monkeypatch.setattr(drafter_choice, "read_spec", lambda path: SPEC)
    monkeypatch.setattr(drafter_choice, "_check_tokenizers", lambda name, draft, path: None)
    assert choice("./other", "native").kind == "model"


class Broken:
    name = "broken"
    waits = False

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        (seq,) = seqs
        if seq.num_output > 20:
            raise ZeroDivisionError("a bug")
        return [Draft([seq.tokens[-37]] if len(seq.tokens) > 37 else [], 20)]

    def observe(self, plan: StepPlan, reads: bool) -> None:
        pass

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
