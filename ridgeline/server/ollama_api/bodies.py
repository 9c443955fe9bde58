"""What /api/… answers with, in Ollama's shapes. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.server.openai_api.response_bodies import ChatLogprob


class OllamaError(msgspec.Struct, frozen=True):
    """Every error: a body, or the last line of a stream that broke off."""

    error: str


class OllamaCalled(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: OllamaCalled


class OllamaSaid(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or one line of a streamed one; the counts and durations are on the last."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatLine(_Line, frozen=True, kw_only=True):
    message: OllamaSaid


class OllamaGenerateLine(_Line, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    embedding: list[float]


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What this server does not know of a model is empty."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int  # bytes of the weights in memory
    digest: str  # the same for the same model, software and backend
    details: OllamaDetails


class OllamaModels(msgspec.Struct, frozen=True):
    models: list[OllamaModel]


class OllamaRunning(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str  # far away: models stay loaded
    size_vram: int
    context_length: int


class OllamaRunningModels(msgspec.Struct, frozen=True):
    models: list[OllamaRunning]


class OllamaShown(msgspec.Struct, frozen=True, kw_only=True):
    license: str = ""
    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(msgspec.Struct, frozen=True):
    version: str
