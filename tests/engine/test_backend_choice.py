"""A GPU serves where one can be used, else the native backend wherever it can, else torch; and always why."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable, InvalidConfig
from ridgeline.engine.start import backend_choice
from ridgeline.engine.start.gpu_probe import Gpu, find_gpu, torch_cuda, why_not_usable
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.ops.cpu import interface

H200 = Gpu("NVIDIA H200", 140 << 30, (9, 0), (13, 0))
# Whatever the machine of these tests has, the choice is made as on one without a GPU, or with a usable one.
choose_backend = partial(backend_choice.choose_backend, probe=lambda: None)
choose_with_gpu = partial(backend_choice.choose_backend, probe=lambda: H200)


@pytest.fixture
def cuda_torch(monkeypatch, tmp_path):
    """A torch that was built for CUDA 13.0, to be looked for; nothing here imports it."""
    (tmp_path / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    found = importlib.util.spec_from_file_location("torch", tmp_path / "__init__.py")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "torch" else real(name))
    return tmp_path


@pytest.fixture(scope="module")
def spec(smollm2_path):
    return read_spec(smollm2_path)


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setattr(interface, "LIBRARY_PATH", tmp_path / "absent.so")
    interface.load.cache_clear()
    yield
    interface.load.cache_clear()


@pytest.fixture
def no_torch(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))


def test_the_native_backend_is_the_default(spec):
    assert choose_backend(EngineConfig(), spec).name == "native"


def test_torch_is_chosen_when_it_is_asked_for(spec):
    choice = choose_backend(EngineConfig(backend="torch"), spec)
    assert (choice.name, choice.reason) == ("torch", "")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"weights": "float16"}, "--weights float16 is for the torch and cuda"),
        ({"block_size": 8}, "--block-size 8"),
    ],
)
def test_a_setting_of_torchs_chooses_torch_and_is_named(spec, settings, flag):
    choice = choose_backend(EngineConfig(**settings), spec)
    assert choice.name == "torch"
    assert flag in choice.reason


def test_a_format_that_every_backend_computes_chooses_none(spec, cuda_torch):
    for weights in ("float32", "bfloat16"):
        assert choose_backend(EngineConfig(weights=weights), spec).name == "native"
        assert choose_with_gpu(EngineConfig(weights=weights), spec).name == "cuda"


def test_without_the_library_torch_serves_and_says_so(spec, no_library):
    choice = choose_backend(EngineConfig(), spec)
    assert choice.name == "torch"
    assert "is missing" in choice.reason


@pytest.mark.parametrize(
    "settings", [{"backend": "native"}, {"weights": "int8"}, {"kv_dtype": "int8"}, {"deterministic": True}]
)
def test_what_only_the_native_backend_has_is_refused_where_it_cannot_serve(spec, no_library, settings):
    with pytest.raises(InvalidConfig, match="is missing"):
        choose_backend(EngineConfig(**settings), spec)


def test_without_either_the_message_says_what_to_install(spec, no_library, no_torch):
    with pytest.raises(BackendUnavailable, match=r"pip install 'ridgeline\[torch\]'"):
        choose_backend(EngineConfig(), spec)


def test_an_instruction_set_that_does_not_run_here_is_an_error_and_no_reason_for_torch(spec, monkeypatch):
    monkeypatch.setenv("RIDGELINE_ISA", "avx1024")
    with pytest.raises(InvalidConfig, match="avx1024"):
        choose_backend(EngineConfig(), spec)


def test_a_gpu_that_can_be_used_is_used(spec, cuda_torch):
    choice = choose_with_gpu(EngineConfig(), spec)
    assert (choice.name, choice.reason) == ("cuda", "")
    assert choose_with_gpu(EngineConfig(backend="cuda", deterministic=True), spec).name == "cuda"


def test_without_a_gpu_none_is_spoken_of(spec):
    assert choose_backend(EngineConfig(), spec).reason == ""


def test_a_gpu_that_is_there_and_not_used_is_a_reason(spec, cuda_torch):
    (cuda_torch / "version.py").write_text("cuda: Optional[str] = None\n")
    choice = choose_with_gpu(EngineConfig(), spec)
    assert choice.name == "native"
    assert "built without CUDA" in choice.reason
    by_setting = choose_with_gpu(EngineConfig(weights="int8-channel"), spec)
    assert by_setting.name == "native"
    assert "--weights int8-channel" in by_setting.reason


def test_a_setting_of_torchs_alone_chooses_torch_beside_a_gpu(spec, cuda_torch):
    choice = choose_with_gpu(EngineConfig(block_size=8), spec)
    assert choice.name == "torch"
    assert "--block-size 8" in choice.reason


def test_asking_for_the_cpu_asks_no_gpu(spec):
    def probe():
        raise AssertionError("asked")

    assert backend_choice.choose_backend(EngineConfig(backend="native"), spec, probe).name == "native"
    assert backend_choice.choose_backend(EngineConfig(backend="torch"), spec, probe).name == "torch"


def test_the_cuda_backend_is_refused_without_a_gpu(spec):
    with pytest.raises(InvalidConfig, match="no GPU is visible"):
        choose_backend(EngineConfig(backend="cuda"), spec)


def test_a_feature_of_gpus_can_be_turned_off_without_one(spec):
    assert choose_backend(EngineConfig(overlap=False, cuda_graphs=False), spec).name == "native"


@pytest.mark.parametrize(
    ("gpu", "complaint"),
    [
        (Gpu("Old", 1 << 30, (7, 5), (13, 0)), "compute capability 7.5, but at least 8.0 is needed"),
        (Gpu("New", 1 << 30, (9, 0), (12, 4)), "driver supports CUDA 12.4, but torch was built for 13.0"),
    ],
)
def test_a_device_or_driver_too_old_is_named(cuda_torch, gpu, complaint):
    assert complaint in why_not_usable(gpu)


def test_a_missing_torch_is_named(no_torch):
    assert "torch is not installed" in why_not_usable(H200)


def test_a_missing_triton_is_named(cuda_torch, monkeypatch):
    assert why_not_usable(H200) is None
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    assert "triton is not installed" in why_not_usable(H200)


def test_the_installed_torch_says_what_it_was_built_for():
    """Its version.py is read as it is on this machine, and agrees with the module."""
    import torch

    stated = None if torch.version.cuda is None else tuple(map(int, torch.version.cuda.split(".")))
    assert torch_cuda(Path(torch.__file__).parent) == stated


def test_looking_for_a_gpu_imports_nothing_heavy_and_respects_a_hidden_one():
    program = (
        "import sys; from ridgeline.engine.start.gpu_probe import find_gpu, why_not_usable, Gpu; "
        "gpu = find_gpu(); why_not_usable(Gpu('any', 1, (9, 0), (13, 0))); "
        "print(gpu, *sys.modules.keys() & {'torch', 'triton', 'numpy'})"
    )
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run([sys.executable, "-c", program], env=hidden, capture_output=True, text=True)
    assert found.stdout == "None\n", found.stderr


def test_this_machines_gpu_is_as_torch_sees_it():
    import torch

    gpu = find_gpu()
    assert (gpu is not None) == (
        torch.cuda.is_available() or (gpu is not None and torch.version.cuda is None)
    )
    if gpu is not None and torch.cuda.is_available():
        assert gpu.name == torch.cuda.get_device_name(0)
        assert gpu.capability == torch.cuda.get_device_capability(0)
