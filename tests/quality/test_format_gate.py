"""The format gate: a fake-quantization in torch against the model in its own precision, per model class.

No native kernel takes part: what is measured is the loss of the format, of weights and inputs, and not the
library's arithmetic (test_kernel_gate). Bounds are 1.5 to 3 times what was measured, as samples are small
(docs/performance/quality.md). SmolLM2's file is Q4_1 already: for it, the model is the file's weights in
float32, and Q4_1 loses nothing.
"""

from __future__ import annotations

import pytest

from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.packed import load_packed
from ridgeline.ops.cpu.library import Format, KvFormat
from tests.quality.conftest import MAX_CONTEXT, Form, packed_table
from tests.quality.fake_quant import Inputs, fake_decoder, torch_logprobs
from tests.quality.native_paths import ISAS, kl
from tests.quality.stories import told
from tests.quality.test_kernel_gate import stories_table

# Mean KL in nats: (15-bit inputs, 8-bit inputs).
STORIES_BOUNDS = {
    "bfloat16": (0.0002, 0.0002),
    "int8": (0.0008, 0.0016),
    "int8-channel": (0.001, 0.0013),
    "int4": (0.14, 0.14),
    "Q4_0": (0.2, 0.2),
}
STORIES_KV_BOUND = 0.004  # int8 KV, float32 weights
SMOLLM2_FORMS = (
    (Form("int8", "int8", 0.0), (0.0025, 0.0075)),
    # The embedding, which is also the head, in 4 bits: a large loss, and the reason why it is kept in 8.
    pytest.param(Form("Q4_0", "auto", 0.0, Format.Q4_H), (0.85, 0.85), marks=pytest.mark.slow),
)
LARGE_BOUNDS = {"int8": 0.01, "int4": 0.035}  # start values of the 8B class

pytestmark = pytest.mark.skipif(not ISAS, reason="the native library, which packs the weights, is not built")


@pytest.fixture(scope="module")
def stories_text(stories_path):
    return told(stories_path, sequences=8, length=32)


@pytest.fixture(scope="module")
def stories_model(stories_path, stories_text):
    packed = load_packed(stories_path, read_spec(stories_path), "float32", keep=False)
    table = packed.table(max_context=128, num_blocks=1, max_step_tokens=1)
    return table, torch_logprobs(fake_decoder(read_spec(stories_path), table, None), stories_text)


@pytest.mark.parametrize("policy", STORIES_BOUNDS)
def test_a_format_of_stories_is_close_to_float32(policy, stories_path, stories_text, stories_model):
    spec, table = read_spec(stories_path), stories_table(stories_path, policy)
    found = losses(spec, table, stories_text, stories_model[1])
    print(f"\nstories260K {policy}: {found[0]:.6f} {found[1]:.6f}")
    assert all(0 < loss <= bound for loss, bound in zip(found, STORIES_BOUNDS[policy], strict=True)), found


def test_an_int8_kv_cache_of_stories_is_close_to_float32(stories_path, stories_text, stories_model):
    table, expected = stories_model
    decoder = fake_decoder(read_spec(stories_path), table, None, KvFormat.INT8)
    assert 0 < kl(expected, torch_logprobs(decoder, stories_text)).mean() <= STORIES_KV_BOUND


@pytest.mark.parametrize(("form", "bounds"), SMOLLM2_FORMS, ids=lambda part: getattr(part, "name", ""))
def test_a_format_of_smollm2_is_close_to_its_file(form, bounds, smollm2_path, text):
    tokens = text(0, 1, 48).endings
    spec, stored = read_spec(smollm2_path), packed_table(smollm2_path, Form("Q4_1", "auto", 0.0))
    expected = torch_logprobs(fake_decoder(spec, stored, None), tokens)
    found = losses(spec, packed_table(smollm2_path, form), tokens, expected)
    print(f"\nSmolLM2-135M {form.name}: {found[0]:.6f} {found[1]:.6f}")
    assert all(0 < loss <= bound for loss, bound in zip(found, bounds, strict=True)), found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", LARGE_BOUNDS)
def test_a_format_of_the_named_model_is_close_to_its_file(policy, named_model, named_text):
    """Qwen2.5-Coder-1.5B, or the model of $RIDGELINE_GATE_MODEL; 4 bytes of memory per parameter."""
    spec, tokens = read_spec(named_model), named_text(sequences=2, length=128).endings

    def table(weights):
        return load_packed(named_model, spec, weights, keep=False).table(
            max_context=MAX_CONTEXT, num_blocks=1, max_step_tokens=1
        )

    expected = torch_logprobs(fake_decoder(spec, table("bfloat16"), None), tokens)
    found = losses(spec, table(policy), tokens, expected)
    print(f"\n{named_model.name} {policy}: {found[0]:.6f} {found[1]:.6f}")
    assert max(found) <= LARGE_BOUNDS[policy], found


def losses(spec, table, tokens, expected):
    """Mean KL with 15-bit and with 8-bit inputs."""
    decoder = fake_decoder(spec, table, Inputs.TWO_LIMBS)
    found = [kl(expected, torch_logprobs(decoder, tokens))]
    decoder.ops.inputs = Inputs.ONE_LIMB
    found.append(kl(expected, torch_logprobs(decoder, tokens)))
    return [float(one.mean()) for one in found]
