"""Writers of quantized checkpoints. `Writer` is what the driver needs of one; here is compressed-tensors'.

A checkpoint is written in parts, one for each layer and one for the rest, each complete or absent: a run that
is killed continues after its last part. The same matrices give the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ridgeline.lab.quantize.checkpoint import Checkpoint
from ridgeline.models.errors import PICKLE_SUFFIXES
from ridgeline.models.files.config_values import read_json_object
from ridgeline.models.files.safetensors_writer import write_safetensors
from ridgeline.models.quantized.compressed import compression_format, config_group, packed_tensors
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.matrix import QuantizedMatrix
from ridgeline.models.quantized.packings import StoredTensor

INDEX = "model.safetensors.index.json"
MOST_BYTES = 64 << 20  # of a file that is copied: tokenizers are the largest
_NOT_COPIED = (".safetensors", ".gguf", ".onnx", ".h5", ".msgpack", *PICKLE_SUFFIXES)


class Writer(Protocol):
    """Writes one checkpoint into a folder. Tensors have the source's names; `Checkpoint` has their roles."""

    def write(
        self, part: int, matrices: Mapping[str, QuantizedMatrix], kept: Mapping[str, StoredTensor]
    ) -> None:
        """Part `part`, counted from 0; writing it again replaces it."""

    def finish(self, kept_modules: Sequence[str], untied: bool) -> None:
        """After all parts. kept_modules: matrices in 16 bits; untied: the head is now a separate tensor."""


class CompressedWriter:
    """A folder in Hugging Face's layout, with the weights as compressed-tensors stores them."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, format: QuantFormat) -> None:
        self._folder, self._checkpoint, self._format = folder, checkpoint, format
        self._parts = checkpoint.layers + 1

    def write(
        self, part: int, matrices: Mapping[str, QuantizedMatrix], kept: Mapping[str, StoredTensor]
    ) -> None:
        tensors = dict(kept)
        for name, matrix in matrices.items():
            module = self._checkpoint.module(name)
            tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in packed_tensors(matrix).items()}
        write_safetensors(self._folder / self._file(part), tensors)

    def finish(self, kept_modules: Sequence[str], untied: bool) -> None:
        weight_map: dict[str, str] = {}
        total = 0
        for part in range(self._parts):
            header = _header(self._folder / self._file(part))
            for name, entry in header.items():
                weight_map[name] = self._file(part)
                begin, end = entry["data_offsets"]
                total += end - begin
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(self._folder / INDEX, index)
        config = read_json_object(self._checkpoint.path / "config.json")
        if untied:
            config["tie_word_embeddings"] = False
        config["quantization_config"] = quantization_config(
            self._format, [*kept_modules, self._checkpoint.module(self._checkpoint.head)]
        )
        self._copy_others()
        _write_json(self._folder / "config.json", config)  # last: a folder with it is complete

    def _file(self, part: int) -> str:
        return f"model-{part + 1:05d}-of-{self._parts:05d}.safetensors"

    def _copy_others(self) -> None:
        """Tokenizer, template, generation settings, licence: every small file but weights."""
        for file in sorted(self._checkpoint.path.iterdir()):
            is_weights = file.suffix in _NOT_COPIED or file.name.endswith(".safetensors.index.json")
            is_other = is_weights or file.name == "config.json" or file.name.startswith(".")
            if file.is_file() and not is_other and file.stat().st_size <= MOST_BYTES:
                shutil.copyfile(file, self._folder / file.name)


def quantization_config(format: QuantFormat, kept_modules: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json: the format of all linear layers, and those left out."""
    return {
        "quant_method": "compressed-tensors",
        "format": compression_format(format),
        "quantization_status": "compressed",
        "config_groups": {"group_0": config_group(format)},
        "ignore": list(kept_modules),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _write_json(path: Path, content: Any) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)
