"""Fields that several endpoints share: type, bounds and description, declared once.

A struct writes `temperature: TemperatureField = None`. Fields stay in the struct that declares them, so each
endpoint keeps its documented order.
"""

from __future__ import annotations

from typing import Annotated, Any

from ridgeline.server.http.body_fields import About, ignored
from ridgeline.server.http.field_types import (
    Alternatives,
    Int,
    MinP,
    Name,
    Penalty,
    RepetitionPenalty,
    Salt,
    Seed,
    Temperature,
    TopK,
    TopP,
    Variables,
)

CACHE = ignored("prefixes are found by their tokens, with or without it")
CacheHintField = Annotated[Any, CACHE]

ModelField = Annotated[Name | None, About("a name of `/v1/models`; absent: the served model")]
StreamField = Annotated[bool | None, About("answer with server-sent events as the text is made")]
ObfuscationField = Annotated[bool | None, ignored("no padding is ever added")]

TemperatureField = Annotated[Temperature | None, About("0 is greedy; default: the model's, else 1")]
TopPField = Annotated[TopP | None, About("nucleus sampling, above 0 up to 1; default: the model's, else 1")]
TopKField = Annotated[
    TopK | None, About("most likely tokens kept; 0 or -1: all; default: the model's, else all")
]
MinPField = Annotated[
    MinP | None, About("least probability kept, relative to the best token's; default: the model's, else 0")
]
PenaltyField = Annotated[Penalty | None, About("-2 to 2")]
RepetitionPenaltyField = Annotated[
    RepetitionPenalty | None, About("0.01 to 10; 1 is off; default: the model's, else 1")
]
SeedField = Annotated[Seed | None, About("same seed, same text, whatever else the server computes")]
IgnoreEosField = Annotated[bool | None, About("do not stop at the end-of-sequence token")]
TopLogprobsField = Annotated[Alternatives | None, About("0 to 20 alternatives per token; needs `logprobs`")]
ThinkingBudgetField = Annotated[
    Int | None,
    About("most tokens of reasoning; then it is ended, and the answer begins; 0: none; -1: no limit"),
]

PriorityField = Annotated[
    Int | None, About("lower is served first; default 0; from 1000 on, in the gaps of all others")
]
CacheSaltField = Annotated[Salt | None, About("requests share cached prefixes only with the same salt")]
TemplateVariablesField = Annotated[Variables | None, About("variables for the chat template")]

ToolDescriptionField = Annotated[str | None, About("what it is for; the model reads it")]
ToolParametersField = Annotated[dict[str, Any] | None, About("JSON schema of the arguments")]
ParallelToolCallsField = Annotated[bool | None, About("false: at most one call; default true")]

UntoldField = Annotated[str | None, ignored("the model is not told of it")]
StrictSchemaField = Annotated[bool | None, ignored("schemas are always followed strictly")]
SentBackField = Annotated[Any, ignored("of an earlier answer that is sent back")]
EndUserField = Annotated[Any, ignored("an end user's name")]
RetentionField = Annotated[Any, ignored("prefixes stay while there is room")]
