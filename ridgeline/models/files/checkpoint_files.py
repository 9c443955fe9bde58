"""Finds the files of a checkpoint's weights: one file, or shards listed in an index.

Used by code that opens a checkpoint, and by the cache of packed weights to detect changes. Reads no tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ridgeline.models.errors import PICKLE_SUFFIXES, BrokenModel
from ridgeline.models.files.config_values import ConfigValues, read_json_object
from ridgeline.models.files.conversion import no_weights, pickle_refusal
from ridgeline.models.files.registry import refuse_pickles_alone
from ridgeline.models.files.safetensors_file import SafetensorsFile


def weights_file(path: Path) -> Path:
    """The first file of a checkpoint: a .gguf or .safetensors file, or an index of shards."""
    path = Path(path)
    if path.is_dir():
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.exists() or single.exists():
            return index if index.exists() else single
        refuse_pickles_alone(path)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise BrokenModel(f"{path}: contains {len(ggufs)} .gguf files; give the path of one of them")
        raise no_weights(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_refusal(path)
    return path


def tensor_names(path: Path) -> Collection[str]:
    """Of a checkpoint in safetensors, from its index or the file's header; none of other files."""
    file = weights_file(path)
    if file.suffix == ".json":
        return (ConfigValues(read_json_object(file), str(file)).mapping("weight_map") or {}).keys()
    return SafetensorsFile(file).tensors.keys() if file.suffix == ".safetensors" else ()


def shard_paths(path: Path) -> list[Path]:
    """The files that hold tensors: `path` itself, or the shards it lists."""
    if path.suffix != ".json":
        return [path]
    weight_map = ConfigValues(read_json_object(path), str(path)).mapping("weight_map")
    if not weight_map:
        raise BrokenModel(f"{path}: is not a safetensors index: it has no weight_map")
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        if Path(shard).name != shard:
            raise BrokenModel(f"{path}: lists the shard {shard!r}, which is outside the model's directory")
        if not (path.parent / shard).is_file():
            raise BrokenModel(f"{path.parent / shard}: the index lists this shard, but the file is missing")
    return [path.parent / shard for shard in shards]
