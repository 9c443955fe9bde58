"""PrefixNames: the names of the prompt blocks in the engine's cache.

A router names prompt blocks by their text; the engine names KV blocks by their tokens. Each name is tied to
the KV block at the same proportion of the prompt, so an eviction removes the name. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ridgeline.engine.kv.prefix_index import HASH_BYTES

MOST_PENDING = 65_536  # names of blocks that are not cached; the oldest are forgotten


class PrefixNames:
    def __init__(self, most_pending: int = MOST_PENDING) -> None:
        self._most_pending = most_pending
        self._cached: set[bytes] = set()
        self._names: dict[bytes, list[int]] = {}  # KV block → names that end in it
        self._block: dict[int, bytes] = {}  # name → KV block
        self._pending: dict[bytes, None] = {}  # blocks with names that are not cached, oldest first

    def register(self, names: Sequence[int], blocks: Sequence[bytes]) -> list[int]:
        """Tie the names of a prompt to its KV blocks, one each. Returns those that are already cached."""
        found = []
        for name, block in zip(names, blocks, strict=True):
            known = self._block.get(name)
            if known == block or known in self._cached:
                continue  # a prompt with another ending has the name: its block is as good
            if known is not None:
                self._forget(name, known)
            self._block[name] = block
            self._names.setdefault(block, []).append(name)
            if block in self._cached:
                found.append(name)
            else:
                self._pending[block] = None
        while len(self._pending) > self._most_pending:
            self._drop(next(iter(self._pending)))
        return found

    def change(self, stored: bytes, removed: bytes, whole: bool) -> tuple[list[int], list[int]]:
        """KV blocks entered or left the cache. Returns the names that are now stored, and those removed."""
        came, gone = split_hashes(stored), split_hashes(removed)
        if whole:
            gone = list(self._cached.difference(came))
        new: list[int] = []
        old: list[int] = []
        for block in gone:
            if block in self._cached:
                self._cached.discard(block)
                old += self._names.get(block, ())
                self._drop(block)
        for block in came:
            if block not in self._cached:
                self._cached.add(block)
                self._pending.pop(block, None)
                new += self._names.get(block, ())
        return new, old

    def stored(self) -> list[int]:
        """Every name that is cached."""
        return [name for block, names in self._names.items() if block in self._cached for name in names]

    def clear(self) -> list[int]:
        """Forget the whole cache. Returns the names it held."""
        held = self.stored()
        for known in (self._cached, self._names, self._block, self._pending):
            known.clear()
        return held

    def _drop(self, block: bytes) -> None:
        """Forget the names of a block."""
        self._pending.pop(block, None)
        for name in self._names.pop(block, ()):
            del self._block[name]

    def _forget(self, name: int, block: bytes) -> None:
        self._names[block].remove(name)
        if not self._names[block]:
            self._drop(block)


def split_hashes(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def blocks_at(hashes: Sequence[bytes], tokens: int, block_size: int, shares: Iterable[float]) -> list[bytes]:
    """The last KV block that is full at each share of the prompt's tokens; the first one for less.

    hashes: of the prompt's full KV blocks, at least one
    """
    last = len(hashes) - 1
    return [hashes[min(max(int(share * tokens) // block_size - 1, 0), last)] for share in shares]
