"""The openai SDK's two clients, and what a streamed chat adds up to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAI

from tests.clients.conftest import KEY, TIMEOUT_S, Target

CLIENTS = ("openai", "openai (async)")


def client_of(name: str, target: Target, **options: Any) -> OpenAI | AsyncOpenAI:
    kind = AsyncOpenAI if name == "openai (async)" else OpenAI
    return kind(**{"base_url": target.v1, "api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S, **options})


@dataclass
class Joined:
    """One choice of a streamed chat, put together as any client would."""

    role: str = ""
    content: str | None = None
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)


def joined(parts: list[Any]) -> list[Joined]:
    choices: dict[int, Joined] = {}
    for choice in (choice for part in parts for choice in part.choices):
        into, delta = choices.setdefault(choice.index, Joined()), choice.delta
        into.role += delta.role or ""
        if delta.content is not None:
            into.content = (into.content or "") + delta.content
        into.logprobs += (choice.logprobs.content or []) if choice.logprobs else []
        into.finish_reason = choice.finish_reason or into.finish_reason
        for call in delta.tool_calls or []:
            if call.index == len(into.calls):
                assert call.type == "function"
                into.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            into.calls[call.index]["arguments"] += call.function.arguments or ""
    return [choices[index] for index in sorted(choices)]
