"""What can go wrong in the lab, for the person at the terminal: one line that says what to do."""

from __future__ import annotations


class LabError(Exception):
    """Something the lab was asked for cannot be done; the message says what, and what would help."""


class BadInput(LabError):
    """A file or setting is wrong; the message names it, by line where there are lines."""


class Infeasible(LabError):
    """No configuration meets what was asked; the message names the binding constraint."""
