"""`ridgeline gateway keys|teams|usage|routes`, and the old names of the same verbs."""

from __future__ import annotations

import pytest

from ridgeline.cli.main import OLD_NAMES, build_parser, main

NEW_NAMES = {"router": "routes"}
COMMANDS = {
    "keys": ["create", "--name", "app", "--rpm", "5"],
    "teams": ["create", "search", "--weight", "2"],
    "usage": ["--by", "team,day"],
    "router": ["fit", "a.csv", "--models", "small,large"],
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_the_old_name_parses_to_the_same_command(old: str) -> None:
    new = build_parser(["gateway"]).parse_args(["gateway", NEW_NAMES.get(old, old), *COMMANDS[old]])
    before = build_parser([old]).parse_args([old, *COMMANDS[old]])
    assert new.parser.prog.startswith(f"ridgeline gateway {NEW_NAMES.get(old, old)}")
    assert {**vars(new), "parser": None} == {**vars(before), "parser": None}


def test_the_gateway_itself_still_takes_flags() -> None:
    args = build_parser(["gateway"]).parse_args(["gateway", "--port", "9080"])
    assert vars(args)["gateway.port"] == 9080


def test_the_gateways_help_lists_its_verbs_and_the_top_lists_only_the_gateway(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["gateway", "--help"], ["--help"]):
        with pytest.raises(SystemExit):
            main(words)
    inner, _, outer = capsys.readouterr().out.partition("usage: ridgeline [-h]")
    for verb in ("keys", "teams", "usage", "routes"):
        assert f"\n  {verb} " in inner
        assert f"\n    {verb} " not in outer
    assert "\n    gateway " in outer


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gateway", "kyes"], "ridgeline gateway: unknown argument kyes; did you mean `keys`?"),
        (
            ["gateway", "keys", "creat"],
            "ridgeline gateway keys: unknown action 'creat'; did you mean `create`?",
        ),
    ],
)
def test_a_misspelt_verb_below_the_gateway_is_suggested(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().err.startswith(said)
