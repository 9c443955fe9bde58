"""Chooses the drafter of an engine from `--speculate` and the backend, with a note for the start-up message.

Called by `build_engine` before anything is loaded.
"""

from __future__ import annotations

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.speculate.drafter import Drafter
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.speculate.suffix import SuffixDrafter

# What `auto` means on each backend: off until the gain of real traffic is measured on idle machines.
AUTO = {"native": "off", "torch": "off", "cuda": "off"}


def choose_speculation(
    config: EngineConfig, backend: str, vocab_size: int
) -> tuple[Speculation | None, tuple[str, ...]]:
    """None: off. Raises InvalidConfig for a drafter that the backend cannot verify."""
    if backend == "cuda" and config.speculate not in ("auto", "off"):
        raise InvalidConfig(
            f"--speculate {config.speculate} is for the native and torch backends; with the cuda backend use "
            "auto or off"
        )
    name = AUTO[backend] if config.speculate == "auto" else config.speculate
    if name == "off":
        is_told = backend == "cuda" and config.speculate == "auto"
        return None, ("speculation off: the cuda backend does not verify guesses yet",) * is_told
    drafter: Drafter = NgramDrafter() if name == "ngram" else SuffixDrafter()
    return Speculation(drafter, vocab_size), (f"speculation {name}, where it pays",)
