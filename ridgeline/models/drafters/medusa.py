"""MedusaHeads: independent heads on the last hidden state (arXiv 2401.10774), for chains of best tokens."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.models.drafters.medusa_config import MedusaConfig, MedusaNames, weights_file
from ridgeline.models.drafters.stored_tensors import read_tensor
from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.safetensors_file import SafetensorsFile


class MedusaHeads(nn.Module):
    """token_ids [draft vocab]: the target's id of each draft token; None: the same ids."""

    token_ids: Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden, bias=config.bias) for _ in range(config.layers))
            for _ in range(config.length)
        )
        outputs = 1 if config.shared_output else config.length
        self.outputs = nn.ModuleList(
            nn.Linear(hidden, config.draft_vocab_size, bias=False) for _ in range(outputs)
        )
        self.register_buffer("token_ids", None)

    def layer(self, head: int, place: int) -> nn.Linear:
        return cast(nn.Linear, cast(nn.ModuleList, self.blocks[head])[place])

    def output(self, number: int) -> nn.Linear:
        return cast(nn.Linear, self.outputs[number])

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, hidden] → [heads, B, draft vocab]"""
        found = []
        for number in range(self.config.length):
            x = hidden
            for place in range(self.config.layers):
                x = x + F.silu(self.layer(number, place)(x))
            found.append(self.output(min(number, len(self.outputs) - 1))(x))
        return torch.stack(found)

    def best(self, hidden: Tensor) -> Tensor:
        """[B, hidden] → the best token of each head [B, heads]"""
        ids = self.logits(hidden).argmax(-1).T
        return ids if self.token_ids is None else self.token_ids[ids]


def read_medusa(config: MedusaConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> MedusaHeads:
    """Raises BrokenModel if a tensor is missing or has another shape."""
    file = SafetensorsFile(weights_file(config.path))
    names = MedusaNames(set(file.tensors), config.layers)
    heads = MedusaHeads(config)
    hidden = config.hidden_size
    token_map: Tensor | None = None
    if "token_map" in file.tensors:
        token_map = read_tensor(file, "token_map", (config.draft_vocab_size,))
        if int(token_map.min()) < 0 or int(token_map.max()) >= config.vocab_size:
            raise BrokenModel(f"{file.path}: token_map names ids beyond {config.vocab_size} tokens")
    with torch.no_grad():
        for number in range(config.length):
            for layer in range(config.layers):
                linear = heads.layer(number, layer)
                weight = names.weight(number, layer) or f"{number}.{layer}.linear.weight"
                linear.weight.copy_(read_tensor(file, weight, (hidden, hidden)))
                if config.bias:
                    bias = names.bias(number, layer) or f"{number}.{layer}.linear.bias"
                    linear.bias.copy_(read_tensor(file, bias, (hidden,)))
        for number in range(len(heads.outputs)):
            name = names.output(number) or f"{number}.{config.layers}.weight"
            stored = file.tensors.get(name)
            rows = config.draft_vocab_size if stored is None else stored.shape[0]
            matrix = read_tensor(file, name, (rows, hidden))
            if token_map is not None and rows == config.vocab_size:
                matrix = matrix[token_map]
            if len(matrix) != config.draft_vocab_size:
                raise BrokenModel(
                    f"{file.path}: tensor {name} has {rows} rows, not {config.draft_vocab_size}"
                )
            heads.output(number).weight.copy_(matrix)
    heads.token_ids = token_map
    return heads.to(device=device, dtype=dtype).requires_grad_(False)
