"""The version, in a module that imports nothing: every layer may show it."""

__version__ = "0.1.0"
