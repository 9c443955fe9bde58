"""Every script in examples/ runs as its reader would run it, against a real server with the default model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import STOP_TIMEOUT_S, LiveServer, await_ready, free_port, start_server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROOT = EXAMPLES.parent
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("examples")
    flags = ["--kv-tokens", "4096", "--state-dir", str(directory / "state")]
    started = start_server(
        directory / "server.log", *flags, models=("smollm2-135m", "all-minilm-l6-v2"), grpc_port=free_port()
    )
    try:
        await_ready(started)
        yield started
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(STOP_TIMEOUT_S) == 0
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


def run_example(name: str, *arguments: str, **variables: str) -> str:
    """The script's output; it must end with code 0."""
    program = [sys.executable] if name.endswith(".py") else ["bash"]
    environment = os.environ | variables
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)  # this checkout's ridgeline
    done = subprocess.run(
        [*program, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_example_has_a_test_and_a_line_in_the_readme() -> None:
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    tests = Path(__file__).read_text(encoding="utf-8")
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert scripts == set(re.findall(r'run_example\(\s*"([^"]+)"', tests))
    assert scripts == set(re.findall(r"\]\((\w+\.(?:py|sh))\)", readme))


def test_chat_prints_a_whole_and_a_streamed_answer(server: LiveServer) -> None:
    out = run_example("chat.py", RIDGELINE_URL=server.base_url)
    whole, usage, *streamed = out.splitlines()
    assert "4" in whole
    assert re.fullmatch(r"\[37 tokens in, \d+ out\]", usage)
    assert "Red" in "".join(streamed)


def test_grpc_client_shows_the_port_and_calls_any_method(server: LiveServer) -> None:
    address = f"127.0.0.1:{server.grpc_port}"
    services, health, *chat = run_example("grpc_client.py", RIDGELINE_GRPC=address).splitlines()
    assert "ridgeline.v1.Inference" in services
    assert health == "health: SERVING"
    assert "Red" in "".join(chat)
    request = '{"prompt": "The capital of France is", "maxTokens": 3, "temperature": 0}'
    method = "ridgeline.v1.Inference/GenerateWhole"
    out = run_example("grpc_client.py", method, request, RIDGELINE_GRPC=address)
    assert json.loads(out)["choices"][0]["text"].startswith(" Paris")
    embed = ("ridgeline.v1.Inference/Embed", '{"texts": ["a", "b"]}')
    assert len(json.loads(run_example("grpc_client.py", *embed, RIDGELINE_GRPC=address))["embeddings"]) == 2


def test_tool_call_prints_a_call_that_matches_its_schema(server: LiveServer) -> None:
    out = run_example("tool_call.py", RIDGELINE_URL=server.base_url)
    assert re.match(
        r'the model calls get_weather\(\{"city": ".*", "unit": "(celsius|fahrenheit)"\}\)\n.', out
    )


def test_structured_output_prints_the_parsed_city(server: LiveServer) -> None:
    out = run_example("structured_output.py", RIDGELINE_URL=server.base_url)
    assert out.startswith("City(name='Paris', continent=")


def test_embeddings_search_ranks_the_river_first(server: LiveServer) -> None:
    first, *others = run_example("embeddings_search.py", RIDGELINE_URL=server.base_url).splitlines()
    assert "Danube" in first
    assert len(others) == 3


def test_file_search_finds_the_file_and_answers(server: LiveServer) -> None:
    shown = run_example("file_search.py", RIDGELINE_URL=server.base_url)
    assert shown.startswith("1.00 tea.md: Green tea is not oxidised. Black tea is fully oxidised.\n")
    assert len(shown.splitlines()) >= 2  # the answer


def test_python_api_answers_without_a_server(smollm2_path: Path) -> None:
    out = run_example("python_api.py")
    assert "'The capital of France is' -> ' Paris" in out


def test_gateway_with_keys_answers_the_key_until_it_is_revoked(server: LiveServer) -> None:
    out = run_example(
        "gateway_with_keys.sh",
        RIDGELINE_URL=server.base_url,
        GATEWAY_PORT=str(free_port()),
        GATEWAY_ADMIN_PORT=str(free_port()),
    )
    assert re.findall(r"HTTP (\d+)", out) == ["200", "401", "401"]
    assert re.search(r"app \(key_\w+\) +fast +1 +1 +37 ", out), out
    assert "revoked_api_key" in out


def test_plan_bench_verify_scores_its_own_prediction(smollm2_path: Path, tmp_path: Path) -> None:
    cache = Path(os.environ.get("RIDGELINE_CACHE", Path.home() / ".cache" / "ridgeline"))
    (tmp_path / "cache").mkdir()
    for folder in ("models", "packed"):  # the plan's residuals stay out of the machine's cache
        (cache / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / folder).symlink_to(cache / folder)
    out = run_example(
        "plan_bench_verify.sh",
        str(tmp_path),
        REQUESTS="8",
        SLO="ttft_p90=600s,tpot_p90=60s",  # other tests may use this machine too
        PORT=str(free_port()),
        RIDGELINE_CACHE=str(tmp_path / "cache"),
    )
    assert re.search(r"median error \d+(\.\d+)?%; \d+ of 8 inside intervals", out), out
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "plan" / "plan.html").is_file()
