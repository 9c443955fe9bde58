"""SmolLM2 in every form of weights that has a bound, and wikitext-2 as its tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ridgeline.models.files.registry import cached_file, find_known
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.models.weights.packed import load_packed
from ridgeline.ops.cpu.library import DecoderTable, Format
from tests.quality.native_paths import ISAS, Text, with_matrices
from tests.quality.stories import convert

MAX_CONTEXT = 1024
GATE_MODEL = "RIDGELINE_GATE_MODEL"  # another model for the gates by name


@dataclass(frozen=True, slots=True)
class Form:
    """A form of weights, and how far from float32 on the same weights it may be: a bound of mean KL."""

    name: str
    policy: str  # of `load_packed`
    bound: float
    packed_anew: Format | None = None  # a format that no policy makes of a Q4_1 file


AS_STORED = Form("Q4_1", "auto", 0.012)  # the layers; the file's embedding is Q8_0
FORMS = (
    Form("bfloat16", "bfloat16", 0.001),
    Form("int8", "int8", 0.005),  # groups of 32, as Q8_0 has them
    Form("int8-channel", "int8-channel", 0.005),
    AS_STORED,
    Form("Q4_0", "auto", 0.012, Format.Q4_H),
)


@pytest.fixture(scope="session", params=FORMS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Form:
    """Of the session: the tests of one form come together, so that its weights are packed once."""
    chosen: Form = request.param
    return chosen


@pytest.fixture(scope="session")
def table(form: Form, smollm2_path: Path) -> DecoderTable:
    return packed_table(smollm2_path, form)


def packed_table(path: Path, form: Form) -> DecoderTable:
    if not ISAS:
        pytest.skip("the native library is not built; its quality is not measured")
    packed = load_packed(path, read_spec(path), form.policy, keep=form.policy == "auto")
    made = packed.table(max_context=MAX_CONTEXT, num_blocks=1, max_step_tokens=1)
    chosen = form.packed_anew
    return made if chosen is None else with_matrices(made, lambda matrix: chosen)


@pytest.fixture(scope="session")
def text(smollm2_path: Path, shared_data: Path) -> Callable[[int, int, int], Text]:
    """text(context, sequences, length): the beginning of wikitext-2, and endings from what follows."""
    file = shared_data / "wikitext-2" / "test.txt"
    if not file.is_file():
        pytest.skip(f"{file} is not there; how close the native backend is to float32 is not measured")
    tokenizer = Tokenizer.load(smollm2_path)
    whole = file.read_text(encoding="utf-8")

    def cut(context: int, sequences: int, length: int) -> Text:
        count = context + sequences * length
        ids = tokenizer.encode(whole[: 8 * count], add_special=False, allow_special=False)[:count]
        tokens = np.array(ids, np.int32)
        return Text(tokens[:context], tokens[context:].reshape(sequences, length))

    return cut


@pytest.fixture(scope="session")
def named_model() -> Path:
    """The model of another class that the gates run on by name: a short name, or a folder or file."""
    name = os.environ.get(GATE_MODEL, "qwen2.5-coder-1.5b")
    known = find_known(name)
    path = Path(name).expanduser() if known is None else cached_file(known)
    if not path.exists():
        pytest.skip(f"{name} is not here (`ridgeline models pull {name}`); its gates are skipped")
    return path


@pytest.fixture(scope="session")
def named_text(named_model: Path, shared_data: Path) -> Callable[..., Text]:
    """named_text(sequences, length): the beginning of wikitext-2 as tokens of the named model."""
    whole = (shared_data / "wikitext-2" / "test.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.load(named_model)

    def cut(sequences: int, length: int) -> Text:
        count = sequences * length
        ids = tokenizer.encode(whole[: 16 * count], add_special=False, allow_special=False)[:count]
        tokens = np.array(ids, np.int32)
        return Text(tokens[:0], tokens.reshape(sequences, length))

    return cut


@pytest.fixture(scope="session")
def stories_path(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K, float32, in Hugging Face's layout."""
    source = shared_data.parent / "models" / "stories260k" / "stories260K.bin"
    if not source.is_file():
        pytest.skip(f"{source} is not there; the gates on stories260K are skipped")
    return convert(source, tmp_path_factory.mktemp("stories260k"))
