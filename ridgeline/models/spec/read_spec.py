"""From a path to a ModelSpec: a directory in Hugging Face layout, a config.json, or a GGUF file.

The only entry point for the engine, the planner and `models inspect`. Describes everything it can read, even
if it cannot be served (`families.check_servable` decides that). Never opens a pickle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ridgeline.models.errors import PICKLE_SUFFIXES, ModelNotFound, UnsupportedModel
from ridgeline.models.files.config_values import read_json_object
from ridgeline.models.files.conversion import pickle_refusal
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.files.registry import refuse_pickles_alone
from ridgeline.models.nearest import config_advice, gguf_advice
from ridgeline.models.spec.families import BY_GGUF_ARCHITECTURE
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.readers.encoder_config import is_encoder
from ridgeline.models.spec.readers.end_tokens import hf_end_id
from ridgeline.models.spec.readers.gguf_config import spec_from_gguf
from ridgeline.models.spec.readers.hf_config import spec_from_hf


def read_spec(path: Path) -> ModelSpec:
    """The description of the model at `path`, or an error that names the file and the problem."""
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file or directory")
    if path.suffix == ".gguf":
        return _from_gguf(GgufFile(path))
    if path.suffix == ".json":
        return _from_config(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_refusal(path)
    raise UnsupportedModel(
        f"{path}: not a model; give a .gguf file, a config.json, or the directory with config.json"
    )


def _from_directory(directory: Path) -> ModelSpec:
    refuse_pickles_alone(directory)
    config = directory / "config.json"
    weights = sorted(directory.glob("*.safetensors"))
    if not config.is_file():
        if ggufs := sorted(directory.glob("*.gguf")):
            names = ", ".join(file.name for file in ggufs)
            raise ModelNotFound(f"{directory}: contains GGUF files; give one of them instead: {names}")
        raise ModelNotFound(f"{directory}: has no config.json")
    spec = _from_config(config)
    return replace(spec, stored_bytes=sum(file.stat().st_size for file in weights)) if weights else spec


def _from_config(config: Path) -> ModelSpec:
    """A config.json with the files next to it."""
    if config.name.endswith("hf_quant_config.json"):
        raise UnsupportedModel(f"{config}: describes a quantization; give the config.json next to it")
    if is_encoder(config):
        raise UnsupportedModel(
            f"{config}: describes an encoder, which computes vectors: serve it and use /v1/embeddings"
        )
    beside = config.name.removesuffix("config.json")  # one directory may have the files of several models
    generation = config.with_name(f"{beside}generation_config.json")
    quantization = config.with_name(f"{beside}hf_quant_config.json")
    content = read_json_object(config)
    try:
        return spec_from_hf(
            content,
            name=model_name(config),
            generation_config=read_json_object(generation) if generation.is_file() else None,
            quantization=read_json_object(quantization) if quantization.is_file() else None,
            tokenizer_end=hf_end_id(config.parent),
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}. {config_advice(content)}") from None


def _from_gguf(gguf: GgufFile) -> ModelSpec:
    try:
        return spec_from_gguf(gguf)
    except UnsupportedModel as error:
        if gguf.architecture in BY_GGUF_ARCHITECTURE:
            raise
        raise UnsupportedModel(f"{error}. {gguf_advice(gguf)}") from None


def model_name(config: Path) -> str:
    """The directory's name; in a hub cache (models--org--name/snapshots/<commit>) the repository's."""
    if config.name != "config.json":
        return config.stem.removesuffix("_config")
    directory = config.resolve().parent if config.parent == Path() else config.parent
    if directory.parent.name == "snapshots":
        return directory.parent.parent.name.removeprefix("models--").replace("--", "/")
    return directory.name
