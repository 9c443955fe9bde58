"""MedusaConfig: Medusa heads as their config.json describes them, in either published layout.

The layout of FasterDecoding (`medusa_num_heads`; weights `0.0.linear.weight`, `0.1.weight`) and that of vLLM
(`num_heads`; weights `blocks.0.layers.0.weight`, `lm_heads.0.weight`). Read strictly. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.safetensors_file import SafetensorsFile
from ridgeline.models.spec.model_spec import ModelSpec

CONFIG = "config.json"
FILES = ("medusa_lm_head.safetensors", "medusa_head.safetensors", "model.safetensors")
PICKLED = "medusa_lm_head.pt"
MOST_HEADS = 15


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Heads that read the target's last hidden state; head i guesses the token i + 2 places behind it.

    length: their number; layers: residual blocks of each
    """

    path: Path
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    length: int
    layers: int
    shared_output: bool = False  # one output matrix for all heads
    bias: bool = True

    @property
    def parameters(self) -> int:
        blocks = self.length * self.layers * self.hidden_size * (self.hidden_size + self.bias)
        outputs = 1 if self.shared_output else self.length
        return blocks + outputs * self.draft_vocab_size * self.hidden_size

    def check_fits(self, spec: ModelSpec) -> None:
        """Raises UnsupportedModel if it was made for a target of another shape."""
        for name, mine, theirs in (
            ("hidden_size", self.hidden_size, spec.hidden_size),
            ("vocab_size", self.vocab_size, spec.vocab_size),
        ):
            if mine != theirs:
                raise UnsupportedModel(
                    f"the Medusa heads have {name} {mine}, and {spec.name} has {theirs}: "
                    "they were trained for another model"
                )


def is_medusa(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def weights_file(path: Path) -> Path:
    """Raises UnsupportedModel for a folder that has pickled weights alone."""
    found = next((path / name for name in FILES if (path / name).is_file()), None)
    if found is not None:
        return found
    if (path / PICKLED).is_file():
        raise UnsupportedModel(
            f"{path / PICKLED}: pickled weights are not read, since loading them runs code; save them as "
            f"{FILES[0]}"
        )
    raise BrokenModel(f"{path}: has none of {', '.join(FILES)}")


def read_medusa_config(path: Path) -> MedusaConfig:
    """Sizes that the config leaves out (FasterDecoding's does) come from the tensors' shapes."""
    file = path / CONFIG
    try:
        config = json.loads(file.read_text())
        heads = int(config["medusa_num_heads"] if "medusa_num_heads" in config else config["num_heads"])
        layers = int(config.get("medusa_num_layers", config.get("num_hidden_layers", 1)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenModel(
            f"{file}: is not the config of Medusa heads ({type(error).__name__}: {error})"
        ) from None
    if not 1 <= heads <= MOST_HEADS or not 0 <= layers <= 64:
        raise UnsupportedModel(f"{file}: {heads} heads of {layers} layers; 1 to {MOST_HEADS} heads are read")
    if config.get("logit_scale", 1.0) <= 0:
        raise UnsupportedModel(f"{file}: logit_scale is {config['logit_scale']}; it must be above 0")
    tensors = SafetensorsFile(weights_file(path)).tensors
    names = MedusaNames(set(tensors), layers)
    output = names.output(0)
    if output is None or len(tensors[output].shape) != 2:
        raise BrokenModel(f"{weights_file(path)}: has no output matrix of head 0 with {layers} layers")
    rows, hidden = tensors[output].shape
    vocab = int(config.get("vocab_size") or rows)
    mapped = "token_map" in tensors
    return MedusaConfig(
        path=path,
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=tensors["token_map"].shape[0] if mapped else rows,
        length=heads,
        layers=layers,
        shared_output=heads > 1 and names.output(1) in (None, output),
        bias=layers > 0 and names.bias(0, 0) is not None,
    )


class MedusaNames:
    """The names of a file's tensors; None for one that it does not have."""

    def __init__(self, names: set[str], layers: int) -> None:
        self._names, self._layers = names, layers

    def weight(self, head: int, layer: int) -> str | None:
        return self._found(f"{head}.{layer}.linear.weight", f"blocks.{head}.layers.{layer}.weight")

    def bias(self, head: int, layer: int) -> str | None:
        return self._found(f"{head}.{layer}.linear.bias", f"blocks.{head}.layers.{layer}.bias")

    def output(self, head: int) -> str | None:
        return self._found(f"{head}.{self._layers}.weight", f"lm_heads.{head}.weight", "lm_head.weight")

    def _found(self, *names: str) -> str | None:
        prefixed = (prefix + name for name in names for prefix in ("", "medusa_head.", "medusa_heads."))
        return next((name for name in prefixed if name in self._names), None)
