"""gateway.toml: what fits together is taken, what does not is refused in words that say what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.gateway.gateway import EXAMPLE_FILE
from ridgeline.gateway.catalog import Catalog, allows
from ridgeline.gateway.errors import NotFound
from ridgeline.gateway.settings import (
    LISTS,
    SECTIONS,
    GatewaySettings,
    checked,
    embedded,
    from_json,
    make_settings,
    read_settings,
    to_json,
)
from ridgeline.gateway.upstreams.outgoing import Target
from ridgeline.options import OptionError, build, options_of

UPSTREAM = {"name": "a", "kind": "openai", "url": "http://127.0.0.1:1"}


def settings(**values: Any) -> GatewaySettings:
    return checked(
        make_settings({"upstreams": [UPSTREAM], "models": [{"name": "m", "targets": ("a/x",)}], **values})
    )


def test_the_printed_example_is_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(EXAMPLE_FILE)
    read = read_settings(path, {"port": 9999})
    assert (read.gateway.port, read.models[0].name) == (9999, "fast")


def test_a_worker_reads_the_settings_as_they_were_written(tmp_path: Path) -> None:
    made = settings(
        gateway={"state_dir": tmp_path, "drain_s": 1.5},
        routes=[{"name": "auto", "models": ("m",)}],
        guards=[{"name": "default", "block": ("card",)}],
    )
    assert from_json(to_json(made)) == made


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"upstreams": []}, "no [[upstreams]]"),
        ({"models": []}, "no [[models]]"),
        ({"models": [{"name": "m", "targets": ("b/x",)}]}, "no upstream is named 'b'"),
        ({"models": [{"name": "m", "targets": ("a",)}]}, "must be upstream/model"),
        ({"models": [{"name": "m", "targets": ()}]}, "targets is empty"),
        ({"models": [{"name": "m", "targets": ("a/x*-1",)}]}, "weight"),
        ({"models": [{"name": "m", "targets": ("a/x",)}] * 2}, "two tables are named 'm'"),
        (
            {
                "models": [{"name": "m", "targets": ("a/x", "a/y"), "hedge_after_ms": 50.0}],
                "retries": {"retries": 0},
            },
            "hedge_after_ms",
        ),
        ({"gateway": {"workers": 2}}, "[redis] url"),
        ({"gateway": {"workers": 0}}, "[gateway] workers must be from 1"),
        ({"gateway": {"require_keys": False, "host": "0.0.0.0"}}, "open 0.0.0.0 to every client"),
        ({"routes": [{"name": "auto", "models": ("other",)}]}, "no [[models]] is named 'other'"),
        ({"cache": {"place": "redis"}}, "[redis] url"),
        ({"gateway": {"objects_upstream": "b"}}, "objects_upstream"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(values: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as refused:
        settings(**values)
    assert says in str(refused.value)


@pytest.mark.parametrize("section", [*SECTIONS, *LISTS])
def test_every_number_has_bounds(section: str) -> None:
    config = {**SECTIONS, **LISTS}[section]
    numbers = [one for one in options_of(config) if one.base in (int, float) and not one.repeated]
    for number in numbers:
        for value in (-2, 10**16):
            with pytest.raises(OptionError, match=number.name):
                build(config, {"name": "x"} if section in LISTS else {}, {number.name: number.base(value)})


def test_an_unknown_key_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("[gateway]\nprot = 1\n")
    with pytest.raises(OptionError, match="did you mean 'port'"):
        read_settings(path)


def test_the_embedded_default_forwards_every_name_to_one_server() -> None:
    catalog = Catalog(embedded("http://127.0.0.1:8000"))
    assert catalog.find("any/name").targets == (Target("local", "any/name"),)
    assert catalog.open_upstreams() == ["local"]


def test_the_longest_pattern_counts_and_a_star_stands_for_what_it_matched() -> None:
    models = [
        {"name": "*", "targets": ("a/*",)},
        {"name": "gpt-*", "targets": ("a/near-*", "a/far*2.5")},
        {"name": "gpt-4", "targets": ("a/four",)},
    ]
    catalog = Catalog(settings(models=models))
    assert catalog.find("other").targets == (Target("a", "other"),)
    assert catalog.find("gpt-5").targets == (Target("a", "near-5"), Target("a", "far", 2.5))
    assert catalog.find("gpt-4").targets == (Target("a", "four"),)


def test_a_name_that_nothing_matches_is_not_found_and_a_long_one_is_not_repeated() -> None:
    catalog = Catalog(settings())
    with pytest.raises(NotFound) as refused:
        catalog.find("x" * 100_000)
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    ("scope", "name", "may"),
    [
        ((), "x", True),
        (("x",), "x", True),
        (("x",), "xy", False),
        (("x*",), "xy", True),
        (("a", "b"), "c", False),
    ],
)
def test_a_scope_holds_names_and_beginnings(scope: tuple[str, ...], name: str, may: bool) -> None:
    assert allows(scope, name) is may


@pytest.mark.parametrize(
    ("changed", "to", "said"),
    [
        ('url = "http://', 'url = "', "must begin with http://"),
        ('kind = "ridgeline"', 'key_env = ["NOT_SET_ANYWHERE"]', "NOT_SET_ANYWHERE is not set"),
        ("[[models]]", '[[guards]]\nname = "g"\npatterns = ["ids=(a+)+$"]\n[[models]]', "ids"),
        (
            "[[models]]",
            '[[guards]]\nname = "g"\nner = true\nner_model = "/nowhere"\n[[models]]',
            "g: NER did not start",
        ),
        (
            "[[models]]",
            '[[routes]]\nname = "auto"\nmodels = ["fast"]\nartifact = "gone.npz"\n[[models]]',
            "artifact",
        ),
    ],
)
def test_check_finds_what_a_worker_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: str, to: str, said: str
) -> None:
    from ridgeline.cli.main import main

    path = tmp_path / "gateway.toml"
    path.write_text(EXAMPLE_FILE)
    assert main(["gateway", "--config", str(path), "--check"]) == 0
    assert "1 upstream, 1 model; the configuration is valid" in capsys.readouterr().out
    path.write_text(EXAMPLE_FILE.replace(changed, to, 1))
    assert main(["gateway", "--config", str(path), "--check"]) != 0
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_the_state_directory_follows_xdg_state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert GatewaySettings().state_dir == tmp_path / "ridgeline" / "gateway"
