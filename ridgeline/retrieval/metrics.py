"""Metrics of ranked results: nDCG@k, recall@k, MRR. Pure.

A run is the ranked ids of a query; judgements map ids to a grade, above 0 for what is relevant. As in
trec_eval: gain = grade, discount = log2(rank + 1), and a query without relevant documents counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Judgements = Mapping[str, float]


def ndcg(ranked: Sequence[str], judged: Judgements, k: int) -> float:
    gains = [max(judged.get(id, 0.0), 0.0) for id in ranked[:k]]
    ideal = sorted((grade for grade in judged.values() if grade > 0), reverse=True)[:k]
    best = _discounted(ideal)
    return _discounted(gains) / best if best else 0.0


def recall(ranked: Sequence[str], judged: Judgements, k: int) -> float:
    relevant = {id for id, grade in judged.items() if grade > 0}
    return len(relevant.intersection(ranked[:k])) / len(relevant) if relevant else 0.0


def reciprocal_rank(ranked: Sequence[str], judged: Judgements) -> float:
    for rank, id in enumerate(ranked, start=1):
        if judged.get(id, 0.0) > 0:
            return 1.0 / rank
    return 0.0


def mean_metrics(
    runs: Mapping[str, Sequence[str]], judgements: Mapping[str, Judgements], ndcg_k: int, recall_k: int
) -> dict[str, float]:
    """Means over the judged queries; a query without a run counts as 0."""
    if not judgements:
        raise ValueError("there are no judgements")
    pairs = [(runs.get(query, ()), judged) for query, judged in judgements.items()]
    return {
        f"ndcg@{ndcg_k}": math.fsum(ndcg(ranked, judged, ndcg_k) for ranked, judged in pairs) / len(pairs),
        f"recall@{recall_k}": math.fsum(recall(ranked, judged, recall_k) for ranked, judged in pairs)
        / len(pairs),
        "mrr": math.fsum(reciprocal_rank(ranked, judged) for ranked, judged in pairs) / len(pairs),
    }


def _discounted(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))
