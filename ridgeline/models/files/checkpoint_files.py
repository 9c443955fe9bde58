"""Which files a checkpoint's weights are in: one, or shards that an index lists.

Used by whoever opens a checkpoint, and by the cache of packed weights to tell whether it has changed. Reads
no tensors.
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.models.errors import PICKLE_SUFFIXES, BrokenModel
from ridgeline.models.files.config_values import ConfigValues, read_json_object
from ridgeline.models.files.conversion import no_weights, pickle_refusal
from ridgeline.models.files.registry import refuse_pickles_alone


def weights_file(path: Path) -> Path:
    """The file a checkpoint begins with: a .gguf or .safetensors file, or an index of shards."""
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
            raise BrokenModel(f"{path}: holds {len(ggufs)} .gguf files; name the one to load")
        raise no_weights(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_refusal(path)
    return path


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
            raise BrokenModel(f"{path}: names the shard {shard!r}, which is not in the model's own directory")
        if not (path.parent / shard).is_file():
            raise BrokenModel(f"{path.parent / shard}: the index lists this shard, but the file is missing")
    return [path.parent / shard for shard in shards]
