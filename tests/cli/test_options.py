"""Flags, file, schema and docs made from one dataclass: equal by construction, strict on input."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.options import (
    OptionError,
    add_flags,
    build,
    given_flags,
    json_schema,
    markdown_table,
    option,
    options_of,
    read_file,
    to_toml,
)
from ridgeline.server.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Sample:
    size: int = option(16, "how large, 100% of it")
    limit: int | None = option(None, "at most; default: none")
    share: float = option(0.5, "a share")
    quick: bool = option(True, "be quick | or slow")
    color: Literal["red", "green"] = option("red", "which color")
    names: tuple[str, ...] = option((), "names")
    place: Path | None = option(None, "where")


SECTIONS = {"sample": Sample}


def from_flags(*words: str) -> Sample:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, "sample", Sample)
    return build(Sample, given_flags(parser.parse_args(words), "sample"))


def from_file(tmp_path: Path, text: str) -> Sample:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return build(Sample, read_file(path, SECTIONS).get("sample", {}))


def test_without_flags_every_field_has_its_default() -> None:
    assert from_flags() == Sample()


def test_every_kind_of_field_can_be_set_by_flag() -> None:
    words = "--size 3 --limit 7 --share 0.25 --no-quick --color green --names a --names b --place /x"
    expected = Sample(3, 7, 0.25, False, "green", ("a", "b"), Path("/x"))
    assert from_flags(*words.split()) == expected


def test_every_kind_of_field_can_be_set_by_file(tmp_path: Path) -> None:
    text = '[sample]\nsize=3\nlimit=7\nshare=1\nquick=false\ncolor="green"\nnames=["a","b"]\nplace="/x"\n'
    assert from_file(tmp_path, text) == Sample(3, 7, 1.0, False, "green", ("a", "b"), Path("/x"))
    assert isinstance(from_file(tmp_path, text).share, float)


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[sample]\nsize = 3\nlimit = 7\n")
    parser = argparse.ArgumentParser()
    add_flags(parser, "sample", Sample)
    flags = given_flags(parser.parse_args(["--size", "16"]), "sample")  # the default, but said aloud
    assert build(Sample, read_file(path, SECTIONS)["sample"], flags) == Sample(size=16, limit=7)


def test_an_alias_is_read_under_the_options_name(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[engine]\ndtype = "bfloat16"\n')
    assert read_file(path, {"engine": EngineConfig}) == {"engine": {"weights": "bfloat16"}}
    path.write_text('[engine]\ndtype = "bfloat16"\nweights = "int8"\n')
    with pytest.raises(OptionError, match=r"\[engine\] dtype and weights are one setting"):
        read_file(path, {"engine": EngineConfig})
    schema = json_schema({"engine": EngineConfig})["properties"]["engine"]["properties"]
    assert schema["dtype"]["enum"] == schema["weights"]["enum"]
    assert "dtype =" not in to_toml({"engine": EngineConfig(weights="int8")}).replace("kv_dtype", "")


@pytest.mark.parametrize(
    "words", [["--size", "big"], ["--share", "nan"], ["--share", "inf"], ["--color", "blue"]]
)
def test_a_flag_of_the_wrong_type_is_refused(words: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=words[0]):
        from_flags(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sample]\nsise = 3", "unknown key 'sise'; did you mean 'size'"),
        ("[sample]\nxyzzy = 3", "known: size, limit, share"),
        ("[simple]\nsize = 3", r"unknown section \[simple\]; did you mean 'sample'"),
        ("sample = 3", r"write \[sample\] above"),
        ('[sample]\nsize = "3"', "size must be an integer, got '3'"),
        ("[sample]\nsize = true", "size must be an integer, got True"),
        ("[sample]\nsize = 3.5", "size must be an integer, got 3.5"),
        ("[sample]\nshare = nan", "share must be a finite number"),
        ('[sample]\nquick = "yes"', "quick must be true or false, got 'yes'"),
        ('[sample]\ncolor = "gren"', "one of red, green, got 'gren'; did you mean 'green'"),
        ('[sample]\nnames = "a"', "names must be a list"),
        ("[sample]\nnames = [1]", "names must be a string, got 1"),
        ("[sample", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_naming_the_key_and_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        from_file(tmp_path, text)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(OptionError, match=r"/no/such\.toml: cannot be read"):
        read_file(Path("/no/such.toml"), SECTIONS)


def test_a_printed_config_reads_back_as_itself(tmp_path: Path) -> None:
    sample = Sample(3, None, 0.25, False, "green", ('a "quoted"', "日本 😀"), Path("/x y"))
    assert from_file(tmp_path, to_toml({"sample": sample})) == sample


def test_the_schema_knows_every_field_and_no_other() -> None:
    schema = json_schema(SECTIONS)["properties"]["sample"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {o.name for o in options_of(Sample)}
    assert schema["properties"]["color"] == {
        "type": "string",
        "enum": ["red", "green"],
        "description": "which color",
        "default": "red",
    }
    assert schema["properties"]["names"]["type"] == "array"


def test_the_table_shows_flag_default_and_meaning() -> None:
    rows = markdown_table(Sample, skip=("place",)).splitlines()
    assert "| `--size N` | `16` | how large, 100% of it |" in rows
    assert "| `--quick, --no-quick` | `on` | be quick \\| or slow |" in rows
    assert "| `--color {red,green}` | `red` | which color |" in rows
    assert not any("place" in row for row in rows)


def test_help_with_a_percent_sign_is_printed() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "sample", Sample)
    assert "100% of it" in parser.format_help()


def test_a_field_of_an_unsupported_type_fails_when_the_program_is_written() -> None:
    @dataclass(frozen=True)
    class Wrong:
        value: dict[str, int] = option(None, "a dict")

    with pytest.raises(TypeError, match="value"):
        options_of(Wrong)


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_field_of_the_real_configs_is_documented(config: type) -> None:
    assert all(o.doc for o in options_of(config))
