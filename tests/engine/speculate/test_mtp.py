"""The module for further tokens of MiMo checkpoints: the same numbers as a plain form of it, read from the
checkpoint of the model itself, and no guess changes an answer."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ridgeline import LLM
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.run.drafters.chain_drafter import ChainDrafter
from ridgeline.engine.schedule.request import SamplingParams, Sequence
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.start.drafter.choice import choose_speculation
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.drafters.mtp import MtpModule
from ridgeline.models.drafters.rotation import rotated, rotation
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.engine.speculate.option_cases import served, work
from tests.engine.speculate.small_heads import SIZES, mimo, random_mtp
from tests.gpu.engines import family, torch_runner, weights_of
from tests.tiny_thinker import save_thinker

BOUND = 2e-4
SPEC = mimo()
WEIGHTS = weights_of(SPEC, torch.float32)
LM_HEAD = WEIGHTS.lm_head.tensor


class Watched(ChainDrafter):
    """Remembers what it proposed behind which tokens."""

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        drafts = super().propose(seqs, most)
        for seq, draft in zip(seqs, drafts, strict=True):
            if draft is not None:
                self.said[tuple(seq.tokens)] = list(draft.tokens)
        return drafts


def drafter(runner, length: int = 3) -> Watched:
    watched = Watched(random_mtp(SPEC, LM_HEAD, length), WEIGHTS.embed.tensor, 1.0, runner, SIZES.max_running)
    watched.said = {}
    return watched


def plain_form(module: MtpModule, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The module over a whole sequence: hidden states [T, h] and the tokens behind them [T]."""
    config = module.config
    embedded = WEIGHTS.embed.tensor[tokens].clone()
    embedded[0] = 0.0
    x = module.input_proj(torch.cat([module.hidden_layernorm(hidden), module.token_layernorm(embedded)], -1))
    normed = module.input_layernorm(x)
    cos, sin = rotation(torch.arange(len(tokens)), config.head_dim, config.attention.rope.theta)
    heads = (len(tokens), -1, config.head_dim)
    q = rotated(module.q_proj(normed).view(heads), cos, sin)
    k = rotated(module.k_proj(normed).view(heads), cos, sin)
    v = module.v_proj(normed).view(heads)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    x = x + module.o_proj(attended.transpose(0, 1).flatten(1))
    normed = module.post_attention_layernorm(x)
    x = x + module.down_proj(F.silu(module.gate_proj(normed)) * module.up_proj(normed))
    return module.final_layernorm(x)


def chain(module: MtpModule, tokens: list[int]) -> list[int]:
    decoder = Decoder(SPEC, WEIGHTS, select_backend("torch"), 128)
    decoder.taps = module.config.taps
    known = tokens[:-1]
    decoder.forward(
        StepInputs.from_rows([InputRow(known, 0, [0, 1, 2, 3], 0)], 16),
        allocate_kv(SPEC, 4, 16, torch.float32),
    )
    hidden, following, guesses = decoder.tapped, list(tokens[1:]), []
    for _ in range(module.config.length):
        out = plain_form(module, hidden, torch.tensor(following))
        guesses.append(int((out[-1] @ LM_HEAD.T).argmax()))
        hidden = torch.cat([hidden, out[-1:]])
        following.append(guesses[-1])
    return guesses


def test_it_guesses_what_the_plain_form_of_the_module_guesses():
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    watched = drafter(runner)
    assert watched.name == "mtp"
    with torch.inference_mode(False):
        requests = work(["greedy", "sampled", "several"])
        served(runner, SIZES, requests, Speculation(watched, SPEC.vocab_size, 3))
    assert len(watched.said) > 10
    for tokens, guesses in list(watched.said.items())[::3]:
        assert chain(watched.head, list(tokens))[: len(guesses)] == guesses


# ── from a checkpoint ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama saved as a MiMo, whose biases are zero, with a random module."""
    folder = tmp_path_factory.mktemp("mimo")
    save_thinker(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    config |= {"num_nextn_predict_layers": 1, "use_sliding_window": False, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [
        name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        tensors[name.removesuffix("weight") + "bias"] = torch.zeros(len(tensors[name]))
    spec = read_spec(folder)
    module = random_mtp(spec, torch.zeros(spec.vocab_size, spec.hidden_size))
    for name, value in module.named_parameters():
        part = name.split(".")[0]
        inside = "self_attn." if part[:2] in ("q_", "k_", "v_", "o_") else ""
        inside = "mlp." if part in ("gate_proj", "up_proj", "down_proj") else inside
        tensors[f"model.mtp_layers.0.{inside}{name}"] = value.detach().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_checkpoint_with_the_module_is_served_with_it(checkpoint, weights_are_not_kept):
    """And without it by every backend, which leave it out."""
    settings = {"backend": "torch", "kv_tokens": 2048, "threads": 1}
    plain = LLM(str(checkpoint), speculate="off", **settings)
    quick = LLM(str(checkpoint), speculate="mtp", **settings)
    assert any("the model's own MTP module" in note for note in quick.engine.notes)
    assert quick.engine.core.speculation.asking.times.pass_s(1, 40) > 0  # measured at the start
    assert len(quick.engine.core.speculation.drafter) == 0
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=2, ignore_eos=True)
    prompts = [plain.tokenizer.encode(f"prompt {number}") for number in range(3)]
    quick.engine.core.speculation.fixed_length = 2
    found, expected = (each.generate(prompts, params) for each in (quick, plain))
    assert [one.completions[0].tokens for one in found] == [one.completions[0].tokens for one in expected]
    stats = quick.engine.core.stats().speculation
    assert (stats.drafter, stats.drafted > 20) == ("mtp", True)


def test_models_without_the_module_and_other_backends_are_refused_by_name(checkpoint):
    spec = read_spec(checkpoint)
    with pytest.raises(InvalidConfig, match="which the native backend does not report"):
        choose_speculation(EngineConfig(speculate="mtp"), "native", spec, checkpoint)
    with pytest.raises(InvalidConfig, match="has no modules that predict further tokens"):
        choose_speculation(EngineConfig(speculate="mtp"), "torch", family("llama"), checkpoint)
    with pytest.raises(InvalidConfig, match="makes no weights for these modules"):
        choose_speculation(EngineConfig(speculate="mtp", load_format="dummy"), "torch", spec, checkpoint)
