"""Engines for embedding and reranking models: build, queue, core, process."""
