"""prompt_blocks(): names the leading blocks of a prompt, from the request's text.

A router has no tokenizer and no chat template, so it names a prefix by its bytes: the raw JSON of the fields
that the template reads, cut into blocks, each named by a chained hash. A server makes the same names from the
same request and reports which of them its KV cache holds. Equal names mean equal text, hence equal tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

BLOCK_BYTES = 256  # about 64 tokens of English: four KV blocks
MAX_BLOCKS = 1024  # 256 kB; the rest of a longer prompt has no names
# In the order in which templates write them. A later turn's messages begin with the earlier turn's bytes.
FIELDS = ("tools", "functions", "system", "instructions", "messages", "prompt", "input")


def prompt_blocks(fields: Mapping[str, bytes], root: str = "") -> list[int]:
    """The blocks of a request, given the raw JSON of its fields. root: model, adapter and cache_salt."""
    text = b"\0".join(bytes(fields[name]) for name in FIELDS if name in fields)
    name = blake2b(root.encode(), digest_size=8).digest()
    blocks = []
    for at in range(0, min(len(text) - BLOCK_BYTES + 1, MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        name = blake2b(name + text[at : at + BLOCK_BYTES], digest_size=8).digest()
        blocks.append(int.from_bytes(name, "little"))
    return blocks


def prefix_root(model: str, adapter: str = "", cache_salt: str = "") -> str:
    """Requests with different roots share no KV."""
    return "\0".join((model, adapter, cache_salt))
