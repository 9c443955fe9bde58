"""Refuses a model that cannot be served, from its description alone.

Called before the weights of a model on the hub are downloaded, and where another file of a model cannot be
read: that the model is unsupported is the better reason. Opens no weights.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ridgeline.models.errors import BrokenModel, ModelNotFound
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.readers.encoder_config import is_encoder, read_encoder_spec


def refuse_unsupported(path: Path) -> None:
    """Raise UnsupportedModel for a directory, config.json or GGUF file that is not served.

    Says nothing of files that are missing or broken: their readers do.
    """
    with contextlib.suppress(BrokenModel, ModelNotFound):
        if is_encoder(path):
            read_encoder_spec(path)
        else:
            check_servable(read_spec(path))
