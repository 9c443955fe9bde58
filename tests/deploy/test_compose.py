"""deploy/compose: commands and settings are accepted, and the names in its files fit each other.

No container is started: that needs a daemon.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/compose"
VARIABLES = dict(
    line.split("=", 1)
    for line in (FOLDER / "example.env").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def document() -> dict[str, Any]:
    """compose.yaml with the variables of example.env; one that is missing there is an error."""
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    text = re.sub(r"\$\{(\w+)(?::[-?][^}]*)?\}", lambda match: VARIABLES[match[1]], text)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def services() -> dict[str, Any]:
    return dict(document()["services"])


def ridgeline(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline.cli.main", *arguments],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_has_what_the_documentation_says() -> None:
    wanted = {"gateway", "replica-1", "replica-2", "redis", "postgres", "prometheus", "grafana"}
    assert set(services()) == wanted


@pytest.mark.parametrize("name", ["replica-1", "replica-2"])
def test_a_replica_s_command_is_accepted(name: str) -> None:
    service = services()[name]
    found = tomllib.loads(ridgeline(*service["command"], "--print-config", **service["environment"]))
    assert found["server"]["host"] == "0.0.0.0"
    assert found["server"]["api_keys"] == [VARIABLES["SERVER_KEY"]]
    assert found["engine"]["model"] == VARIABLES["MODEL"]


def test_the_gateway_s_file_is_accepted() -> None:
    command = [word.replace("/etc/ridgeline", str(FOLDER)) for word in services()["gateway"]["command"]]
    environment = services()["gateway"]["environment"]
    assert "2 upstreams, 1 model; the configuration is valid" in ridgeline(*command, "--check", **environment)


def test_every_address_names_a_service_and_its_port() -> None:
    ports = {"replica-1": 8000, "replica-2": 8000, "gateway": 8081, "redis": 6379, "prometheus": 9090}
    with (FOLDER / "gateway.toml").open("rb") as file:
        gateway = tomllib.load(file)
    urls = [one["url"] for one in gateway["upstreams"]] + [gateway["redis"]["url"]]
    urls += [
        one["url"] for one in yaml.safe_load((FOLDER / "grafana/datasources.yaml").read_text())["datasources"]
    ]
    scraped = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    urls += [f"http://{name}" for job in scraped for one in job["static_configs"] for name in one["targets"]]
    for url in urls:
        parts = urlsplit(url)
        assert parts.hostname in services()
        assert parts.port == ports[parts.hostname]
    assert gateway["admin"]["port"] == ports["gateway"]
    assert urlsplit(gateway["store"]["url"]).hostname in services()


def test_mounts_dependencies_networks_and_volumes_exist() -> None:
    whole = document()
    for name, service in services().items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            there = (FOLDER / source).exists() if source.startswith(".") else source in whole["volumes"]
            assert there, (name, mount)
        assert set(service.get("depends_on", ())) <= set(services())
        assert set(service["networks"]) <= set(whole["networks"])
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "published to this machine alone"
        assert ":latest" not in service["image"]
        assert re.search(r":v?\d", service["image"]), "a version"


def test_our_services_run_without_rights() -> None:
    for name in ("gateway", "replica-1", "replica-2"):
        service = services()[name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["build"]["target"] in ("cpu", "cuda")
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
