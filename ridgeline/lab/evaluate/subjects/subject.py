"""Subject: what answers. An engine in this process and a server over HTTP have this one face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.scoring.likelihood import Likelihood, Pair
from ridgeline.lab.evaluate.statistics.divergence import TokenScores
from ridgeline.lab.evaluate.verdicts import ServedFormat


class Scored(NamedTuple):
    """A scored continuation; `tokens` is filled only if top tokens were requested."""

    likelihood: Likelihood
    tokens: TokenScores | None


class Prompt(NamedTuple):
    text: str
    max_tokens: int
    stops: tuple[str, ...]


class Completion(NamedTuple):
    text: str
    tokens: int  # generated; 0: the server does not say


class Subject(Protocol):
    """name: as the user wrote it. facts: for reports; `identity` tells models of one name apart.
    most_top: top tokens per position that it can give. prefix: the token before a text, BOS or else EOS;
    None if it is not known. chat_only: it answers messages, and does not continue text. served: the model
    and its formats; None for a server, which does not tell.
    """

    name: str
    facts: dict[str, Any]
    most_top: int
    prefix: int | None
    chat_only: bool
    served: ServedFormat | None

    def refuse_scoring(self) -> str | None:
        """Why it cannot score given text; None if it can."""
        ...

    def score(self, pairs: Sequence[Pair], top: int, concurrency: int) -> list[Scored]: ...

    def complete(self, prompts: Sequence[Prompt], concurrency: int) -> list[Completion]:
        """Greedy answers, in the order of the prompts."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SubjectSpec:
    """A subject as written on the command line: `MODEL[,key=value…]` or `URL[,key=value…]`."""

    text: str
    name: str  # the model or the address
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def is_url(self) -> bool:
        return self.name.startswith(("http://", "https://"))


def parse_subject(text: str) -> SubjectSpec:
    """Settings are those of the engine (weights=int8, kv_dtype=int8, …); of a URL: model, tokenizer."""
    name, *parts = text.split(",")
    settings: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or not value:
            raise BadInput(f"{text!r}: {part!r} is not a setting; write MODEL,key=value,key=value")
        if key in settings:
            raise BadInput(f"{text!r}: {key} is given twice")
        settings[key] = value
    if not name:
        raise BadInput(f"{text!r}: no model or URL before the settings")
    return SubjectSpec(text, name, settings)
