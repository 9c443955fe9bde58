"""From a path to a ModelSpec: a directory in Hugging Face layout, a config.json, or a GGUF file.

The one entrance for the engine, the planner and `models inspect`. Describes whatever it can read, also what
cannot be served (`families.check_servable` decides that). Never opens a pickle.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.models.errors import BrokenModel, ModelNotFound, UnsupportedModel
from ridgeline.models.gguf import GgufFile
from ridgeline.models.gguf_config import spec_from_gguf
from ridgeline.models.hf_config import spec_from_hf
from ridgeline.models.spec import ModelSpec

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_spec(path: Path) -> ModelSpec:
    """The description of the model at `path`, or an error that names the file and what is wrong with it."""
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file or directory")
    if path.suffix == ".gguf":
        return spec_from_gguf(GgufFile(path))
    if path.suffix == ".json":
        return _from_config(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise _pickle(path)
    raise UnsupportedModel(
        f"{path}: not a model; give a .gguf file, a config.json, or the directory that holds config.json"
    )


def _from_directory(directory: Path) -> ModelSpec:
    config = directory / "config.json"
    weights = sorted(directory.glob("*.safetensors"))
    pickles = sorted(file for file in directory.iterdir() if file.suffix in PICKLE_SUFFIXES)
    ggufs = sorted(directory.glob("*.gguf"))
    if pickles and not weights:
        raise _pickle(pickles[0])
    if not config.is_file():
        if ggufs:
            names = ", ".join(file.name for file in ggufs)
            raise ModelNotFound(f"{directory}: holds GGUF files; give one of them instead: {names}")
        raise ModelNotFound(f"{directory}: has no config.json")
    spec = _from_config(config)
    return replace(spec, stored_bytes=sum(file.stat().st_size for file in weights)) if weights else spec


def _from_config(config: Path) -> ModelSpec:
    """A config.json with what lies beside it."""
    if config.name == "hf_quant_config.json":
        raise UnsupportedModel(f"{config}: describes a quantization; give the config.json beside it")
    generation, quantization = (
        config.with_name("generation_config.json"),
        config.with_name("hf_quant_config.json"),
    )
    return spec_from_hf(
        _read_json(config),
        name=_model_name(config),
        generation_config=_read_json(generation) if generation.is_file() else None,
        quantization=_read_json(quantization) if quantization.is_file() else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModel(f"{path}: holds {type(content).__name__}, not a JSON object")
    return content


def _model_name(config: Path) -> str:
    """The directory's name; in a hub cache (models--org--name/snapshots/<commit>) the repository's."""
    if config.name != "config.json":
        return config.stem.removesuffix("_config")
    directory = config.resolve().parent if config.parent == Path() else config.parent
    if directory.parent.name == "snapshots":
        return directory.parent.parent.name.removeprefix("models--").replace("--", "/")
    return directory.name


def _pickle(path: Path) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path}: is a pickle, which can run code when it is opened; convert to safetensors and try again"
    )
