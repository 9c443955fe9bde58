"""Keys a config.json leaves out are filled in as the reference code does, or the config is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

transformers = pytest.importorskip("transformers")

from ridgeline.models.errors import ModelError  # noqa: E402
from ridgeline.models.spec.model_spec import ModelSpec  # noqa: E402
from ridgeline.models.spec.readers.hf_config import spec_from_hf  # noqa: E402
from tests.models.test_spec_transformers import CASES, DECLARED, EXPERTS, reference_config  # noqa: E402

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
ALL_CASES = {**CASES, **DECLARED, **EXPERTS, "qwen3 windowed": ("Qwen3Config", {"head_dim": 16, **WINDOWED})}


def computed(spec: ModelSpec) -> ModelSpec:
    """What the model computes with. An unstated end token is none here, and token 2 there."""
    return replace(spec, notes=(), bos_id=None, eos_ids=(), pad_id=None)


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_missing_key_means_what_it_means_to_the_reference(name: str) -> None:
    """Each key left out alone, and together with layer_types, which newer files add to say it again."""
    kind, _ = ALL_CASES[name]
    full = reference_config(ALL_CASES[name]).to_dict()
    understood = 0
    for key in full:
        for also in (key, "layer_types"):
            partial = {other: value for other, value in full.items() if other not in (key, also)}
            try:
                ours = spec_from_hf(partial, name="tiny")
            except ModelError:
                continue
            # The reference's own token ids lie beyond a tiny vocabulary.
            filled = getattr(transformers, kind)(**partial).to_dict() | dict.fromkeys(TOKENS)
            theirs = spec_from_hf(filled, name="tiny")
            assert computed(ours) == computed(theirs), key
            understood += 1
    assert understood > len(full)
