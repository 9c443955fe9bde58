"""BM25 in plain Python: the definition that the index must agree with.

A chunk's score is the sum, over the query's distinct terms, of
idf · tf · (k1 + 1) / (tf + k1 · (1 - b + b · length / mean length)), idf = ln(1 + (N - n + 0.5) / (n + 0.5)),
with k1 = 1.2 and b = 0.75. N, n and the mean length are those of the whole namespace: a filter changes no
score.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

K1 = 1.2
B = 0.75


def bm25(query: Sequence[str], texts: Sequence[Sequence[str]]) -> list[float]:
    """The score of each text, given as terms."""
    counts = [Counter(text) for text in texts]
    mean = sum(len(text) for text in texts) / max(len(texts), 1)
    scores = [0.0] * len(texts)
    for term in dict.fromkeys(query):
        n = sum(term in count for count in counts)
        idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
        for i, count in enumerate(counts):
            tf = count[term]
            if tf:
                scores[i] += idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * len(texts[i]) / mean))
    return scores
