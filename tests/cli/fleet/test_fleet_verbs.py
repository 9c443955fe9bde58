"""`ridgeline fleet`: what it refuses before a controller is asked, and what `status` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.fleet.check import read_checked, warnings
from ridgeline.cli.fleet.commands import _is_moving, settings_of
from ridgeline.cli.fleet.status import limit_notes, model_lines, replica_row
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
    "limit_uncertainty": 0.0,
    "kv_blocks_held": 25,
    "kv_blocks": 100,
    "prefix_queries": 200,
    "prefix_hits": 150,
    "weights": {"source": "local", "bytes": 0, "seconds": 0.0, "limit_bytes_per_s": None, "cache": None},
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


def test_the_example_of_1000_replicas_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "check", str(ROOT / "examples" / "fleet-1000.toml")]) == 0
    assert "chat: 1000 × meta-llama/Llama-3.1-8B-Instruct" in capsys.readouterr().out


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
        "local",
        "4.00 s: spawn 0.01 · weights 1.50",
    )
    fresh = REPLICA | {"state": "starting", "reason": "no port", "kv_blocks": 0, "prefix_queries": 0}
    row = replica_row(fresh | {"limit_tokens_per_s": None, "weight": 0.1, "segments": {}})
    assert (row[1], row[4:]) == (
        "starting (10% of a replica's share): no port",
        ("50", "-", "-", "local", ""),
    )


def test_an_uncertain_limit_is_marked_and_never_exceeded_by_a_share() -> None:
    faster = REPLICA | {"id": "chat-2", "output_tokens_per_s": 80.0, "limit_tokens_per_s": 77.0}
    busy = REPLICA | {"id": "chat-3", "limit_uncertainty": 0.3}
    unknown = REPLICA | {"limit_tokens_per_s": None}
    assert replica_row(faster)[4] == "80 of ~77"
    assert replica_row(busy)[4] == "50 of ~200 (~25%)"
    (note,) = limit_notes([REPLICA, faster, busy, unknown])
    assert note.startswith("~: the limit of chat-2, chat-3 is uncertain, probably too low")
    assert limit_notes([REPLICA, unknown]) == []


def test_the_parts_of_a_start_end_with_the_first_token() -> None:
    segments = {"first_token": 0.5, "total": 4.0, "spawn": 0.1, "weights": 1.5}
    assert replica_row(REPLICA | {"segments": segments})[-1] == (
        "4.00 s: spawn 0.10 · weights 1.50 · first_token 0.50"
    )


def test_check_names_the_currency_of_a_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[[models]]\nname = "chat"\nreplicas = 2\n[models.resources]\nprice = 2.5\n')
    assert main(["fleet", "check", str(path)]) == 0
    cost = "cost 5 per hour, in the currency of [models.resources] price: 2 replicas at 2.5"
    assert cost in capsys.readouterr().out


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
        "moving": 2,
    }
    assert model_lines(model) == [
        "chat: 1 of 2 serve, 1 starting, version v1; rollout to v2: canary; 2 replicas move to other places",
        "  crash loop: 3 failed starts; exit code 1",
        "  autoscaler: keep 2",
        "  warning: w",
    ]
    line = model_lines(model | {"rollout_awaits": "3 of 20 requests"})[0]
    assert "; rollout to v2: canary (3 of 20 requests); 2" in line


def test_without_a_controller_the_verbs_say_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (["status"], ["scale", "chat", "2"], ["events"], ["logs", "chat-1"], ["drain", "chat-1"]):
        assert main(["fleet", *verb, "--state-dir", str(tmp_path)]) == 1
        assert "ridgeline fleet up" in capsys.readouterr().err
    assert main(["fleet", "down", "--state-dir", str(tmp_path)]) == 1
    assert "no fleet is running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("moving", "serving", "is_moving"),
    [(1, 4, True), (0, 3, True), (0, 4, False)],  # the fifth and sixth are the autoscaler's wish
)
def test_a_move_ends_with_the_replicas_that_moved(moving: int, serving: int, is_moving: bool) -> None:
    model = {"moving": moving, "serving": serving, "target": 6}
    assert _is_moving(model, 4) == is_moving
