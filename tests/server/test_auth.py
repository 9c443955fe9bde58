"""API keys: who gets in, and where no key is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_a_key_file_without_a_key_does_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(OptionError, match="holds no key"):
        ServerConfig(api_key_file=file).accepted_keys()
    with pytest.raises(OptionError, match="cannot be read"):
        ServerConfig(api_key_file=tmp_path / "absent").accepted_keys()
