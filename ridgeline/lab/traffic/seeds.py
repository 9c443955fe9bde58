"""Random numbers of the lab: one root seed, and a separate stream for each purpose.

A stream depends only on the root seed and its names. Drawing more arrivals therefore changes no length and no
word; two runs that differ in one setting differ only in its effect.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The random numbers for these names: `stream(7, "arrivals")`, `stream(7, "words", 31)`."""
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
