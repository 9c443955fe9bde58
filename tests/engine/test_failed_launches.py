"""A failed launch has no effect: rows, parameters and counts are as if it had never happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline import LLM
from ridgeline.engine.errors import DeviceLost, InvalidRequest
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.run.cuda.runner import CudaRunner
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from tests.engine.winding_grammar import constrained
from tests.gpu.engines import Sizes, cuda_runner, family, weights_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; tests/gpu checks on it")

SPEC = family("llama", num_layers=1)
SIZES = Sizes(step_tokens=24, max_running=4, num_blocks=16, max_context=64)
OUT_OF_MEMORY = torch.OutOfMemoryError("none left")
# Each changes what greedy decoding gives, so that an answer without it is another.
PARAMS = {
    "bias": SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logit_bias={7: 100.0}),
    "penalties": SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, frequency_penalty=2.0),
    "seed": SamplingParams(temperature=5.0, max_tokens=3, ignore_eos=True, seed=3),
}
# Under a grammar, tokens after the first are chosen when the step is completed.
GRAMMAR = Request("grammar", [5, 9], replace(PARAMS["seed"], frequency_penalty=1.0), arrival=9.0)


def runner() -> CudaRunner:
    return cuda_runner(SPEC, weights_of(SPEC, torch.float32), SIZES)


def answers(runner: CudaRunner) -> dict[str, list[int]]:
    core = EngineCore(Scheduler(SIZES.limits()), runner)
    for number, (name, params) in enumerate(PARAMS.items()):
        core.add(Request(name, [5, 9, 11 + number], params, arrival=float(number)))
    core.add(constrained(GRAMMAR))
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for delta in core.step():
            assert delta.error is None
            tokens.setdefault(delta.request_id, []).extend(delta.tokens)
    core.check_integrity()
    return tokens


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    found = answers(runner())
    assert found["bias"] == [7] * 3
    assert len(found["grammar"]) == 3
    return found


def failing(function: Any, at: set[int], error: Exception, after: bool = False) -> Any:
    """The function, but its calls number `at` raise: before they do anything, or after all is done."""
    calls = iter(range(1 << 30))

    def call(*args: Any, **options: Any) -> Any:
        fails = next(calls) in at
        if fails and not after:
            raise error
        result = function(*args, **options)
        if fails:
            raise error
        return result

    return call


PLACES = ("set_row", "flush", "send", "forward", "masks", "sampled")
LATER = RuntimeError("odd")
CASES = [
    *(pytest.param(place, 0, OUT_OF_MEMORY, id=f"{place}-memory") for place in PLACES),
    pytest.param("masks", 2, LATER, id="masks-other"),
    *(
        pytest.param(place, 2, LATER, id=f"{place}-other", marks=pytest.mark.slow)
        for place in PLACES
        if place != "masks"
    ),
]


@pytest.mark.parametrize(("place", "call", "error"), CASES)
def test_a_launch_that_breaks_off_is_made_again_with_the_same_result(
    place: str, call: int, error: Exception, expected: dict[str, list[int]]
) -> None:
    tested = runner()
    where: dict[str, tuple[Any, str, bool]] = {
        "set_row": (tested._sampler._state, "set_row", False),
        "flush": (tested._sampler._state, "_send", False),
        "send": (tested._inputs.block, "upload", False),
        "forward": (tested.decoder, "pieces", False),
        "masks": (tested._sampler, "_send_masks", False),
        "sampled": (tested._sampler, "sample", True),  # tokens are drawn and counted, and the result is lost
    }
    owner, name, after = where[place]
    if place == "set_row" and call == 2:
        call = 1
    setattr(owner, name, failing(getattr(owner, name), {call}, error, after))
    assert answers(tested) == expected


def test_what_the_device_has_no_room_for_is_refused_before_it_is_queued() -> None:
    core = EngineCore(Scheduler(SIZES.limits()), runner())
    biased = SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        core.add(Request("biased", [1], biased))
    assert not core.has_work


def test_llm_refuses_what_the_device_has_no_room_for_before_the_first_prompt_is_computed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(Scheduler(replace(SIZES.limits(), max_waiting=2)), runner())
    monkeypatch.setattr(llm, "engine", replace(llm.engine, core=core))
    plain = SamplingParams(temperature=0.0, max_tokens=1)
    biased = SamplingParams(max_tokens=1, logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        llm.generate([[5, 9]] * 4, [plain] * 3 + [biased])
    assert core.stats().steps == 0
    assert len(llm.generate([[5, 9]] * 4, plain)) == 4


@pytest.fixture
def lost_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaRunner]:
    tested = runner()

    class Stream:
        def synchronize(self) -> None:
            raise RuntimeError("illegal memory access")

    def lost(error: Exception) -> None:
        tested._stream = Stream()  # type: ignore[assignment]
        CudaRunner._raise_if_lost(tested, error)

    monkeypatch.setattr(tested, "_raise_if_lost", lost)
    monkeypatch.setattr(tested.decoder, "pieces", failing(tested.decoder.pieces, {0}, RuntimeError("odd")))
    return tested


def test_a_device_that_is_lost_ends_the_engine(lost_device: CudaRunner) -> None:
    core = EngineCore(Scheduler(SIZES.limits()), lost_device)
    core.add(Request("one", [5], PARAMS["seed"]))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        core.step()
