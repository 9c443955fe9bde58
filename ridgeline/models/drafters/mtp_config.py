"""MtpConfig: the modules of a checkpoint that predict further tokens, in the layout of MiMo-7B. No torch.

The other published layouts belong to families that are not served (DeepSeek-V3 and GLM-5: latent attention;
Qwen3-Next and Qwen3.5: linear attention; MiMo-V2: sinks; Nemotron 3: Mamba): `read_spec` refuses those models
by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec

FAMILIES = ("mimo",)
LENGTH = 3  # tokens that it proposes: the first module is applied to its own output again


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """One module: a layer of the model's shape over the last hidden state and the next token's embedding."""

    path: Path
    hidden_size: int
    attention: Attention
    ffn_size: int
    norm_eps: float
    vocab_size: int
    taps: tuple[int, ...]
    max_context: int
    parameters: int
    length: int = LENGTH

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim


def mtp_config(spec: ModelSpec, path: Path) -> MtpConfig:
    """Raises UnsupportedModel for a model without such modules, or without their weights."""
    extra = next((each for each in spec.extra_parameters if each.name == "MTP"), None)
    if extra is None or spec.family not in FAMILIES:
        raise UnsupportedModel(
            f"{spec.name} (family {spec.family}) has no modules that predict further tokens; they are "
            f"read in the family {', '.join(FAMILIES)}"
        )
    if path.suffix == ".gguf":
        raise UnsupportedModel(f"{path}: GGUF files have no such modules; use the original checkpoint")
    if spec.quantization is not None:
        raise UnsupportedModel(
            f"{spec.name}: modules of quantized checkpoints are not read; use the original checkpoint"
        )
    attention = spec.attentions[-1]
    if attention.window is not None or attention.rope is None or attention.rope.scaling is not None:
        raise UnsupportedModel(
            f"{spec.name}: modules with a sliding window, scaled rotation or none are not computed"
        )
    return MtpConfig(
        path=path,
        hidden_size=spec.hidden_size,
        attention=attention,
        ffn_size=spec.ffn_size,
        norm_eps=spec.norm.eps,
        vocab_size=spec.vocab_size,
        taps=(spec.num_layers,),
        max_context=spec.max_context,
        parameters=extra.parameters,
    )
