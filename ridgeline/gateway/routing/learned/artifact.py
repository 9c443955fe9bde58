"""Artifact: the file that `ridgeline gateway routes fit` writes for a route: arrays and a JSON header.

Read and checked when the gateway starts: a file that is truncated, changed, or made for other models or
another embedding model is refused with advice. Holds vectors and outcomes, no text.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.embedder import Vectors
from ridgeline.gateway.routing.learned.classifier import Classifier, Floats
from ridgeline.gateway.routing.learned.features import NAMES, Recipe, features_of
from ridgeline.gateway.routing.learned.neighbours import Shortlist, Weighing
from ridgeline.gateway.routing.learned.predictor import Predictor
from ridgeline.gateway.routing.learned.words import WordVectors
from ridgeline.options import OptionError

VERSION = 1
ARRAYS = ("vectors", "outcomes", "centre", "scale", "weights", "platt", "prior")
WORD_ARRAYS = ("word_list", "word_table", "word_centre")  # if vectors are made of words


@dataclass(frozen=True, slots=True)
class ModelCost:
    """US dollars of a request: `request`, and `token` for each token of its prompt."""

    request: float
    token: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """For one request: each model's chance to be right and its cost, in units of `cost_span` dollars."""

    models: tuple[str, ...]
    chances: Floats
    costs: Floats
    threshold: float
    nearest: float

    def choice(self, allowed: Sequence[str], threshold: float | None = None) -> tuple[str, dict[str, Any]]:
        """The model whose chance, less its cost at the price of quality, is best; and why, for the ledger."""
        price = self.threshold if threshold is None else threshold
        places = [self.models.index(model) for model in allowed]
        worth = self.chances[places] - price * self.costs[places]
        chosen = allowed[int(np.argmax(worth))]
        why: dict[str, Any] = {
            "chance": {self.models[m]: round(float(self.chances[m]), 4) for m in places},
            "threshold": round(price, 6),
            "nearest": round(self.nearest, 4),
        }
        if len(places) == 2:
            gain = self.chances[places[1]] - self.chances[places[0]]
            why["gain_per_cost"] = round(float(gain / (self.costs[places[1]] - self.costs[places[0]])), 6)
        return chosen, why


@dataclass(frozen=True, slots=True)
class Artifact:
    """models: from the cheapest to the strongest, by their names in the examples.

    cost_span: dollars between the cheapest and the strongest model on an average request; a threshold is the
    gain in quality that this amount must buy.
    """

    models: tuple[str, ...]
    embedding_model: str
    recipe: Recipe
    costs: tuple[ModelCost, ...]
    cost_span: float
    threshold: float
    predictor: Predictor
    cascade_threshold: float | None = None
    words: WordVectors | None = None  # None: each decision embeds the text with the embedding model
    report: dict[str, Any] = field(default_factory=dict)  # how it was fitted, and the expected savings

    @property
    def dimensions(self) -> int:
        return int(self.predictor.vectors.shape[1])

    def forecast(self, vector: Vectors, text: str, tokens: int) -> Forecast:
        features = np.array(features_of(text), np.float32)
        chances, near = self.predictor.one(vector, features)
        costs = np.array([cost.request + cost.token * tokens for cost in self.costs]) / self.cost_span
        return Forecast(self.models, chances, costs, self.threshold, near)

    def check(self, models: Sequence[str], embedding_model: str, where: str) -> None:
        """OptionError if it does not match the route that names it."""
        if tuple(models) != self.models:
            raise OptionError(
                f"{where}: its artifact was fitted for the models {', '.join(self.models)}, in this order; "
                "name these, or fit again with --names"
            )
        if self.words is None and embedding_model != self.embedding_model:
            raise OptionError(
                f"{where}: its artifact was fitted with vectors of {self.embedding_model!r}, but "
                f"[embeddings] has {embedding_model!r}: fit again"
            )


def save(artifact: Artifact, path: Path) -> None:
    """Written to a temporary file and renamed: a reader finds the old file or the new one."""
    predictor = artifact.predictor
    arrays: dict[str, npt.NDArray[Any]] = {
        "vectors": predictor.vectors.astype(np.float16),
        "outcomes": predictor.outcomes.astype(np.float16),
        "centre": predictor.classifier.centre,
        "scale": predictor.classifier.scale,
        "weights": predictor.classifier.weights,
        "platt": predictor.platt,
        "prior": predictor.prior,
    }
    if artifact.words is not None:
        arrays["word_list"] = _text(list(artifact.words.words))
        arrays["word_table"] = artifact.words.table.astype(np.float16)
        arrays["word_centre"] = artifact.words.centre
    weighing = predictor.weighing
    header = {
        "version": VERSION,
        "models": artifact.models,
        "embedding_model": artifact.embedding_model,
        "recipe": asdict(artifact.recipe),
        "features": NAMES,
        "costs": [asdict(cost) for cost in artifact.costs],
        "cost_span": artifact.cost_span,
        "threshold": artifact.threshold,
        "cascade_threshold": artifact.cascade_threshold,
        "neighbours": {
            "k": weighing.k,
            "temperature": None if math.isinf(weighing.temperature) else weighing.temperature,
            "prior_weight": weighing.prior_weight,
        },
        "classifier_share": predictor.share,
        "report": artifact.report,
        "digest": _digest(arrays),
    }
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, header=_text(header), **arrays)
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(buffer.getvalue())
    beside.replace(path)


def load(path: Path) -> Artifact:
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            own = WORD_ARRAYS if WORD_ARRAYS[0] in file else ()
            arrays = {name: file[name] for name in (*ARRAYS, *own)}
    except FileNotFoundError:
        raise OptionError(f"{path}: no such artifact; make one with `ridgeline gateway routes fit`") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise OptionError(f"{path}: not an artifact of `ridgeline gateway routes fit`: {error}") from None
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise OptionError(f"{path}: an artifact of another version; fit again with this version")
    if header.get("digest") != _digest(arrays):
        raise OptionError(f"{path}: the checksum does not match; fit again")
    if header["features"] != list(NAMES):
        raise OptionError(f"{path}: fitted with other text features; fit again")
    try:
        return _artifact(header, arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise OptionError(f"{path}: its header cannot be read: {error!r}; fit again") from None


def _artifact(header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Artifact:
    near = header["neighbours"]
    temperature = math.inf if near["temperature"] is None else float(near["temperature"])
    vectors = arrays["vectors"].astype(np.float32)
    predictor = Predictor(
        vectors=vectors,
        outcomes=arrays["outcomes"].astype(np.float32),
        weighing=Weighing(int(near["k"]), temperature, float(near["prior_weight"])),
        classifier=Classifier(arrays["centre"], arrays["scale"], arrays["weights"]),
        share=float(header["classifier_share"]),
        platt=arrays["platt"],
        prior=arrays["prior"],
        shortlist=Shortlist.of(vectors),
    )
    return Artifact(
        models=tuple(header["models"]),
        embedding_model=header["embedding_model"],
        recipe=Recipe(**header["recipe"]),
        costs=tuple(ModelCost(**cost) for cost in header["costs"]),
        cost_span=float(header["cost_span"]),
        threshold=float(header["threshold"]),
        predictor=predictor,
        cascade_threshold=header["cascade_threshold"],
        words=_words(arrays) if WORD_ARRAYS[0] in arrays else None,
        report=header["report"],
    )


def _words(arrays: dict[str, npt.NDArray[Any]]) -> WordVectors:
    words = tuple(json.loads(arrays["word_list"].tobytes()))
    return WordVectors(words, arrays["word_table"].astype(np.float32), arrays["word_centre"])


def _text(header: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(header).encode(), np.uint8)


def _digest(arrays: dict[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (name for name in (*ARRAYS, *WORD_ARRAYS) if name in arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
