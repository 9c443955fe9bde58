"""A tool call: the model asks for a function, the program runs it, the model gets its result."""

from __future__ import annotations

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

URL = os.environ.get("RIDGELINE_URL", "http://127.0.0.1:8000")
MODEL = "smollm2-135m"

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str, unit: str) -> str:
    return json.dumps({"city": city, "temperature": 18, "unit": unit, "sky": "cloudy"})


client = OpenAI(base_url=f"{URL}/v1", api_key="none")
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]

# "required": the answer is a call whose arguments match the schema. "auto" leaves the choice to the model.
first = client.chat.completions.create(
    model=MODEL, messages=messages, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=128
)
message = first.choices[0].message
assert message.tool_calls
call = message.tool_calls[0]
assert call.type == "function"
print(f"the model calls {call.function.name}({call.function.arguments})")

result = get_weather(**json.loads(call.function.arguments))
messages += [
    {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},  # type: ignore[list-item, misc]
    {"role": "tool", "tool_call_id": call.id, "content": result},
]
second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=64)
print(second.choices[0].message.content)
