"""What a MODEL argument resolves to, and how clearly it is refused when it resolves to nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from ridgeline.machine import cache_dir
from ridgeline.models.errors import BrokenModel, ModelNotFound, UnsupportedModel
from ridgeline.models.files import registry
from ridgeline.models.files.known_models import KnownModel, WheelMember
from ridgeline.models.files.registry import resolve

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KnownModel:
    """A known model of a few kilobytes, in a separate cache."""
    known = KnownModel(
        name="tiny-1k",
        aliases=("tiny",),
        about="for tests",
        licence="CC0",
        file_name="tiny.gguf",
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        parts=(WheelMember("tiny-pkg", "1.0", "0" * 64, 1, "tiny/tiny.gguf", len(CONTENT), "0" * 64),),
    )
    monkeypatch.setattr(registry, "KNOWN_MODELS", (*registry.KNOWN_MODELS, known))
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return known


@pytest.fixture
def tiny_file(tiny: KnownModel) -> Path:
    path = registry.cached_file(tiny)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


def test_a_short_name_and_its_aliases_resolve_to_the_cached_file(tiny_file: Path) -> None:
    assert resolve("tiny-1k") == resolve("TINY")
    assert resolve("tiny-1k").path == tiny_file
    assert resolve("tiny").name == "tiny-1k"
    assert resolve("tiny").source == "registry"


def test_a_known_model_that_was_not_fetched_says_which_command_fetches_it(tiny: KnownModel) -> None:
    with pytest.raises(ModelNotFound, match="ridgeline models pull tiny-1k"):
        resolve("tiny")


def test_an_unknown_name_is_answered_with_the_nearest_known_ones() -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        resolve("smolm2-135")


def test_a_name_like_no_other_is_answered_with_the_whole_list() -> None:
    with pytest.raises(ModelNotFound, match="Short names: smollm2-135m, gemma3-270m"):
        resolve("xyzzy")


@pytest.mark.parametrize(
    ("name", "example"),
    [("llama3", "meta-llama/Llama-3"), ("qwen3:8b", "(Qwen/Qwen3-8B)"), ("mistral", "mistralai/Mistral-7B")],
)
def test_a_name_of_another_tool_is_answered_with_a_path_a_file_and_a_hub_id(name: str, example: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        resolve(name)
    for part in (f"no model is called '{name}'", f"(./{name})", f"(./{name}.gguf)", example):
        assert part in str(refused.value)


def test_a_truncated_file_is_refused_by_name_with_the_command_that_repairs_it(tiny_file: Path) -> None:
    resolve("tiny")
    tiny_file.write_bytes(CONTENT[:-1])
    with pytest.raises(BrokenModel, match=r"tiny\.gguf.*altered or truncated.*pull --force tiny-1k"):
        resolve("tiny")


def test_an_altered_file_of_the_same_size_is_refused_although_its_manifest_was_good(tiny_file: Path) -> None:
    resolve("tiny")
    tiny_file.write_bytes(CONTENT[:-1] + b"\x00")
    with pytest.raises(BrokenModel, match="altered"):
        resolve("tiny")


def test_a_file_touched_but_unchanged_is_accepted_again(tiny_file: Path) -> None:
    resolve("tiny")
    os.utime(tiny_file, ns=(1, 1))
    assert resolve("tiny").path == tiny_file
    assert json.loads(registry.manifest_file(tiny_file).read_text())["mtime_ns"] == 1


def test_a_file_with_a_fitting_manifest_is_not_hashed_again(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve("tiny")

    def never(path: Path) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(registry, "_sha256", never)
    resolve("tiny")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sha256": 3}', '{"unknown": 1}'])
def test_a_damaged_manifest_leads_to_a_hash_and_not_to_an_error(tiny_file: Path, text: str) -> None:
    registry.manifest_file(tiny_file).write_text(text)
    assert resolve("tiny").path == tiny_file


def test_a_manifest_of_another_version_of_the_file_is_not_believed(tiny_file: Path) -> None:
    tiny_file.write_bytes(CONTENT[::-1])
    registry.write_manifest(tiny_file, "a" * 64)
    with pytest.raises(BrokenModel):
        resolve("tiny")


def test_a_model_directory_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    found = resolve(str(tmp_path / "mine"))
    assert (found.name, found.path, found.source) == ("mine", tmp_path / "mine", "directory")


def test_a_directory_without_config_names_the_gguf_inside_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"no config\.json.*model\.gguf"):
        resolve(str(tmp_path))


def test_a_gguf_file_is_named_after_its_stem(tmp_path: Path) -> None:
    (tmp_path / "some-model.gguf").write_bytes(b"GGUF")
    found = resolve(str(tmp_path / "some-model.gguf"))
    assert (found.name, found.source) == ("some-model", "gguf")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".PT"])
def test_a_pickle_is_refused_and_the_reason_given(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedModel, match=r"pickle.*safetensors"):
        resolve(str(path))


def test_safetensors_alone_ask_for_their_directory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        resolve(str(path))


@pytest.mark.parametrize("name", ["./absent", "/no/such/dir", "absent.gguf", "~/no-such-model"])
def test_a_path_that_does_not_exist_is_called_a_path(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file or directory"):
        resolve(name)


@pytest.mark.parametrize("name", ["hf:", "hf:name", "hf:a/b/c", "hf:org/na me", "hf:org/name@"])
def test_a_malformed_hub_name_is_refused_before_any_request(name: str) -> None:
    with pytest.raises(ModelNotFound, match="must have the form hf:org/name"):
        resolve(name)


def test_an_unreachable_hub_says_what_to_do_instead(tmp_path: Path) -> None:
    code = "from ridgeline.models.files.registry import resolve; resolve('hf:org/name')"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ModelNotFound: hf:org/name: it could not be downloaded" in done.stderr.replace(
        "ridgeline.models.errors.", ""
    )
    assert "put config.json" in done.stderr


def test_a_hub_cache_that_cannot_be_written_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **options: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", "/home/.cache/huggingface")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFound, match=r"Permission denied.*set HF_HOME to a writable directory"):
        resolve("hf:org/name")


def test_a_hub_model_asks_for_its_revision_and_for_no_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}
    (tmp_path / "config.json").write_text("{}")

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(repo=repo, **options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = resolve("hf:org/some.model@v1.2")
    assert (found.name, found.path, found.source) == ("org/some.model", tmp_path, "hub")
    assert (asked["repo"], asked["revision"]) == ("org/some.model", "v1.2")
    there = [
        *("config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json"),
        *("chat_template.jinja", "additional_chat_templates/rag.jinja", "model-00001-of-00002.safetensors"),
    ]
    others = ["pytorch_model.bin", "model.pt", "tokenizer.pkl", "consolidated.safetensors", "README.md"]
    options = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*there, *others], **options)) == there


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("RIDGELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "ridgeline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "ridgeline"


def test_the_real_model_is_the_published_file(smollm2_path: Path) -> None:
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
