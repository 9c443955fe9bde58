"""Retrieval: documents in chunks, stores with vector and text search, hybrid ranking, rerankers, metrics.

`stores` keeps chunks and finds them, `search` ranks them. The embedder is given by the caller: this package
imports neither the engine nor the server.
"""
