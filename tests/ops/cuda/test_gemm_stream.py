"""The streamed linears against plain torch; where there is no GPU, the kernel's code on a model of Gluon."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.cuda.linear import gemm_stream
from ridgeline.ops.cuda.linear.gemm_stream import (
    MOST_STAGES,
    SHARED_BYTES,
    StreamConfig,
    shapes_stream,
    stages_of,
    stream_config,
    token_block,
)
from tests.ops.cuda import gluon_model
from tests.ops.cuda.conftest import assert_close


class _Shared(gluon_model.Shared):
    """Shared memory that may be seen as boxes of another number of dimensions."""

    def index(self, index: Any) -> Any:
        part = self.data[int(index)]
        return _Shared(part, self.halves) if isinstance(part, Tensor) else part

    def permute(self, order: tuple[int, ...]) -> _Shared:
        assert order == (1, 0)
        return _Shared(self.data, self.halves, not self.flipped)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: None) -> _Shared:
        return _Shared(self.data.view(shape))

    @property
    def dtype(self) -> Any:
        return self.data.dtype


class _Descriptor(gluon_model.Descriptor):
    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], box: list[int], layout: None
    ) -> None:
        self.data, self.box = base.as_strided(shape, strides), box
        self.dtype = base.dtype


class _Kernel(gluon_model.Kernel):
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        launch = super().__getitem__(grid)
        return lambda *args, maxnreg, **constants: launch(*args, **constants)


@pytest.fixture(scope="module")
def stream(device: str) -> Any:
    """`stream_linear`: on the GPU as it is, elsewhere on the model."""
    if device == "cuda":
        return gemm_stream.stream_linear
    before = gluon_model._modules

    def modules() -> dict[str, Any]:
        made = before()
        language = made[f"{gluon_model.GLUON}.language"]
        language.__dict__.update(
            reshape=lambda x, shape: x.reshape(shape),
            permute=lambda x, order: x.permute(order),
            split=lambda x: (x[..., 0], x[..., 1]),
            exp=torch.exp,
            DistributedLinearLayout=lambda *args: None,
        )
        made[f"{gluon_model.GLUON}.nvidia.hopper"].__dict__.update(TensorDescriptor=_Descriptor)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon_model, "_modules", modules)
        patch.setattr(gluon_model, "Shared", _Shared)
        patch.setattr(gluon_model, "Kernel", _Kernel)
        patch.setitem(sys.modules, "modelled", ModuleType("modelled"))  # dataclasses look for theirs
        content = gluon_model.modelled(str(gemm_stream.__file__))
        content["stages_of"] = lambda config, block_t: 3  # a ring that is used more than once
        yield content["stream_linear"]


def _random(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def _poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("boxes", [1, 2, 3, 4])
@pytest.mark.parametrize(("tokens", "n", "k"), [(3, 64, 128), (17, 272, 488), (128, 48, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_batch_times_a_weight_of_any_size(
    tokens: int, n: int, k: int, boxes: int, dtype: torch.dtype, stream: Any, device: str
) -> None:
    x, weight = _random(tokens, k, dtype=dtype, device=device), _random(n, k, dtype=dtype, device=device)
    bias = _random(n, dtype=dtype, device=device, scale=5.0)
    out = _poisoned(tokens, n, dtype=dtype, device=device)
    stream(x, weight, out, StreamConfig(boxes, 1), bias=bias)
    assert_close(out, _exact(x, weight, bias), dtype)


@pytest.mark.parametrize("splits", [1, 3, 8])  # 8 of 5 steps: some parts are empty, and must be zeros
@pytest.mark.parametrize("together", [1, 2, 3])
def test_partial_sums_add_up_and_each_is_its_own_part_of_k(
    splits: int, together: int, stream: Any, device: str
) -> None:
    tokens, n, k = 20, 80, 320
    x = _random(tokens, k, dtype=torch.bfloat16, device=device)
    weight = _random(n, k, dtype=torch.bfloat16, device=device)
    partials = _poisoned(splits, tokens, n, dtype=torch.float32, device=device)
    stream(x, weight, partials, StreamConfig(1, splits, together, early=together == 1))
    assert_close(partials.sum(0), _exact(x, weight), torch.float32, tolerance=1e-4)
    part = 64 * -(-5 // splits)
    assert_close(partials[0], _exact(x[:, :part], weight[:, :part]), torch.float32, tolerance=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("boxes", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_gates_and_ups_become_their_gated_product(
    biased: bool, boxes: int, activation: str, stream: Any, device: str
) -> None:
    tokens, ffn, k = 19, 88, 456
    x = _random(tokens, k, dtype=torch.bfloat16, device=device)
    weight = _random(2 * ffn, k, dtype=torch.bfloat16, device=device, scale=0.1)
    bias = _random(2 * ffn, dtype=torch.bfloat16, device=device) if biased else None
    out = _poisoned(tokens, ffn, dtype=torch.bfloat16, device=device)
    stream(x, weight, out, StreamConfig(boxes, 1), bias=bias, activation=activation)
    gate, up = _exact(x, weight, bias).to(torch.bfloat16).chunk(2, dim=-1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert_close(out, active * up, torch.bfloat16)


@pytest.mark.parametrize("tokens", [3, 16, 40, 64, 128])
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 12288), (24576, 4096), (1024, 2048), (1024, 3072), (48, 24)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_a_cut_fills_the_machine_once_and_its_ring_fits(tokens: int, n: int, k: int, gated: bool) -> None:
    config = stream_config(tokens, n, k, gated=gated)
    block_t = token_block(tokens)
    stages = stages_of(config, block_t)
    assert 3 <= stages <= MOST_STAGES
    ring = stages * (64 * config.boxes + block_t) * 128 + 16 * stages + 1024
    assert ring * config.together <= SHARED_BYTES
    assert not gated or config.splits == 1
    steps = -(-k // 64)
    assert (config.splits - 1) * -(-steps // config.splits) < steps, "a part of K is empty"
    if n * k > 1 << 20 and not gated:
        assert 96 <= -(-n // (64 * config.boxes)) * config.splits <= 132 * 3
    assert stream_config(token_block(tokens), n, k, gated=gated) == config, "buffers are planned by buckets"


def test_shapes_that_copies_cannot_reach_are_left_to_others() -> None:
    assert shapes_stream(64, 4096, 4096, torch.bfloat16)
    assert not shapes_stream(64, 4096, 4096, torch.float32)
    assert not shapes_stream(64, 4096, 4100, torch.bfloat16)
    assert not shapes_stream(64, 4090, 4096, torch.bfloat16)
    assert not shapes_stream(129, 4096, 4096, torch.bfloat16)
