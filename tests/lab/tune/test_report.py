"""The output of a ledger: the front, the winner as a config file, the page, the settings as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.lab.errors import BadInput
from ridgeline.lab.tune.climb import Climb, NotMeasured, RunId, Search
from ridgeline.lab.tune.front import Point, front, points
from ridgeline.lab.tune.html import ledger_page
from ridgeline.lab.tune.ledger import Header, Ledger, Settings
from ridgeline.lab.tune.report import ledger_lines, winner, winner_toml
from ridgeline.lab.tune.servers import last_words
from ridgeline.lab.tune.space import default_space, known_values, parse_settings, parse_space
from ridgeline.options import read_file

LATENCY = "ttft_ms.p90"


def figures(settings: Settings, which: RunId) -> dict[str, float]:
    if settings.get("max_running") == 64:
        raise NotMeasured("refused", "<b>too many</b>")
    steps, running = settings["step_tokens"], settings.get("max_running", 8)
    wobble = 1 + 0.001 * ((which.round * 7 + (which.arm == "b") * 3) % 5)
    rate = (50 + steps / 8 + running) * wobble
    return {"output_tokens_per_s": rate, LATENCY: 100 + steps * wobble, "failures": 0.0}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    with Ledger(tmp_path) as ledger:
        base: Settings = {"step_tokens": 64, "prefix_cache": True}
        ledger.append(Header("smollm2-135m", base, "output_tokens_per_s", {"concurrency": 8}, rounds=3))
        Climb(ledger, figures, Search({"step_tokens": (64, 128, 256), "max_running": (16, 64)})).run()
        return ledger


def test_the_winner_is_a_file_that_serve_reads_with_every_change_and_its_effect(
    ledger: Ledger, tmp_path: Path
) -> None:
    path = tmp_path / "winner.toml"
    path.write_text(winner_toml(ledger), encoding="utf-8")
    values = read_file(path, {"engine": EngineConfig})["engine"]
    assert values == {"model": "smollm2-135m", "step_tokens": 256, "prefix_cache": True, "max_running": 16}
    EngineConfig(**values)
    lines = path.read_text(encoding="utf-8").splitlines()
    above = lines[: lines.index("step_tokens = 256")]
    assert above[-6:-3] == ["# trial 1, was 64:", *above[-5:-3]]
    assert above[-5].startswith("#   output_tokens_per_s +1")
    assert above[-4].startswith("#   ttft_ms.p90 +")
    assert above[-3] == "# trial 2, was 128:"
    assert above[-2].startswith("#   output_tokens_per_s +2")
    assert lines[lines.index("prefix_cache = true") - 1] == "# initial setting"


def test_the_way_to_the_winner_leads_from_parent_to_parent(ledger: Ledger) -> None:
    settings, way = winner(ledger)
    assert settings["step_tokens"] == 256
    assert [trial.parent for trial, _ in way] == [0, *(trial.number for trial, _ in way[:-1])]


def test_the_front_holds_what_nothing_beats(ledger: Ledger) -> None:
    found = points(ledger, LATENCY, usd_per_hour=3.6)
    best = front(found)
    assert [point.settings["step_tokens"] for point in best] == [256, 128, 64]
    assert best[0].settings["max_running"] == 16
    for point in best:
        assert point.usd_per_mtok == pytest.approx(3.6 / 3600 / point.tokens_per_s * 1e6)


def test_a_machine_that_slows_down_does_not_move_the_points(tmp_path: Path) -> None:
    """Every round takes a tenth longer than the one before; only the setting itself is worth a fifth."""
    rounds = 0

    def slowing(settings: Settings, which: RunId) -> dict[str, float]:
        nonlocal rounds
        rounds += which.arm == "a"
        drift = 1.1**rounds
        gain = 1.2 if settings.get("max_running") == 16 else 1.0
        return {"output_tokens_per_s": gain * 100 / drift, LATENCY: 50 * drift / gain}

    with Ledger(tmp_path) as ledger:
        ledger.append(Header("m", {}, "output_tokens_per_s", {}, rounds=3))
        Climb(ledger, slowing, Search({"max_running": (16,)})).run()
        base, changed = points(ledger, LATENCY, None)
    assert changed.tokens_per_s / base.tokens_per_s == pytest.approx(1.2)
    assert base.latency_ms / changed.latency_ms == pytest.approx(1.2)


def test_a_point_is_beaten_only_by_one_that_is_nowhere_worse() -> None:
    def point(rate: float, latency: float, cost: float | None = None) -> Point:
        return Point({}, 1, rate, latency, cost)

    assert point(100, 10).beats(point(90, 10))
    assert not point(100, 10).beats(point(100, 10))
    assert not point(100, 11).beats(point(90, 10))
    assert not point(100, 10, 2.0).beats(point(90, 11, 1.0))


def test_the_table_tells_of_every_trial(ledger: Ledger) -> None:
    text = "\n".join(ledger_lines(ledger, LATENCY, None))
    assert "none: noise" in text
    assert "step_tokens 64 → 128" in text
    assert "refused    <b>too many</b>" in text
    assert "winner: step_tokens 256" in text
    assert re.search(r"step_tokens 64 → 128 +accepted +\+1.*  better\n +ttft_ms.p90 \+.*  worse", text)
    assert "–" in text  # the hourly price is unknown


def test_settings_that_change_answers_are_told_of(tmp_path: Path) -> None:
    def smaller_is_faster(settings: Settings, which: RunId) -> dict[str, float]:
        gain = 2.0 if settings.get("kv_dtype") == "int8" else 1.0
        return {"output_tokens_per_s": gain * (100 + which.round), LATENCY: 5.0}

    with Ledger(tmp_path) as ledger:
        ledger.append(Header("m", {}, "output_tokens_per_s", {}, rounds=2))
        Climb(ledger, smaller_is_faster, Search({"kv_dtype": ("int8",)})).run()
        assert "kv_dtype also changes the answers" in "\n".join(ledger_lines(ledger, LATENCY, None))


def test_the_page_is_whole_and_escapes_what_servers_say(ledger: Ledger) -> None:
    page = ledger_page(ledger, LATENCY, 3.6)
    assert page.count("<svg") == 2
    assert "step_tokens 128 → 256" in page
    assert "<b>too many</b>" not in page
    assert "&lt;b&gt;too many&lt;/b&gt;" in page


def test_an_unfinished_ledger_can_be_shown(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.append(Header("m", {}, "output_tokens_per_s", {}, rounds=2))
        assert "the defaults" in "\n".join(ledger_lines(ledger, LATENCY, None))
        ledger_page(ledger, LATENCY, None)


def test_spaces_are_read_with_the_types_of_the_settings() -> None:
    space = parse_space(
        ["step-tokens=64, 128", "prefix_cache=on,off", "weights=int8,int4", "memory_fraction=0.5"]
    )
    assert space == {
        "step_tokens": (64, 128),
        "prefix_cache": (True, False),
        "weights": ("int8", "int4"),
        "memory_fraction": (0.5,),
    }


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("step_token=64", "did you mean step_tokens"),
        ("step_tokens=many", "integer"),
        ("step_tokens=", "write step_tokens=VALUE"),
        ("step_tokens", "write step_tokens=VALUE"),
        ("step_tokens=64,64", "twice"),
        ("weights=int9", "must be one of"),
        ("prefix_cache=1", "true or false"),
        ("model=other", "unknown engine setting 'model'"),
    ],
)
def test_what_cannot_be_tried_is_refused_by_name(text: str, wanted: str) -> None:
    with pytest.raises(BadInput, match=wanted):
        parse_space([text])


def test_a_setting_has_one_value() -> None:
    assert parse_settings(["threads=2"]) == {"threads": 2}
    with pytest.raises(BadInput, match="one value"):
        parse_settings(["threads=1,2"])
    with pytest.raises(BadInput, match="twice"):
        parse_settings(["threads=1", "threads=2"])


def test_keys_alone_are_tried_at_the_usual_values() -> None:
    assert default_space(2, "kv_dtype, step-tokens") == {
        "kv_dtype": ("bfloat16", "int8"),
        "step_tokens": (64, 128, 256, 512, 1024),
    }
    with pytest.raises(BadInput, match="did you mean step_tokens"):
        default_space(2, "step_token")


def test_what_is_tried_by_default_changes_no_answer() -> None:
    space = default_space(4)
    assert not {"weights", "kv_dtype", "load_format"} & space.keys()
    for key, values in known_values(4).items():
        for value in values:
            EngineConfig(**{key: value})


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "loading\nridgeline: no room: lower it\nridgeline: it ended; its reason is above\n",
            "no room: lower it",
        ),
        (
            '{"level": "error", "message": "ridgeline: no room"}\n'
            '{"level": "error", "message": "ridgeline: it ended; its reason is above"}\n',
            "no room",
        ),
        ('{"level": "error", "message": "it failed"}\n{"level": "info", "message": "bye"}\n', "it failed"),
        ("one\ntwo\n", "two"),
        ("", ""),
    ],
)
def test_the_reason_is_found_in_a_servers_log(log: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(log, encoding="utf-8")
    assert last_words(path) == words
