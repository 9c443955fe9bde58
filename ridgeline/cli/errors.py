"""The errors of the command line's own, apart from what raises them: `main` catches them in every run."""

from __future__ import annotations


class RemoteError(Exception):
    """The server cannot be reached, refused the request or broke off; the message has its reason."""
