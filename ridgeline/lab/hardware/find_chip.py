"""find_chip: a chip by its name in the usual spellings. `find_chip("h200")`, `find_chip("cpu")`."""

from __future__ import annotations

import difflib

from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.chip import CPU, Chip
from ridgeline.lab.hardware.table import CHIPS
from ridgeline.lab.hardware.this_machine import this_cpu

# As other tables and clouds write them.
_SUFFIXES = ("-sxm", "-sxm4", "-sxm5", "-sxm6", "-server", "-nvl72", "-80gb", "-141gb", "-180gb", "-192gb")
_PREFIXES = ("nvidia-", "amd-", "geforce-", "instinct-")
_OTHER_NAMES = {
    "rtxpro6000": "rtx-pro-6000",
    "pro-6000": "rtx-pro-6000",
    "rtx5090": "rtx-5090",
    "5090": "rtx-5090",
    "rtx4090": "rtx-4090",
    "4090": "rtx-4090",
}


def find_chip(name: str) -> Chip:
    """The chip of that name, in the usual spellings; `cpu` is this machine's processor."""
    wanted = _plain(name)
    if wanted == CPU:
        return this_cpu()
    for known in CHIPS:
        if known.name == wanted:
            return known
    names = [known.name for known in CHIPS]
    close = difflib.get_close_matches(wanted, [*names, CPU], n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise BadInput(f"unknown hardware {name!r}; {hint}known are {', '.join(names)}, and {CPU}")


def _plain(name: str) -> str:
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    for prefix in _PREFIXES:
        plain = plain.removeprefix(prefix)
    for suffix in _SUFFIXES:
        plain = plain.removesuffix(suffix)
    return _OTHER_NAMES.get(plain, plain)
