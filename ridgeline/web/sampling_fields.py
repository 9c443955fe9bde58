"""SAMPLING: sampling fields that every text API has under the same name and with the same meaning."""

from __future__ import annotations

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
