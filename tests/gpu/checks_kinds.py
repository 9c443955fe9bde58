"""Every kind of layer on the device: as the torch decoder on the CPU, in float32; to the bit in deterministic
mode, whatever else is in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ridgeline.models.spec.coverage import refusal
from tests.gpu.collection import DEVICE, scaled
from tests.gpu.engines import Sizes, Work, bits_of, cuda_runner, on_cpu, serve, torch_runner, weights_of
from tests.gpu.models import DTYPES, compile_kernels, first_difference, greedy, prompt
from tests.models.kind_specs import SPECS, VOCAB

SIZES = Sizes(step_tokens=32, max_running=8, num_blocks=64, max_context=64)
LENGTHS = scaled((1, 9, 30, 45), (1, 19))
TOKENS = scaled(12, 2)
TOLERANCE = 2e-4  # of a log-probability in float32


def _work() -> Work:
    return [
        ([token % VOCAB for token in prompt(length, seed=2)], greedy(TOKENS, logprobs=4))
        for length in LENGTHS
    ]


def _as_the_reference(name: str) -> None:
    spec = SPECS[name]
    weights = weights_of(spec, DTYPES["float32"], device=DEVICE)
    compile_kernels(spec, "float32", SIZES)
    work = _work()
    runner = cuda_runner(spec, weights, SIZES)
    expected = serve(torch_runner(spec, on_cpu(weights), SIZES), SIZES, work)
    for found in (serve(runner, SIZES, work), [serve(runner, SIZES, [item])[0] for item in work]):
        for number, ((mine,), (theirs,)) in enumerate(zip(found, expected, strict=True)):
            assert (mine.error, theirs.error) == (None, None)
            difference = first_difference(mine, theirs, TOLERANCE)
            assert difference is None, f"{name}, request {number}: {difference}"


def _to_the_bit(name: str) -> None:
    spec = SPECS[name]
    weights = weights_of(spec, DTYPES["bfloat16"], device=DEVICE)
    compile_kernels(spec, "bfloat16", SIZES, deterministic=True)
    work = _work()
    runner = cuda_runner(spec, weights, SIZES, deterministic=True)
    together = bits_of(serve(runner, SIZES, work))
    for number, item in enumerate(work):
        for sizes in (SIZES, replace(SIZES, prefill_chunk=7)):
            assert bits_of(serve(runner, sizes, [item])) == [together[number]], f"{name}, request {number}"


def check_a_wide_shared_gate_to_the_bit() -> None:
    """The prompt in steps of 1, 7 and 300 tokens: K is long enough that a library would choose by rows."""
    spec = replace(SPECS["experts_shared"], hidden_size=scaled(2048, 64), max_context=scaled(512, 64))
    length, tokens = scaled((300, 8), (20, 2))
    sizes = replace(SIZES, step_tokens=scaled(512, 32), max_context=spec.max_context)
    compile_kernels(spec, "bfloat16", sizes, deterministic=True)
    weights = weights_of(spec, DTYPES["bfloat16"], device=DEVICE)
    item = [token % VOCAB for token in prompt(length, seed=3)], greedy(tokens, logprobs=4, prompt_logprobs=2)
    runner = cuda_runner(spec, weights, sizes, deterministic=True)
    found = [bits_of(serve(runner, replace(sizes, prefill_chunk=chunk), [item])) for chunk in (length, 7, 1)]
    assert found[1:] == found[:1] * 2


def _checks() -> dict[str, Callable[[], None]]:
    return {
        f"check_{name}_{how}": partial(check, name)
        for how, check in (("as_the_reference", _as_the_reference), ("to_the_bit", _to_the_bit))
        for name in SPECS
        if refusal(SPECS[name], "cuda") is None
    }


globals().update(_checks())
