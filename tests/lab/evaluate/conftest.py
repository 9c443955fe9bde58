"""Two tasks in files for gates on scripted subjects: choices, and texts."""

from __future__ import annotations

import json

import pytest

from ridgeline.lab.evaluate.options import EvaluateOptions

ITEMS = 320


@pytest.fixture
def options(tmp_path):
    choices = tmp_path / "choices.jsonl"
    lines = [{"query": f"item {n} is", "choices": ["right", "wrong"], "gold": 0} for n in range(ITEMS)]
    choices.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"word{n} a b c d e f g h {n}"}) + "\n" for n in range(8)))
    return EvaluateOptions(tasks=f"{choices},{texts}", concurrency=4)
