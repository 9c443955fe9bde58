"""ridgeline: the whole inference stack in one package, from a kernel to a fleet.

The public names are loaded on first use, so that `import ridgeline` and `ridgeline --help` cost nothing.
"""

from typing import TYPE_CHECKING, Any

from ridgeline.version import __version__

if TYPE_CHECKING:
    from ridgeline.engine.client.client import AsyncClient
    from ridgeline.engine.client.llm import LLM
    from ridgeline.engine.schedule.request import SamplingParams

_PUBLIC = {
    "LLM": "ridgeline.engine.client.llm",
    "AsyncClient": "ridgeline.engine.client.client",
    "SamplingParams": "ridgeline.engine.schedule.request",
}

__all__ = ["LLM", "AsyncClient", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
