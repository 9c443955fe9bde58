"""Errors of ingest that pass by themselves."""

from __future__ import annotations


class EmbedderUnavailable(Exception):
    """The embedding model cannot be asked now; it may be later."""
