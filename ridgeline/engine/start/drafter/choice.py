"""Chooses the drafter of an engine from `--speculate` and the backend, with a note for the start-up message.

`build_engine` calls `choose_speculation` before anything is loaded, and `build` of its answer when the model
is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ridgeline.engine.config import TEXT_DRAFTERS, EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.speculate.drafter import Drafter
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.speculate.suffix import SuffixDrafter
from ridgeline.models.drafters.kinds import HeadConfig, head_kind, read_head_config
from ridgeline.models.drafters.medusa_config import MedusaConfig
from ridgeline.models.drafters.mtp_config import mtp_config
from ridgeline.models.errors import ModelNotFound, UnsupportedModel
from ridgeline.models.files.registry import resolve
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec

if TYPE_CHECKING:
    from ridgeline.engine.run.runner import Runner

# What `auto` means on each backend. torch is the reference of the tests: it stays plain.
AUTO = {"native": "suffix", "torch": "off", "cuda": "off"}
HEAD_BACKENDS = ("torch", "cuda")
MTP = "mtp"  # modules of the served model itself

Kind = Literal["off", "ngram", "suffix", "head", "model"]
BuildModelDrafter = Callable[["DraftModel"], Drafter]


@dataclass(frozen=True, slots=True)
class DraftModel:
    path: Path
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    kind: Kind
    notes: tuple[str, ...] = ()
    head: HeadConfig | None = None
    path: Path | None = None  # of a head, or of the model for its own modules
    model: DraftModel | None = None

    def build(
        self, runner: Runner, vocab_size: int, most_running: int, model: BuildModelDrafter
    ) -> Speculation | None:
        """runner: of the served model. model: loads a draft model."""
        drafter: Drafter
        if self.kind == "off":
            return None
        if self.kind == "ngram":
            drafter = NgramDrafter()
        elif self.kind == "suffix":
            drafter = SuffixDrafter()
        elif self.model is not None:
            drafter = model(self.model)
        else:
            from ridgeline.engine.run.drafters.build import head_drafter

            assert self.head is not None
            assert self.path is not None
            drafter = head_drafter(self.head, self.path, runner, most_running)
        return Speculation(drafter, vocab_size)


def choose_speculation(config: EngineConfig, backend: str, spec: ModelSpec, path: Path) -> SpeculationChoice:
    """path: of the served model. Raises InvalidConfig for a drafter that does not fit model or backend."""
    name = AUTO[backend] if config.speculate == "auto" else config.speculate
    if name == "off":
        is_told = backend == "cuda" and config.speculate == "auto"
        note = "speculation off: on a GPU it is on with --speculate suffix or a draft model"
        return SpeculationChoice("off", (note,) * is_told)
    if name in TEXT_DRAFTERS:
        kind: Kind = "ngram" if name == "ngram" else "suffix"
        return SpeculationChoice(kind, (f"speculation {name}, where it pays",))
    folder = Path(name).expanduser()
    try:
        if name == MTP:
            return _own_modules(config, backend, spec, path)
        if head_kind(folder) is not None:
            return _head(name, folder, backend, spec)
        return _model(config, name, spec, path)
    except (ModelNotFound, UnsupportedModel) as error:
        raise InvalidConfig(f"--speculate {name}: {error}") from None


def _head(name: str, folder: Path, backend: str, spec: ModelSpec) -> SpeculationChoice:
    _check_reports_hidden(name, backend)
    head = read_head_config(folder)
    head.check_fits(spec)
    size = f"{head.parameters / 1e6:.1f}M parameters"
    kind = "Medusa heads" if isinstance(head, MedusaConfig) else "EAGLE-3 head"
    note = f"speculation by the {kind} {folder} ({size}), up to {head.length} tokens, where it pays"
    return SpeculationChoice("head", (note,), head=head, path=folder)


def _own_modules(config: EngineConfig, backend: str, spec: ModelSpec, path: Path) -> SpeculationChoice:
    _check_reports_hidden(MTP, backend)
    if config.load_format == "dummy":
        raise InvalidConfig("--speculate mtp: --load-format dummy makes no weights for these modules")
    head = mtp_config(spec, path)
    size = f"{head.parameters / 1e6:.0f}M parameters"
    note = f"speculation by the model's own MTP module ({size}), up to {head.length} tokens, where it pays"
    return SpeculationChoice("head", (note,), head=head, path=path)


def _check_reports_hidden(name: str, backend: str) -> None:
    if backend not in HEAD_BACKENDS:
        raise InvalidConfig(
            f"--speculate {name}: a draft head reads hidden states of the model, which the {backend} backend "
            "does not report; use --backend torch or cuda, a draft model, or --speculate suffix"
        )


def _model(config: EngineConfig, name: str, spec: ModelSpec, path: Path) -> SpeculationChoice:
    draft = resolve(name).path
    draft_spec = read_spec(draft)
    check_servable(draft_spec)
    if draft.resolve() != path.resolve():
        _check_tokenizers(name, config.model, (draft, draft_spec.vocab_size), (path, spec.vocab_size))
    size = f"{draft_spec.parameters / 1e6:.0f}M parameters"
    note = f"speculation by the draft model {name} ({size}), where it pays"
    return SpeculationChoice("model", (note,), model=DraftModel(draft, draft_spec))


_SAMPLE = "The quick brown fox, 12345 + 67; def f(x):\n\treturn x  # naïve café — 你好 🙂"


def _check_tokenizers(name: str, model: str, draft: tuple[Path, int], target: tuple[Path, int]) -> None:
    """draft, target: the folder, and the rows of the embedding, of which the last may be padding."""
    from ridgeline.models.text.tokenizer import Tokenizer

    mine, theirs = Tokenizer.load(target[0]), Tokenizer.load(draft[0])
    is_padded = draft[1] != target[1]
    if is_padded and (mine.vocab_size != theirs.vocab_size or mine.vocab_size > min(draft[1], target[1])):
        raise InvalidConfig(
            f"--speculate {name}: its embedding has {draft[1]} rows and that of {model} {target[1]}, with "
            f"tokenizers of {theirs.vocab_size} and {mine.vocab_size} tokens; a draft model must have the "
            "same tokenizer"
        )
    ids = mine.encode(_SAMPLE, add_special=False)
    step = 1 if is_padded else max(1, mine.vocab_size // 512)
    known = [*ids, *range(0, mine.vocab_size, step)]
    alike = ids == theirs.encode(_SAMPLE, add_special=False)
    if not alike or any(mine.token_bytes(each) != theirs.token_bytes(each) for each in known):
        raise InvalidConfig(f"--speculate {name}: its tokenizer is another one than the model's")


def draft_config(config: EngineConfig, draft: DraftModel) -> EngineConfig:
    """The settings of a draft model's own runner: the engine's, with formats as its file has them."""
    return replace(
        config,
        model=str(draft.path),
        speculate="off",
        weights="auto",
        load_format="auto",
        quantization_keep=(),
    )
