"""Medusa heads where they are served: both published layouts give the heads' best tokens behind the right
hidden state, and no guess changes an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.engine.run.drafters.medusa_drafter import MedusaDrafter
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.drafters.kinds import head_kind, read_head_config
from ridgeline.models.drafters.medusa import MedusaHeads, read_medusa
from ridgeline.models.drafters.medusa_config import MedusaConfig
from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.engine.speculate.option_cases import served, work
from tests.engine.speculate.small_heads import SIZES, SPEC, WEIGHTS, random_medusa
from tests.gpu.engines import torch_runner

BOUND = 2e-4
HIDDEN, VOCAB = SPEC.hidden_size, SPEC.vocab_size


class Watched(MedusaDrafter):
    """Remembers what it proposed behind which tokens."""

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        drafts = super().propose(seqs, most)
        for seq, draft in zip(seqs, drafts, strict=True):
            if draft is not None:
                self.said[tuple(seq.tokens)] = list(draft.tokens)
        return drafts


def drafter(runner, length: int = 4) -> Watched:
    watched = Watched(random_medusa(length), runner, SPEC.num_layers)
    watched.said = {}
    return watched


def last_hidden(tokens: list[int]) -> torch.Tensor:
    """What the LM head reads behind the last of these tokens."""
    decoder = Decoder(SPEC, WEIGHTS, select_backend("torch"), 128)
    decoder.taps = (SPEC.num_layers,)
    row = InputRow(tokens, 0, [0, 1, 2, 3], len(tokens) - 1)
    logits = decoder.forward(StepInputs.from_rows([row], 16), allocate_kv(SPEC, 4, 16, torch.float32))
    assert torch.allclose(decoder.tapped[-1] @ decoder.weights.lm_head.T, logits[-1], atol=1e-5)
    return decoder.tapped[-1]


def test_it_guesses_what_the_heads_say_behind_the_last_computed_token():
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    watched = drafter(runner)
    with torch.inference_mode(False):
        served(runner, SIZES, work(["greedy", "sampled", "several"]), Speculation(watched, VOCAB, 3))
    assert len(watched.said) > 10
    for tokens, guesses in list(watched.said.items())[::3]:
        expected = watched.heads.best(last_hidden(list(tokens[:-1]))[None])[0].tolist()
        assert expected[: len(guesses)] == guesses


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def save(heads: MedusaHeads, folder: Path, layout: str) -> None:
    """As FasterDecoding's medusa_lm_head, or as vLLM's converted files have them."""
    config, tensors = heads.config, {}
    for number, block in enumerate(heads.blocks):
        for layer, linear in enumerate(block):
            own = f"{number}.{layer}.linear" if layout == "first" else f"blocks.{number}.layers.{layer}"
            tensors |= {f"{own}.weight": linear.weight, f"{own}.bias": linear.bias}
        output = f"{number}.{config.layers}" if layout == "first" else f"lm_heads.{number}"
        tensors[f"{output}.weight"] = heads.outputs[number].weight
    if layout == "first":
        name, about = "medusa_lm_head", {
            "medusa_num_heads": config.length,
            "medusa_num_layers": config.layers,
            "base_model_name_or_path": "small",
        }  # fmt: skip
    else:
        name, about = "model", {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "truncated_vocab_size": VOCAB,
            "num_heads": config.length,
            "num_hidden_layers": config.layers,
            "medusa_fc_bias": True,
        }  # fmt: skip
    folder.mkdir(exist_ok=True)
    save_file(
        {key: each.detach().contiguous() for key, each in tensors.items()}, folder / f"{name}.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(about))


@pytest.mark.parametrize("layout", ["first", "vllm"])
@pytest.mark.parametrize("layers", [1, 2])
def test_both_published_layouts_are_read(tmp_path, layout, layers):
    heads = random_medusa(3, layers)
    save(heads, tmp_path, layout)
    assert head_kind(tmp_path) == "medusa"
    config = read_head_config(tmp_path)
    assert isinstance(config, MedusaConfig)
    assert replace(config, path=Path()) == heads.config
    config.check_fits(SPEC)
    found = read_medusa(config, torch.float32)
    states = torch.randn(5, HIDDEN)
    assert torch.equal(found.logits(states), heads.logits(states))
    assert sum(each.numel() for each in found.parameters()) == config.parameters


def test_a_shorter_vocabulary_names_the_models_tokens(tmp_path):
    heads = random_medusa(2)
    save(heads, tmp_path, "vllm")
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    kept = torch.arange(0, VOCAB, 3)
    save_file({**tensors, "token_map": kept}, tmp_path / "model.safetensors")
    found = read_medusa(read_head_config(tmp_path), torch.float32)
    states = torch.randn(5, HIDDEN)
    expected = kept[heads.logits(states)[..., kept].argmax(-1)].T
    assert torch.equal(found.best(states), expected)


def test_what_is_not_read_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="loading them runs code"):
        read_head_config(tmp_path)
    save(random_medusa(2), tmp_path, "first")
    config = read_head_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="hidden_size 32"):
        config.check_fits(replace(SPEC, hidden_size=64))
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    with pytest.raises(BrokenModel, match=r"2\.0\.linear\.weight is missing"):
        read_medusa(read_head_config(tmp_path), torch.float32)
