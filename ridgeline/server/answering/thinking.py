"""How much a model may think: a request's effort or budget, for the template and for the engine.

Called by `chat_job`. The template gets the effort in the variables that templates know; the engine gets a
number of tokens, after which it writes the closing tag.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.client.thinking_tags import thinking_tags
from ridgeline.engine.schedule.thinking import ThinkingBudget, ThinkingCount, ThinkingTags
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.server.answering.model_formats import ModelFormats, formats_of
from ridgeline.server.config import ServerConfig
from ridgeline.server.effort import DEFAULT, EFFORTS, effort_budgets
from ridgeline.server.errors import BadRequest
from ridgeline.server.openai_api.request_bodies import ChatRequest
from ridgeline.server.parsing.reasoning import ReasoningFormat

UNLIMITED = -1  # of thinking_token_budget
_budgets = functools.lru_cache(maxsize=8)(effort_budgets)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thinking of one request's answers: where it begins and ends, and how long it may be."""

    tags: ThinkingTags
    inside: bool  # the prompt has opened it
    budget: int | None

    def new_count(self) -> ThinkingCount:
        """Counts one answer's tokens for its usage, as the engine counts them for the budget."""
        return ThinkingCount(self.tags, self.inside)

    @property
    def limit(self) -> ThinkingBudget | None:
        return None if self.budget is None else ThinkingBudget(self.budget, self.tags, self.inside)


def thinking_of(
    body: ChatRequest, formats: ModelFormats, inside: bool, tokenizer: Tokenizer, config: ServerConfig
) -> Thinking | None:
    """None for a model that does not mark its reasoning: an effort has then no effect here."""
    budget = _budget(body, config)
    reasoning = formats.reasoning
    if reasoning is None:
        if body.thinking_token_budget not in (None, UNLIMITED):
            raise BadRequest(
                "thinking_token_budget", "this model does not mark its reasoning, so it cannot be limited"
            )
        return None
    return Thinking(_tags(tokenizer, reasoning), inside, budget)


def prepare_tags(tokenizer: Tokenizer, config: ServerConfig) -> None:
    """Read the vocabulary for the tags of a model that thinks, so that its first request does not have to."""
    reasoning = formats_of(tokenizer, config).reasoning
    if reasoning is not None:
        _tags(tokenizer, reasoning)


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """The effort as template variables: some templates take its name, others a switch of one of two names."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise BadRequest(
            "reasoning_effort", f"unknown effort {effort[:64]!r}; known are {', '.join(EFFORTS)}"
        )
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort, "enable_thinking": True, "thinking": True}


def _tags(tokenizer: Tokenizer, reasoning: ReasoningFormat) -> ThinkingTags:
    return thinking_tags(tokenizer, reasoning.opener.rstrip(), reasoning.closer, reasoning.leads)


def _budget(body: ChatRequest, config: ServerConfig) -> int | None:
    """The request's own budget, else its effort's."""
    given = body.thinking_token_budget
    if given is None:
        return _budgets(config.reasoning_budget)[body.reasoning_effort or DEFAULT]
    if given < UNLIMITED:
        raise BadRequest("thinking_token_budget", f"must be at least 0, or -1 for no limit; got {given}")
    return None if given == UNLIMITED else given
