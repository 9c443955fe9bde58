"""Structured output: the answer always parses as the given type. What is in it depends on the model."""

from __future__ import annotations

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

URL = os.environ.get("RIDGELINE_URL", "http://127.0.0.1:8000")
MODEL = "smollm2-135m"


class City(BaseModel):
    name: str = Field(max_length=40)
    continent: Literal["Africa", "America", "Antarctica", "Asia", "Australia", "Europe"]
    is_capital: bool


client = OpenAI(base_url=f"{URL}/v1", api_key="none")
answer = client.chat.completions.parse(
    model=MODEL,
    messages=[{"role": "user", "content": "Which city is the capital of France?"}],
    response_format=City,
    temperature=0,
    max_tokens=128,
)
city = answer.choices[0].message.parsed
assert city is not None
print(repr(city))
