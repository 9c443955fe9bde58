"""The errors of the models layer: each says which file is wrong, why, and what to do."""

from __future__ import annotations

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})


class ModelError(Exception):
    """Base of all errors in a model's name, files, configuration or template."""


class ModelNotFound(ModelError):
    """No model has this name or path."""


class UnsupportedModel(ModelError):
    """The model is well-formed, but uses a feature this version cannot serve; the message names it."""


class BrokenModel(ModelError):
    """A file is missing, truncated, altered or inconsistent; the message names the file."""


class ImpossibleShape(BrokenModel):
    """A layer's sizes contradict each other. The reader that meets it adds the file."""


class TemplateError(ModelError):
    """The chat template is missing, or rejected these messages."""
