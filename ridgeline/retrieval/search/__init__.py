"""Ranking: the vector and text legs, their fusion, rerankers, explanations."""
