"""Which drafter an engine gets, what it says about it, and that a failing drafter ends only speculation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from ridgeline import LLM
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.run.drafters.known_tokens import KnownTokens
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.start.drafter.choice import SpeculationChoice, choose_speculation
from ridgeline.models.drafters.eagle3 import Eagle3Head, write_head
from ridgeline.models.drafters.eagle3_config import Eagle3Config
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.telemetry.metrics import ServerMetrics
from ridgeline.telemetry.stats import EngineStats
from tests.engine.speculate.test_draft_lengths import copied, small_model
from tests.engine.speculate.timed_engine import generate
from tests.gpu.engines import family
from tests.tiny_thinker import save_thinker

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


def test_a_draft_model_must_be_there():
    with pytest.raises(InvalidConfig, match="did you mean 'suffix'"):
        EngineConfig(speculate="sufix")
    with pytest.raises(InvalidConfig, match=r"--speculate \./none"):
        choice("./none", "native")


@pytest.fixture
def thinkers(tmp_path):
    """thinkers(padding) → its folder: one tokenizer, embeddings of different numbers of rows."""

    def save(padding: int, name: str = "") -> Path:
        folder = tmp_path / (name or f"padded-{padding}")
        folder.mkdir()
        save_thinker(folder, padding)
        return folder

    return save


def chosen_model(draft: Path, target: Path) -> SpeculationChoice:
    config = EngineConfig(model=str(target), speculate=str(draft))
    return choose_speculation(config, "native", read_spec(target), target)


def test_a_draft_model_of_the_same_tokenizer_may_have_other_padding(thinkers):
    plain, padded, other = thinkers(0), thinkers(24), thinkers(40)
    for draft, target in ((plain, padded), (padded, plain), (other, padded), (plain, plain)):
        assert chosen_model(draft, target).kind == "model"


def test_a_draft_model_of_another_tokenizer_is_refused(thinkers):
    target, padded = thinkers(0), thinkers(24)
    shuffled, longer = thinkers(8, "shuffled"), thinkers(24, "longer")
    file = json.loads((shuffled / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    (shuffled / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(InvalidConfig, match="its tokenizer is another one"):
        chosen_model(shuffled, target)
    added = Tokenizer.from_file(str(longer / "tokenizer.json"))
    added.add_tokens(["another"])
    added.save(str(longer / "tokenizer.json"))
    size = added.get_vocab_size()
    with pytest.raises(
        InvalidConfig, match=rf"has {size + 23} rows .* {size - 1}, with tokenizers of {size}"
    ):
        chosen_model(longer, target)
    # A token in the served model's padding would have no row in the draft model.
    small = thinkers(0, "small")
    for folder in (small, padded):
        (folder / "tokenizer.json").write_text((longer / "tokenizer.json").read_text())
    with pytest.raises(InvalidConfig, match="a draft model must have the same tokenizer"):
        chosen_model(small, padded)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("of_draft", "of_target"), [(0, 24), (24, 0)])
def test_padding_of_either_changes_no_answer(thinkers, weights_are_not_kept, of_draft, of_target, backend):
    """Nor do a prompt, a bias and a stop id in the padding that the draft model does not have."""
    draft, target = thinkers(of_draft), thinkers(of_target)
    settings = {"backend": backend, "kv_tokens": 4096, "threads": 1, "deterministic": backend == "native"}
    plain = LLM(str(target), speculate="off", **settings)
    quick = LLM(str(target), speculate=str(draft), **settings)
    speculation = quick.engine.core.speculation
    speculation.fixed_length = 3
    last = plain.engine.spec.vocab_size - 1
    prompts = [plain.tokenizer.encode(f"prompt {number}") for number in range(5)]
    prompts[1].append(last)
    asked = {"max_tokens": 20, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    params = [SamplingParams(**asked) for _ in prompts]
    params[2] = SamplingParams(**asked, logit_bias={last: 100.0})
    params[3] = SamplingParams(**asked, stop_token_ids=(last,), min_tokens=4)
    found, expected = (each.generate(prompts, params) for each in (quick, plain))
    assert [one.completions[0].tokens for one in found] == [one.completions[0].tokens for one in expected]
    assert found[2].completions[0].tokens == [last] * 20
    assert all(one.completions[0].error is None for one in found)
    assert speculation.stats().drafted > 20
    guessed = [one.completions[0].timing.drafted_tokens > 0 for one in found]
    assert guessed == [True, of_target == 0, of_target == 0, of_target == 0, True]


def test_a_token_without_a_row_ends_the_guesses_of_its_sequence():
    class Parrot:
        name, waits, longest = "parrot", True, 7
        forgotten = 0

        def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
            assert all(max(seq.tokens) < 50 for seq in seqs)
            return [Draft([seq.tokens[-1]] * most) for seq in seqs]

        def observe(self, plan: StepPlan, reads: bool) -> None:
            pass

        def forget(self, seq: Sequence) -> None:
            self.forgotten += 1

        def passes(self, length: int) -> int:
            return length

        def behind(self, seq: Sequence) -> int | None:
            return 0

        def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
            assert all(max(seq.tokens) < 50 for seq in seqs)
            return len(seqs)

    drafter = KnownTokens(Parrot(), 50)
    one, two = (
        Sequence(Request(name, [1, 3], SamplingParams()), 0, [1, 3], 2, 64, seed=0) for name in ("one", "two")
    )
    assert [draft.tokens for draft in drafter.propose([one, two], 2)] == [[3, 3], [3, 3]]
    two.tokens.append(50)
    assert [draft and draft.tokens for draft in drafter.propose([two, one], 1)] == [None, [3]]
    two.tokens.append(4)
    assert drafter.propose([two], 1) == [None]
    assert (drafter.behind(one), drafter.behind(two)) == (0, None)
    assert drafter.catch_up([one, two], 9) == 1  # of one alone
    drafter.forget(two)
    assert (drafter.drafter.forgotten, len(drafter._known)) == (1, 1)


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
