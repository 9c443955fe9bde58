"""Settings from RIDGELINE_* variables: between the file, which they override, and the flags."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.cli.flags.aliases import add_note
from ridgeline.options import NOT_SETTINGS, given_variables, options_of

PREFIXES = {"server": "RIDGELINE_", "engine": "RIDGELINE_", "gateway": "RIDGELINE_GATEWAY_"}
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://[\d.:\[\]a-f]+")


def from_environment(args: argparse.Namespace, **sections: type) -> dict[str, dict[str, Any]]:
    """The values of each section. Notes about ignored variables go into `args`."""
    environ = {name: text for name, text in os.environ.items() if name.startswith("RIDGELINE_")}
    for name in [name for name, text in environ.items() if _SERVICE_LINK.fullmatch(text)]:
        # Kubernetes sets RIDGELINE_PORT=tcp://10.0.0.1:80 beside a service that is called ridgeline.
        add_note(args, f"{name}={environ.pop(name)} is a Kubernetes service link and is ignored")
    _note_misspelt(args, environ, sections)
    return {name: given_variables(config, environ, PREFIXES[name]) for name, config in sections.items()}


def _note_misspelt(
    args: argparse.Namespace, environ: Mapping[str, str], sections: Mapping[str, type]
) -> None:
    """Verbs with all settings of a prefix tell a misspelt variable from another verb's."""
    prefix = next((PREFIXES[name] for name in ("server", "gateway") if name in sections), None)
    if prefix is None:
        return
    options = [option for config in sections.values() for option in options_of(config)]
    known = {name.upper() for option in options for name in (option.name, option.alias) if name}
    for variable in environ.keys() - set(NOT_SETTINGS):
        is_others = prefix == PREFIXES["server"] and variable.startswith(PREFIXES["gateway"])
        name = variable.removeprefix(prefix)
        if name == variable or name in known or is_others:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
            add_note(args, f"{variable} is not a setting and is ignored; did you mean {prefix}{near[0]}?")
