"""The target's states are the decoder's; a head learns; a killed run continues as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline.lab.errors import LabError
from ridgeline.lab.train_drafter import target as target_module
from ridgeline.lab.train_drafter.answers import Answer, _kept, read_prompts, split_held_out
from ridgeline.lab.train_drafter.evaluation import _walk, acceptance
from ridgeline.lab.train_drafter.optimizers import orthogonal
from ridgeline.lab.train_drafter.options import TrainOptions
from ridgeline.lab.train_drafter.target import Target
from ridgeline.lab.train_drafter.trainer import (
    LAST_RATE,
    UNBOUNDED,
    _rate,
    draft_vocabulary,
    new_head,
    train,
)
from ridgeline.lab.train_drafter.unroll import Guesses
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.drafters.eagle3 import read_head, write_head
from ridgeline.models.drafters.eagle3_config import Eagle3Config, read_config
from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from ridgeline.options import OptionError
from tests.gpu.engines import family, weights_of

SPEC = family("llama", num_layers=4)
WEIGHTS = weights_of(SPEC, torch.float32)
CONFIG = Eagle3Config.for_target(SPEC, 64, 3, "tiny")
ANSWERS = [Answer([3 + n, 4, 5], [(n * 7 + i * 3) % 60 for i in range(20)]) for n in range(8)]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(target_module, "load_weights", lambda *given, **more: WEIGHTS)
    return Target(Path(), SPEC, torch.device("cpu"), CONFIG.taps, 64)


def quiet(what: str, done: int, total: int) -> None:
    pass


def options(**more: object) -> TrainOptions:
    return TrainOptions(**{"samples": 8, "batch": 4, "steps": 6, "length": 64, "guesses": 3} | more)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_moe"])
def test_the_target_sees_what_the_decoder_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = family(name, num_layers=4)
    weights = weights_of(spec, torch.float32)
    monkeypatch.setattr(target_module, "load_weights", lambda *given, **more: weights)
    taps = (1, 2, 3)
    seen = Target(Path(), spec, torch.device("cpu"), taps, 64).see(
        torch.tensor([[*range(5, 25)] + [0] * 12] * 2)
    )
    decoder = Decoder(spec, weights, select_backend("torch"), 64)
    decoder.taps = taps
    row = InputRow(list(range(5, 25)), 0, [0, 1], 0)
    logits = decoder.forward(StepInputs.from_rows([row], 16), allocate_kv(spec, 2, 16, torch.float32))
    assert torch.allclose(seen.logits[1, :20], logits, atol=2e-5)
    assert decoder.tapped is not None
    assert torch.allclose(seen.taps[1, :20], decoder.tapped, atol=2e-5)


@pytest.mark.parametrize("matrix_rate", [0.0, 0.01])
def test_it_learns(target: Target, tmp_path: Path, matrix_rate: float) -> None:
    head = new_head(CONFIG, ANSWERS, target, 0)
    chosen = options(steps=40, learning_rate=3e-3, matrix_rate=matrix_rate)
    run = train(head, target, ANSWERS, chosen, tmp_path / "c.pt", quiet)
    assert run.step == 40
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 40)])
def test_muon_steps_along_an_orthogonal_matrix(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.median() > 0.6
    assert values.max() < 1.5


def test_a_killed_run_continues_as_if_it_had_not_been(target: Target, tmp_path: Path) -> None:
    whole, part = new_head(CONFIG, ANSWERS, target, 0), new_head(CONFIG, ANSWERS, target, 0)
    train(whole, target, ANSWERS, options(), tmp_path / "whole.pt", quiet)

    class Killed(Exception):
        pass

    ticks = iter(range(0, 10_000, 61))  # a checkpoint after every step

    def kill(what: str, done: int, total: int) -> None:
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        train(part, target, ANSWERS, options(), tmp_path / "part.pt", kill, lambda: float(next(ticks)))
    again = new_head(CONFIG, ANSWERS, target, 5)
    run = train(again, target, ANSWERS, options(), tmp_path / "part.pt", quiet)
    assert run.step == 6
    for mine, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    other = [Answer(one.prompt, [token + 30 for token in one.answer]) for one in ANSWERS]
    with pytest.raises(LabError, match="of other answers"):
        train(new_head(CONFIG, other, target, 0), target, other, options(), tmp_path / "part.pt", quiet)


def test_with_minutes_alone_the_rate_and_the_report_follow_the_time(target: Target, tmp_path: Path) -> None:
    """More passes than the default's; the loss of every tenth of the time; the last steps learn little."""
    head = new_head(CONFIG, ANSWERS, target, 0)
    ticks = iter(range(10_000))
    seen: list[tuple[int, int]] = []
    run = train(
        head,
        target,
        ANSWERS,
        options(steps=0, minutes=1.0),
        tmp_path / "c.pt",
        lambda what, done, total: seen.append((done, total)),
        lambda: float(next(ticks)),
    )
    assert 3 * len(ANSWERS) // 4 < run.step < 60
    assert len(run.losses) == 10
    assert run.losses[-1] < run.losses[0]
    assert seen[-1] == (60, 60)
    assert _rate(500, UNBOUNDED, 60.0, 60.0) == pytest.approx(LAST_RATE)
    assert _rate(500, UNBOUNDED, 30.0, 60.0) == pytest.approx((1 + LAST_RATE) / 2)


def test_files_are_read_back(target: Target, tmp_path: Path) -> None:
    head = new_head(CONFIG, ANSWERS, target, 0)
    write_head(head, tmp_path / "head")
    again = read_head(tmp_path / "head")
    assert again.config == CONFIG
    assert torch.equal(again.draft_ids, head.draft_ids)
    assert torch.equal(again.down_proj.weight, head.down_proj.weight.to(torch.bfloat16).float())
    from safetensors import safe_open

    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert torch.equal(file.get_tensor("t2d").nonzero()[:, 0], head.draft_ids)
        assert torch.equal(file.get_tensor("d2t") + torch.arange(64), head.draft_ids)
    assert {
        "fc.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.hidden_norm.weight",
        "norm.weight",
    } < names


def test_a_head_of_another_kind_is_refused_by_name(target: Target, tmp_path: Path) -> None:
    write_head(new_head(CONFIG, ANSWERS, target, 0), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for change, message in (
        ({"speculators_model_type": "eagle"}, "speculators_model_type is 'eagle'"),
        (
            {"transformer_layer_config": config["transformer_layer_config"] | {"hidden_act": "gelu"}},
            "hidden_act",
        ),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids is missing"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModel, match=message):
            read_config(tmp_path)
    file.write_text("{}")
    with pytest.raises(BrokenModel, match="is not the config of a draft head"):
        read_config(tmp_path)
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="it was trained for another model"):
        read_config(tmp_path).check_fits(family("llama", num_layers=4, hidden_size=64))
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 32}))
    with pytest.raises(BrokenModel, match="tensor d2t is I64"):
        read_head(tmp_path)


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    answers = [Answer([1], [50, 50, 9, 9, 9, 70])]
    small = Eagle3Config.for_target(SPEC, 4, 3, "tiny")
    assert draft_vocabulary(answers, small).tolist() == [0, 9, 50, 70]


def test_a_walk_takes_the_rows_that_serving_would_verify() -> None:
    tokens = [0, 1, 2, 3, 4, 5, 6, 7]
    chains = [[9, 9]] * 8
    chains[1], chains[4] = [3, 4], [6, 9]  # behind token 2: both right; behind 5: the first
    accepted = [0, 0]
    assert _walk(chains, tokens, 2, accepted) == 2  # 3 4 +5; 6 +7
    assert accepted == [2, 1]


def test_acceptance_of_a_head_that_knows_the_answer(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = new_head(CONFIG, ANSWERS, target, 0)

    def right(head, embed, taps, tokens, guesses, scale):
        places = tokens.shape[1] - 1 - guesses
        found = []
        for number in range(guesses):
            wanted = tokens[:, number + 2 : number + 2 + places].contiguous()
            place = torch.searchsorted(head.draft_ids, wanted).clamp(max=63)
            found.append(Guesses(torch.nn.functional.one_hot(place, 64).float(), number + 2))
        return found

    monkeypatch.setattr("ridgeline.lab.train_drafter.evaluation.unrolled", right)
    found = acceptance(head, target, ANSWERS, 64, 4, quiet)
    assert found.length > 3.5
    assert found.answers == 8
    in_vocabulary = [token in set(head.draft_ids.tolist()) for one in ANSWERS for token in one.answer]
    assert found.covered == pytest.approx(sum(in_vocabulary) / len(in_vocabulary))


def test_a_cut_line_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text("[[1], [2, 3]]\n[[4], [5")
    assert _kept(file) == [Answer([1], [2, 3])]
    assert file.read_text() == "[[1], [2, 3]]\n"


def test_prompts_are_read_from_any_common_field(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"question": "a?"}\n{"turns": ["b?", "c?"]}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d?"}]}\n\n'
    )
    (tmp_path / "p.txt").write_text("e?\n\nf?\n")
    assert read_prompts((str(file), str(tmp_path / "p.txt"))) == ["a?", "b?", "d?", "e?", "f?"]
    file.write_text('{"other": 1}\n')
    with pytest.raises(LabError, match="has no prompts"):
        read_prompts((str(file),))
    with pytest.raises(LabError, match="cannot be read"):
        read_prompts((str(tmp_path / "none.jsonl"),))
    learned, held = split_held_out([str(n) for n in range(120)])
    assert held == ["49", "99"]
    assert len(learned) == 118


def test_options_name_what_is_wrong() -> None:
    for change, message in (
        ({"guesses": 16}, "--guesses must be at most 15"),
        ({"samples": 2}, "--samples must be at least 8"),
        ({"device": "tpu"}, "--device must be auto, cpu or cuda"),
        ({"learning_rate": 0.0}, "--learning-rate must be above 0"),
    ):
        with pytest.raises(OptionError, match=message):
            TrainOptions(**change)
