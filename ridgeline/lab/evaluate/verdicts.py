"""QualityVerdict: a gate's verdict about one weight format of one model, where `ridgeline plan` finds it.

`evaluate gate` appends a line to verdicts.jsonl in the cache directory, and has the same in gate.json. The
newest verdict of a format counts. A damaged line is skipped with a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ridgeline.lab.errors import BadInput
from ridgeline.lab.model_identity import ModelIdentity
from ridgeline.machine import cache_dir
from ridgeline.version import __version__

STORED = "stored"  # weights as the files have them
# What a reference may compute with: others have lost something themselves.
WIDE = (STORED, "float32", "bfloat16", "float16")
WIDE_KV = ("float32", "bfloat16", "float16")
# The engines that a plan asks for: other programs, and ridgeline's backends.
PLANNED_ENGINES = ("vllm", "sglang", "trtllm", "native", "torch", "cuda")
GATE_FILE = "gate.json"

log = logging.getLogger(__name__)


class ServedFormat(msgspec.Struct, frozen=True):
    """A model as one side of a gate served it.

    weights: a value of --weights, or STORED. backend: native, torch, cuda, or another engine's name.
    engine: in words, as the engine describes itself. stated: by the user, as a server does not tell.
    """

    model: ModelIdentity
    weights: str
    kv: str
    backend: str
    engine: str = ""
    stated: bool = False


class CheckSummary(msgspec.Struct, frozen=True):
    task: str
    verdict: str
    items: int
    figures: str


class QualityVerdict(msgspec.Struct, frozen=True):
    reference: str  # as given to the gate
    candidate: str
    served: ServedFormat  # by the candidate
    passed: bool
    checks: list[CheckSummary]
    kl_margin: float
    margin: float
    at: str  # ISO 8601
    version: str = __version__

    @property
    def date(self) -> str:
        return self.at[:10]

    @property
    def items(self) -> int:
        return sum(check.items for check in self.checks)

    @property
    def words(self) -> str:
        """The verdict with its date, and what each task found on how many items."""
        tasks = ", ".join(f"{one.task} {one.verdict} ({one.items} items)" for one in self.checks)
        return f"{'passed' if self.passed else 'FAILED'} on {self.date}: {tasks}"


def why_unusable(reference: ServedFormat | None, candidate: ServedFormat | None) -> str:
    """Why a gate says nothing about a format of a model; "" if it does."""
    if candidate is None:
        return (
            "the candidate is a server, whose format is not known: --record-as MODEL,weights=FORMAT states it"
        )
    if reference is not None and (reference.weights not in WIDE or reference.kv not in WIDE_KV):
        return f"the reference is quantized itself: {reference.engine}"
    if candidate.stated:
        return ""
    if reference is None:
        return "the reference is a server, whose model and format are not known"
    if not candidate.model.same_as(reference.model):
        return "reference and candidate are different models"
    if candidate.weights == STORED and candidate.kv in WIDE_KV:
        return "the candidate has the weights as stored, as the reference has"
    return ""


def verdicts_file() -> Path:
    return cache_dir() / "evaluate" / "verdicts.jsonl"


def append_verdict(verdict: QualityVerdict, path: Path | None = None) -> Path:
    """In one write, so that concurrent writers do not mix lines."""
    path = path or verdicts_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        # It begins a line too: the previous write may have ended within one, on a full disk.
        os.write(descriptor, b"\n" + msgspec.json.encode(verdict) + b"\n")
    finally:
        os.close(descriptor)
    return path


def read_verdicts(given: Path | None = None) -> list[QualityVerdict]:
    """The recorded verdicts; given: a gate.json, its folder or a verdicts.jsonl, read as well."""
    return [*_recorded(), *([] if given is None else _given(given))]


def newest(
    verdicts: Sequence[QualityVerdict], model: ModelIdentity, *, weights: str, kv: str, backend: str
) -> QualityVerdict | None:
    """The verdict that counts for this format of this model on this backend."""
    wanted = (weights, kv, backend)
    about = [
        one
        for one in verdicts
        if (one.served.weights, one.served.kv, one.served.backend) == wanted
        and one.served.model.same_as(model)
    ]
    return max(about, key=lambda one: one.at, default=None)


class _GateFile(msgspec.Struct):
    """The part of a gate.json that counts here."""

    verdict: QualityVerdict | None = None
    not_recorded: str = ""


def _recorded() -> list[QualityVerdict]:
    path = verdicts_file()
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s cannot be read: %s; recorded quality verdicts are not used", path, error)
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(msgspec.json.decode(line, type=QualityVerdict))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s:%d is skipped: %s", path, number, error)
    return found


def _given(path: Path) -> list[QualityVerdict]:
    """An error here is the user's: the file was named."""
    path = path / GATE_FILE if path.is_dir() else path
    try:
        content = path.read_bytes()
        if path.suffix == ".jsonl":
            lines = content.splitlines()
            return [msgspec.json.decode(line, type=QualityVerdict) for line in lines if line.strip()]
        found = msgspec.json.decode(content, type=_GateFile)
    except OSError as error:
        raise BadInput(f"--quality {path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"--quality {path}: not a result of `ridgeline evaluate gate`: {error}") from error
    if found.verdict is None:
        why = found.not_recorded or "it was written by an older version; run the gate again"
        raise BadInput(f"--quality {path}: says nothing about a format of a model: {why}")
    return [found.verdict]
