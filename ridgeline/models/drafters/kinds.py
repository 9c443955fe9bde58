"""Tells draft heads from models by their config.json, and reads the config of each kind. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from ridgeline.models.drafters.eagle3_config import CONFIG, Eagle3Config, read_config
from ridgeline.models.drafters.medusa_config import MedusaConfig, is_medusa, read_medusa_config
from ridgeline.models.drafters.mtp_config import MtpConfig

HeadConfig = Eagle3Config | MedusaConfig | MtpConfig


def head_kind(path: Path) -> Literal["speculators", "medusa"] | None:
    """The kind of head in the folder; None: it holds a model, or nothing."""
    try:
        config: Any = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    if "speculators_config" in config:
        return "speculators"
    return "medusa" if is_medusa(config) else None


def read_head_config(path: Path) -> Eagle3Config | MedusaConfig:
    """Raises BrokenModel or UnsupportedModel with the file and the key."""
    return read_medusa_config(path) if head_kind(path) == "medusa" else read_config(path)
