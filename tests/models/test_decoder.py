"""The decoder equals transformers for every family: whole, in chunks, in mixed batches, through paged KV."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.rope import RopeScaling, RopeSpec
from ridgeline.models.weights.torch_weights import load_weights, random_weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.models.specs import decoder_spec
from tests.models.tiny_checkpoints import MODELS, tiny_model
from tests.models.tiny_families import VOCAB

BLOCK_SIZE = 16
LENGTHS = (100, 61, 33, 18)  # all longer than the tiny models' window of 9
TOLERANCE = 1e-4  # of the largest logit


class Paged:
    """A decoder over a small, NaN-poisoned, shuffled KV cache, fed row by row."""

    def __init__(self, decoder: Decoder, sequences: list[list[int]]) -> None:
        self.decoder = decoder
        self.sequences = sequences
        counts = [-(-len(tokens) // BLOCK_SIZE) for tokens in sequences]
        free = list(range(1, sum(counts) + 3))
        random.Random(0).shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.computed = [0] * len(sequences)
        self.kv = allocate_kv(decoder.spec, sum(counts) + 3, BLOCK_SIZE, torch.float32)
        for layer in self.kv:
            layer.fill_(torch.nan)

    def step(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Compute the next `counts[i]` tokens of each named sequence; logits of all of them."""
        rows = []
        for index, count in counts.items():
            start = self.computed[index]
            tokens = self.sequences[index][start : start + count]
            table = self.tables[index][: -(-(start + count) // BLOCK_SIZE)]
            rows.append(InputRow(tokens, start, table, logits_from=0))
            self.computed[index] = start + count
        with torch.inference_mode():
            logits = self.decoder.forward(StepInputs.from_rows(rows, BLOCK_SIZE), self.kv)
        parts = logits.split([len(row.token_ids) for row in rows])
        return dict(zip(counts, parts, strict=True))


def random_tokens(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB), k=length)


def expected_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().item()
    assert scale > 0.5, "the tiny model's logits are too flat to tell right from wrong"
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * scale)


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, PreTrainedModel]:
    """Our decoder and transformers' model of one checkpoint on disk."""
    model = tiny_model(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return load(directory), model


def load(path: Path) -> Decoder:
    spec = read_spec(path)
    return Decoder(spec, load_weights(path, spec, torch.float32), select_backend("torch"))


def test_a_whole_prompt_equals_transformers(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = pair
    tokens = random_tokens(100)
    logits = Paged(decoder, [tokens]).step({0: len(tokens)})[0]
    assert_close(logits, expected_logits(model, tokens))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_in_chunks_equals_transformers(pair: tuple[Decoder, PreTrainedModel], chunk: int) -> None:
    decoder, model = pair
    tokens = random_tokens(100)
    paged = Paged(decoder, [tokens])
    parts = [paged.step({0: min(chunk, 100 - start)})[0] for start in range(0, 100, chunk)]
    assert_close(torch.cat(parts), expected_logits(model, tokens))


def test_mixed_batches_equal_transformers(pair: tuple[Decoder, PreTrainedModel]) -> None:
    """Decodes, chunks and whole prompts in the same steps, sequences coming and going."""
    decoder, model = pair
    sequences = [random_tokens(length) for length in LENGTHS]
    paged = Paged(decoder, sequences)
    chooser = random.Random(1)
    logits: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(sequences))}
    while unfinished := [i for i, tokens in enumerate(sequences) if paged.computed[i] < len(tokens)]:
        counts = {}
        for index in chooser.sample(unfinished, chooser.randint(1, len(unfinished))):
            left = len(sequences[index]) - paged.computed[index]
            counts[index] = min(left, chooser.choice([1, 1, 1, 5, 30]))
        for index, part in paged.step(counts).items():
            logits[index].append(part)
    for index, tokens in enumerate(sequences):
        assert_close(torch.cat(logits[index]), expected_logits(model, tokens))


def test_the_reference_backend_computes_the_same(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = pair
    plain = copy.copy(decoder)
    plain.use(select_backend("reference"))
    tokens = random_tokens(40)
    assert_close(Paged(plain, [tokens]).step({0: 40})[0], expected_logits(model, tokens))


def small_spec(rope: RopeSpec | None = None) -> ModelSpec:
    return decoder_spec(
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=48,
        vocab_size=VOCAB,
        max_context=64,
        layers=((rope or RopeSpec(10000.0, 8), None),) * 2,
    )


def test_logits_are_computed_for_the_asked_rows_only_and_in_float32() -> None:
    spec = small_spec()
    decoder = Decoder(spec, random_weights(spec, torch.bfloat16), select_backend("torch"))
    kv = allocate_kv(spec, 4, BLOCK_SIZE, torch.bfloat16)
    rows = [InputRow([5, 6, 7], 0, [1], 2), InputRow([8, 9], 0, [2], None), InputRow([3, 4], 0, [3], 0)]
    with torch.inference_mode():
        some = decoder.forward(StepInputs.from_rows(rows, BLOCK_SIZE), kv)
        every = [replace(row, logits_from=0) for row in rows]
        all_rows = decoder.forward(StepInputs.from_rows(every, BLOCK_SIZE), kv)
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, all_rows[[2, 5, 6]], atol=0.05, rtol=0)


def test_the_cache_may_be_bfloat16_under_float32_activations() -> None:
    spec = small_spec()
    decoder = Decoder(spec, random_weights(spec, torch.float32), select_backend("torch"))
    inputs = StepInputs.from_rows([InputRow(random_tokens(30), 0, [1, 2], 0)], BLOCK_SIZE)
    with torch.inference_mode():
        wide = decoder.forward(inputs, allocate_kv(spec, 3, BLOCK_SIZE, torch.float32))
        narrow = decoder.forward(inputs, allocate_kv(spec, 3, BLOCK_SIZE, torch.bfloat16))
    assert 0 < (wide - narrow).abs().max() < 0.05 * wide.abs().max()


def test_dynamic_scaling_changes_nothing_up_to_the_trained_context_and_is_refused_beyond() -> None:
    dynamic = RopeSpec(10000.0, 8, RopeScaling("dynamic", 4.0, original_context=64))
    plain, scaled = small_spec(), small_spec(dynamic)
    weights = random_weights(plain, torch.float32)
    inputs = StepInputs.from_rows([InputRow(random_tokens(30), 0, [1, 2], 0)], BLOCK_SIZE)
    results = []
    for spec in (plain, scaled):
        decoder = Decoder(spec, weights, select_backend("torch"))
        with torch.inference_mode():
            results.append(decoder.forward(inputs, allocate_kv(spec, 3, BLOCK_SIZE, torch.float32)))
    assert torch.equal(*results)
    with pytest.raises(UnsupportedModel, match="trained context of 64 tokens, not up to 65"):
        Decoder(scaled, weights, select_backend("torch"), max_context=65)


def test_longrope_uses_its_short_factors_where_the_served_context_is_the_trained_one(tmp_path: Path) -> None:
    model = tiny_model("phi3-longrope")
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert any("16 tokens" in note for note in spec.notes)
    weights = load_weights(tmp_path, spec, torch.float32)
    decoder = Decoder(spec, weights, select_backend("torch"), max_context=16)
    tokens = random_tokens(16)
    logits = Paged(decoder, [tokens]).step({0: 16})[0]
    assert_close(logits, expected_logits(model, tokens))
    long = Decoder(spec, weights, select_backend("torch"), max_context=17)
    assert not torch.allclose(Paged(long, [tokens]).step({0: 16})[0], logits, atol=1e-3)


def test_yarn_multiplies_by_its_usual_factor_where_the_spec_states_none() -> None:
    """Cosine and sine both grow by 0.1 · ln(4) + 1, so q · k grows by its square."""
    stated, unstated = (
        RopeSpec(10000.0, 8, RopeScaling("yarn", 4.0, original_context=16, attention_factor=factor))
        for factor in (0.1 * math.log(4.0) + 1, None)
    )
    weights = random_weights(small_spec(), torch.float32)
    inputs = StepInputs.from_rows([InputRow(random_tokens(30), 0, [1, 2], 0)], BLOCK_SIZE)
    results = []
    for rope in (stated, unstated):
        decoder = Decoder(small_spec(rope), weights, select_backend("torch"))
        with torch.inference_mode():
            results.append(decoder.forward(inputs, allocate_kv(decoder.spec, 3, BLOCK_SIZE, torch.float32)))
    torch.testing.assert_close(*results)


def test_a_scaling_that_lacks_a_number_is_refused_by_its_name() -> None:
    spec = small_spec(RopeSpec(10000.0, 8, RopeScaling("llama3", 4.0, original_context=64)))
    with pytest.raises(BrokenModel, match="low_freq_factor"):
        Decoder(spec, random_weights(spec, torch.float32), select_backend("torch"))
