"""API keys: which requests are accepted, and where no key is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.options import OptionError
from ridgeline.server.config import ServerConfig
from tests.server.stage import CHAT, HELLO, Stage

KEYS = ("first-key", "k2", "schlüssel")


@pytest.mark.parametrize("key", KEYS)
async def test_every_accepted_key_gets_in(key: str) -> None:
    stage = Stage(config=ServerConfig(api_keys=KEYS))
    headers = {"authorization": f"Bearer {key}".encode()}
    assert (await stage.post(CHAT, HELLO, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key"],
)
async def test_anything_else_is_401_in_openai_shape(authorization: str | None) -> None:
    stage = Stage(config=ServerConfig(api_keys=KEYS))
    headers = {} if authorization is None else {"authorization": authorization}
    response = await stage.post(CHAT, HELLO, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert stage.client.asked == []
    assert not any(key in response.text for key in KEYS)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/health", 200),
        ("/ready", 200),
        ("/metrics", 200),
        ("/v1/models", 401),
        ("/version", 401),
        ("/debug/steps", 401),
        ("/nothing", 401),
        ("/health/", 401),
    ],
)
async def test_only_probes_and_scrapers_need_no_key(path: str, status: int) -> None:
    async with Stage(config=ServerConfig(api_keys=KEYS)).http() as http:
        assert (await http.get(path)).status_code == status


async def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\n  from-file \n\n")
    stage = Stage(config=ServerConfig(api_keys=("direct",), api_key_file=file))
    for key in ("direct", "from-file"):
        response = await stage.post(CHAT, HELLO, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200
    response = await stage.post(CHAT, HELLO, headers={"authorization": "Bearer # team a"})
    assert response.status_code == 401


@pytest.mark.parametrize("keys", [(), ("",), (" ",), ("k", "")])
def test_an_empty_key_or_an_empty_list_of_keys_is_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match=r"api_keys contains an empty key or no key: give a key"):
        ServerConfig(api_keys=keys)


def test_an_empty_key_ends_the_command_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "none.gguf")
    assert main(["serve", missing, "--api-keys", ""]) == 2
    assert "api_keys contains an empty key" in capsys.readouterr().err
    (tmp_path / "keys").write_text("# none\n")
    assert main(["serve", missing, "--log-format", "text", "--api-key-file", str(tmp_path / "keys")]) == 2
    assert "keys contains no key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "::"], True),
        (["--host", "0.0.0.0", "--api-keys", "secret"], False),
        (["--host", "127.0.0.2"], False),
        (["--host", "::1"], False),
        ([], False),
    ],
)
def test_a_public_address_without_keys_is_warned_of(
    flags: list[str], warned: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert main(["serve", str(tmp_path / "none.gguf"), *flags]) == 1  # no such model: it ends there
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ("without API keys: every machine" in "".join(told)) is warned


def test_a_key_file_without_a_key_does_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(OptionError, match="contains no key"):
        ServerConfig(api_key_file=file).accepted_keys()
    with pytest.raises(OptionError, match="cannot be read"):
        ServerConfig(api_key_file=tmp_path / "absent").accepted_keys()
