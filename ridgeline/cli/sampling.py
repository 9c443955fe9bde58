"""The sampling flags of `run` and `chat`, and what they are as SamplingParams or as an HTTP body."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ridgeline.options import option

if TYPE_CHECKING:
    from ridgeline.engine.schedule.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampling:
    """None leaves a field to the model's defaults, here and at a server alike."""

    max_tokens: int = option(512, "stop after this many tokens")
    temperature: float | None = option(
        None, "scale the randomness; 0 always takes the likeliest token; default: the model's, else 1"
    )
    top_p: float | None = option(
        None, "keep the likeliest tokens that together have this probability; default: the model's, else 1"
    )
    top_k: int | None = option(
        None, "keep this many of the likeliest tokens; 0: all; default: the model's, else 0"
    )
    min_p: float | None = option(
        None, "drop tokens less likely than this share of the likeliest; default: the model's, else 0"
    )
    repetition_penalty: float | None = option(
        None, "make tokens that occurred before less likely, above 1; default: the model's, else 1"
    )
    presence_penalty: float = option(0.0, "lower tokens that the answer already has, once")
    frequency_penalty: float = option(0.0, "lower tokens that the answer already has, each time")
    seed: int | None = option(
        None, "repeat an answer with the same seed; default: a different answer each time"
    )
    stop: tuple[str, ...] = option((), "end the answer before this text; may be given several times")
    ignore_eos: bool = option(False, "continue where the model would end; for measurements")

    def check(self) -> None:
        """Raise InvalidRequest for a wrong value, before a model is loaded."""
        from ridgeline.engine.schedule.request import SamplingParams

        self.params(SamplingParams())

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """For the engine in this process: `defaults`, the model's, and over them what is given."""
        return replace(defaults, **self._given())

    def body(self) -> dict[str, Any]:
        """For a server, which has the same defaults: what is given."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in self._given().items()
        }

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}
