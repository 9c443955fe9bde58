"""The sampling flags of `run` and `chat`, and what they are as SamplingParams or as an HTTP body."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.options import option

if TYPE_CHECKING:
    from ridgeline.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampling:
    """Quieter than the API's defaults: at temperature 1 a small model rambles."""

    max_tokens: int = option(512, "most tokens of the answer")
    temperature: float = option(0.2, "randomness; 0 always takes the likeliest token")
    top_p: float = option(0.95, "keep the likeliest tokens that together have this probability")
    top_k: int = option(0, "keep this many of the likeliest tokens; 0: all")
    min_p: float = option(0.0, "drop tokens less likely than this share of the likeliest")
    repetition_penalty: float = option(1.0, "above 1 makes tokens that already occurred less likely")
    presence_penalty: float = option(0.0, "lowers tokens the answer already has, once")
    frequency_penalty: float = option(0.0, "lowers tokens the answer already has, each time")
    seed: int | None = option(None, "same seed, same answer; default: different each time")
    stop: tuple[str, ...] = option((), "end the answer before this text; may be given several times")
    ignore_eos: bool = option(False, "go on where the model would end; for measurements")

    def params(self) -> SamplingParams:
        """For the engine in this process. Wrong values raise InvalidRequest here."""
        from ridgeline.engine.request import SamplingParams

        return SamplingParams(**asdict(self))

    def body(self) -> dict[str, Any]:
        """For a server: what was left at 'not given' is left out."""
        values = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
