"""From a chat body to what the engine is asked, and how its answer is to be read.

/v1/responses and /v1/messages turn their bodies into a ChatRequest and come here too: one way from messages
to tokens, for all of them. A bad request ends here.
"""

from __future__ import annotations

from ridgeline.engine.request import SamplingParams
from ridgeline.server.choices import Prompt
from ridgeline.server.course import Job
from ridgeline.server.errors import BadRequest
from ridgeline.server.front import Front
from ridgeline.server.prompts import chat_ids, check_prompts
from ridgeline.server.protocol import ChatRequest
from ridgeline.server.validation import check_stream_options, sampling_params


def chat_job(front: Front, body: ChatRequest) -> Job:
    served = front.served(body.model, "generate")
    check_stream_options(body)
    client = served.ready_client()
    params = _params(body, client.hello.vocab_size)
    prompts = [Prompt(chat_ids(client.tokenizer, body.messages, body))]
    check_prompts(client, prompts, params, "messages")
    return Job.of(body, client, served, prompts, params)


def _params(body: ChatRequest, vocab_size: int) -> SamplingParams:
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
        vocab_size=vocab_size,
    )
