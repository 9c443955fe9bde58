"""The models to serve and their names. Built by the command line before any engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.engine.config import EngineConfig
from ridgeline.models.files.hub import hub_id
from ridgeline.models.files.registry import find_known
from ridgeline.options import OptionError
from ridgeline.server.config import ServerConfig


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """One model to serve: its engine's settings, and the names clients may use, its own first.

    other_names: for a model known by a short name, its remaining names; accepted, but not listed by
    /v1/models.
    """

    engine: EngineConfig
    names: tuple[str, ...]
    other_names: tuple[str, ...] = ()


def named(
    configs: Sequence[EngineConfig], names: Sequence[tuple[str, ...]], server: ServerConfig
) -> list[ModelSetup]:
    """Each model with its names: from its table or --served-model-name, else its own, plus its aliases."""
    chosen = [(server.served_model_name if not place else ()) or given for place, given in enumerate(names)]
    all_names = [
        list(given or (public_name(config.model),)) for config, given in zip(configs, chosen, strict=True)
    ]
    for alias in server.alias:
        new, equals, old = alias.partition("=")
        owners = [known for known in all_names if old in known]
        if not (new and equals and owners):
            served = ", ".join(name for known in all_names for name in known)
            raise OptionError(
                f"--alias {alias}: write NAME=MODEL, with MODEL one of {served}; "
                "--served-model-name renames the first model"
            )
        if new not in owners[0]:  # a printed configuration already lists it among the names
            owners[0].append(new)
    flat = [name for known in all_names for name in known]
    for name in flat:
        if flat.count(name) > 1:
            raise OptionError(f"the name {name} is used twice; rename one of the models with names")
    return [
        ModelSetup(config, tuple(known), () if given else _other_names(config.model, flat))
        for config, known, given in zip(configs, all_names, chosen, strict=True)
    ]


def _other_names(model: str, taken: Sequence[str]) -> tuple[str, ...]:
    """Other names of the model in `ridgeline models list`."""
    known = find_known(model)
    names = () if known is None else (known.name, *known.aliases)
    return tuple(name for name in names if name not in taken)


def sharing_memory(models: Sequence[ModelSetup], paths: Sequence[Path]) -> list[ModelSetup]:
    """The engines start concurrently and each plans from the free memory: those with a KV cache share it
    evenly, except those with an explicit share.
    """
    if len(models) == 1:
        return list(models)
    from ridgeline.models.spec.readers.encoder_config import is_encoder

    keeping_kv = sum(not is_encoder(path) for path in paths)
    return [
        setup
        if setup.engine.memory_share != 1.0 or is_encoder(path)
        else replace(setup, engine=replace(setup.engine, memory_share=1 / keeping_kv))
        for setup, path in zip(models, paths, strict=True)
    ]


def public_name(model: str) -> str:
    """The model's name for clients: its short name or hub id, or the name of its file or directory."""
    path = Path(model)
    if (on_hub := hub_id(model)) is not None:
        return on_hub
    return path.stem if path.suffix == ".gguf" else path.name or model
