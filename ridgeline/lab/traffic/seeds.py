"""Random numbers of the lab: one root seed, and a stream of its own for everything that is drawn.

A stream depends on the root seed and its names alone. Drawing more arrivals, or none, therefore moves no
length and no word; two runs that differ in one thing differ in that thing only.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The random numbers for what the names say: `stream(7, "arrivals")`, `stream(7, "words", 31)`."""
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
