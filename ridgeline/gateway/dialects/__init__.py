"""Translation between OpenAI's and Anthropic's requests and answers, and the usage they report."""

from ridgeline.gateway.dialects.counts import usage_of
from ridgeline.gateway.dialects.error_bodies import error_body, error_event, translated_error
from ridgeline.gateway.dialects.families import Family, family_of, shape_of
from ridgeline.gateway.dialects.streams.usage_reader import Hide, UsageReader, ask_for_usage
from ridgeline.gateway.dialects.translate import StreamTranslator, translate_answer, translate_request

__all__ = [
    "Family",
    "Hide",
    "StreamTranslator",
    "UsageReader",
    "ask_for_usage",
    "error_body",
    "error_event",
    "family_of",
    "shape_of",
    "translate_answer",
    "translate_request",
    "translated_error",
    "usage_of",
]
