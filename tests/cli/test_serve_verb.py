"""`ridgeline serve` as a user starts it, and `run` against it: answers, figures, logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.cli.main import main
from tests.conftest import LiveServer
from tests.patience import PATIENCE_S


def metric(server: LiveServer, name: str, **labels: str) -> float:
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"ridgeline:{name}" and labels.items() <= sample.labels.items()
    )


def test_run_asks_the_server_and_its_metrics_and_log_agree(
    live_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {
        name: metric(live_server, name)
        for name in (
            "generation_tokens_total",
            "time_to_first_token_seconds_count",
            "request_generation_tokens_sum",
        )
    }
    words = ["run", "--url", live_server.base_url, "--temperature", "0", "--max-tokens", "6", "--json"]
    assert main([*words, "--raw", "The capital of France is"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "Paris" in result["text"]
    assert result["model"] == "smollm2-135m"
    tokens = result["stats"]["output_tokens"]
    assert metric(live_server, "generation_tokens_total") - before["generation_tokens_total"] == tokens
    assert (
        metric(live_server, "request_generation_tokens_sum") - before["request_generation_tokens_sum"]
        == tokens
    )
    counted = metric(live_server, "time_to_first_token_seconds_count")
    assert counted - before["time_to_first_token_seconds_count"] == 1
    assert metric(live_server, "engine_up") == 1
    assert metric(live_server, "startup_seconds", stage="weights") > 0
    assert metric(live_server, "memory_bytes", kind="kv") > 0
    lines = [json.loads(line) for line in live_server.log.read_text().splitlines()]  # nothing but JSON
    assert [line["url"] for line in lines if line["message"] == "serving"] == [live_server.base_url]
    logged = [
        line for line in lines if line["message"] == "request" and line["endpoint"] == "/v1/completions"
    ]
    assert logged[-1]["output_tokens"] == tokens
    assert logged[-1]["ttft_ms"] > 0
    assert "France" not in live_server.log.read_text()  # prompts are never logged


def test_a_question_the_server_refuses_is_exit_code_1_with_its_reason(
    live_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--url", live_server.base_url, "--model", "nope", "hello"]) == 1
    assert "answered 404" in capsys.readouterr().err


def test_a_model_that_is_not_there_leaves_no_state_behind(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ridgeline.cli.main", "serve", str(tmp_path / "none.gguf"), "--port", "0"]
    ended = subprocess.run(
        words, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, timeout=PATIENCE_S
    )
    assert (ended.returncode, b"none.gguf" in ended.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "package", ["opentelemetry", "opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"]
)
def test_an_otlp_endpoint_without_its_packages_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    words = ["serve", str(tmp_path / "none.gguf"), "--otlp-endpoint", "http://127.0.0.1:4318"]
    assert main([*words, "--log-format", "text"]) == 2
    said = capsys.readouterr().err
    assert f"needs the package {package}" in said
    assert "pip install 'ridgeline[otel]'" in said
    assert "This is a bug" not in said
