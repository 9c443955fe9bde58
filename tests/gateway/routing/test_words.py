"""Vectors made of words: the same when fitted, kept and asked; and a route that needs no server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.gateway.body import raw
from ridgeline.gateway.routing.config import RouteConfig
from ridgeline.gateway.routing.learned.artifact import load, save
from ridgeline.gateway.routing.learned.examples import Costing, read_examples
from ridgeline.gateway.routing.learned.features import Recipe
from ridgeline.gateway.routing.learned.fitting import Prepared, fit_artifact
from ridgeline.gateway.routing.learned.words import READ_CHARS, WordVectors, words_of
from ridgeline.gateway.routing.router import ModelRouter
from ridgeline.gateway.routing.routing_request import RoutingRequest
from ridgeline.options import OptionError

EASY, HARD = ("capital city river country", "integral proof theorem lemma")


def embed(words: Sequence[str]) -> np.ndarray:
    """A vector for each word, the same every time."""
    found = [np.random.default_rng(sum(map(ord, word))).standard_normal(32) for word in words]
    return np.array([one / np.linalg.norm(one) for one in found], np.float32)


def texts(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice((EASY, HARD)[n % 2].split(), 6)) + f" {n}" for n in range(count)]


def test_words_are_of_any_script_and_digits_stand_alone() -> None:
    assert words_of("What's 12+3? Größe 中国") == [
        "what",
        "'",
        "s",
        "1",
        "2",
        "+",
        "3",
        "?",
        "größe",
        "中",
        "国",
    ]
    assert len(words_of("x " * 100_000)) == READ_CHARS // 2


@given(st.text(max_size=300))
def test_every_text_has_a_vector_of_length_one_or_none_at_all(text: str) -> None:
    length = float(np.linalg.norm(VECTORS.vector(text)))
    assert length == pytest.approx(1, abs=1e-4) or length == 0


VECTORS = WordVectors.of(texts(200), embed)


def test_texts_of_one_topic_lie_together() -> None:
    easy, also, hard = VECTORS.many(["the capital city", "city of a country, capital", "lemma of a theorem"])
    assert easy @ also > easy @ hard


def fitted(tmp_path: Path) -> Path:
    """Where the small model is right on easy questions alone."""
    examples = tmp_path / "examples.csv"
    rows = [f"{text},{n % 2 == 0},True" for n, text in enumerate(texts(400))]
    examples.write_text("\n".join(["prompt,small,large", *rows]))
    read = read_examples([examples], ("small", "large"), Costing({}, {}))
    recipe = Recipe(head_chars=READ_CHARS)
    asked = [recipe.text(turns) for turns in read.turns]
    words = WordVectors.of(asked, embed)
    artifact = fit_artifact(
        Prepared.of(read, words.many(asked)),
        names=("small", "large"),
        gap=0.95,
        recipe=recipe,
        embedding_model="any",
        seed=0,
        words=words,
    )
    path = tmp_path / "route.npz"
    save(artifact, path)
    return path


async def test_a_route_of_words_decides_without_a_server(tmp_path: Path) -> None:
    path = fitted(tmp_path)
    router = ModelRouter([RouteConfig(models=("small", "large"), artifact=path, sticky_s=0.0)])
    for text, model in (("the capital city of a country", "small"), ("proof of the lemma", "large")):
        fields = {"messages": raw([{"role": "user", "content": text}])}
        decision = await router.decide(RoutingRequest("auto", "chat", fields))
        assert (decision.model, decision.why["by"]) == (model, "predicted")


def test_what_is_kept_is_what_was_fitted(tmp_path: Path) -> None:
    kept = load(fitted(tmp_path)).words
    assert kept is not None
    again = load(tmp_path / "route.npz").words
    assert again is not None
    assert np.array_equal(kept.vector("a river 7"), again.vector("a river 7"))


def test_a_changed_list_of_words_is_refused(tmp_path: Path) -> None:
    path = fitted(tmp_path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["word_list"] = np.frombuffer(
        arrays["word_list"].tobytes().replace(b"capital", b"capitol"), np.uint8
    )
    np.savez(path, **arrays)
    with pytest.raises(OptionError, match="checksum"):
        load(path)
