"""The bodies clients may send, as typed structs: each field with what it means and how far it is served.

`decoding` turns bytes into these, `validation` turns these into what the engine takes, and the tables of
docs/http-api.md are generated from them. A field is supported, ignored (harmless, documented) or refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ridgeline.server.http import limits
from ridgeline.server.http.body_fields import About, Body, ignored, refused
from ridgeline.server.http.common_fields import (
    CacheHintField,
    CacheSaltField,
    EndUserField,
    IgnoreEosField,
    MinPField,
    ModelField,
    ObfuscationField,
    ParallelToolCallsField,
    PenaltyField,
    PriorityField,
    RepetitionPenaltyField,
    RetentionField,
    SeedField,
    SentBackField,
    StreamField,
    StrictSchemaField,
    TemperatureField,
    TemplateVariablesField,
    ThinkingBudgetField,
    ToolDescriptionField,
    ToolParametersField,
    TopKField,
    TopLogprobsField,
    TopPField,
    UntoldField,
)
from ridgeline.server.http.field_types import (
    Alternatives,
    Choices,
    Count,
    CountOrNone,
    GrammarText,
    Id,
    LogitBias,
    Name,
    Samples,
    Stop,
    StopIds,
    Stops,
    TokenIds,
    Variables,
    one_of,
)


class StreamOptions(Body, kw_only=True, frozen=True):
    include_usage: Annotated[bool | None, About("send a last chunk with the usage")] = None
    continuous_usage_stats: Annotated[
        bool | None, About("every chunk tells the usage so far; needs `include_usage`")
    ] = None
    include_obfuscation: ObfuscationField = None


class ContentPart(Body, kw_only=True, frozen=True):
    type: Annotated[Annotated[str, one_of("text")], About("`text`; every other kind is refused")]
    text: Annotated[str | None, About("the text of a `text` part")] = None
    image_url: Annotated[Any, refused("images are not supported yet")] = None
    video_url: Annotated[Any, refused("video is not supported yet")] = None
    input_audio: Annotated[Any, refused("audio is not supported yet")] = None
    file: Annotated[Any, refused("files are not supported yet")] = None
    refusal: Annotated[Any, refused("refusal parts are not supported yet")] = None
    prompt_cache_breakpoint: CacheHintField = None
    cache_control: CacheHintField = None


class CalledFunction(Body, kw_only=True, frozen=True):
    name: Annotated[Name, About("the tool's name")]
    arguments: Annotated[str, About("JSON text, as it was answered")]


class MessageToolCall(Body, kw_only=True, frozen=True):
    id: Annotated[Id, About("what the tool's message names in `tool_call_id`")]
    type: Annotated[Annotated[str, one_of("function")] | None, About("`function`")] = None
    function: Annotated[CalledFunction | None, About("which function, with which arguments")] = None
    custom: Annotated[Any, refused("custom tools are not supported; use functions")] = None
    index: Annotated[Any, ignored("of a streamed answer that is sent back")] = None


class Message(Body, kw_only=True, frozen=True):
    role: Annotated[
        Annotated[str, one_of("system", "developer", "user", "assistant", "tool", "function")],
        About(
            "`system`, `developer` (rendered as `system`), `user`, `assistant` or `tool`; in chat also "
            "`function`: the result of the last `function_call` with its `name`"
        ),
    ]
    content: Annotated[
        str | Annotated[list[ContentPart], msgspec.Meta(max_length=limits.MAX_PARTS)] | None,
        About("text, or text parts, which are joined with a newline"),
    ] = None
    name: Annotated[Name | None, About("given to the template, which may use it")] = None
    refusal: Annotated[Any, refused("refusals are not supported yet")] = None
    annotations: SentBackField = None
    audio: Annotated[Any, refused("audio is not supported yet")] = None
    reasoning_content: Annotated[
        str | None, About("an assistant's reasoning that is sent back; the template may use it")
    ] = None
    reasoning: Annotated[
        str | None, About("another name of `reasoning_content`, which counts if both are there")
    ] = None
    reasoning_details: Annotated[Any, ignored("the text is in `reasoning` or `reasoning_content`")] = None
    thinking_blocks: Annotated[Any, ignored("the text is in `reasoning` or `reasoning_content`")] = None
    id: SentBackField = None
    cache_control: CacheHintField = None
    tool_calls: Annotated[
        Annotated[list[MessageToolCall], msgspec.Meta(max_length=limits.MAX_CALLS)] | None,
        About("calls an assistant's message made"),
    ] = None
    tool_call_id: Annotated[Id | None, About("which call a `tool` message answers")] = None
    function_call: Annotated[
        CalledFunction | None, About("the call of an assistant's message, in the older shape; in chat alone")
    ] = None


Messages = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=limits.MAX_MESSAGES)]


class Function(Body, kw_only=True, frozen=True):
    name: Annotated[Name, About("1 to 64 of a-z, A-Z, 0-9, _ and -")]
    description: ToolDescriptionField = None
    parameters: ToolParametersField = None
    strict: Annotated[bool | None, About("arguments always follow the schema")] = None
    cache_control: CacheHintField = None


class ToolDefinition(Body, kw_only=True, frozen=True):
    type: Annotated[Annotated[str, one_of("function")], About("`function`")]
    function: Annotated[Function | None, About("what may be called")] = None
    custom: Annotated[Any, refused("custom tools are not supported; use functions")] = None
    cache_control: CacheHintField = None


Tools = Annotated[list[ToolDefinition], msgspec.Meta(max_length=limits.MAX_TOOLS)]


class FunctionName(Body, kw_only=True, frozen=True):
    name: Annotated[Name, About("the tool that must be called")]


class NamedToolChoice(Body, kw_only=True, frozen=True):
    type: Annotated[Annotated[str, one_of("function")], About("`function`")]
    function: Annotated[FunctionName | None, About("which one")] = None
    allowed_tools: Annotated[Any, refused("allowed_tools are not supported; send only those tools")] = None
    custom: Annotated[Any, refused("custom tools are not supported; use functions")] = None


class JsonSchemaFormat(Body, kw_only=True, frozen=True):
    name: Annotated[Name | None, About("1 to 64 of a-z, A-Z, 0-9, _ and -; nothing depends on it")] = None
    description: UntoldField = None
    schema: Annotated[dict[str, Any] | bool | None, About("the JSON schema every answer follows")] = None
    strict: StrictSchemaField = None


class ResponseFormat(Body, kw_only=True, frozen=True):
    type: Annotated[
        Annotated[str, one_of("text", "json_object", "json_schema")],
        About("`text`, `json_object` or `json_schema`"),
    ]
    json_schema: Annotated[JsonSchemaFormat | None, About("for `json_schema`")] = None
    schema: Annotated[
        dict[str, Any] | bool | None,
        About(
            "the JSON schema every answer follows, as llama.cpp takes it; not with `text` or `json_schema`"
        ),
    ] = None


class StructuredOutputs(Body, kw_only=True, frozen=True):
    json: Annotated[dict[str, Any] | GrammarText | bool | None, About("a JSON schema")] = None
    regex: Annotated[GrammarText | None, About("a regular expression the whole text matches")] = None
    choice: Annotated[Choices | None, About("texts, one of which is the answer")] = None
    grammar: Annotated[GrammarText | None, About("an EBNF grammar")] = None
    json_object: Annotated[bool | None, About("any JSON object")] = None


class GenerationRequest(Body, kw_only=True, frozen=True):
    """What chat and completions have in common."""

    model: ModelField = None
    stream: StreamField = None
    stream_options: Annotated[StreamOptions | None, About("only with `stream`; see below")] = None
    n: Annotated[Samples | None, About("samples per prompt, 1 to 128")] = None
    max_tokens: Annotated[
        Count | None, About("most tokens to make; what the context leaves, where that is less")
    ] = None
    min_tokens: Annotated[CountOrNone | None, About("tokens before which nothing stops it")] = None
    temperature: TemperatureField = None
    top_p: TopPField = None
    top_k: TopKField = None
    min_p: MinPField = None
    presence_penalty: PenaltyField = None
    frequency_penalty: PenaltyField = None
    repetition_penalty: RepetitionPenaltyField = None
    logit_bias: Annotated[
        LogitBias | None,
        About("token id (as a string) to -100 … 100; up to 1024"),
    ] = None
    seed: SeedField = None
    stop: Annotated[
        Stop | Stops | None,
        About("one string or up to 16, of up to 1024 characters; the text ends before it"),
    ] = None
    stop_token_ids: Annotated[
        StopIds | None,
        About("up to 1024 token ids that end the text"),
    ] = None
    include_stop_str_in_output: Annotated[bool | None, About("keep the matched stop in the text")] = None
    ignore_eos: IgnoreEosField = None
    prompt_logprobs: Annotated[
        Alternatives | None,
        About("0 to 20 alternatives for every prompt token, as `prompt_logprobs` in the answer"),
    ] = None
    priority: PriorityField = None
    cache_salt: CacheSaltField = None
    return_token_ids: Annotated[
        bool | None, About("the ids of the generated tokens, as `token_ids` of every choice")
    ] = None
    include_timing: Annotated[bool | None, About("add `usage.timing`: one record per choice, in ms")] = None
    skip_special_tokens: Annotated[
        bool | None, About("false: special tokens appear in the text; default true")
    ] = None
    guided_json: Annotated[
        dict[str, Any] | GrammarText | bool | None,
        About("a JSON schema the text follows; as in `response_format`"),
    ] = None
    guided_regex: Annotated[GrammarText | None, About("a regular expression the whole text matches")] = None
    guided_choice: Annotated[Choices | None, About("texts, one of which is the answer")] = None
    guided_grammar: Annotated[
        GrammarText | None, About("an EBNF grammar (Lark's notation) the text follows")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, About("the newer way to write the `guided_` fields")
    ] = None
    user: EndUserField = None


class ChatRequest(GenerationRequest, kw_only=True, frozen=True):
    messages: Annotated[Messages, About("the conversation; at least one message")]
    max_completion_tokens: Annotated[
        Count | None, About("the newer name of `max_tokens`; default: what the context leaves")
    ] = None
    logprobs: Annotated[bool | None, About("log-probability of every token made")] = None
    top_logprobs: TopLogprobsField = None
    add_generation_prompt: Annotated[
        bool | None, About("end the rendered prompt with the assistant's opening; default true")
    ] = None
    chat_template_kwargs: TemplateVariablesField = None
    response_format: Annotated[
        ResponseFormat | None, About("the shape of the answer: any text, a JSON object, or a schema's")
    ] = None
    tools: Annotated[Tools | None, About("functions the model may call; up to 128")] = None
    tool_choice: Annotated[
        Annotated[str, one_of("none", "auto", "required")] | NamedToolChoice | None,
        About("`none`, `auto` (the default with tools), `required`, or the function that must be called"),
    ] = None
    parallel_tool_calls: ParallelToolCallsField = None
    functions: Annotated[
        Annotated[list[Function], msgspec.Meta(max_length=limits.MAX_TOOLS)] | None,
        About("the older shape of `tools`; the answer has `function_call` and at most one call"),
    ] = None
    function_call: Annotated[
        Annotated[str, one_of("none", "auto")] | FunctionName | None,
        About("the older shape of `tool_choice`: `none`, `auto`, or the function that must be called"),
    ] = None
    modalities: Annotated[Any, refused("only text is made", ["text"])] = None
    audio: Annotated[Any, refused("audio is not supported yet")] = None
    prediction: Annotated[Any, ignored("a hint for speed alone")] = None
    reasoning_effort: Annotated[
        Name | None,
        About(
            "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`: given to the template, and limits "
            "the tokens of reasoning by `--reasoning-budget`; `none`: no reasoning"
        ),
    ] = None
    thinking_token_budget: ThinkingBudgetField = None
    verbosity: Annotated[Any, ignored("the model is not told of it")] = None
    web_search_options: Annotated[Any, refused("web search is not supported yet")] = None
    continue_final_message: Annotated[
        bool | None, About("the last message, which must be the assistant's, is continued, not answered")
    ] = None
    chat_template: Annotated[Any, refused("a client's own template is not accepted")] = None
    documents: Annotated[Any, refused("documents are not supported yet", [])] = None
    store: Annotated[Any, ignored("chat completions are not stored")] = None
    metadata: Annotated[Any, ignored("chat completions are not stored")] = None
    service_tier: Annotated[Any, ignored("there is one tier")] = None
    cache_control: CacheHintField = None
    prompt_cache_key: CacheHintField = None
    prompt_cache_options: CacheHintField = None
    prompt_cache_retention: RetentionField = None
    moderation: Annotated[Any, refused("moderation is not supported yet")] = None
    safety_identifier: EndUserField = None


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    prompt: Annotated[
        str | list[int | str | list[int]],
        About("text, token ids, or a list of either: choice `i·n + j` is sample `j` of prompt `i`"),
    ]
    logprobs: Annotated[Alternatives | None, About("0 to 20 alternatives per token, in the older shape")] = (
        None
    )
    echo: Annotated[bool | None, About("begin with the prompt, with its log-probabilities if asked")] = None
    add_special_tokens: Annotated[
        bool | None, About("begin a text prompt with the model's own special tokens; default true")
    ] = None
    suffix: Annotated[Any, refused("infilling is not supported yet", "")] = None
    best_of: Annotated[Any, refused("best_of is not supported; ask for n and choose", 1)] = None


class TokenizeRequest(Body, kw_only=True, frozen=True):
    model: ModelField = None
    prompt: Annotated[str | None, About("text; either this or `messages`")] = None
    messages: Annotated[Messages | None, About("a conversation, rendered as chat renders it")] = None
    tools: Annotated[Tools | None, About("for `messages`: as in a chat request")] = None
    add_special_tokens: Annotated[bool | None, About("for `prompt`; default true")] = None
    add_generation_prompt: Annotated[bool | None, About("for `messages`; default true")] = None
    chat_template_kwargs: Annotated[Variables | None, About("for `messages`")] = None
    return_token_strs: Annotated[bool | None, About("also the text of every token")] = None


class DetokenizeRequest(Body, kw_only=True, frozen=True):
    model: ModelField = None
    tokens: Annotated[TokenIds, About("token ids")]
    skip_special_tokens: Annotated[bool | None, About("leave special tokens out; default false")] = None


class TemplateRequest(Body, kw_only=True, frozen=True):
    model: ModelField = None
    messages: Annotated[Messages, About("a conversation, rendered as chat renders it")]
    tools: Annotated[Tools | None, About("as in a chat request")] = None
    add_generation_prompt: Annotated[bool | None, About("end with the assistant's opening; default true")] = (
        None
    )
    chat_template_kwargs: TemplateVariablesField = None
    return_tokens: Annotated[bool | None, About("also the token ids of the prompt")] = None
