"""From a chat body to the engine's job and the parser of its answer.

/v1/responses and /v1/messages convert their bodies to a ChatRequest and use this too: one path from messages
to tokens for all of them. Invalid requests are refused here.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.engine.link.messages import Hello
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.server.answering.answer_grammar import AnswerGrammar, answer_grammar
from ridgeline.server.answering.job import Job
from ridgeline.server.answering.model_formats import PROMPT_TAIL, ModelFormats, formats_of, needs_special
from ridgeline.server.answering.prompts import Prompt, check_prompts, counted_ids, rendered_chat, text_ids
from ridgeline.server.answering.thinking import template_variables, thinking_of
from ridgeline.server.answering.tools import ToolUse, tool_use
from ridgeline.server.answering.validation import (
    check_stream_options,
    sampling_params,
    template_messages,
    with_default_length,
)
from ridgeline.server.errors import BadRequest
from ridgeline.server.openai_api.request_bodies import ChatRequest, TokenizeRequest
from ridgeline.server.served_models import ServedModels


def chat_job(served_models: ServedModels, body: ChatRequest) -> Job:
    served = served_models.served(body.model, "generate")
    check_stream_options(body)
    client = served.ready_client()
    formats, use = formats_of(client.tokenizer, served_models.config), tool_use(body)
    prompt = chat_prompt(client.tokenizer, formats, use, body)
    inside_reasoning = formats.reasoning is not None and formats.reasoning.opened_by(prompt[-PROMPT_TAIL:])
    thinking = thinking_of(body, formats, inside_reasoning, client.tokenizer, served_models.config)
    grammar = answer_grammar(body, formats, use, inside_reasoning, client.tokenizer)
    new_parser = formats.new_parser(use.callable, inside_reasoning)
    show_special = new_parser is not None and needs_special(client.tokenizer, formats)
    params = _params(body, client.hello, grammar, show_special)
    if thinking is not None:
        params = replace(params, thinking=thinking.limit)
    prompts = [Prompt(text_ids(client, prompt, "messages", add_special=False))]
    check_prompts(client, prompts, params, "messages")
    params = with_default_length(params, client.hello)
    new_count = None if thinking is None else thinking.new_count
    return Job.of(body, client, served, prompts, params, new_parser, grammar.field, new_count)


def prompt_tokens(served_models: ServedModels, body: ChatRequest) -> int:
    """Count as `chat_job` does, without checking the context: the caller wants to know whether it fits."""
    client = served_models.served(body.model, "generate").ready_client()
    prompt = chat_prompt(
        client.tokenizer, formats_of(client.tokenizer, served_models.config), tool_use(body), body
    )
    return len(counted_ids(client, prompt, "messages", add_special=False))


def chat_prompt(
    tokenizer: Tokenizer, formats: ModelFormats, use: ToolUse, body: ChatRequest | TokenizeRequest
) -> str:
    """The conversation rendered by the model's template, with tools and reasoning settings."""
    messages, tools = formats.prepared(template_messages(body.messages or []), use)
    own = template_variables(body) if isinstance(body, ChatRequest) else {}
    return rendered_chat(tokenizer, messages, tools, body, own)


def _params(body: ChatRequest, engine: Hello, grammar: AnswerGrammar, show_special: bool) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs", "only allowed together with logprobs: true")
    newer = body.max_completion_tokens
    return sampling_params(
        body,
        max_tokens=body.max_tokens if newer is None else newer,
        max_tokens_field="max_tokens" if newer is None else "max_completion_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        logprobs_field="top_logprobs",
        prompt_logprobs=body.prompt_logprobs,
        engine=engine,
        grammar=grammar.grammar,
        show_special=show_special,
    )
