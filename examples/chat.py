"""Chat through OpenAI's SDK: one whole answer, then one streamed."""

from __future__ import annotations

import os

from openai import OpenAI

URL = os.environ.get("RIDGELINE_URL", "http://127.0.0.1:8000")
MODEL = "smollm2-135m"

client = OpenAI(base_url=f"{URL}/v1", api_key="none")

answer = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "What is 2+2?"}],
    temperature=0,
    max_tokens=64,
)
print(answer.choices[0].message.content)
assert answer.usage is not None
print(f"[{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out]")

stream = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "Name three primary colors."}],
    temperature=0,
    max_tokens=64,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
