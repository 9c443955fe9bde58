"""What all clients ask: a few messages, two tools, one schema; answers are held to their form alone."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
JSON_QUESTION: list[Any] = [
    {
        "role": "user",
        "content": 'Fill in: {"city": "Rome", "warm": true, "level": 1}. Reply with this JSON only.',
    }
]
TURNS: list[Any] = [
    *QUESTION,
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "And of Italy?"},
]
WHO: list[Any] = [{"role": "user", "content": "Who are you?"}]
SYSTEM = "You are a pirate named Bones."
ROOM = 400  # tokens for a Report: 40 blanks are allowed in each of its eight gaps, and may be taken
STOP = "l of Fr"  # inside the answer to the question, across tokens
TEXTS = ["a cat on a mat", "the price of copper", "un chat sur un tapis"]


class Report(BaseModel, extra="forbid"):
    """A schema with few answers: whatever a model writes under it ends within ROOM tokens."""

    city: Literal["Paris", "Rome", "Oslo"]
    warm: bool
    level: Literal[1, 2, 3]


CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
REPORT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "warm": {"type": "boolean"},
        "level": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "warm", "level"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather in a city", "parameters": CITY_SCHEMA}
CLOCK = {"name": "get_time", "description": "The time in a city", "parameters": CITY_SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": tool} for tool in (WEATHER, CLOCK)]
TOOL_NAMES = {"get_weather", "get_time"}
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


def assert_city(arguments: str) -> None:
    """Arguments that the tools' schema allows."""
    assert json.loads(arguments).keys() == {"city"}
    assert json.loads(arguments)["city"] in ("Paris", "Rome", "Oslo")
