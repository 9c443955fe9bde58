"""The bodies of /v1/responses as typed structs: each field with what it means and how far it is served.

Input items and their parts are one struct each, as `type` may be left out of a message; `items` checks which
field goes with which type. Decoded by `server.http.decoding`, like every body.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ridgeline.server.http.body_fields import About, Body, ignored, refused
from ridgeline.server.http.common_fields import (
    CacheHintField,
    CacheSaltField,
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
    TopPField,
    UntoldField,
)
from ridgeline.server.http.field_types import (
    Alternatives,
    Int,
    LogitBias,
    Name,
    Stop,
    Stops,
    TopK,
)
from ridgeline.server.http.limits import MAX_MESSAGES, MAX_NAME_CHARACTERS, MAX_PARTS, MAX_TOOLS
from ridgeline.server.vector_stores.protocol import RankingOptions

MAX_ITEMS = MAX_MESSAGES  # of one conversation, earlier turns included

LOGPROBS = "message.output_text.logprobs"
RESULTS = "file_search_call.results"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Label = Annotated[str, msgspec.Meta(max_length=1024)]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
NO_FILES = "only text is read; images, audio and files are not supported yet"


class InputPart(Body, kw_only=True, frozen=True):
    type: Annotated[
        Name, About("`input_text`, `output_text`, or `reasoning_text` and `summary_text` in a reasoning item")
    ]
    text: Annotated[str | None, About("the text")] = None
    annotations: SentBackField = None
    logprobs: SentBackField = None
    prompt_cache_breakpoint: CacheHintField = None
    refusal: Annotated[Any, refused("refusal parts are not supported yet")] = None
    image_url: Annotated[Any, refused(NO_FILES)] = None
    detail: Annotated[Any, refused(NO_FILES)] = None
    file_id: Annotated[Any, refused(NO_FILES)] = None
    file_data: Annotated[Any, refused(NO_FILES)] = None
    file_url: Annotated[Any, refused(NO_FILES)] = None
    filename: Annotated[Any, refused(NO_FILES)] = None
    input_audio: Annotated[Any, refused(NO_FILES)] = None


Parts = Annotated[list[InputPart], msgspec.Meta(max_length=MAX_PARTS)]


class InputItem(Body, kw_only=True, frozen=True):
    type: Annotated[
        Name | None,
        About(
            "`message` (default), `function_call`, `function_call_output`, `reasoning`, `file_search_call`, "
            "`compaction` or `item_reference`"
        ),
    ] = None
    id: Annotated[Name | None, About("of the item; for `item_reference`: which stored item is meant")] = None
    role: Annotated[Name | None, About("of a message: `user`, `assistant`, `system` or `developer`")] = None
    content: Annotated[
        str | Parts | None, About("of a message: text or text parts; of `reasoning`: its text parts")
    ] = None
    call_id: Annotated[Name | None, About("which call is meant, in `function_call` and its output")] = None
    name: Annotated[Name | None, About("of `function_call`: the function's")] = None
    arguments: Annotated[str | None, About("of `function_call`: JSON text")] = None
    output: Annotated[
        str | Parts | None, About("of `function_call_output`: what the function returned, as text")
    ] = None
    summary: Annotated[Parts | None, About("of `reasoning`; kept, and not read by the model")] = None
    encrypted_content: Annotated[
        str | None,
        About("of `compaction`: the summary; of `reasoning`, where it is ignored: another server's"),
    ] = None
    status: Annotated[Name | None, ignored("of an earlier answer that is sent back")] = None
    phase: Annotated[Name | None, ignored("nothing depends on it")] = None
    caller: Annotated[Any, ignored("functions are called directly, always")] = None
    async_: Annotated[Any, refused("calls are answered in their turn", False)] = None
    namespace: Annotated[Name | None, About("of `function_call`: the function's, if it has one")] = None
    queries: Annotated[
        Annotated[list[str], msgspec.Meta(max_length=16)] | None,
        About("of `file_search_call`, which is sent back; the model does not read it again"),
    ] = None
    results: Annotated[Any, ignored("of `file_search_call`, which is sent back")] = None


class FunctionTool(Body, kw_only=True, frozen=True, tag_field="type", tag="function"):
    name: Annotated[
        Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)],
        About("1 to 64 of a-z, A-Z, 0-9, _ and -"),
    ]
    description: ToolDescriptionField = None
    parameters: ToolParametersField = None
    strict: Annotated[bool | None, About("arguments always follow the schema; default false")] = None
    output_schema: Annotated[Any, ignored("the model is not told of it")] = None
    allowed_callers: Annotated[Any, refused("only direct calls are made", ["direct"])] = None
    defer_loading: Annotated[Any, refused("every tool is told to the model at once", False)] = None
    async_: Annotated[Any, refused("calls are answered in their turn", False)] = None


class NamespaceTool(Body, kw_only=True, frozen=True, tag_field="type", tag="namespace"):
    name: Annotated[
        Name, About("the `namespace` of the calls; the model reads each function as `namespace__name`")
    ]
    description: Annotated[str | None, About("the model reads it with the first of the functions")] = None
    tools: Annotated[
        Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)],
        About("functions; custom tools are refused"),
    ]


class FileSearchTool(Body, kw_only=True, frozen=True, tag_field="type", tag="file_search"):
    vector_store_ids: Annotated[
        Annotated[list[Name], msgspec.Meta(min_length=1, max_length=8)], About("1 to 8 vector stores")
    ]
    filters: Annotated[Any, About("on attributes, as in a search of a vector store")] = None
    max_num_results: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=50)] | None, About("most results; 1 to 50, default 20")
    ] = None
    ranking_options: Annotated[RankingOptions | None, About("how results are ranked")] = None


class HostedTool(Body, kw_only=True, frozen=True, forbid_unknown_fields=False, tag_field="type"):
    """A tool that runs on OpenAI's servers and that clients send without being asked to: the model is not
    offered it, which changes nothing but that it cannot be called. All of its fields are ignored.
    """


class WebSearchTool(HostedTool, kw_only=True, frozen=True, tag="web_search"):
    pass


class WebSearchPreviewTool(HostedTool, kw_only=True, frozen=True, tag="web_search_preview"):
    pass


class ToolSearchTool(HostedTool, kw_only=True, frozen=True, tag="tool_search"):
    pass


class ImageGenerationTool(HostedTool, kw_only=True, frozen=True, tag="image_generation"):
    pass


ResponseTool = (
    FunctionTool
    | NamespaceTool
    | FileSearchTool
    | WebSearchTool
    | WebSearchPreviewTool
    | ToolSearchTool
    | ImageGenerationTool
)


class AllowedTool(Body, kw_only=True, frozen=True):
    type: Annotated[Name, About("`function`, or a kind of `tools` that the model is not offered")]
    name: Annotated[Name | None, About("a function of `tools`")] = None


class ResponseToolChoice(Body, kw_only=True, frozen=True):
    type: Annotated[Name, About("`function`, `allowed_tools` or `file_search`")]
    name: Annotated[Name | None, About("of `function`: the one that must be called")] = None
    mode: Annotated[Name | None, About("of `allowed_tools`: `auto` or `required`")] = None
    tools: Annotated[
        Annotated[list[AllowedTool], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        About("of `allowed_tools`: the model is told of no others"),
    ] = None


class TextFormat(Body, kw_only=True, frozen=True):
    type: Annotated[Name, About("`text`, `json_object` or `json_schema`")]
    name: Annotated[Name | None, About("of `json_schema`; nothing depends on it")] = None
    description: UntoldField = None
    schema: Annotated[dict[str, Any] | None, About("of `json_schema`: what every answer follows")] = None
    strict: StrictSchemaField = None


class TextOptions(Body, kw_only=True, frozen=True):
    format: Annotated[TextFormat | None, About("the shape of the answer")] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, ignored("the model is not told of it")] = (
        None
    )


class ReasoningOptions(Body, kw_only=True, frozen=True):
    effort: Annotated[Name | None, About("as `reasoning_effort` in chat")] = None
    summary: Annotated[Any, ignored("no summary is made; the reasoning itself is in the item's content")] = (
        None
    )
    generate_summary: Annotated[Any, ignored("the older name of `summary`")] = None
    context: Annotated[
        Any, refused("the template decides which earlier reasoning the model reads", "auto")
    ] = None
    mode: Annotated[Any, refused("there is one mode", "standard")] = None


class ResponseStreamOptions(Body, kw_only=True, frozen=True):
    include_obfuscation: ObfuscationField = None


class InputTokensRequest(Body, kw_only=True, frozen=True):
    """What makes the prompt; all there is to count its tokens."""

    model: ModelField = None
    input: Annotated[
        str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_ITEMS)] | None,
        About("a user's message, or items; up to 10,000, earlier turns included"),
    ] = None
    instructions: Annotated[
        str | None, About("a system message before all others; earlier responses' are not repeated")
    ] = None
    previous_response_id: Annotated[
        Name | None, About("a stored response that this one goes on from, with all that led to it")
    ] = None
    tools: Annotated[
        Annotated[list[ResponseTool], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        About("functions the model may call, alone or in namespaces, and `file_search`; up to 128"),
    ] = None
    tool_choice: Annotated[
        Name | ResponseToolChoice | None,
        About("`none`, `auto` (the default), `required`, a function, or `allowed_tools`"),
    ] = None
    parallel_tool_calls: ParallelToolCallsField = None
    text: Annotated[TextOptions | None, About("the shape of the answer's text")] = None
    reasoning: Annotated[ReasoningOptions | None, About("how much the model thinks first")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        ignored("nothing is left out: a conversation beyond the context is refused"),
    ] = None
    chat_template_kwargs: TemplateVariablesField = None
    conversation: Annotated[Any, refused("conversations are not kept; use previous_response_id")] = None
    personality: Annotated[Any, refused("personalities are not supported; write instructions")] = None


class ResponseRequest(InputTokensRequest, kw_only=True, frozen=True):
    stream: StreamField = None
    stream_options: Annotated[ResponseStreamOptions | None, About("only with `stream`")] = None
    store: Annotated[bool | None, About("keep the response for later requests to name; default true")] = None
    background: Annotated[
        bool | None, About("answer at once, and run without a connection; needs `store`")
    ] = None
    max_output_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None,
        About("most tokens to make, reasoning included; at most and by default what the context leaves"),
    ] = None
    temperature: TemperatureField = None
    top_p: TopPField = None
    top_logprobs: Annotated[
        Alternatives | None, About(f"0 to 20 alternatives per token; needs `{LOGPROBS}` in `include`")
    ] = None
    include: Annotated[
        Annotated[list[Include], msgspec.Meta(max_length=16)] | None,
        About(
            f"`{LOGPROBS}`, `{RESULTS}`; OpenAI's other values name what is never left out, or never there"
        ),
    ] = None
    metadata: Annotated[
        Metadata | None, About("up to 16 keys of up to 64 characters, values of up to 512; kept")
    ] = None
    client_metadata: Annotated[Any, ignored("the client's own notes, such as Codex's ids")] = None
    user: Annotated[Label | None, ignored("an end user's name; kept")] = None
    safety_identifier: Annotated[Label | None, ignored("an end user's name; kept")] = None
    prompt_cache_key: Annotated[Label | None, ignored("prefixes are found by their tokens; kept")] = None
    prompt_cache_options: CacheHintField = None
    prompt_cache_retention: RetentionField = None
    service_tier: Annotated[Label | None, ignored("there is one tier, `default`")] = None
    max_tool_calls: Annotated[Int | None, ignored("of tools a server runs itself; there are none")] = None
    top_k: Annotated[TopK | None, About("as in chat, as are all that follow")] = None
    min_p: MinPField = None
    presence_penalty: PenaltyField = None
    frequency_penalty: PenaltyField = None
    repetition_penalty: RepetitionPenaltyField = None
    logit_bias: Annotated[LogitBias | None, About("token id to -100 … 100; up to 1024")] = None
    seed: SeedField = None
    stop: Annotated[Stop | Stops | None, About("the text ends before any of these")] = None
    ignore_eos: IgnoreEosField = None
    thinking_token_budget: ThinkingBudgetField = None
    priority: PriorityField = None
    cache_salt: CacheSaltField = None
    prompt: Annotated[Any, refused("prompt templates are not kept here; send their text")] = None
    context_management: Annotated[Any, refused("conversations are not compacted", [])] = None
    moderation: Annotated[Any, refused("moderation is not supported yet")] = None
    image: Annotated[Any, refused(NO_FILES)] = None
    access_programs: Annotated[Any, refused("there are no access programs")] = None


class CompactRequest(InputTokensRequest, kw_only=True, frozen=True):
    """A conversation as `/v1/responses` takes it; `tools`, `tool_choice` and `text` are not looked at."""

    client_metadata: Annotated[Any, ignored("the client's own notes, such as Codex's ids")] = None
    prompt_cache_key: CacheHintField = None
    prompt_cache_options: CacheHintField = None
    prompt_cache_retention: RetentionField = None
    service_tier: Annotated[Any, ignored("there is one tier, `default`")] = None
    priority: Annotated[Int | None, About("lower is served first; default 0")] = None
    cache_salt: CacheSaltField = None
    image: Annotated[Any, refused(NO_FILES)] = None


class RetrieveQuery(msgspec.Struct, frozen=True):
    stream: Annotated[bool | None, About("the events of a background response that was asked to stream")] = (
        None
    )
    starting_after: Annotated[
        Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None,
        About("with `stream`: the `sequence_number` of the last event that was seen"),
    ] = None
    include_obfuscation: Annotated[bool | None, About("ignored: no padding is ever added")] = None


class ItemsQuery(msgspec.Struct, frozen=True):
    limit: Annotated[Annotated[int, msgspec.Meta(ge=1, le=100)] | None, About("1 to 100; default 20")] = None
    order: Annotated[Literal["asc", "desc"] | None, About("default `desc`: newest first")] = None
    after: Annotated[Name | None, About("the id of the last item that was seen")] = None
