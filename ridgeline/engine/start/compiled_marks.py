"""Which kernels a start may expect on disk: a mark for each model and plan whose kernels were all compiled.

A start with a mark loads every kernel before it is ready; one without compiles the first ones and lets other
processes compile the rest. A mark that is wrong costs time, never a result: a missing kernel is compiled.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import ridgeline.engine.run.cuda
import ridgeline.models.decoders
import ridgeline.ops.cuda

_MOST_PLANS = 32  # of one model


class CompiledMarks:
    def __init__(self, folder: Path, *model: Any) -> None:
        """folder: Triton's cache. model: whatever decides about its kernels, as far as known before the
        plan."""
        self._path = folder / f"compiled-{_digest(*model, _sources(), _versions())}.json"

    def __bool__(self) -> bool:
        """Whether all kernels of some plan of this model were compiled."""
        return bool(self._plans())

    def holds(self, *plan: Any) -> bool:
        return _digest(*plan) in self._plans()

    def add(self, *plan: Any) -> None:
        plans = [each for each in self._plans() if each != _digest(*plan)]
        temporary = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # the next start compiles again what it does not find
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps([*plans[1 - _MOST_PLANS :], _digest(*plan)]), encoding="utf-8")
            temporary.replace(self._path)

    def _plans(self) -> list[str]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _digest(*parts: Any) -> str:
    return sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:24]


def _sources() -> str:
    """Of everything that launches a kernel or is one."""
    found = sha256()
    for package in (ridgeline.ops.cuda, ridgeline.models.decoders, ridgeline.engine.run.cuda):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _versions() -> tuple[str, ...]:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    return tuple(map(version, ("torch", "triton")))
