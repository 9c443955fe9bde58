"""transformers' own reading of a Llama GGUF file: its names, its dequantization, its model.

The same steps as `from_pretrained(..., gguf_file=...)`, which also insists on the accelerate package.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def llama_from_gguf(path: Path) -> LlamaForCausalLM:
    """The float32 model transformers makes of the file."""
    # The file is read twice, and its names asked for once per module; uncached that takes twice as long.
    reader = patch("gguf.GGUFReader", cache(gguf.GGUFReader))
    names = patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map))
    with reader, names:
        config = LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
        model = LlamaForCausalLM(config).to(torch.float32).eval()
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model
