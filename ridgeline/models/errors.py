"""The errors of the models layer: each says what is wrong with which file, and what to do about it."""

from __future__ import annotations

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})


class ModelError(Exception):
    """Base of everything that can be wrong with a model: its name, files, configuration or template."""


class ModelNotFound(ModelError):
    """No model answers to this name or path."""


class UnsupportedModel(ModelError):
    """The model is well-formed, but uses something this version cannot serve; the message names it."""


class BrokenModel(ModelError):
    """A file is missing, truncated, altered or inconsistent; the message names the file."""


class TemplateError(ModelError):
    """The chat template is missing, or refused these messages."""
