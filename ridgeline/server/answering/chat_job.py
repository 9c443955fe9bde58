"""From a chat body to what the engine is asked, and how its answer is to be read.

/v1/responses and /v1/messages turn their bodies into a ChatRequest and come here too: one way from messages
to tokens, for all of them. A bad request ends here.
"""

from __future__ import annotations

from typing import Any

from ridgeline.engine.link.messages import Hello
from ridgeline.engine.plan.request import SamplingParams
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.server.answering.answer_grammar import AnswerGrammar, answer_grammar
from ridgeline.server.answering.choices import Prompt
from ridgeline.server.answering.prompts import check_prompts, counted_ids, rendered_chat, text_ids
from ridgeline.server.answering.running_request import Job
from ridgeline.server.answering.speech import PROMPT_TAIL, Speech, needs_special, speech_of
from ridgeline.server.answering.tools import ToolUse, tool_use
from ridgeline.server.answering.validation import (
    check_stream_options,
    sampling_params,
    template_messages,
    with_default_length,
)
from ridgeline.server.errors import BadRequest
from ridgeline.server.front import Front
from ridgeline.server.openai_api.protocol import ChatRequest, TokenizeRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def chat_job(front: Front, body: ChatRequest) -> Job:
    served = front.served(body.model, "generate")
    check_stream_options(body)
    client = served.ready_client()
    speech, use = speech_of(client.tokenizer, front.config), tool_use(body)
    prompt = chat_prompt(client.tokenizer, speech, use, body)
    inside_reasoning = speech.reasoning is not None and speech.reasoning.opened_by(prompt[-PROMPT_TAIL:])
    grammar = answer_grammar(body, speech, use, inside_reasoning, client.tokenizer)
    new_parser = speech.new_parser(use.callable, inside_reasoning)
    show_special = new_parser is not None and needs_special(client.tokenizer, speech)
    params = _params(body, client.hello, grammar, show_special)
    prompts = [Prompt(text_ids(client, prompt, "messages", add_special=False))]
    check_prompts(client, prompts, params, "messages")
    params = with_default_length(params, client.hello)
    return Job.of(body, client, served, prompts, params, new_parser, grammar.field)


def prompt_tokens(front: Front, body: ChatRequest) -> int:
    """As `chat_job` counts, but for the context: whoever asks wants to know whether it fits."""
    client = front.served(body.model, "generate").ready_client()
    prompt = chat_prompt(client.tokenizer, speech_of(client.tokenizer, front.config), tool_use(body), body)
    return len(counted_ids(client, prompt, "messages", add_special=False))


def chat_prompt(
    tokenizer: Tokenizer, speech: Speech, use: ToolUse, body: ChatRequest | TokenizeRequest
) -> str:
    """The conversation as the model's template writes it, tools and reasoning's settings included."""
    messages, tools = speech.prepared(template_messages(body.messages or []), use)
    own = _effort_variables(body) if isinstance(body, ChatRequest) else {}
    return rendered_chat(tokenizer, messages, tools, body, own)


def _effort_variables(body: ChatRequest) -> dict[str, Any]:
    """`reasoning_effort` as templates take it: some by that name, others by a switch."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise BadRequest(
            "reasoning_effort", f"unknown effort {effort[:64]!r}; known are {', '.join(EFFORTS)}"
        )
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


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
