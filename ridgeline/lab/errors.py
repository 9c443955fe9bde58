"""Errors of the lab, each one line that says what to do."""

from __future__ import annotations


class LabError(Exception):
    """The lab cannot do what was requested; the message says what, and what would help."""


class BadInput(LabError):
    """A file or setting is invalid; the message names it, with the line where there is one."""


class Infeasible(LabError):
    """No configuration meets the requirements; the message names the binding constraint."""
