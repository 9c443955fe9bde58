"""Flags, variables, configuration file, JSON schema and documentation tables, made from one frozen dataclass.

A config declares each field once, with a default and a `doc` in its metadata; the command line and the docs
call the functions here. Stands outside the layers: knows dataclasses, but none of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
_NOUNS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path (a string)",
    bool: "true or false",
}
_SCHEMA_TYPES = {int: "integer", float: "number", str: "string", Path: "string", bool: "boolean"}


class OptionError(Exception):
    """A configuration value or file is wrong; the message names the key, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a config, with its type taken apart."""

    name: str
    base: type  # str, int, float, bool or Path
    choices: tuple[str, ...]
    optional: bool  # None is allowed, and means what the doc says
    repeated: bool  # a tuple: the flag may be given several times, the file has a list
    default: Any
    doc: str
    alias: str = ""  # an older name of the same option, still read in files and variables

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def option(default: Any, doc: str, alias: str = "") -> Any:
    """A field with its one-line documentation, read by the flag, schema and docs generators."""
    return field(default=default, metadata={"doc": doc, "alias": alias})


def options_of(config: type) -> tuple[Option, ...]:
    """Every option of a config class, in its order."""
    if not is_dataclass(config):
        raise TypeError(f"{config.__name__} is not a dataclass")
    hints = get_type_hints(config)
    return tuple(
        _option(f.name, hints[f.name], f.default, f.metadata.get("doc", ""), f.metadata.get("alias", ""))
        for f in fields(config)
    )


def by_name(config: type, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values under their options' names: an alias is replaced; both names at once are an OptionError."""
    named = dict(values)
    for option in options_of(config):
        if option.alias and option.alias in named:
            if option.name in named:
                raise OptionError(
                    f"{where}{option.alias} and {option.name} are one setting; give one of them"
                )
            named[option.name] = named.pop(option.alias)
    return named


# ---- flags ----


def add_flags(
    parser: argparse.ArgumentParser, section: str, config: type, *, title: str = "", skip: Iterable[str] = ()
) -> None:
    """A flag for every option but the skipped. Absent flags leave no trace, so that a file can set them."""
    group = parser.add_argument_group(title or f"{section} options")
    for option in options_of(config):
        if option.name not in skip:
            _add_flag(group, section, option)


def given_flags(arguments: argparse.Namespace, section: str) -> dict[str, Any]:
    """The options of a section that were given as flags."""
    prefix = section + "."
    given = {key: value for key, value in vars(arguments).items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): tuple(v) if isinstance(v, list) else v for key, v in given.items()}


# ---- environment ----

# RIDGELINE_* variables that are not settings of a server or gateway.
NOT_SETTINGS = (
    *("RIDGELINE_CACHE", "RIDGELINE_API_KEY", "RIDGELINE_ADMIN_URL", "RIDGELINE_ADMIN_KEY_FILE"),
    *("RIDGELINE_DEBUG", "RIDGELINE_ISA", "RIDGELINE_PDL", "RIDGELINE_ASSUME_CAPABILITY"),
    *("RIDGELINE_FLEET_REPLICA", "RIDGELINE_FLEET_ROUTER", "RIDGELINE_DATA"),
)
_TRUTHS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def given_variables(config: type, environ: Mapping[str, str], prefix: str = "RIDGELINE_") -> dict[str, Any]:
    """The options that environment variables set: --kv-tokens is RIDGELINE_KV_TOKENS. Lists have commas."""
    given = {}
    for option in options_of(config):
        for name in filter(None, (option.name, option.alias)):
            variable = prefix + name.upper()
            if variable in environ:
                given[name] = _from_text(option, environ[variable], variable)
    return by_name(config, given, where="environment: ")


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server that another command starts: that command chooses the settings."""
    return {k: v for k, v in environ.items() if not k.startswith("RIDGELINE_") or k in NOT_SETTINGS}


def _from_text(option: Option, text: str, variable: str) -> Any:
    if not text.strip():
        # An unset variable in a script must not pass for a value: of api_keys, it would open the server.
        raise OptionError(f"{variable} is empty: give it a value, or unset it")
    if option.repeated:
        return tuple(_from_text(replace(option, repeated=False), part, variable) for part in text.split(","))
    text = text.strip()
    value: Any = text
    if option.base is bool:
        value = _TRUTHS.get(text.lower(), text)
    elif option.base in (int, float):
        with contextlib.suppress(ValueError):
            value = option.base(text)
    return _checked_one(replace(option, name=variable), value, "")


# ---- file ----


def read_file(
    path: Path, sections: Mapping[str, type], lists: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """A TOML file's values by section, checked: an unknown key or a wrong type is an OptionError.

    `lists`: sections that may stand there several times, written [[name]]; their values are lists.
    """
    lists = lists or {}
    values: dict[str, Any] = {}
    for section, table in read_toml(path).items():
        if section in lists:
            values[section] = [
                check_values(lists[section], one, where=f"{path}: [[{section}]] {number} ")
                for number, one in enumerate(list_of_tables(table, section, f"{path}: "), start=1)
            ]
            continue
        if section not in sections:
            raise OptionError(f"{path}: unknown section [{section}]{nearest(section, [*sections, *lists])}")
        if not isinstance(table, dict):
            raise OptionError(f"{path}: {section} must be a section: write [{section}] above its keys")
        values[section] = check_values(sections[section], table, where=f"{path}: [{section}] ")
    return values


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's document. OptionError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: not valid TOML: {error}") from error


def list_of_tables(tables: Any, section: str, where: str = "") -> list[dict[str, Any]]:
    """The tables of [[section]]. OptionError if it is written in another form."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise OptionError(f"{where}{section} is a list: write [[{section}]] above the keys of each")
    return tables


def check_values(config: type, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values with their types checked and converted to those of the config's fields."""
    known = {option.name: option for option in options_of(config)}
    checked = {}
    for key, value in by_name(config, values, where).items():
        if key not in known:
            raise OptionError(f"{where}unknown key {key!r}{nearest(key, known)}")
        checked[key] = _checked(known[key], value, where)
    return checked


def build(config: type[Config], *layers: Mapping[str, Any]) -> Config:
    """The config with its defaults, overlaid by each layer in turn: file, environment, flags."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    return config(**merged)


# ---- documentation ----


def check_range(config: object, where: str, least: float, most: float, *names: str) -> None:
    """For a `__post_init__`: these options, where they are set, lie within the bounds."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise OptionError(f"{where} {name} must be from {least:,} to {most:,}, got {value}")


def markdown_table(config: type, skip: Iterable[str] = ()) -> str:
    """The options as a Markdown table: flag, default, meaning."""
    head = ["| flag | default | meaning |", "|---|---|---|"]
    shown = [option for option in options_of(config) if option.name not in skip]
    return "\n".join(head + [_table_row(option) for option in shown])


def json_schema(sections: Mapping[str, type], lists: Mapping[str, type] | None = None) -> dict[str, Any]:
    """A JSON schema of the configuration file, for editors that complete and check TOML."""
    repeated = {name: {"type": "array", "items": _section_schema(c)} for name, c in (lists or {}).items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ridgeline configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {section: _section_schema(config) for section, config in sections.items()} | repeated,
    }


def to_toml(sections: Mapping[str, Any]) -> str:
    """Configs as a file that `read_file` reads back: each value under its doc; unset ones commented out."""
    lines: list[str] = []
    for section, config in sections.items():
        lines += [f"[{section}]"]
        for option in options_of(type(config)):
            value = getattr(config, option.name)
            lines += [
                f"# {option.doc}",
                f"# {option.name} =" if value is None else f"{option.name} = {_toml(value)}",
            ]
        lines += [""]
    return "\n".join(lines)


# ---- one option ----


def _option(name: str, hint: Any, default: Any, doc: str, alias: str) -> Option:
    optional = repeated = False
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not types.NoneType]
        if len(members) != 1:
            raise TypeError(f"{name}: an option has one type, or one type or None, not {hint}")
        hint, optional = members[0], True
    if get_origin(hint) is tuple:
        hint, repeated = get_args(hint)[0], True
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    base = str if choices else hint
    if base not in _NOUNS:
        raise TypeError(f"{name}: options of type {hint} are not supported")
    return Option(name, base, choices, optional, repeated, default, doc, alias)


def _add_flag(group: argparse._ArgumentGroup, section: str, option: Option) -> None:
    settings: dict[str, Any] = {"dest": f"{section}.{option.name}", "default": argparse.SUPPRESS}
    text = option.doc
    if option.default not in (None, ()):
        text += f" (default: {_plain_default(option)})"
    settings["help"] = text.replace("%", "%%")
    if option.base is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **settings)
        return
    settings["action"] = "append" if option.repeated else _StoreOnce
    if option.choices:
        settings["choices"] = option.choices
    else:
        settings["type"] = _parser_of(option)
        settings["metavar"] = _METAVARS[option.base]
    group.add_argument(option.flag, **settings)


class _StoreOnce(argparse.Action):
    """Stores the last value. An option that is given under two names, a flag and its alias, is an error."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        names = vars(namespace).setdefault("names_of_options", {})
        if (first := names.setdefault(self.dest, option_string)) != option_string:
            parser.error(f"{first} and {option_string} are one setting; give one of them")
        setattr(namespace, self.dest, values)


def _parser_of(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = option.base(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {_NOUNS[option.base]}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
        return value

    return parse


def _checked(option: Option, value: Any, where: str) -> Any:
    if option.repeated:
        if not isinstance(value, list):
            raise OptionError(f"{where}{option.name} must be a list of strings, got {value!r}")
        return tuple(_checked_one(option, item, where) for item in value)
    return _checked_one(option, value, where)


def _checked_one(option: Option, value: Any, where: str) -> Any:
    allowed = {float: (int, float), Path: (str,)}.get(option.base, (option.base,))
    # bool is an int to Python, but `port = true` is a mistake.
    wrong_bool = isinstance(value, bool) and option.base is not bool
    if wrong_bool or not isinstance(value, allowed):
        raise OptionError(f"{where}{option.name} must be {_NOUNS[option.base]}, got {value!r}")
    if option.choices and value not in option.choices:
        near = nearest(str(value), option.choices)
        raise OptionError(
            f"{where}{option.name} must be one of {', '.join(option.choices)}, got {value!r}{near}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{where}{option.name} must be a finite number, got {value!r}")
    return option.base(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


def _usage(option: Option) -> str:
    if option.base is bool:
        return f"{option.flag}, --no-{option.flag.removeprefix('--')}"
    if option.choices:
        return f"{option.flag} {{{','.join(option.choices)}}}"
    return f"{option.flag} {_METAVARS[option.base]}" + (" …" if option.repeated else "")


def _table_row(option: Option) -> str:
    doc = option.doc.replace("|", "\\|")
    return f"| `{_usage(option)}` | {_shown_default(option)} | {doc} |"


def _plain_default(option: Option) -> str:
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if isinstance(option.default, tuple):
        return ", ".join(map(str, option.default))
    return str(option.default)


def _shown_default(option: Option) -> str:
    return "" if option.default in (None, ()) else f"`{_plain_default(option)}`"


def _section_schema(config: type) -> dict[str, Any]:
    properties = {}
    for option in options_of(config):
        schema: dict[str, Any] = {"type": _SCHEMA_TYPES[option.base]}
        if option.choices:
            schema["enum"] = list(option.choices)
        if option.repeated:
            schema = {"type": "array", "items": schema}
        schema["description"] = option.doc
        if option.default is not None:
            schema["default"] = list(option.default) if option.repeated else option.default
        properties[option.name] = schema
        if option.alias:
            properties[option.alias] = {**schema, "description": f"alias of {option.name}"}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)  # TOML's basic strings escape as JSON's do
