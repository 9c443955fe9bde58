"""Well-known models by name and hub id: the config values that a plan needs, without a download.

`published.json` has for each model its ids on Hugging Face and the values of its config.json that the readers
use. Read by `find_spec` and the planner; serving downloads the model itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True, slots=True)
class PublishedModel:
    name: str
    hub_ids: tuple[str, ...]  # the first one is used in a plan's command
    config: dict[str, Any]


def published_models() -> tuple[PublishedModel, ...]:
    return _all()


def find_published(model: str) -> PublishedModel | None:
    """By name, hub id or the last part of one, with or without hf:, case-insensitive; None if not listed.

    A revision (hf:org/name@abc) is never listed: it may differ.
    """
    wanted = model.removeprefix("hf:").lower()
    return next((known for known in _all() if wanted in _names(known)), None)


def published_id(known: PublishedModel, model: str) -> str:
    """The hub id that `model` names. Several models may have the same shape."""
    wanted = model.removeprefix("hf:").lower()
    named = (one for one in known.hub_ids if wanted in (one.lower(), one.lower().partition("/")[2]))
    return next(named, known.hub_ids[0])


def nearest_published(name: str, most: int = 2) -> list[str]:
    """Hub ids of models whose names start like this one, such as llama3 or qwen3:8b; closest first."""
    wanted = _letters(name)
    found = [known for known in _all() if _letters(known.name).startswith(wanted)]
    ranked = sorted(found, key=lambda known: (len(known.name), known.name))
    return [known.hub_ids[0] for known in ranked[:most]]


def _letters(name: str) -> str:
    return "".join(mark for mark in name.lower() if mark.isalnum())


def _names(known: PublishedModel) -> set[str]:
    ids = {hub_id.lower() for hub_id in known.hub_ids}
    return {known.name.lower(), *ids, *(hub_id.partition("/")[2] for hub_id in ids)}


@cache
def _all() -> tuple[PublishedModel, ...]:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(PublishedModel(name, tuple(row["hub_ids"]), row["config"]) for name, row in content.items())
