"""SmolLM2 in every form of weights that has a bound, and wikitext-2 as its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.models.weights.packed import load_packed
from ridgeline.ops.cpu.library import DecoderTable, Format
from tests.quality.native_paths import ISAS, Text, with_matrices

MAX_CONTEXT = 1024


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
