"""Settings from RIDGELINE_* variables: generated like flags, between the file and the flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli.main import build_parser, main
from ridgeline.cli.parsing import engine_config
from ridgeline.engine.config import EngineConfig
from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.options import NOT_SETTINGS, OptionError, given_variables, options_of, without_settings
from ridgeline.server.config import ServerConfig
from tests.cli.test_options import Sample


def test_every_kind_of_option_can_be_set() -> None:
    environ = {
        "RIDGELINE_SIZE": "3",
        "RIDGELINE_LIMIT": "7",
        "RIDGELINE_SHARE": "0.25",
        "RIDGELINE_QUICK": "off",
        "RIDGELINE_COLOR": "green",
        "RIDGELINE_NAMES": "a,b",
        "RIDGELINE_PLACE": "/x",
        "SIZE": "4",
    }
    assert Sample(**given_variables(Sample, environ)) == Sample(
        3, 7, 0.25, False, "green", ("a", "b"), Path("/x")
    )


def test_a_variable_may_have_an_options_older_name() -> None:
    assert given_variables(EngineConfig, {"RIDGELINE_DTYPE": "float16"}) == {"weights": "float16"}
    both = {"RIDGELINE_DTYPE": "float16", "RIDGELINE_WEIGHTS": "float32"}
    with pytest.raises(OptionError, match="dtype and weights are one setting"):
        given_variables(EngineConfig, both)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("SIZE", "big", "RIDGELINE_SIZE must be an integer, got 'big'"),
        ("SIZE", "", "RIDGELINE_SIZE is empty"),
        ("NAMES", "a,,b", "RIDGELINE_NAMES is empty"),
        ("QUICK", "maybe", "RIDGELINE_QUICK must be true or false, got 'maybe'"),
        ("COLOR", "gren", "RIDGELINE_COLOR must be one of red, green, got 'gren'; did you mean 'green'"),
        ("SHARE", "nan", "RIDGELINE_SHARE must be a finite number"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        given_variables(Sample, {f"RIDGELINE_{name}": text})


def test_flag_over_variable_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ridgeline.toml"
    file.write_text(
        "[server]\nport = 1\nhost = '1.1.1.1'\ndrain_s = 1.0\n[engine]\nmax_running = 1\nkv_tokens = 1\n"
    )
    for name, value in {"PORT": "2", "HOST": "2.2.2.2", "KV_TOKENS": "2"}.items():
        monkeypatch.setenv(f"RIDGELINE_{name}", value)
    assert main(["serve", "--config", str(file), "--port", "3", "--print-config"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for line in ("port = 3", 'host = "2.2.2.2"', "drain_s = 1.0", "kv_tokens = 2", "max_running = 1"):
        assert line in shown
    assert "max_waiting = 512" in shown


def test_the_model_of_the_environment_stands_for_the_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ridgeline.toml"
    file.write_text('[[models]]\nmodel = "minilm"\n[[models]]\nmodel = "smollm2"\n')
    monkeypatch.setenv("RIDGELINE_MODEL", "gemma3")
    main(["serve", "--config", str(file), "--print-config"])
    assert 'model = "gemma3"' in capsys.readouterr().out
    main(["serve", "smollm2", "--print-config"])
    assert 'model = "smollm2"' in capsys.readouterr().out


def test_an_engine_that_is_loaded_here_reads_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_KV_TOKENS", "64")
    monkeypatch.setenv("RIDGELINE_THREADS", "2")
    args = build_parser(["run"]).parse_args(["run", "--threads", "1", "hello"])
    config = engine_config(args)
    assert (config.kv_tokens, config.threads) == (64, 1)


def test_a_gateways_variables_have_their_own_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_STATE_DIR", "/nowhere")
    monkeypatch.setenv("RIDGELINE_GATEWAY_WORKERS", "2")
    assert main(["gateway", "--check"]) == 2  # two workers need Redis
    assert "[gateway] workers" in capsys.readouterr().err
    assert main(["gateway", "--check", "--workers", "1", "--state-dir", str(tmp_path)]) == 0


def test_a_misspelt_variable_and_a_service_link_are_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_KV_TOKNES", "64")
    monkeypatch.setenv("RIDGELINE_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("RIDGELINE_API_KEY", "of the client")
    assert main(["serve", "--print-config"]) == 0
    shown = capsys.readouterr()
    assert "port = 8000" in shown.out
    assert sorted(shown.err.splitlines()) == [
        "note: RIDGELINE_KV_TOKNES is not a setting and is ignored; did you mean RIDGELINE_KV_TOKENS?",
        "note: RIDGELINE_PORT=tcp://10.0.0.1:8000 is a Kubernetes service link and is ignored",
    ]


def test_a_server_started_by_another_command_reads_no_settings() -> None:
    environ = {"RIDGELINE_PORT": "1", "RIDGELINE_CACHE": "/c", "HOME": "/h"}
    assert without_settings(environ) == {"RIDGELINE_CACHE": "/c", "HOME": "/h"}


def test_no_two_settings_share_a_variable() -> None:
    names = [option.name for config in (ServerConfig, EngineConfig) for option in options_of(config)]
    variables = [f"RIDGELINE_{name.upper()}" for name in names]
    variables += [f"RIDGELINE_GATEWAY_{option.name.upper()}" for option in options_of(GatewayConfig)]
    assert len({*variables, *NOT_SETTINGS}) == len(variables) + len(NOT_SETTINGS)
