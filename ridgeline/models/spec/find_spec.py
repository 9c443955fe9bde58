"""From a path or a name to a ModelSpec: the only entry point for the planner.

Reads files and the registry's names through `read_spec`, and families that are planned but not served with
their own readers. Unknown models are rejected with the reason; weights are never opened.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ridgeline.models.errors import BrokenModel, ImpossibleShape, ModelNotFound, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues, read_json_object
from ridgeline.models.files.hub import fetch_config, hub_id
from ridgeline.models.files.registry import find_known, resolve
from ridgeline.models.spec.families import BY_MODEL_TYPE
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision
from ridgeline.models.spec.published import PublishedModel, find_published, published_models
from ridgeline.models.spec.read_spec import model_name, read_spec
from ridgeline.models.spec.readers.compressed import read_deepseek_v4
from ridgeline.models.spec.readers.grouped import read_minimax_m2, read_minimax_m3
from ridgeline.models.spec.readers.hf_config import spec_from_hf
from ridgeline.models.spec.readers.kimi_k3 import read_kimi_k3
from ridgeline.models.spec.readers.latent import read_latent
from ridgeline.models.spec.readers.nemotron import read_nemotron_h, read_pruned_llama
from ridgeline.models.spec.readers.planner_config import PlannerConfig
from ridgeline.models.spec.readers.qwen import read_qwen_hybrid, read_qwen_vl
from ridgeline.models.spec.readers.stored import known_format
from ridgeline.models.spec.readers.windowed import (
    read_gemma4,
    read_mimo_v2,
    read_step,
)

Reader = Callable[[PlannerConfig], ModelSpec]

# model_type → its reader. Served families are read by `spec_from_hf`.
READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "deepseek_ref": read_deepseek_v4,
        "deepseek_v3": read_latent,
        "deepseek_v32": read_latent,
        "deepseek_v4": read_deepseek_v4,
        "gemma4": read_gemma4,
        "glm_moe_dsa": read_latent,
        "kimi_k2": read_latent,
        "kimi_k25": read_latent,
        "kimi_k3": read_kimi_k3,
        "mimo_v2_flash": read_mimo_v2,
        "minimax_m2": read_minimax_m2,
        "minimax_m3": read_minimax_m3,
        "nemotron-nas": read_pruned_llama,
        "nemotron_h": read_nemotron_h,
        "qwen3_5": read_qwen_hybrid,
        "qwen3_5_moe": read_qwen_hybrid,
        "qwen3_vl": read_qwen_vl,
        "qwen3_vl_moe": read_qwen_vl,
        "step3p7": read_step,
    }
)


def find_spec(model: str | Path) -> ModelSpec:
    """The spec of a config.json, a directory with one, a GGUF file, a well-known model or org/name.

    Of models on the hub that are not well known the config alone is fetched, not the weights.
    """
    known = published_for(model)
    if known is not None:
        return _from_config(PlannerConfig(known.name, known.config, None), lambda: spec_of(known))
    path = _path_of(model)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or not config.is_file():
        return _from_spec(path)
    content = read_json_object(config)
    name = model_name(config)
    beside = config.with_name(config.name.removesuffix("config.json") + "hf_quant_config.json")
    quantization = read_json_object(beside) if beside.is_file() else None
    described = PlannerConfig(name, content, quantization)
    if config.name.endswith("hf_quant_config.json"):
        return _from_spec(path)  # its error says what to give instead
    return _from_config(described, lambda: read_spec(path))


def published_for(model: str | Path) -> PublishedModel | None:
    """The well-known model of this name. The registry's short names and files take precedence."""
    if isinstance(model, Path) or find_known(model) is not None or Path(model).expanduser().exists():
        return None
    return find_published(model)


def spec_of(known: PublishedModel) -> ModelSpec:
    return spec_from_hf(known.config, name=known.name)


def _from_config(described: PlannerConfig, spec: Callable[[], ModelSpec]) -> ModelSpec:
    """spec: reads the same config; called for served families."""
    model_type = ConfigValues(described.outer, described.where).optional_text("model_type")
    if model_type in BY_MODEL_TYPE:
        return replace(spec(), stored=described.storage().precision)
    reader = READERS.get(model_type or "")
    if reader is None:
        known = ", ".join(sorted({*READERS, *BY_MODEL_TYPE}))
        raise UnsupportedModel(
            f"{described.where}: the planner does not support model type {model_type!r}. Supported: {known}"
        )
    try:
        return reader(described)
    except ImpossibleShape as error:
        raise BrokenModel(f"{described.where}: {error}") from error


def _path_of(model: str | Path) -> Path:
    if isinstance(model, Path):
        return model
    if find_known(model) is not None:
        return resolve(model).path
    if hub_id(model) is not None:
        return fetch_config(model)
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelNotFound(
            f"{model}: no such file or model{_near(model)}; give a config.json, its directory, "
            "a .gguf file, a name of `ridgeline models list`, a well-known one like Qwen3-8B, or org/name"
        )
    return path


def _near(model: str) -> str:
    names = {known.name.lower(): known.name for known in published_models()}
    close = difflib.get_close_matches(model.rpartition("/")[2].lower(), names, n=1, cutoff=0.75)
    return f" (did you mean {names[close[0]]}?)" if close else ""


def _from_spec(path: Path) -> ModelSpec:
    """GGUF files, and models that are rejected."""
    spec = read_spec(path)
    return replace(spec, stored=Precision.named(known_format(spec.weight_format, spec.name)))
