"""The CUDA decoder computes every kind of layer as the torch decoder does, in Triton's interpreter.

Random specs and weights, one per kind, in float32, through the runner: a prompt in chunks beside decodes, and
decode batches of one row and of several. Memory that was never written contains NaN. `tests/gpu` has the same
for a device, with every router.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.models.spec.coverage import COMPUTED, kinds_of, refusal
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.cuda.linear import gemv
from tests.gpu.engines import (
    Sizes,
    Work,
    bits_of,
    cuda_runner,
    poisoned_memory,
    serve,
    tokens_of,
    torch_runner,
    weights_of,
)
from tests.models.kind_specs import SPECS as ALL_SPECS
from tests.models.kind_specs import VOCAB

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; tests/gpu checks on it")

SIZES = Sizes(step_tokens=12, max_running=4, num_blocks=16, max_context=64)
SPECS = {name: spec for name, spec in ALL_SPECS.items() if refusal(spec, "cuda") is None}
# The other routers have their tests in tests/ops/cuda.
OTHER_EXPERTS = ("experts_parallel", "experts_sparsemixer")
TRIED = [name for name in SPECS if not name.startswith("experts_") or name in OTHER_EXPERTS]
# These run by default: each takes seconds in the interpreter.
QUICK = {
    *("layer_norm", "post_norm_only", "parallel", "unit_norm", "sinks", "partial_rope"),
    *("learned_positions", "tied_head_bias", *OTHER_EXPERTS),
}


def by_default(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def _memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And a program has many rows: the interpreter's time goes by programs."""
    config = gemv.gemv_config
    monkeypatch.setattr(gemv, "gemv_config", lambda *args, **more: replace(config(*args, **more), block_n=64))
    with poisoned_memory():
        yield


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize("name", by_default(TRIED, QUICK))
def test_answers_and_counts_of_experts_are_those_of_the_torch_decoder(name):
    """The second request ends first: the first goes on alone."""
    spec = SPECS[name]
    weights = weights_of(spec, torch.float32)
    work: Work = [(prompt(17), greedy(3)), (prompt(5), greedy(3))]
    runner, twin = cuda_runner(spec, weights, SIZES), torch_runner(spec, weights, SIZES)
    found, expected = serve(runner, SIZES, work), serve(twin, SIZES, work)
    assert tokens_of(found) == tokens_of(expected)
    assert runner.expert_counts() == twin.expert_counts()
    for (mine,), (theirs,) in zip(found, expected, strict=True):
        assert (mine.error, theirs.error) == (None, None)
        values = [[p for each in answer.logprobs for _, p in each.top] for answer in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], abs=5e-5)


@pytest.mark.parametrize(
    "name",
    by_default(["parallel", "projection_norm", "sinks", "chunked", "ungated"], ("parallel", "chunked")),
)
def test_deterministic_answers_have_the_same_bits_in_any_company(name):
    spec = SPECS[name]
    weights = weights_of(spec, torch.bfloat16)
    needle, company = (prompt(19), greedy(2)), (prompt(6), greedy(2))

    def bits(sizes: Sizes, *work: tuple[list[int], SamplingParams]) -> list[object]:
        runner = cuda_runner(spec, weights, sizes, deterministic=True)
        return bits_of(serve(runner, sizes, list(work)))[0]

    whole = bits(replace(SIZES, step_tokens=24), needle)
    assert bits(SIZES, needle, company) == whole


class LibraryProducts(TorchDispatchMode):
    """Records the matrix products of torch: on a device cuBLAS computes them, by the number of rows."""

    PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::dot"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self.PRODUCTS:
            self.found.append(f"{func} of {[tuple(arg.shape) for arg in args]}")
        return func(*args, **(kwargs or {}))


def test_the_dispatch_mode_finds_a_product():
    with LibraryProducts() as products:
        torch.mm(torch.ones(2, 3), torch.ones(3, 1), out=torch.empty(2, 1))
    assert products.found == ["aten.mm.out of [(2, 3), (3, 1)]"]


@pytest.mark.parametrize("name", ["plain", "ungated", "experts_shared", "experts_sparsemixer"])
def test_a_deterministic_step_leaves_no_product_to_the_library(name):
    spec = SPECS[name]
    runner = cuda_runner(spec, weights_of(spec, torch.bfloat16), SIZES, deterministic=True)
    with LibraryProducts() as products:
        ((answer,),) = serve(runner, SIZES, [(prompt(7), greedy(2))])
    assert answer.error is None
    assert products.found == []


def test_every_kind_that_the_backend_claims_is_here() -> None:
    assert COMPUTED["cuda"] == set().union(*(kinds_of(spec) for spec in SPECS.values()))
