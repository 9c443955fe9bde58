"""NER in its own process: a real one, with a model that knows two names."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ridgeline.gateway.body import Fields, read_fields
from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.guard import ner
from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.gateway.guard.errors import GuardFailed
from ridgeline.gateway.guard.guards import Guard, Guards
from ridgeline.gateway.objects.batch_files import Uploader
from ridgeline.gateway.offload.offload import Offload
from ridgeline.gateway.pipeline.request_state import ANONYMOUS
from ridgeline.gateway.settings import make_settings
from ridgeline.options import OptionError
from tests.gateway.stage import CHAT, asking, staged
from tests.patience import PATIENCE_S

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
    return GuardConfig(
        **{"ner": True, "ner_model": model, "ner_timeout_ms": 600_000, "redact": kinds, **more}
    )


def test_names_are_redacted_and_restored(model):
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
        await guards.close()

    asyncio.run(run())


PROMPT = read_fields(b'{"prompt":"Ada Lovelace"}')


def processes(guard: Guard) -> set[int]:
    assert guard._names is not None
    return {process.pid for process in guard._names._running}


def test_what_one_request_asks_of_ner_fails_that_request_alone(model, monkeypatch):
    """Each of these ended the process before, and with it the requests that came while it started again."""

    async def run() -> None:
        guards = Guards([config(model, ner_max_chars=2_000_000)])
        guard = guards.policy("")
        assert guard is not None
        await guards.start()
        before = processes(guard)
        for case in (client_leaves, out_of_time, over_long, more_than_spacy_takes):
            await case(guard, monkeypatch)
            assert (await guard.request("chat", PROMPT)).findings["person"] == 1, case
            assert processes(guard) == before, case
        await guards.close()

    asyncio.run(run())


async def client_leaves(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped(guard):
        asked = asyncio.create_task(guard.request("chat", PROMPT))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


async def out_of_time(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard._names is not None
    with monkeypatch.context() as patch, stopped(guard):
        patch.setattr(guard._names, "_config", replace(guard.config, ner_timeout_ms=50))
        with pytest.raises(GuardFailed, match="time limit"):
            await guard.request("chat", PROMPT)


async def over_long(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 1_100_000 + " Ada Lovelace"  # spaCy takes a million characters at once
    both = await asyncio.gather(guard.request("chat", prompt(long)), guard.request("chat", PROMPT))
    assert [one.findings["person"] for one in both] == [1, 1]
    with pytest.raises(BadRequest, match="2000000") as refused:
        await guard.request("chat", prompt(long * 2))
    assert refused.value.code == "guard_text_too_long"


async def more_than_spacy_takes(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ner, "PIECE_CHARS", 2_000_000)
        with pytest.raises(GuardFailed, match="nothing was forwarded"):
            await guard.request("chat", prompt("x" * 1_100_000))


def prompt(text: str) -> Fields:
    return read_fields(json.dumps({"prompt": text}).encode())


@contextlib.contextmanager
def stopped(guard: Guard) -> Iterator[None]:
    (pid,) = processes(guard)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("filler", ["word ", "line\n", "x", "A sentence. "])
def test_every_character_and_every_name_is_in_a_piece(filler):
    text = filler * (30_000 // len(filler))
    cuts = list(ner.pieces(text))
    assert (cuts[0][0], cuts[-1][1]) == (0, len(text))
    for (start, end), (following, _) in itertools.pairwise(cuts):
        assert start < following < end
        assert end - start <= ner.PIECE_CHARS
        assert end - following >= ner.OVERLAP_CHARS - len(filler)


async def test_ready_waits_for_ner_and_is_red_while_no_process_runs(tmp_path, model):
    policy = {"name": "default", "ner": True, "ner_model": model, "redact": ("person",)}
    async with staged(tmp_path, {"guards": [{**policy, "ner_timeout_ms": 600_000}]}) as gateway:
        asked = await gateway.http.post(CHAT, json=asking("mock_out1"))  # the first is answered like any
        assert (asked.status_code, (await gateway.http.get("/ready")).status_code) == (200, 200)
        (pid,) = processes(gateway.parts.guards.policy(""))
        os.kill(pid, signal.SIGKILL)
        failed = await gateway.http.post(CHAT, json=asking("mock_out1"))
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "guard_failed")
        seen = []
        async with asyncio.timeout(PATIENCE_S):
            while len(seen) < 2:
                told = await gateway.http.get("/ready")
                if told.status_code == (503, 200)[len(seen)]:
                    seen.append(told.json())
                await asyncio.sleep(0.02)
        assert "NER" in seen[0]["reason"]
        assert (await gateway.http.post(CHAT, json=asking("mock_out1"))).status_code == 200


async def test_names_in_a_large_batch_file_are_redacted(tmp_path, model):
    said = {"model": "mock", "messages": [{"role": "user", "content": "Ada Lovelace " + "x" * 40_000}]}
    asked = {"custom_id": "c", "method": "POST", "url": CHAT, "body": said}
    file, out = tmp_path / "file", tmp_path / "out"
    file.write_text("\n".join([json.dumps(asked)] * 2))
    policy = {"name": "names", "ner": True, "ner_model": model, "redact": ("person",)}
    settings = make_settings(
        {
            "guards": [{**policy, "ner_timeout_ms": 600_000}],
            "upstreams": [{"name": "up", "kind": "openai", "url": "http://127.0.0.1:9"}],
            "models": [{"name": "*", "targets": ("up/*",)}],
        }
    )
    uploader = Uploader("tenant", ANONYMOUS, "names")
    offload = Offload(settings, processes=1)
    try:
        for _ in range(2):  # NER ends with each file
            place = (str(file), 0, file.stat().st_size, str(out))
            batch = await offload.run("tenant", "batch_file", *place, uploader, "up")
            assert batch.meta.lines == 2
            texts = [json.loads(line)["body"]["messages"][0]["content"] for line in out.open()]
            assert [text[:11] for text in texts] == ["<PERSON_1> ", "<PERSON_1> "]
    finally:
        await offload.close()


def test_a_model_that_is_not_installed_is_told_at_start():
    async def run() -> None:
        guards = Guards([config("/nowhere/model")])
        with pytest.raises(
            OptionError, match="default: NER did not start: is the spaCy model /nowhere/model"
        ):
            await guards.start()
        await guards.close()

    asyncio.run(run())


def test_names_in_answers_are_refused_at_start(model):
    with pytest.raises(OptionError, match="requests only"):
        config(model, answers_redact=("person",))
