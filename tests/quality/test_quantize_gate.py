"""The format gate of what `ridgeline quantize` writes: its fake quantization against 16 bits, by model class.

Weights are rounded to the format, and inputs too where the format says so. All else is float32: the loss is
the format's, and no kernel takes part. Each case is a run of the driver: the figure is the one in the
checkpoint's report. Bounds are 1.4 to 2 times what was measured (docs/performance/quality.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.versus.quantized_files import FAMILIES, write_folder
from ridgeline.lab.evaluate.statistics.divergence import Divergence
from ridgeline.lab.quantize.calibration import Calibration
from ridgeline.lab.quantize.checkpoint import Checkpoint
from ridgeline.lab.quantize.driver import Job, quantize
from ridgeline.lab.quantize.forward import Forward
from ridgeline.lab.quantize.keep import KeepPolicy
from ridgeline.lab.quantize.layer_quantizer import LayerQuantizer
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.lab.quantize.targets import target_format
from ridgeline.models.spec.read_spec import read_spec
from tests.quality.stories import told

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Case:
    """bound: of the mean KL, in nats."""

    to: str
    bound: float
    method: str = "rtn"
    zero_points: bool = False

    @property
    def name(self) -> str:
        return f"{self.to}{'-zeros' if self.zero_points else ''}-{self.method}"


# stories260K has rows of 64 and 172 weights: groups of 32, and down_proj in 16 bits for types with groups.
STORIES = (
    Case("fp8", 0.02),
    Case("fp8-block", 0.02),
    Case("int8", 0.002),
    Case("nvfp4", 0.18),
    Case("mxfp4", 0.18),
    Case("int4", 0.2),
    Case("int4", 0.14, zero_points=True),
    Case("int4", 0.14, "awq"),
    Case("int4", 0.1, "gptq"),
)
# SmolLM2-135M has rows of 576 and 1,536: groups of 64.
SMOLLM2 = (
    Case("fp8", 0.06),
    Case("fp8-block", 0.045),
    Case("int8", 0.075),
    Case("nvfp4", 0.42),
    Case("mxfp4", 1.2),
    Case("int4", 0.9),
    pytest.param(Case("int4", 0.7, zero_points=True), marks=pytest.mark.slow),
)
# Qwen2.5-Coder-1.5B: groups of 128. FP8 has the 8B class's start value. Int8 and int4 miss theirs: of int8's
# loss, seven eighths are at the first token of each text (docs/performance/quality.md).
NAMED = (
    Case("fp8", 0.02),
    Case("int8", 0.2),
    Case("int4", 0.2),
)


@pytest.fixture(scope="module")
def stories_text(stories_path: Path) -> Tokens:
    """[32, 32]: the first 24 for the methods that learn, the last 8 are measured."""
    return told(stories_path, sequences=32, length=32).astype(np.int64)


@pytest.mark.parametrize("case", STORIES, ids=lambda case: case.name)
def test_a_format_of_stories_is_close_to_float32(
    case: Case, stories_path: Path, stories_text: Tokens, tmp_path: Path
) -> None:
    keep = () if case.to in ("fp8", "fp8-block", "int8") else ("down_proj",)
    require_close(loss_of(case, stories_path, stories_text[24:], stories_text[:24], tmp_path, 32, keep), case)


@pytest.fixture(scope="module")
def smollm2_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(smollm2_path, tmp_path_factory.mktemp("smollm2") / "bfloat16")


@pytest.mark.parametrize("case", SMOLLM2, ids=lambda case: case.name)
def test_a_format_of_smollm2_is_close_to_bfloat16(case: Case, smollm2_folder: Path, text, tmp_path) -> None:
    tokens = text(0, 2, 48).endings.astype(np.int64)
    require_close(loss_of(case, smollm2_folder, tokens, tokens, tmp_path, 64), case)


@pytest.fixture(scope="module")
def named_folder(named_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16; of a GGUF file with 4 bits, its weights as they are."""
    if named_model.suffix != ".gguf":
        return named_model
    if (family := read_spec(named_model).family) not in FAMILIES:
        pytest.skip(
            f"{named_model}: only {' and '.join(FAMILIES)} files are expanded to 16 bits, not {family}"
        )
    return write_folder(named_model, tmp_path_factory.mktemp("named") / "bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_a_format_of_the_named_model_is_close_to_bfloat16(
    case: Case, named_folder: Path, named_text, tmp_path: Path
) -> None:
    """Qwen2.5-Coder-1.5B, or the model of $RIDGELINE_GATE_MODEL."""
    tokens = named_text(sequences=4, length=64).endings.astype(np.int64)
    require_close(loss_of(case, named_folder, tokens, tokens, tmp_path, 128), case)


def require_close(found: Divergence, case: Case) -> None:
    print(
        f"\n{case.name}: KL {found.mean_kl:.6f}, 99 % {found.kl_p99:.4f}, same top {found.same_top:.4f}, "
        f"{found.positions} positions"
    )
    assert 0 < found.mean_kl <= case.bound


def loss_of(
    case: Case,
    model: Path,
    held_out: Tokens,
    fitted: Tokens,
    out: Path,
    group: int,
    keep: tuple[str, ...] = (),
) -> Divergence:
    """A run of the driver on these tokens. fitted: read by the methods that learn."""
    text = Calibration("tokens", "tokens", "", fitted, held_out)
    options = QuantizeOptions(
        case.method, group=group, zero_points=case.zero_points, keep=keep, calibration="tokens"
    )
    checkpoint, format = Checkpoint(model), target_format(case.to, options)
    policy = KeepPolicy(checkpoint, keep, format)
    quantizer = LayerQuantizer(checkpoint, format, options, policy)
    forward = Forward(checkpoint, text.length)
    job = Job(checkpoint, case.to, format, options, policy, quantizer, text, forward)
    losses = quantize(job, out / "quantized", lambda *_: None).losses
    assert losses is not None
    return losses
