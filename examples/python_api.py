"""The Python API: the engine in this process, without a server."""

from __future__ import annotations

from dataclasses import replace

from ridgeline import LLM, SamplingParams

llm = LLM("smollm2-135m", kv_tokens=4096)

prompts = ["The capital of France is", "1, 2, 3,"]
for prompt, answer in zip(
    prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)), strict=True
):
    print(f"{prompt!r} -> {answer.text!r}")

params = replace(llm.get_default_sampling_params(), temperature=0, max_tokens=32)
for chunk in llm.chat_stream([{"role": "user", "content": "What is 2+2?"}], params):
    print(chunk.text, end="", flush=True)
print()
