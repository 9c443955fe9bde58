"""Endpoints that answer with vectors and scores: embeddings, rerank, score. Served by encoders."""
