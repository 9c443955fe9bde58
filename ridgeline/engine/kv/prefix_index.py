"""PrefixIndex: maps a prefix to the block that holds its KV.

A full block is named by a chained hash: blake2b over its parent's hash and its own tokens. The first parent
is a root salted by model, adapter and cache namespace. Equal hashes therefore mean equal KV. The scheduler
reads and fills the index; the block pool removes evicted blocks. It never decides which sequence holds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import pack

HASH_BYTES = 16
EVICTED_KEPT = 16_384  # hashes of evicted blocks: 2 MB


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of the block that holds `tokens` after the prefix with hash `parent`."""
    return blake2b(parent + pack(f"={len(tokens)}I", *tokens), digest_size=HASH_BYTES).digest()


class PrefixIndex:
    """A map from block hash to block, one to one."""

    def __init__(self, block_size: int, model_salt: str = "") -> None:
        self.block_size = block_size
        self._model_salt = model_salt
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.version = 0  # grows with every change
        # Hashes that came or went since a reader last took it, and whether they are indexed now. None: no
        # reader.
        self.journal: dict[bytes, bool] | None = None
        # Hashes of evicted blocks, oldest first: a lookup can say why it missed. None: not kept.
        self.evicted: dict[bytes, None] | None = None

    def root(self, adapter: str = "", namespace: str = "") -> bytes:
        """The parent of every first block. Prefixes under different roots never match."""
        parts = [part.encode("utf-8", "surrogatepass") for part in (self._model_salt, adapter, namespace)]
        # Lengths distinguish ("ab", "c") from ("a", "bc").
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
        """Append to `hashes` the hashes of the full blocks of `tokens`, up to `end`, that are missing."""
        size = self.block_size
        end = len(tokens) if end is None else end
        for start in range(len(hashes) * size, end - size + 1, size):
            parent = hashes[-1] if hashes else self.root(adapter, namespace)
            hashes.append(block_hash(parent, tokens[start : start + size]))

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest indexed prefix of `hashes`."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, name: bytes, block: int) -> bool:
        """Add `block` to the index. False if a block with the same content is indexed; that one stays."""
        self.version += 1
        known = self._block_of.setdefault(name, block)
        if known != block:
            return False
        old = self._hash_of.setdefault(block, name)
        if old != name:
            del self._block_of[name]
            raise ValueError(f"block {block} already has hash {old.hex()} and cannot also have {name.hex()}")
        if self.journal is not None:
            self.journal[name] = True
        return True

    def forget(self, block: int) -> None:
        """Remove a block whose content is about to change."""
        self.version += 1
        name = self._hash_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
            if self.journal is not None:
                self.journal[name] = False
            if self.evicted is not None:
                self.evicted[name] = None
                if len(self.evicted) > EVICTED_KEPT:
                    del self.evicted[next(iter(self.evicted))]

    def num_evicted(self, hashes: Sequence[bytes]) -> int:
        """How many blocks with these hashes were indexed once and are evicted, as far as is remembered."""
        evicted = self.evicted or {}
        return sum(1 for name in hashes if name in evicted and name not in self._block_of)

    def clear(self) -> None:
        self.version += 1
        if self.journal is not None:
            self.journal.update(dict.fromkeys(self._block_of, False))
        self._block_of.clear()
        self._hash_of.clear()

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of.get(block)

    def entries(self) -> list[tuple[bytes, int]]:
        return list(self._block_of.items())

    def blocks(self) -> Iterable[int]:
        """Every block that a hash maps to."""
        return self._block_of.values()

    @property
    def is_one_to_one(self) -> bool:
        return len(self._block_of) == len(self._hash_of)

    def agrees_on(self, block: int) -> bool:
        """Whether the hash of this block maps to it."""
        return self._block_of.get(self._hash_of[block]) == block

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._block_of)
