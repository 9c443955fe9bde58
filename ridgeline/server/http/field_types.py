"""The value types of bodies with their bounds. Decoding refuses values beyond them and the OpenAPI document
shows them. Shared by all endpoints, so a field has the same bounds everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from ridgeline.engine.schedule.request import MAX_SAMPLES, MAX_TOP_LOGPROBS
from ridgeline.server.http import limits

# Every count is bounded, so that no huge number reaches the engine's wire format.
Int = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
CountOrNone = Annotated[int, Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Samples = Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
LogitBias = Annotated[dict[str, Bias], Meta(max_length=limits.MAX_TOKEN_IDS)]
# msgspec's bounds cannot express unsigned 64 bits; the engine refuses larger values.
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})]

Name = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARACTERS)]
Id = Annotated[str, Meta(max_length=limits.MAX_ID_CHARACTERS)]
Salt = Annotated[str, Meta(min_length=1, max_length=limits.MAX_SALT_CHARACTERS)]
Stop = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], Meta(max_length=limits.MAX_STOPS)]
StopIds = Annotated[list[TokenId], Meta(max_length=limits.MAX_TOKEN_IDS)]
TokenIds = Annotated[list[TokenId], Meta(max_length=limits.MAX_DETOKENIZED)]
GrammarText = Annotated[str, Meta(max_length=limits.MAX_GRAMMAR_CHARACTERS)]
Choices = Annotated[list[GrammarText], Meta(max_length=limits.MAX_CHOICE_TEXTS)]
Variables = Annotated[dict[str, Any], Meta(max_length=limits.MAX_TEMPLATE_VARIABLES)]


def one_of(*values: str) -> Meta:
    """For the document: the supported values; the handler refuses others with its own message."""
    return Meta(max_length=limits.MAX_NAME_CHARACTERS, extra_json_schema={"enum": list(values)})
