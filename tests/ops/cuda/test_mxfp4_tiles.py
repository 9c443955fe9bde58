"""The products of MXFP4 experts in tiles; where there is no GPU, the kernel's code on a model of Gluon.

The model raises where a kernel reads beyond a tensor. The expansion of the words is an instruction sequence:
here its result stands in, and `tests/gpu` checks the sequence itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.experts import mxfp4_tiles
from ridgeline.ops.cuda.experts.group import group
from ridgeline.ops.cuda.experts.scratch import experts_scratch
from ridgeline.ops.mxfp4 import Mxfp4, expanded, mxfp4
from tests.ops.cuda import gluon_model
from tests.ops.cuda.conftest import assert_close

TOKENS, NUM, PER_TOKEN, CLAMP = 11, 3, 2, 0.7


class _Kernel(gluon_model.Kernel):
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        launch = super().__getitem__(grid)
        return lambda *args, maxnreg, **constants: launch(*args, **constants)


@pytest.fixture(scope="module")
def tiles(device: str) -> Any:
    """The names of the kernel's file: on the GPU as they are, elsewhere on the model."""
    if device == "cuda":
        return vars(mxfp4_tiles)
    before = gluon_model._modules

    def modules() -> dict[str, Any]:
        made = before()
        language = made[f"{gluon_model.GLUON}.language"]
        language.__dict__.update(
            bfloat16=torch.bfloat16,
            int32=torch.int32,
            load=lambda pointer, mask=True, other=0, eviction_policy="": gluon_model.load(
                pointer, mask, other
            ),
            expand_dims=torch.unsqueeze,
            reshape=lambda x, shape: x.reshape(shape),
            permute=lambda x, order: x.permute(order),
            join=lambda a, b: torch.stack([a, b], dim=-1),
            split=lambda x: (x[..., 0], x[..., 1]),
            exp=torch.exp,
            DistributedLinearLayout=lambda *args: None,
        )
        ampere = type(language)(f"{gluon_model.GLUON}.language.nvidia.ampere")
        ampere.__dict__.update(mma_v2=lambda a, b, sums: sums + a.float() @ b.float())
        return {**made, ampere.__name__: ampere}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon_model, "_modules", modules)
        patch.setattr(gluon_model, "Kernel", _Kernel)
        content = gluon_model.modelled(str(mxfp4_tiles.__file__))
        content["_eight"] = _eight
        yield content


def _eight(words: Tensor, power: Tensor) -> tuple[Tensor, ...]:
    """The eight numbers of each word, 2^63 too small, as bfloat16."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    scale = torch.exp2((power >> 7).double() - 253)
    return tuple((values[words >> 4 * place & 15] * scale).bfloat16() for place in range(8))


@pytest.mark.parametrize("k", [64, 128, 320])
@pytest.mark.parametrize("block_t", [16, 32])
def test_both_products_are_the_references_and_read_nothing_beyond_the_weights(
    k: int, block_t: int, tiles: Any, device: str
) -> None:
    size, hidden = k, k
    gate_up, down = _stored(2 * size, hidden, device), _stored(hidden, size, device)
    x = torch.randn(TOKENS, hidden, device=device).bfloat16()
    choice, weights = reference.route(torch.randn(TOKENS, NUM, device=device), PER_TOKEN)
    chosen = choice.int()
    scratch = experts_scratch(TOKENS, NUM, PER_TOKEN, hidden, size, torch.bfloat16, device)
    for buffer in (scratch.inner, scratch.results):
        buffer.fill_(float("nan"))
    capacity = group(chosen, scratch.groups, NUM, block_t)
    shared = (weights, scratch.groups, capacity, block_t)
    tiles["gate_up_mxfp4_tiles"](x, *shared, gate_up, scratch.inner, bias=None, clamp=CLAMP)
    tiles["down_mxfp4_tiles"](scratch.inner, *shared, down, scratch.results)
    results = scratch.results.view(TOKENS, PER_TOKEN, hidden).float()
    expected = reference.experts(
        x.float(), chosen, weights, expanded(gate_up), expanded(down), "silu", clamp=CLAMP
    )
    assert_close((results * weights[..., None]).sum(1), expected, torch.bfloat16)


def _stored(rows: int, k: int, device: str) -> Mxfp4:
    blocks = torch.randint(256, (NUM, rows, k // 32, 16), dtype=torch.uint8, device=device)
    return mxfp4(blocks, torch.randint(117, 121, (NUM, rows, k // 32), dtype=torch.uint8, device=device))
