"""Search with embeddings: the documents nearest to a query, by cosine similarity.

The server needs an embedding model:  ridgeline serve smollm2-135m all-minilm-l6-v2
"""

from __future__ import annotations

import os

import numpy as np
from openai import OpenAI

URL = os.environ.get("RIDGELINE_URL", "http://127.0.0.1:8000")
MODEL = "all-minilm-l6-v2"

DOCUMENTS = [
    "The KV cache holds the keys and values of the tokens seen so far.",
    "Bread rises because yeast makes carbon dioxide.",
    "A load balancer spreads requests over several servers.",
    "The Danube flows from the Black Forest to the Black Sea.",
]
QUERY = "Which river ends in the Black Sea?"

client = OpenAI(base_url=f"{URL}/v1", api_key="none")


def embedded(texts: list[str]) -> np.ndarray:
    answer = client.embeddings.create(model=MODEL, input=texts)
    return np.array([item.embedding for item in answer.data])  # vectors of length 1


scores = embedded(DOCUMENTS) @ embedded([QUERY])[0]
for place in np.argsort(-scores):
    print(f"{scores[place]:.3f}  {DOCUMENTS[place]}")
