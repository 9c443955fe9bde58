"""The real SmolLM2, straight from its quantized file, equals transformers on the same dequantized weights."""

from __future__ import annotations

from pathlib import Path

import torch

from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import load_weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.models.gguf_oracle import llama_from_gguf

BLOCK_SIZE = 16


def test_logits_equal_transformers_at_every_position_of_200_tokens(smollm2_path: Path) -> None:
    spec = read_spec(smollm2_path)
    decoder = Decoder(spec, load_weights(smollm2_path, spec, torch.float32), select_backend("torch"))
    model = llama_from_gguf(smollm2_path)
    tokens = torch.randint(20, 5000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    kv = allocate_kv(spec, 14, BLOCK_SIZE, torch.float32)
    for layer in kv:
        layer.fill_(torch.nan)
    parts = []
    with torch.inference_mode():
        for start, end in ((0, 150), (150, 199), (199, 200)):
            row = InputRow(tokens[start:end], start, list(range(13, 0, -1)), logits_from=0)
            parts.append(decoder.forward(StepInputs.from_rows([row], BLOCK_SIZE), kv))
        expected = model(torch.tensor([tokens])).logits[0]
    actual = torch.cat(parts)
    difference = (actual - expected).abs().amax(dim=-1) / expected.abs().amax(dim=-1)
    assert difference.max().item() < 1e-3
