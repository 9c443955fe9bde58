"""Several models behind one front: which name selects which model, and what covers all of them."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.cli.main import build_parser
from ridgeline.cli.models import run_list
from ridgeline.cli.serve import model_setups, read_models_file
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import QueueFull
from ridgeline.options import OptionError, build, given_flags
from ridgeline.server.app import build_app
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError
from ridgeline.server.process.setup import ModelSetup, named, sharing_memory
from ridgeline.server.served_models import Model, ServedModels
from ridgeline.telemetry.metrics import ServerMetrics
from tests.server.scripted_client import ScriptedClient, ScriptedSupervisor, fail, say
from tests.server.stage import CHAT, HELLO


class Pair:
    """A model that chats and one that embeds, served side by side."""

    def __init__(self) -> None:
        self.chat, self.embed = ScriptedClient(say("hi")), ScriptedClient(say("never"))
        self.embed.hello = msgspec.structs.replace(self.embed.hello, task="embed", max_context=99)
        self.supervisors = [ScriptedSupervisor(self.chat), ScriptedSupervisor(self.embed)]
        models = [
            Model(("chat", "gpt"), self.supervisors[0], ServerMetrics("chat")),
            Model(("embed",), self.supervisors[1], ServerMetrics("embed")),
        ]
        self.app = build_app(ServerConfig(), models)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, **options)


async def test_a_request_reaches_the_model_it_names_and_the_first_if_it_names_none() -> None:
    pair = Pair()
    for name in ("chat", "gpt"):
        answer = await pair.ask("POST", CHAT, json={**HELLO, "model": name})
        assert answer.json()["model"] == name
    answer = await pair.ask("POST", CHAT, json={"messages": HELLO["messages"]})
    assert answer.json()["model"] == "chat"
    assert (len(pair.chat.asked), len(pair.embed.asked)) == (3, 0)


async def test_a_model_that_does_something_else_is_refused_by_what_it_does() -> None:
    answer = await Pair().ask("POST", CHAT, json={**HELLO, "model": "embed"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_suitable")
    assert "makes embeddings" in answer.json()["error"]["message"]


async def test_an_unknown_model_is_answered_with_all_the_names() -> None:
    answer = await Pair().ask("POST", CHAT, json={**HELLO, "model": "gpt-9"})
    assert answer.status_code == 404
    assert "chat, gpt, embed" in answer.json()["error"]["message"]


async def test_every_name_is_listed_with_what_it_is_for() -> None:
    pair = Pair()
    cards = (await pair.ask("GET", "/v1/models")).json()["data"]
    assert [(card["id"], card["task"], card.get("root")) for card in cards] == [
        ("chat", "generate", None),
        ("gpt", "generate", "chat"),
        ("embed", "embed", None),
    ]
    assert (await pair.ask("GET", "/v1/models/embed")).json()["max_model_len"] == 99


async def test_one_model_that_is_not_ready_makes_the_server_not_ready_and_is_named() -> None:
    pair = Pair()
    assert (await pair.ask("GET", "/ready")).status_code == 200
    pair.supervisors[1].reason = "no memory"
    answer = await pair.ask("GET", "/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "embed: no memory")
    assert (await pair.ask("POST", CHAT, json=HELLO | {"model": "chat"})).status_code == 200


async def test_while_one_restarts_what_it_is_for_is_not_asked_of_it() -> None:
    pair = Pair()
    await pair.ask("GET", "/v1/models")
    restarting = pair.supervisors[0]
    restarting.client, restarting.reason = None, "the engine is being started"
    answer = await pair.ask("POST", "/v1/embeddings", json={"input": [99_999]})  # by the one that embeds
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    answer = await pair.ask("POST", CHAT, json={"messages": HELLO["messages"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    cards = (await pair.ask("GET", "/v1/models")).json()["data"]
    assert [card["task"] for card in cards] == ["generate", "generate", "embed"]


async def test_the_figures_of_all_models_stand_in_one_family_each() -> None:
    pair = Pair()
    await pair.ask("POST", CHAT, json={**HELLO, "model": "chat"})
    text = (await pair.ask("GET", "/metrics")).text
    assert text.count("# TYPE ridgeline:engine_up gauge") == 1
    for name in ("chat", "embed"):
        assert f'ridgeline:engine_up{{model_name="{name}"}} 1.0' in text
    assert (
        'request_success_total{endpoint="/v1/chat/completions",finished_reason="stop",model_name="chat"}'
        in text
    )


async def test_a_queue_that_is_full_is_counted_for_the_model_whose_it_is() -> None:
    pair = Pair()
    pair.embed.hello, pair.embed.script = pair.chat.hello, fail(QueueFull(3, 1.0))
    answer = await pair.ask("POST", CHAT, json={**HELLO, "model": "embed"})
    assert answer.status_code == 429
    text = (await pair.ask("GET", "/metrics")).text
    counted = [line for line in text.splitlines() if line.startswith("ridgeline:request_refused_total{")]
    assert counted == [
        'ridgeline:request_refused_total{model_name="embed",reason="queue_full",status="429"} 1.0'
    ]


def served_by(setup: ModelSetup) -> Model:
    engine = ScriptedSupervisor(ScriptedClient(say("")))
    return Model(setup.names, engine, ServerMetrics(setup.names[0]), setup.other_names)


def setups(arguments: list[str], file: Path | None = None) -> list[ModelSetup]:
    args = build_parser().parse_args(["serve", *arguments])
    values, tables = read_models_file(file) if file else ({}, [])
    server = build(ServerConfig, values.get("server", {}), given_flags(args, "server"))
    return model_setups(args, values.get("engine", {}), tables, server)


def test_models_and_aliases_come_from_the_command_line() -> None:
    first, second = setups(["a", "hf:org/b", "--alias", "x=org/b", "--max-running", "3"])
    assert (first.names, second.names) == (("a",), ("org/b", "x"))
    assert first.engine.max_running == second.engine.max_running == 3


def test_every_name_that_models_list_has_for_a_model_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    run_list(argparse.Namespace(json=True))
    known = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "smollm2-135m")
    for asked_for in (known["name"], *known["aliases"]):
        (setup,) = setups([asked_for])
        assert setup.names == (asked_for,)
        served_models = ServedModels(ServerConfig(), [served_by(setup)])
        for name in (known["name"], *known["aliases"]):
            assert served_models.served(name).model.names == (asked_for,)
        with pytest.raises(ApiError, match="is not served here"):
            served_models.served("gemma3")


def test_a_name_that_was_chosen_is_not_shared_and_chosen_names_alone_are_accepted() -> None:
    first, second = setups(["smollm2-135m", "./dir/smollm2"])
    assert (first.other_names, second.other_names) == (("smollm2-135m-instruct",), ())
    (renamed,) = setups(["smollm2-135m", "--served-model-name", "gpt-4o"])
    assert (renamed.names, renamed.other_names) == (("gpt-4o",), ())


def test_models_that_keep_kv_share_the_memory_and_others_take_no_part(tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    decoder = tmp_path / "decoder.gguf"
    models = setups(["a", "b", "c"])
    told = replace(models[2], engine=replace(models[2].engine, memory_share=0.25))
    shared = sharing_memory([*models[:2], told], [decoder, encoder, decoder])
    assert [setup.engine.memory_share for setup in shared] == [0.5, 1.0, 0.25]
    assert sharing_memory(models[:1], [decoder]) == models[:1]


def test_models_come_from_a_file_each_with_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        "[engine]\nmax_waiting = 7\n[[models]]\nmodel = 'a'\nnames = ['one', 'two']\n"
        "[[models]]\nmodel = 'b'\nmax_waiting = 9\n"
    )
    first, second = setups([], file)
    assert (first.engine.model, first.engine.max_waiting, first.names) == ("a", 7, ("one", "two"))
    assert (second.engine.model, second.engine.max_waiting, second.names) == ("b", 9, ("b",))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[models]\nmodel = 'a'\n", r"\[\[models\]\]"),
        ("[[models]]\nmodle = 'a'\n", "did you mean 'model'"),
        ("[[models]]\nmax_running = 'many'\n", "an integer"),
    ],
)
def test_a_wrong_table_is_refused_by_its_key(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(OptionError, match=word):
        read_models_file(file)


@pytest.mark.parametrize("alias", ["x", "x=", "=a", "x=unknown"])
def test_an_alias_of_nothing_is_refused(alias: str) -> None:
    with pytest.raises(OptionError, match="NAME=MODEL"):
        named([EngineConfig(model="a")], [()], ServerConfig(alias=(alias,)))


def test_one_name_for_two_models_is_refused() -> None:
    with pytest.raises(OptionError, match="the name a is used twice"):
        named([EngineConfig(model="a"), EngineConfig(model="./dir/a")], [(), ()], ServerConfig())
