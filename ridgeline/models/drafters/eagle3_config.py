"""Eagle3Config: a draft head as its config.json describes it, in the layout of vLLM's speculators.

Read strictly: a value that changes the mathematics and is not computed here is refused by name. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.spec.model_spec import ModelSpec

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ALGORITHM = "eagle3"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """One transformer layer that reads the target's hidden states and the next token's embedding.

    taps: hidden states of the target that it reads: 0 is the embedding, j the output of layer j
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope_theta: float
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    length: int = 4  # tokens that it proposes
    norm_before_residual: bool = False
    max_context: int = 2048
    target: str = ""

    @staticmethod
    def for_target(spec: ModelSpec, draft_vocab_size: int, length: int, target: str) -> Eagle3Config:
        """A head of the target's own width; it reads a low, a middle and a high layer."""
        mixer = spec.attentions[0]
        rope = mixer.rope
        if spec.num_layers < 4:
            raise UnsupportedModel(
                f"{spec.name}: has {spec.num_layers} layers; an EAGLE-3 head reads three of 4 or more"
            )
        return Eagle3Config(
            hidden_size=spec.hidden_size,
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            ffn_size=spec.ffn_size,
            norm_eps=spec.norm.eps,
            rope_theta=10_000.0 if rope is None else rope.theta,
            vocab_size=spec.vocab_size,
            draft_vocab_size=min(draft_vocab_size, spec.vocab_size),
            taps=default_taps(spec.num_layers),
            length=length,
            max_context=spec.max_context,
            target=target,
        )

    @property
    def parameters(self) -> int:
        """Without the embedding, which is the target's."""
        hidden, wide = self.hidden_size, 2 * self.hidden_size
        attention = (
            wide * (self.heads + 2 * self.kv_heads) * self.head_dim + self.heads * self.head_dim * hidden
        )
        ffn, fused = 3 * hidden * self.ffn_size, len(self.taps) * hidden * hidden
        return attention + ffn + fused + self.draft_vocab_size * hidden + 4 * hidden

    def check_fits(self, spec: ModelSpec) -> None:
        """Raises UnsupportedModel if it was made for a target of another shape."""
        for name, mine, theirs in (
            ("hidden_size", self.hidden_size, spec.hidden_size),
            ("vocab_size", self.vocab_size, spec.vocab_size),
        ):
            if mine != theirs:
                raise UnsupportedModel(
                    f"the draft head has {name} {mine}, and {spec.name} has {theirs}: "
                    "it was trained for another model"
                )
        if max(self.taps) >= spec.num_layers:
            raise UnsupportedModel(
                f"the draft head reads layer {max(self.taps)}, and {spec.name} has {spec.num_layers} layers"
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": ALGORITHM,
            "speculators_version": "0.3.0",
            "draft_vocab_size": self.draft_vocab_size,
            "norm_before_residual": self.norm_before_residual,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "transformer_layer_config": {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": self.hidden_size,
                "intermediate_size": self.ffn_size,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "num_hidden_layers": 1,
                "hidden_act": "silu",
                "attention_bias": False,
                "mlp_bias": False,
                "rms_norm_eps": self.norm_eps,
                "rope_theta": self.rope_theta,
                "rope_scaling": None,
                "max_position_embeddings": self.max_context,
                "vocab_size": self.vocab_size,
            },
            "speculators_config": {
                "algorithm": ALGORITHM,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": self.length,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": self.target, "architectures": ["LlamaForCausalLM"]},
            },
        }


def default_taps(layers: int) -> tuple[int, ...]:
    """Low, middle and high, as vLLM has them where a model has enough layers."""
    return (2, layers // 2, layers - 3) if layers >= 8 else (1, layers // 2, layers - 1)


def read_config(path: Path) -> Eagle3Config:
    """Raises BrokenModel for a file that is not readable, UnsupportedModel for another kind of head."""
    file = path / CONFIG
    try:
        config = json.loads(file.read_text())
        layer, speculators = config["transformer_layer_config"], config["speculators_config"]
        kind = config.get("speculators_model_type")
        if kind != ALGORITHM:
            raise UnsupportedModel(
                f"{file}: speculators_model_type is {kind!r}; {ALGORITHM!r} is what is read"
            )
        _refuse_unknown_arithmetic(file, config, layer)
        hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
        layers = config.get("eagle_aux_hidden_state_layer_ids")
        if not layers:
            raise UnsupportedModel(f"{file}: eagle_aux_hidden_state_layer_ids is missing")
        return Eagle3Config(
            hidden_size=hidden,
            heads=heads,
            kv_heads=int(layer["num_key_value_heads"]),
            head_dim=int(layer.get("head_dim") or hidden // heads),
            ffn_size=int(layer["intermediate_size"]),
            norm_eps=float(layer["rms_norm_eps"]),
            rope_theta=float(layer["rope_theta"]),
            vocab_size=int(layer["vocab_size"]),
            draft_vocab_size=int(config["draft_vocab_size"]),
            taps=tuple(int(one) for one in layers),
            length=int(speculators["proposal_methods"][0]["speculative_tokens"]),
            norm_before_residual=bool(config["norm_before_residual"]),
            max_context=int(layer["max_position_embeddings"]),
            target=str(speculators["verifier"]["name_or_path"] or ""),
        )
    except UnsupportedModel:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise BrokenModel(
            f"{file}: is not the config of a draft head ({type(error).__name__}: {error})"
        ) from None


def _refuse_unknown_arithmetic(file: Path, config: dict[str, Any], layer: dict[str, Any]) -> None:
    expected = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "num_hidden_layers": 1,
    }
    for key, value in expected.items():
        if layer.get(key, value) != value:
            raise UnsupportedModel(f"{file}: {key} is {layer[key]!r}; only {value!r} is computed")
    if config.get("target_hidden_size") not in (None, layer.get("hidden_size")):
        raise UnsupportedModel(f"{file}: target_hidden_size differs from hidden_size; that is not computed")
