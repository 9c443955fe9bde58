"""Checkpoints with random weights for any ModelSpec, as safetensors whose names are the weights' roles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.models.spec.families import FAMILIES
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.names import NameMap
from ridgeline.models.weights.layout import Piece, pieces
from ridgeline.models.weights.places import find_places
from ridgeline.models.weights.torch_weights import Weights, random_weights, target_rows

HEAD = "lm_head.weight"


def write_checkpoint(spec: ModelSpec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Weights:
    """Random float32 weights in `folder`; `spec.family` is known until the test ends."""
    names = NameMap(
        top=MappingProxyType({piece.role: piece.role for piece in pieces(spec) if piece.layer is None}),
        layer=MappingProxyType(
            {piece.role: _name(piece) for piece in pieces(spec) if piece.layer is not None}
        ),
        layer_prefix="layers.{layer}.",
        prefixes=("",),
        heads=(HEAD,),
    )
    monkeypatch.setitem(FAMILIES, spec.family, replace(FAMILIES["llama"], name=spec.family, hf_names=names))
    weights = random_weights(spec, torch.float32, seed=1)
    generator = torch.Generator().manual_seed(2)
    for piece in pieces(spec):
        if piece.is_norm:  # random_weights has ones
            rows = target_rows(weights, piece)
            rows += 0.2 * torch.randn(rows.shape, generator=generator)
    places = find_places(spec, names, "", HEAD)
    tensors = {place.name: target_rows(weights, piece).clone() for piece, place in places.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return weights


def _name(piece: Piece) -> str:
    return piece.role if piece.expert is None else f"{piece.role}.{{expert}}"
