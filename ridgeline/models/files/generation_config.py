"""SamplingDefaults: the sampling parameters recommended by the model's authors, for requests without them.

Read from generation_config.json or from the general.sampling keys of a GGUF file, as vLLM and llama.cpp do;
for a known model whose files have none, from its registry entry. Called when an engine is built and by
`ridgeline models inspect`. The engine checks the ranges.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.models.errors import BrokenModel, ModelNotFound
from ridgeline.models.files.config_values import read_json_object, shown
from ridgeline.models.files.gguf import GgufFile

FILE_NAME = "generation_config.json"
GGUF_PREFIX = "general.sampling."
# The files' keys → our names.
_HF_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
GGUF_KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_WHOLE = frozenset({"top_k", "max_tokens"})


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """None: the engine's default. The names match the engine's SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # for requests without a limit
    source: str = ""  # the file or table it comes from, for display

    def values(self) -> dict[str, Any]:
        """The values that are set, by name."""
        return {name: value for name, value in asdict(self).items() if name != "source" and value is not None}

    def text(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values().items())


NO_DEFAULTS = SamplingDefaults()


def sampling_defaults(
    path: Path,
    generation_config: str = "auto",
    overrides: str | None = None,
    recommended: SamplingDefaults | None = None,
) -> SamplingDefaults:
    """The defaults of the model at `path`: those of `generation_config`, then `overrides` (JSON).

    generation_config: auto uses the model's own files, none uses nothing, else a file or its directory.
    recommended: used by auto if the files have none.
    """
    if generation_config in ("none", "vllm"):  # vLLM's word for none
        found = NO_DEFAULTS
    elif generation_config == "auto":
        found = _of_model(path)
        if not found.values() and recommended is not None:
            found = recommended
    else:
        found = _of_file(Path(generation_config).expanduser())
    changed = parse_overrides(overrides)
    if not changed:
        return found
    sources = [found.source] if found.values() else []
    return replace(found, **changed, source=" and ".join([*sources, "--override-generation-config"]))


def parse_overrides(text: str | None) -> dict[str, Any]:
    """--override-generation-config as values with our names; raises ValueError with the reason."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"""must be a JSON object such as {{"temperature": 0.5}}, got {shown(given)}""")
    for key in given:
        if key not in _HF_KEYS and key != "max_tokens":
            near = difflib.get_close_matches(key, _HF_KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_HF_KEYS)}"
            raise ValueError(f"has the unknown key {shown(key)}; {hint}")
    try:
        return _values({_HF_KEYS.get(key, "max_tokens"): value for key, value in given.items()}, {})
    except _WrongValue as wrong:
        raise ValueError(str(wrong)) from None


def _of_model(path: Path) -> SamplingDefaults:
    if path.suffix == ".gguf":
        metadata = GgufFile(path).metadata
        values = {
            key.removeprefix(GGUF_PREFIX): value
            for key, value in metadata.items()
            if key.startswith(GGUF_PREFIX)
        }
        return _read(values, GGUF_KEYS, f"{path.name}: {GGUF_PREFIX}", f"{GGUF_PREFIX}* of {path.name}")
    beside = path.name.removesuffix("config.json")  # for a config.json on its own, as `read_spec` accepts
    file = path.with_name(beside + FILE_NAME) if path.suffix == ".json" else path / FILE_NAME
    return _of_file(file) if file.is_file() else NO_DEFAULTS


def _of_file(path: Path) -> SamplingDefaults:
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ModelNotFound(f"--generation-config {path}: no such file; use auto, none or a path")
    return _read(read_json_object(file), _HF_KEYS, f"{file}: ", str(file))


def _read(values: Mapping[str, Any], keys: Mapping[str, str], where: str, source: str) -> SamplingDefaults:
    try:
        found = _values(values, keys)
    except _WrongValue as wrong:
        raise BrokenModel(f"{where}{wrong}; --generation-config none ignores it") from None
    return SamplingDefaults(**found, source=source) if found else NO_DEFAULTS


class _WrongValue(Exception):
    """A value has the wrong type."""


def _values(values: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The numbers with our names, without null and absent ones. Without `keys` the names are ours already."""
    found: dict[str, Any] = {}
    for key, name in (keys or {key: key for key in values}).items():
        value = values.get(key)
        if value is None:
            continue
        is_whole = name in _WHOLE
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            raise _WrongValue(
                f"{key} is {shown(value)}; {'an integer' if is_whole else 'a number'} was expected"
            )
        found[name] = value if is_whole else float(value)
    if found.get("top_k") == -1:  # vLLM's value for off
        found["top_k"] = 0
    return found
