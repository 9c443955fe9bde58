"""Finds the checks, says what they run on, and what they raise where something they need is not there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

import torch

import tests.gpu
from ridgeline.ops.cuda.dependent_launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
T = TypeVar("T")


class Skipped(Exception):
    """What is missing."""


def scaled(real: T, tiny: T) -> T:
    """The size for a device, or the one for Triton's interpreter, where a check is only tried out."""
    return tiny if INTERPRETED else real


def has_device() -> bool:
    return INTERPRETED or torch.cuda.is_available()


def all_checks() -> dict[str, Callable[[], None]]:
    """By name, as `paths.check_graphs_change_no_bit`: the functions check_* of the modules checks_*."""
    found: dict[str, Callable[[], None]] = {}
    for module in pkgutil.iter_modules(tests.gpu.__path__):
        if module.name.startswith("checks_"):
            group = importlib.import_module(f"tests.gpu.{module.name}")
            for name, value in vars(group).items():
                if name.startswith("check_") and callable(value):
                    found[f"{module.name.removeprefix('checks_')}.{name}"] = value
    return found
