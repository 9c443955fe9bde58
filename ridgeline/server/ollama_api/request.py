"""The bodies of /api/… as typed structs: each field with what it means and how far it is served."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ridgeline.server.http.body_fields import About, Body, ignored, refused
from ridgeline.server.http.common_fields import PenaltyField, SeedField, SentBackField, TopLogprobsField
from ridgeline.server.http.field_types import (
    Id,
    Int,
    MinP,
    Name,
    RepetitionPenalty,
    Stop,
    Stops,
    Temperature,
    TopK,
    TopP,
)
from ridgeline.server.http.limits import MAX_CALLS, MAX_MESSAGES
from ridgeline.server.openai_api.request_bodies import Tools

_HOST = ignored("the server's settings decide how a model is run")
_MODEL = About("a name of `/api/tags`, with or without `:latest`; absent: the served model")
_LOADED = ignored("models stay loaded")
_OVERFLOW = ignored("a prompt beyond the context is refused, never cut")
_NO_IMAGES = refused("images are not supported yet", [])


class OllamaOptions(Body, kw_only=True, frozen=True):
    temperature: Annotated[Temperature | None, About("0 is greedy; default: the server's")] = None
    top_p: Annotated[TopP | None, About("nucleus sampling, above 0 up to 1")] = None
    top_k: Annotated[TopK | None, About("most likely tokens kept; 0 or -1: all")] = None
    min_p: Annotated[MinP | None, About("least probability kept, relative to the best token's")] = None
    seed: SeedField = None
    stop: Annotated[Stop | Stops | None, About("the text ends before any of these")] = None
    num_predict: Annotated[
        Annotated[int, msgspec.Meta(ge=-2, lt=2**31)] | None,
        About("most tokens to make; 0 or below, and by default: what the context leaves"),
    ] = None
    repeat_penalty: Annotated[RepetitionPenalty | None, About("0.01 to 10; 1 is off")] = None
    presence_penalty: PenaltyField = None
    frequency_penalty: PenaltyField = None
    repeat_last_n: Annotated[Any, refused("penalties count all tokens, prompt included", 64, -1)] = None
    penalize_newline: Annotated[Any, refused("penalties count newlines", True)] = None
    typical_p: Annotated[Any, refused("typical sampling is not supported", 1)] = None
    tfs_z: Annotated[Any, refused("tail-free sampling is not supported", 1)] = None
    mirostat: Annotated[Any, refused("mirostat is not supported", 0)] = None
    mirostat_tau: Annotated[Any, ignored("of mirostat, which is off")] = None
    mirostat_eta: Annotated[Any, ignored("of mirostat, which is off")] = None
    num_ctx: Annotated[Any, ignored("the context is the served model's; `--max-context` sets it")] = None
    num_keep: Annotated[Any, _OVERFLOW] = None
    num_batch: Annotated[Any, _HOST] = None
    num_gpu: Annotated[Any, _HOST] = None
    main_gpu: Annotated[Any, _HOST] = None
    num_thread: Annotated[Any, _HOST] = None
    numa: Annotated[Any, _HOST] = None
    low_vram: Annotated[Any, _HOST] = None
    f16_kv: Annotated[Any, _HOST] = None
    use_mmap: Annotated[Any, _HOST] = None
    use_mlock: Annotated[Any, _HOST] = None
    logits_all: Annotated[Any, _HOST] = None
    vocab_only: Annotated[Any, _HOST] = None
    embedding_only: Annotated[Any, _HOST] = None


class OllamaFunctionCall(Body, kw_only=True, frozen=True):
    name: Annotated[Name, About("the tool's name")]
    arguments: Annotated[dict[str, Any] | None, About("the arguments, as an object")] = None
    index: SentBackField = None
    description: SentBackField = None


class OllamaToolCall(Body, kw_only=True, frozen=True):
    function: Annotated[OllamaFunctionCall, About("which function, with which arguments")]
    id: Annotated[Id | None, About("what the tool's message may name in `tool_call_id`")] = None
    type: Annotated[Any, ignored("every call is a function call")] = None


class OllamaMessage(Body, kw_only=True, frozen=True):
    role: Annotated[Name, About("`system`, `user`, `assistant` or `tool`")]
    content: Annotated[str | None, About("the text")] = None
    thinking: Annotated[str | None, About("an assistant's, sent back; the template may use it")] = None
    tool_calls: Annotated[
        Annotated[list[OllamaToolCall], msgspec.Meta(max_length=MAX_CALLS)] | None,
        About("calls an assistant's message made"),
    ] = None
    tool_name: Annotated[
        Name | None, About("of a `tool` message: whose result it is; absent: the next call's")
    ] = None
    name: Annotated[Name | None, About("an older name of `tool_name`")] = None
    tool_call_id: Annotated[Id | None, About("of a `tool` message: which call it answers")] = None
    images: Annotated[Any, _NO_IMAGES] = None


class OllamaRequest(Body, kw_only=True, frozen=True):
    """What chat and generate have in common."""

    model: Annotated[Name | None, _MODEL] = None
    stream: Annotated[bool | None, About("one line of JSON for each part of the text; default true")] = None
    format: Annotated[
        Name | dict[str, Any] | None, About("`json`, or a JSON schema that the answer follows")
    ] = None
    options: Annotated[OllamaOptions | None, About("how tokens are chosen")] = None
    think: Annotated[
        bool | Name | None,
        About(
            "whether the model thinks first, or how much: `low`, `medium`, `high`; default: the template's"
        ),
    ] = None
    logprobs: Annotated[bool | None, About("log-probability of every token made")] = None
    top_logprobs: TopLogprobsField = None
    keep_alive: Annotated[Any, _LOADED] = None
    truncate: Annotated[Any, _OVERFLOW] = None
    shift: Annotated[Any, _OVERFLOW] = None


class OllamaChatRequest(OllamaRequest, kw_only=True, frozen=True):
    messages: Annotated[
        Annotated[list[OllamaMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None,
        About("the conversation; absent or empty: an answer of nothing, as after loading"),
    ] = None
    tools: Annotated[Tools | None, About("functions the model may call; up to 128")] = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True, frozen=True):
    prompt: Annotated[
        str | None, About("a user's message; absent or empty: an answer of nothing, as after loading")
    ] = None
    system: Annotated[str | None, About("a system message before it")] = None
    raw: Annotated[bool | None, About("true: the prompt is continued as it is, without a template")] = None
    template: Annotated[Any, refused("a client's own template is not accepted", "")] = None
    suffix: Annotated[Any, refused("infilling is not supported yet", "")] = None
    context: Annotated[Any, refused("send the conversation to /api/chat instead", [])] = None
    images: Annotated[Any, _NO_IMAGES] = None
    width: Annotated[Any, refused("images are not made")] = None
    height: Annotated[Any, refused("images are not made")] = None
    steps: Annotated[Any, refused("images are not made")] = None


class OllamaEmbedRequest(Body, kw_only=True, frozen=True):
    model: Annotated[Name | None, _MODEL] = None
    input: Annotated[str | list[str], About("a text, or up to 2048")]
    truncate: Annotated[bool | None, About("false: refuse longer texts instead of cutting; default true")] = (
        None
    )
    dimensions: Annotated[Int | None, About("keep this many of a vector's first numbers, and normalize")] = (
        None
    )
    options: Annotated[Any, ignored("an encoder chooses no tokens")] = None
    keep_alive: Annotated[Any, _LOADED] = None


class OllamaEmbeddingsRequest(Body, kw_only=True, frozen=True):
    model: Annotated[Name | None, _MODEL] = None
    prompt: Annotated[str | None, About("a text; longer ones are cut")] = None
    options: Annotated[Any, ignored("an encoder chooses no tokens")] = None
    keep_alive: Annotated[Any, _LOADED] = None


class OllamaShowRequest(Body, kw_only=True, frozen=True):
    model: Annotated[Name | None, _MODEL] = None
    name: Annotated[Name | None, About("the older name of `model`")] = None
    verbose: Annotated[Any, ignored("there is no more to tell")] = None
