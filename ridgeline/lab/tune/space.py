"""Settings and their allowed values, as written on the command line: `step_tokens=64,256`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ridgeline.engine.config import EngineConfig
from ridgeline.lab.errors import BadInput
from ridgeline.lab.tune.ledger import Settings
from ridgeline.options import Option, OptionError, check_values, options_of

# Not tunable.
FIXED = ("model", "step_ring", "memory_share", "generation_config", "override_generation_config")
_OPTIONS = {option.name: option for option in options_of(EngineConfig) if option.name not in FIXED}


def known_values(cpus: int) -> dict[str, tuple[Any, ...]]:
    """Values to try for settings worth tuning, most promising settings first."""
    return {
        "step_tokens": (64, 128, 256, 512, 1024),
        "prefill_chunk": (64, 128, 256, 512),
        "max_running": (8, 16, 32, 64, 128),
        "threads": tuple(sorted({max(1, cpus // 2), cpus})),
        "prefix_cache": (True, False),
        "background_tokens": (4, 8, 16, 32),
        "kv_tokens": (8192, 32_768, 131_072),
        "block_size": (8, 16, 32),
        "kv_dtype": ("bfloat16", "int8"),
        "weights": ("bfloat16", "int8", "int4"),
        "overlap": (True, False),
        "cuda_graphs": (True, False),
    }


BY_DEFAULT = ("step_tokens", "prefill_chunk", "max_running", "threads", "prefix_cache")  # change no answer


def default_space(cpus: int, keys: str = "") -> dict[str, tuple[Any, ...]]:
    """Known values of these settings, comma-separated; by default of those that change no answer."""
    known = known_values(cpus)
    named = [key.strip().replace("-", "_") for key in keys.split(",") if key.strip()] or list(BY_DEFAULT)
    for key in named:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise BadInput(f"--keys: no values are known for {key!r}; {hint} Others: --try {key}=VALUE,VALUE")
    return {key: known[key] for key in named}


def parse_space(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """`KEY=VALUE,VALUE` each; values in search order."""
    space: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, values = _split(text, "--try")
        if key in space:
            raise BadInput(f"--try {key} is given twice: write all its values in one")
        if len(set(map(str, values))) != len(values):
            raise BadInput(f"--try {text}: a value is given twice")
        space[key] = tuple(values)
    return space


def parse_settings(texts: Sequence[str], flag: str = "--set") -> Settings:
    """`KEY=VALUE` each. A repeated key is refused: otherwise the last would silently win."""
    settings: Settings = {}
    for text in texts:
        key, values = _split(text, flag)
        if len(values) != 1:
            raise BadInput(f"{flag} {text}: one value, not {len(values)}")
        if key in settings:
            raise BadInput(f"{flag} {key} is given twice")
        settings[key] = values[0]
    return settings


def _split(text: str, flag: str) -> tuple[str, list[Any]]:
    key, equals, rest = text.partition("=")
    key = key.strip().replace("-", "_")
    option = _OPTIONS.get(key)
    if option is None:
        near = difflib.get_close_matches(key, _OPTIONS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_OPTIONS)}"
        raise BadInput(f"{flag} {text}: unknown engine setting {key!r}; {hint}")
    parts = [part.strip() for part in rest.split(",")]
    if not equals or not all(parts):
        raise BadInput(f"{flag} {text}: write {key}=VALUE" + (",VALUE" if flag == "--try" else ""))
    return key, [_value(option, part, f"{flag} ") for part in parts]


def _value(option: Option, text: str, where: str) -> Any:
    value: Any = text
    if option.repeated and not text.startswith("["):
        value = text.split("+")
    elif option.base is bool:
        value = {"true": True, "on": True, "false": False, "off": False}.get(text.lower(), text)
    elif option.base is not str or option.repeated:
        try:
            value = json.loads(text)
        except ValueError:
            value = text
    try:
        return check_values(EngineConfig, {option.name: value}, where)[option.name]
    except OptionError as error:
        raise BadInput(str(error)) from error
