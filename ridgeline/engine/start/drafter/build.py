"""The drafter of an engine that starts: what it takes of the memory, and its loading beside the served model.

Used by `build_engine`: `footprint` before the memory plan is made, `build` after the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.speculate.drafter import Drafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.start.drafter.choice import DraftModel, SpeculationChoice, draft_config
from ridgeline.engine.start.loading import BackendBuild, Loaded, StepSizes
from ridgeline.engine.start.memory import (
    NO_DRAFTER,
    DrafterFootprint,
    Footprint,
    MemoryPlan,
    draft_model_plan,
    planned_context,
)
from ridgeline.models.drafters.kinds import HeadConfig
from ridgeline.models.drafters.medusa_config import MedusaConfig
from ridgeline.models.spec.model_spec import ModelSpec

MakeBuild = Callable[[EngineConfig, Path, ModelSpec], BackendBuild]
STEPS_OF_TAPS = 3  # hidden states of a step: where layers write them, and kept of two steps


class DrafterBuild:
    def __init__(
        self, choice: SpeculationChoice, config: EngineConfig, spec: ModelSpec, make_build: MakeBuild
    ) -> None:
        """spec: of the served model. make_build: of a draft model, for the served model's backend"""
        self._choice, self._config, self._spec = choice, config, spec
        self._room = NO_DRAFTER
        self._model: _ModelBuild | None = None
        if choice.model is not None:
            context = min(choice.model.spec.max_context, planned_context(spec, config))
            own = replace(draft_config(config, choice.model), max_context=context)
            build = make_build(own, choice.model.path, choice.model.spec)
            self._model = _ModelBuild(choice.model, build, context)
        self._loaded: Loaded | None = None  # a draft model

    def footprint(self, sizes: StepSizes, target: Footprint) -> DrafterFootprint:
        """The served model's build is prepared. That of a draft model is not yet: its device is the same."""
        if self._model is not None:
            self._room = model_footprint(self._model.build.footprint(sizes))
        elif self._choice.head is not None:
            self._room = head_footprint(self._choice.head, target.element_bytes, sizes)
        return self._room

    @property
    def weights_bytes(self) -> int:
        """As loaded, of a draft model; as planned, of a head."""
        return self._room.weights_bytes if self._loaded is None else self._loaded.weights_bytes

    @property
    def resident_bytes(self) -> int:
        """Of the weights, those that take memory of this process."""
        return self.weights_bytes - (0 if self._loaded is None else self._loaded.mapped_bytes)

    def build(self, target: Loaded, plan: MemoryPlan, sizes: StepSizes) -> Speculation | None:
        """plan: of both. The served model is loaded."""
        speculation = self._choice.build(
            target.runner,
            self._spec.vocab_size,
            plan.drafter_sequences,
            lambda draft: self._model_drafter(plan, sizes),
        )
        if target.count_drafter is not None and plan.drafter_bytes:
            assert speculation is not None
            target.count_drafter(self._kv_bytes(speculation.drafter))
        return speculation

    def _model_drafter(self, plan: MemoryPlan, sizes: StepSizes) -> Drafter:
        """A draft model behind a runner of its own."""
        from ridgeline.engine.run.drafters.known_tokens import KnownTokens
        from ridgeline.engine.run.drafters.model_drafter import ModelDrafter

        assert self._model is not None
        own = draft_model_plan(plan, self._room, self._model.max_context)
        self._model.build.prepare()
        loaded = self._loaded = self._model.build.load(own, sizes, None)
        if loaded.before_first_step is not None:
            loaded.before_first_step()
        drafter = ModelDrafter(
            loaded.runner, own.num_blocks, self._config.block_size, sizes.step_tokens, own.max_context
        )
        vocab_size = self._model.model.spec.vocab_size
        return drafter if vocab_size >= self._spec.vocab_size else KnownTokens(drafter, vocab_size)

    def _kv_bytes(self, drafter: Drafter) -> Callable[[], int]:
        """Of its cache on a device: of a draft model as it was allocated, of a head as it grows."""
        if self._loaded is not None and self._loaded.memory is not None:
            kv_bytes = self._loaded.memory().observed["kv"]
            return lambda: kv_bytes
        from ridgeline.engine.run.drafters.build import head_cache_bytes

        return lambda: head_cache_bytes(drafter)


@dataclass(frozen=True, slots=True)
class _ModelBuild:
    model: DraftModel
    build: BackendBuild
    max_context: int


def model_footprint(own: Footprint) -> DrafterFootprint:
    """own: of a draft model served alone"""
    return DrafterFootprint(
        weights_bytes=own.weights_bytes,
        kv_bytes_per_token=own.kv_bytes_per_token,
        activation_bytes=own.activation_bytes,
        reserve_bytes=own.reserve_bytes,
    )


def head_footprint(head: HeadConfig, element_bytes: int, sizes: StepSizes) -> DrafterFootprint:
    """Its weights, its cache, and the hidden states of the served model that are kept for it."""
    taps = 1 if isinstance(head, MedusaConfig) else len(head.taps)
    per_sequence = 0
    if not isinstance(head, MedusaConfig):
        from ridgeline.engine.run.drafters.chain_drafter import bytes_per_sequence

        per_sequence = bytes_per_sequence(head, element_bytes)
    return DrafterFootprint(
        weights_bytes=head.parameters * element_bytes,
        kv_bytes_per_sequence=per_sequence,
        most_sequences=sizes.max_running,
        activation_bytes=STEPS_OF_TAPS * sizes.step_tokens * taps * head.hidden_size * element_bytes,
    )
