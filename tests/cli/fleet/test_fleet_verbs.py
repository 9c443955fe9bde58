"""`ridgeline fleet`: what it refuses before a controller is asked, and what `status` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.fleet.check import read_checked, warnings
from ridgeline.cli.fleet.commands import settings_of
from ridgeline.cli.fleet.status import model_lines, replica_row
from ridgeline.cli.fleet.up import EXAMPLE_FILE
from ridgeline.cli.main import main
from ridgeline.fleet.controller.model_state import serve_flags
from ridgeline.options import OptionError

ROOT = Path(__file__).resolve().parents[3]
REPLICA: dict[str, Any] = {
    "id": "chat-1",
    "state": "ready",
    "weight": 1.0,
    "reason": "",
    "age_s": 90.0,
    "running": 2,
    "waiting": 1,
    "queued_tokens": 1500,
    "output_tokens_per_s": 50.0,
    "limit_tokens_per_s": 200.0,
    "kv_blocks_held": 25,
    "kv_blocks": 100,
    "prefix_queries": 200,
    "prefix_hits": 150,
    "segments": {"spawn": 0.011, "weights": 1.5, "total": 4.0},
}


def written(tmp_path: Path, serve: str = "", more: str = "") -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(f'[[models]]\nname = "chat"\n[models.serve]\n{serve}\n{more}\n')
    return path


def test_the_example_is_valid_and_is_the_one_in_examples(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "fleet.toml"
    assert path.read_text(encoding="utf-8") == EXAMPLE_FILE
    assert main(["fleet", "check", str(path)]) == 0
    assert "chat: 2 × smollm2-135m" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ("kv_token = 5", "did you mean 'kv_tokens'"),
        ('kv_tokens = "many"', "must be an integer"),
        ('weights = "q3"', "must be one of|weights"),
    ],
)
def test_options_of_serve_are_checked_before_a_replica_starts(
    tmp_path: Path, serve: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        read_checked(written(tmp_path, serve))


def test_settings_that_work_against_each_other_are_warned_about(tmp_path: Path) -> None:
    scaling = "[models.scaling]\nmin = 0\nmax = 2\nttft_slo_ms = 500.0\n[models.limits]\ncold_s = 5.0"
    found = warnings(read_checked(written(tmp_path, more=scaling), {"host": "0.0.0.0", "drain_s": 1.0}))
    assert len(found) == 4
    assert [
        word for word in ("api_keys", "min = 0", "cold_s", "drain_s") if word not in " ".join(found)
    ] == []


def test_values_of_set_are_toml_or_texts() -> None:
    given = ["kv-tokens=8192", "source=./a b", "speculate=false", 'lora=["a=./a"]']
    assert settings_of(given) == {
        "kv_tokens": 8192,
        "source": "./a b",
        "speculate": False,
        "lora": ["a=./a"],
    }
    with pytest.raises(OptionError, match="OPTION=VALUE"):
        settings_of(["kv_tokens"])


def test_settings_become_flags_of_serve() -> None:
    assert serve_flags("kv_tokens", 5) == ["--kv-tokens=5"]
    assert serve_flags("speculate", False) == ["--no-speculate"]
    assert serve_flags("lora", ("a=1", "b=2")) == ["--lora=a=1", "--lora=b=2"]


def test_a_row_shows_rates_beside_their_limits() -> None:
    assert replica_row(REPLICA) == (
        "chat-1",
        "ready",
        "90 s",
        "2/1 +1,500 tok",
        "50 of 200 (25%)",
        "25%",
        "75%",
        "4.00 s: spawn 0.01 · weights 1.50",
    )
    fresh = REPLICA | {"state": "starting", "reason": "no port", "kv_blocks": 0, "prefix_queries": 0}
    row = replica_row(fresh | {"limit_tokens_per_s": None, "weight": 0.1, "segments": {}})
    assert (row[1], row[4:]) == ("starting (10% of requests): no port", ("50", "-", "-", ""))


def test_a_models_line_names_the_rollout_and_the_crash_loop() -> None:
    model = {
        "name": "chat",
        "serving": 1,
        "target": 2,
        "starting": 1,
        "version": "v1",
        "rollout": "canary",
        "rollout_to": "v2",
        "last_rollout": "",
        "crash_loop": True,
        "blocked": "3 failed starts; exit code 1",
        "explained": "keep 2",
        "warnings": ["w"],
    }
    assert model_lines(model) == [
        "chat: 1 of 2 serve, 1 starting, version v1; rollout to v2: canary",
        "  crash loop: 3 failed starts; exit code 1",
        "  autoscaler: keep 2",
        "  warning: w",
    ]


def test_without_a_controller_the_verbs_say_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (["status"], ["scale", "chat", "2"], ["events"], ["logs", "chat-1"], ["drain", "chat-1"]):
        assert main(["fleet", *verb, "--state-dir", str(tmp_path)]) == 1
        assert "ridgeline fleet up" in capsys.readouterr().err
    assert main(["fleet", "down", "--state-dir", str(tmp_path)]) == 1
    assert "no fleet runs" in capsys.readouterr().err
