"""gpt-oss as published on the CUDA decoder: experts in MXFP4 as stored give the answers of expanded ones.

In Triton's interpreter, in bfloat16, through the runner: a prompt, then a decode.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.models.errors import BrokenModel
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.stream import stream_weights
from ridgeline.models.weights.torch_weights import tensors_of
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.mxfp4 import Mxfp4, expanded
from tests.gpu.engines import Sizes, Work, cuda_runner, poisoned_memory, serve, tokens_of
from tests.models.tiny_checkpoints import tiny_model

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; tests/gpu checks on it")

SIZES = Sizes(step_tokens=12, max_running=4, num_blocks=16, max_context=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt-oss")
    tiny_model("gpt-oss-mxfp4").save_pretrained(path)
    return path


def test_stored_experts_have_the_values_of_expanded_ones(published: Path) -> None:
    spec = read_spec(published)
    stored, plain = (
        stream_weights(published, spec, torch.bfloat16, device="cpu", stored_experts=is_stored)
        for is_stored in (True, False)
    )
    for ours, theirs in zip(tensors_of(stored).layers, tensors_of(plain).layers, strict=True):
        for name in ("experts_gate_up", "experts_down"):
            matrix = getattr(ours, name)
            assert isinstance(matrix, Mxfp4)
            assert torch.equal(expanded(matrix).bfloat16(), getattr(theirs, name))
    assert stored.nbytes < 0.7 * plain.nbytes


@pytest.mark.slow
def test_answers_are_those_of_expanded_experts(published: Path) -> None:
    spec = read_spec(published)
    work: Work = [(list(range(3, 12)), GREEDY)]
    answers = []
    for is_stored in (True, False):
        weights = stream_weights(published, spec, torch.bfloat16, device="cpu", stored_experts=is_stored)
        with poisoned_memory():
            answers.append(serve(cuda_runner(spec, weights, SIZES), SIZES, work))
    found, expected = answers
    assert tokens_of(found) == tokens_of(expected)
    for (mine,), (theirs,) in zip(found, expected, strict=True):
        assert (mine.error, theirs.error) == (None, None)
        values = [[p for each in answer.logprobs for _, p in each.top] for answer in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], abs=0.03)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (192, r"tensor .*gate_up_proj.* has the MXFP4 scale 2\^65 \(byte 192\); .* up to 2\^64"),
        (255, "contains values that are not finite in "),  # the format's NaN
    ],
)
def test_a_scale_that_the_kernels_do_not_compute_is_named(
    published: Path, tmp_path: Path, scale: int, message: str
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(published, copy)
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("gate_up_proj_scales"))
    tensors[name].view(-1)[5] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BrokenModel, match=message):
        stream_weights(copy, read_spec(copy), torch.bfloat16, device="cpu", stored_experts=True)
