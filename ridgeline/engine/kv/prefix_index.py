"""PrefixIndex: which block holds the KV of which prefix.

A full block is named by a chained hash: blake2b over its parent's hash and its own tokens, the first parent
being a root salted by model, adapter and cache namespace. Equal hash therefore means equal KV. The scheduler
asks and fills it, the block pool makes it forget what was evicted. It never decides who holds a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

HASH_BYTES = 16


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the block that holds `tokens` after the prefix named `parent`."""
    return blake2b(parent + pack(f"={len(tokens)}I", *tokens), digest_size=HASH_BYTES).digest()


class PrefixIndex:
    """A map from block hash to block, one to one."""

    def __init__(self, block_size: int, model_salt: str = "") -> None:
        self.block_size = block_size
        self._model_salt = model_salt
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def root(self, adapter: str = "", namespace: str = "") -> bytes:
        """The parent of every first block: prefixes under different roots never meet."""
        parts = [part.encode("utf-8", "surrogatepass") for part in (self._model_salt, adapter, namespace)]
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        salted = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return blake2b(salted, digest_size=HASH_BYTES).digest()

    def extend(
        self,
        hashes: list[bytes],
        tokens: Sequence[int],
        adapter: str = "",
        namespace: str = "",
        end: int | None = None,
    ) -> None:
        """Append to `hashes` the names of the full blocks of `tokens`, up to `end`, not named yet."""
        size = self.block_size
        end = len(tokens) if end is None else end
        for start in range(len(hashes) * size, end - size + 1, size):
            parent = hashes[-1] if hashes else self.root(adapter, namespace)
            hashes.append(block_hash(parent, tokens[start : start + size]))

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of `hashes`."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, name: bytes, block: int) -> bool:
        """Make `block` findable; False: another block with the same content is, and stays so."""
        known = self._block_of.setdefault(name, block)
        if known != block:
            return False
        old = self._hash_of.setdefault(block, name)
        if old != name:
            del self._block_of[name]
            raise ValueError(f"block {block} is known as {old.hex()}, it cannot also be {name.hex()}")
        return True

    def forget(self, block: int) -> None:
        """The block's content is about to change."""
        name = self._hash_of.pop(block, None)
        if name is not None:
            del self._block_of[name]

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of.get(block)

    def entries(self) -> list[tuple[bytes, int]]:
        return list(self._block_of.items())

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._block_of)
