"""Well-known models are planned by name, without a file or a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.models.errors import ModelNotFound
from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.find_spec import find_spec, published_for
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.published import find_published, published_id, published_models
from tests.models.test_planned_specs import CONFIGS

# Totals on Hugging Face, of the language model; those of the configs at hand are in test_planned_specs.
TOTALS = {
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-14B": 14_768_307_200,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-2407": 12_247_782_400,
    "Mistral-Small-24B-2501": 23_572_403_200,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "gemma-3-1b-it": 999_885_952,
    "gemma-3-4b-it": 3.88e9,
    "gemma-3-12b-it": 11.77e9,
    "gemma-3-27b-it": 27.01e9,
}


def costs(spec: ModelSpec) -> tuple[object, ...]:
    """What a plan needs; the bundled values leave out what changes no cost, such as rotary bases."""
    cache = CacheLayout.of(spec)
    counted = (spec.parameters, spec.active_parameters, spec.num_layers, str(spec.stored))
    return *counted, cache.kept(50_000), cache.read(50_000), spec.flops(100, 5_000), spec.max_context


@pytest.mark.parametrize("known", published_models(), ids=lambda known: known.name)
def test_a_well_known_model_has_the_published_number_of_parameters(known) -> None:
    shape = find_spec(known.name)
    assert shape.name == known.name
    if known.name in TOTALS:
        assert shape.parameters == pytest.approx(TOTALS[known.name], rel=0.01)
        return
    for hub_id in known.hub_ids:  # the same shape as from its config.json
        path = CONFIGS / f"{hub_id.replace('/', '--')}_config.json"
        if path.is_file():
            whole = find_spec(path)
            assert costs(shape) == costs(whole)
            return
    if not CONFIGS.is_dir():
        pytest.skip(f"{CONFIGS} is not there")
    raise AssertionError(f"{known.name}: neither a total nor a config to compare with")


@pytest.mark.parametrize("name", ["Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B", "hf:Qwen/Qwen3-8B"])
def test_a_model_is_found_by_name_and_hub_id(name: str) -> None:
    found = find_published(name)
    assert found is not None
    assert found.hub_ids[0] == "Qwen/Qwen3-8B"
    assert find_spec(name).parameters == 8_190_735_360


@pytest.mark.parametrize("model", [one for known in published_models() for one in known.hub_ids])
def test_a_hub_id_names_itself_and_not_another_model_of_its_shape(model: str) -> None:
    for name in (model, f"hf:{model}", model.lower(), model.partition("/")[2]):
        known = find_published(name)
        assert known is not None
        assert published_id(known, name) == model


def test_a_revision_is_not_what_was_published() -> None:
    assert find_published("hf:Qwen/Qwen3-8B@abc123") is None


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert published_for("Qwen3-8B") is not None
    (tmp_path / "Qwen3-8B").mkdir()
    assert published_for("Qwen3-8B") is None


def test_a_name_that_is_nearly_one_is_told() -> None:
    with pytest.raises(ModelNotFound, match="did you mean Qwen3-14B"):
        find_spec("Qwen3-14")
