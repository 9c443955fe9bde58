"""NER in its own process: a real one, with a model that knows two names."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from ridgeline.gateway.body import read_fields
from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.gateway.guard.errors import GuardFailed
from ridgeline.gateway.guard.guards import Guards
from ridgeline.options import OptionError

spacy = pytest.importorskip("spacy")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    nlp = spacy.blank("en")
    ruler = nlp.add_pipe("entity_ruler")
    ruler.add_patterns(
        [
            {"label": "PERSON", "pattern": "Ada Lovelace"},
            {"label": "GPE", "pattern": "Turin"},
        ]
    )
    folder = tmp_path_factory.mktemp("model") / "names"
    nlp.to_disk(folder)
    return str(folder)


def config(model: str, **more) -> GuardConfig:
    kinds = ("person", "location", "email")
    return GuardConfig(**{"ner": True, "ner_model": model, "ner_timeout_ms": 30_000, "redact": kinds, **more})


def test_names_are_redacted_and_restored_and_a_dead_process_fails_one_request_only(model):
    async def run() -> None:
        guards = Guards([config(model)])
        guard = guards.policy("")
        assert guard is not None
        await guards.start()
        arguments = json.dumps({"who": "Ada Lovelace", "to": "ada@x.org"})
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        content = "Ada Lovelace met Ada Lovelace in Turin, ada@x.org"
        body = {
            "messages": [{"role": "user", "content": content}, {"role": "assistant", "tool_calls": [call]}]
        }
        fields = read_fields(json.dumps(body).encode())
        asked = await guard.request("chat", fields)
        sent = json.loads(bytes(asked.fields["messages"]))
        assert sent[0]["content"] == "<PERSON_1> met <PERSON_1> in <LOCATION_1>, <EMAIL_1>"
        changed = json.loads(sent[1]["tool_calls"][0]["function"]["arguments"])
        assert changed == {"who": "<PERSON_1>", "to": "<EMAIL_1>"}
        assert asked.restorer is not None
        answer = asked.restorer.answer("chat", b'{"choices":[{"message":{"content":"Dear <person_1>"}}]}')
        assert b"Dear Ada Lovelace" in answer

        finder = guard._names
        assert finder is not None
        for process in finder._running:
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(GuardFailed):
            await guard.request("chat", fields)
        assert (await guard.request("chat", fields)).findings["person"] == 3
        await guards.close()

    asyncio.run(run())


def test_a_process_that_misses_its_deadline_fails_the_request(model):
    async def run() -> None:
        guards = Guards([config(model, ner_timeout_ms=1)])
        guard = guards.policy("")
        assert guard is not None
        with pytest.raises(GuardFailed, match="in time"):
            await guard.request("chat", read_fields(b'{"prompt":"Ada Lovelace"}'))
        await guards.close()

    asyncio.run(run())


def test_a_model_that_is_not_installed_is_told_at_start():
    async def run() -> None:
        guards = Guards([config("/nowhere/model")])
        with pytest.raises(GuardFailed, match="model"):
            await guards.start()
        await guards.close()

    asyncio.run(run())


def test_names_in_answers_are_refused_at_start(model):
    with pytest.raises(OptionError, match="requests only"):
        config(model, answers_redact=("person",))
