"""The native backend serves wherever it can; else torch does and says why, or the start is refused."""

import importlib.util

import pytest

from ridgeline.engine.backend_choice import choose_backend
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable, InvalidConfig
from ridgeline.models.read_spec import read_spec
from ridgeline.ops.cpu import interface


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
    [({"dtype": "bfloat16"}, "--dtype bfloat16"), ({"block_size": 8}, "--block-size 8")],
)
def test_a_setting_of_torchs_chooses_torch_and_is_named(spec, settings, flag):
    choice = choose_backend(EngineConfig(**settings), spec)
    assert choice.name == "torch"
    assert flag in choice.reason


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
