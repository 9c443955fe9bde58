"""The bodies the server sends, as typed structs. Shapes are OpenAI's; our additions are marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.server.errors import ErrorReply


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Timing(msgspec.Struct, frozen=True):
    """Ours, only if asked: one choice's milliseconds. Inference is what the hardware is answerable for."""

    index: int
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    inference_ms: float | None
    preemptions: int
    drafted_tokens: int = 0  # guesses verified, and those that were right
    accepted_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()
    timing: list[Timing] | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """Ours (the shape is vLLM's): one candidate for one position of the prompt."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct):
    """The older shape: four lists of one entry per token. Grown piece by piece."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON text, as the model wrote it


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET  # instead of tool_calls, if `functions` were given


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None  # ours: the stop string or token id that matched
    token_ids: list[int] | UnsetType = UNSET  # only if requested; vLLM's name, as below


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion, or one event of a streamed one: they differ in nothing but length."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    max_model_len: int | None  # ours, as are the next fields; None until the engine is connected
    task: str | None = None  # "generate" or "embed"
    root: str | UnsetType = UNSET  # an alias's own model
    limits: dict[str, float] | UnsetType = UNSET  # of its machine, where measured
    owned_by: str = "ridgeline"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(msgspec.Struct, frozen=True):
    prompt: str


class RenderedPrompt(msgspec.Struct, frozen=True):
    prompt: str
    tokens: list[int] | UnsetType = UNSET


class Health(msgspec.Struct, frozen=True):
    status: str


class Readiness(msgspec.Struct, frozen=True):
    status: str
    reason: str


class Version(msgspec.Struct, frozen=True):
    version: str


class ExpertTokens(msgspec.Struct, frozen=True):
    """One layer: the tokens that chose each expert; imbalance: of the busiest expert over the mean."""

    layer: int
    imbalance: float | None  # null without tokens
    tokens: list[int]


class ExpertList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ExpertTokens]


Event = ChatChunk | TextCompletion
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()
_MARK = "\x00"


def encode(body: Any) -> bytes:
    return _encoder.encode(body)


def event(body: Event) -> bytes:
    """A body as a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def failure_event(reply: ErrorReply) -> bytes:
    """The last event of a stream that failed, in OpenAI's shape."""
    return b"data: " + reply.body() + b"\n\n"


class TextEvents:
    """Events that carry only new text of a choice: consecutive ones differ only in the text.

    The rest is encoded once per choice, from the same struct as every other event.
    """

    def __init__(self, event_of: Callable[[int, str], Event]) -> None:
        self._event_of = event_of
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def of(self, index: int, text: str) -> bytes:
        around = self._around.get(index)
        if around is None:
            before, _, after = event(self._event_of(index, _MARK)).rpartition(_encoder.encode(_MARK))
            around = self._around[index] = (before, after)
        return around[0] + _encoder.encode(text) + around[1]
