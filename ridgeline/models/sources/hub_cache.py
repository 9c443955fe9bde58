"""A model's snapshot in the hub's own cache, where it is complete: found without asking the hub."""

from __future__ import annotations

from pathlib import Path

from ridgeline.models.errors import ModelError
from ridgeline.models.files.checkpoint_files import shard_paths, weights_file
from ridgeline.models.files.hub import hub_parts

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")


def complete_snapshot(model: str) -> Path | None:
    """The folder of org/name[@revision], or None where a file is missing."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    repo, revision = hub_parts(model)
    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    try:
        has_weights = all(path.is_file() for path in shard_paths(weights_file(folder)))
    except (ModelError, OSError):
        return None
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    return folder if has_weights and has_tokenizer else None
