"""Ids of stored responses: each begins with the epoch of the server that stores it.

A router sends a request that continues a response to that server. It learns nothing and keeps nothing: every
router reads the same from the id, also after a restart.
"""

from __future__ import annotations

import re

_EPOCH = re.compile(r"[0-9a-f]{16}")
_ID = re.compile(r"resp_([0-9a-f]{16})[0-9a-f]{32}")


def response_id(id: str, epoch: str) -> str:
    """An id with 48 random hexadecimal digits; the epoch takes the place of the first 16."""
    prefix, _, digits = id.partition("_")
    return f"{prefix}_{epoch}{digits[16:]}" if _EPOCH.fullmatch(epoch) else id


def epoch_of(id: str) -> str:
    """Of the server that stores this response; empty: the id is not one of ours."""
    found = _ID.fullmatch(id)
    return "" if found is None else found[1]
