"""Reading server-sent events as a client would, and joining them into what the whole answer says."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[dict[str, Any] | str]:
    """The data of every event: JSON, or the string [DONE]. Comments are skipped."""
    found: list[dict[str, Any] | str] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            named = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
            assert len(lines) == 1, block
            data = lines[0].removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
            assert named is None or json.loads(data)["type"] == named, block
    return found


def chunks(text: str) -> list[dict[str, Any]]:
    """The events of a stream that ended well."""
    found = events(text)
    assert found[-1] == "[DONE]"
    assert "[DONE]" not in found[:-1]
    return [event for event in found if isinstance(event, dict)]


def joined_chat(parts: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Per choice index, what a client puts together: role, text, logprobs, reasons."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        whole = choices.setdefault(choice["index"], {"role": "", "text": "", "logprobs": None})
        whole["role"] += choice["delta"].get("role", "")
        whole["text"] += choice["delta"].get("content", "")
        if choice["logprobs"]:
            whole["logprobs"] = (whole["logprobs"] or []) + choice["logprobs"]["content"]
        if choice["finish_reason"]:
            assert "finish_reason" not in whole, "a choice ended twice"
            whole["finish_reason"] = choice["finish_reason"]
            whole["stop_reason"] = choice["stop_reason"]
    return choices


def whole_chat(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same, of an answer that came whole."""
    return {
        choice["index"]: {
            "role": choice["message"]["role"],
            "text": choice["message"]["content"],
            "logprobs": choice["logprobs"]["content"] if choice["logprobs"] else None,
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in answer["choices"]
    }


def joined_completion(parts: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        whole = choices.setdefault(choice["index"], {"text": "", "logprobs": None})
        whole["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
        for name in ("finish_reason", "stop_reason", "prompt_logprobs"):
            if choice.get(name) is not None:
                assert name not in whole, f"{name} came twice"
                whole[name] = choice[name]
    return choices
