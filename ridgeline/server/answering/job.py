"""Job: what to ask of which engine, and how the client wants the answer. RunningRequest runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.engine.schedule.thinking import ThinkingCount
from ridgeline.server.answering.prompts import Prompt
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.openai_api.request_bodies import GenerationRequest
from ridgeline.server.parsing.events import OutputParser
from ridgeline.server.served_models import Served, fingerprint


@dataclass(frozen=True, slots=True)
class Job:
    client: AsyncClient
    served: Served
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    running_usage: bool = False  # in every chunk
    include_timing: bool = False
    return_token_ids: bool = False
    priority: int = 0
    cache_namespace: str = ""
    new_parser: Callable[[], OutputParser] | None = None  # for each choice; None: text is not parsed
    grammar_field: str = "grammar"  # the client's field that became `params.grammar`
    new_count: Callable[[], ThinkingCount] | None = None  # for each choice of a model that thinks

    @classmethod
    def of(
        cls,
        body: GenerationRequest,
        client: AsyncClient,
        served: Served,
        prompts: list[Prompt],
        params: SamplingParams,
        new_parser: Callable[[], OutputParser] | None = None,
        grammar_field: str = "grammar",
        new_count: Callable[[], ThinkingCount] | None = None,
    ) -> Job:
        return cls(
            client,
            served,
            prompts,
            params,
            new_parser=new_parser,
            grammar_field=grammar_field,
            new_count=new_count,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            running_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
            include_timing=bool(body.include_timing),
            return_token_ids=bool(body.return_token_ids),
            priority=body.priority or 0,
            cache_namespace=body.cache_salt or "",
        )

    def head(self, context: RequestContext, prefix: str) -> dict[str, Any]:
        """The fields that every body of the answer begins with."""
        return {
            "id": f"{prefix}-{context.request_id}",
            "created": context.created,
            "model": self.served.name,
            "system_fingerprint": fingerprint(self.client),
        }
