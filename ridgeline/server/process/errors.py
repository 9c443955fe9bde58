"""Errors of the server process itself; the command line prints them as one line."""


class PortTaken(Exception):
    """The server cannot listen on the configured address."""
