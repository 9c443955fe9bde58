"""The kernel gate of the GPU's 8- and 4-bit products: a whole model against torch's fake-quantization of the
same format, with weights dequantized and inputs rounded as `ops.input_rounding` says.

In Triton's interpreter, with float32 around the products, on stories260K: a prompt, then a decode. The two
differ in the order of sums. An input that lies within a millionth of the middle of two 8-bit numbers may fall
to either side; in this model one such input changes a position's KL by up to 0.004. So the reference is
computed several times, with inputs that are off by a millionth, and the kernels must give one of the results.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU's kernels runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.start.cuda_trial import trial_step
from ridgeline.models.decoders.cuda import CudaDecoder
from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.checkpoint import open_source
from ridgeline.models.weights.low_bits.plan import low_bit_plan
from ridgeline.models.weights.stream import stream_weights
from ridgeline.models.weights.torch_weights import MATRICES, Weight, Weights
from ridgeline.ops import reference, torch_backend
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.input_rounding import round_inputs
from ridgeline.ops.inputs import InputRow, StepInputs
from ridgeline.ops.low_bits import LowBits, expanded
from tests.quality.native_paths import kl, logprobs
from tests.quality.stories import told

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; the benchmark has its gates")

BLOCK, TOKENS = 16, 14
BOUND = 1e-4  # mean KL in nats
NOISE, REFERENCES = 1e-6, 8


class FakeQuant:
    """The torch backend, whose products with these matrices are those of the format, in float32."""

    NAME = "fake"

    def __init__(self, seed: int) -> None:
        self.matrices: dict[int, LowBits] = {}
        self.random = torch.Generator().manual_seed(seed)
        self.gated_mlp = partial(reference.gated_mlp, product=self.linear)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_backend, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        matrix = self.matrices.get(weight.data_ptr())
        if matrix is None:
            return reference.linear(x, weight, bias)
        inputs, format = x.float(), matrix.format
        if format.inputs:
            element = {"fp8": "e4m3", "int8": "int8"}[format.element]
            inputs = inputs * (1 + NOISE * torch.randn(inputs.shape, generator=self.random))
            inputs = round_inputs(inputs, element, group=format.group)
        out = inputs @ weight.t()
        return (out if bias is None else out + bias.float()).to(x.dtype)

    def expanded(self, weight: Any) -> Any:
        if not isinstance(weight, Weight) or weight.low is None:
            return weight
        values = expanded(weight.low)
        self.matrices[values.data_ptr()] = weight.low
        return Weight.dense(values)


def fake_decoder(spec: Any, weights: Weights, seed: int) -> Decoder:
    ops = FakeQuant(seed)
    layers = [
        replace(
            layer, **{name: ops.expanded(getattr(layer, name)) for name in MATRICES & set(layer.__slots__)}
        )
        for layer in weights.layers
    ]
    return Decoder(spec, replace(weights, layers=layers), ops)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def story(stories_path: Path) -> list[int]:
    return [int(token) for token in told(stories_path, sequences=1, length=TOKENS)[0]]


@pytest.mark.parametrize(
    "weights",
    ["fp8", pytest.param("int8", marks=pytest.mark.slow), pytest.param("int4", marks=pytest.mark.slow)],
)
def test_a_model_is_that_of_the_fake_quantization(weights: str, stories_path: Path, story: list[int]) -> None:
    spec = read_spec(stories_path)
    low = low_bit_plan(spec, weights, source=open_source(stories_path, spec))
    assert len(low.formats) == 4 * spec.num_layers
    stored = stream_weights(stories_path, spec, torch.float32, device="cpu", low=low)
    kv_shape = (spec.num_layers, 4, spec.num_kv_heads, 2, BLOCK, spec.head_dim)
    buffers = Buffers.allocate(spec, torch.float32, torch.device("cpu"), TOKENS, TOKENS, 64, low)
    decoder = CudaDecoder(spec, stored, torch.zeros(kv_shape, dtype=torch.float32), buffers, 64)
    found = []
    with torch.inference_mode():
        # A prompt of all tokens but one, whose states are all scored; then a decode.
        prompt = len(story) - 1
        step = trial_step(decoder, [prompt], 64)
        ids = torch.tensor(story, dtype=torch.int32)
        step = replace(step, token_ids=ids[:prompt], num_logits=prompt, logit_rows=torch.arange(prompt))
        found.append(decoder.forward(step).float().clone())
        for place in range(prompt, len(story)):
            one = trial_step(decoder, [1], 64)
            at = torch.tensor([place], dtype=torch.int32)
            tables = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
            one = replace(one, token_ids=ids[place : place + 1], positions=at, slots=at, tables=tables)
            found.append(decoder.forward(one).float().clone())
        divergences = []
        ours = logprobs(torch.cat(found).numpy())
        for seed in range(REFERENCES):
            fake, cache = fake_decoder(spec, stored, seed), allocate_kv(spec, 4, BLOCK, torch.float32)
            rows = [InputRow([token], place, [0, 1, 2, 3], 0) for place, token in enumerate(story)]
            steps = [StepInputs.from_rows([row], BLOCK) for row in rows]
            theirs = torch.cat([fake.forward(step, cache).float() for step in steps])
            divergences.append(float(np.mean(kl(logprobs(theirs.numpy()), ours))))
    assert min(divergences) <= BOUND, divergences
