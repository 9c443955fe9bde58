"""Examples: texts with each model's outcome. Read from CSV or JSON lines, to fit or evaluate."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.gateway.routing.learned.artifact import ModelCost
from ridgeline.gateway.routing.learned.classifier import Floats
from ridgeline.gateway.routing.learned.neighbours import Outcomes
from ridgeline.gateway.routing.reading import CHARS_PER_TOKEN
from ridgeline.options import OptionError

FIELD_BYTES = 1 << 24  # of one cell of a CSV file
LEAST = 50  # least number of examples to fit or judge
OUTPUT_TOKENS = 200  # of an answer, if the examples do not give it
_WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "right": 1.0, "wrong": 0.0}


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens."""

    tokens_in: float
    tokens_out: float


@dataclass(frozen=True)
class Examples:
    """models: from the cheapest to the strongest. turns: each example's user turns, the last one last.

    costs: US dollars of each model on each example. by_model: the assumed cost of an unseen request.
    """

    models: tuple[str, ...]
    turns: list[tuple[str, ...]]
    outcomes: Outcomes
    costs: Floats
    by_model: tuple[ModelCost, ...]
    groups: list[str]
    confidence: Floats  # of the cheapest model's answers, for the cascade; nan if unknown

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def cost_span(self) -> float:
        """Dollars between the cheapest and the strongest model, on average."""
        return float(self.costs[:, -1].mean() - self.costs[:, 0].mean())

    @property
    def scaled_costs(self) -> Floats:
        """In units of the span, as in thresholds and curves."""
        return self.costs / self.cost_span

    def part(self, rows: Any) -> Examples:
        indices = np.arange(len(self))[rows]
        return Examples(
            self.models,
            [self.turns[i] for i in indices],
            self.outcomes[indices],
            self.costs[indices],
            self.by_model,
            [self.groups[i] for i in indices],
            self.confidence[indices],
        )


@dataclass(frozen=True)
class Costing:
    """The user's costs: dollars per request, or prices of tokens. Without either, calls are counted."""

    requests: Mapping[str, float]
    prices: Mapping[str, Price]


@dataclass(slots=True)
class _Row:
    turns: tuple[str, ...]
    outcomes: list[float]
    costs: list[float | None]
    tokens_out: list[int | None]
    group: str
    confidence: float


def read_examples(
    paths: Sequence[Path], models: Sequence[str], costing: Costing, newest: int | None = None
) -> Examples:
    """OptionError names the unusable file and line. `newest`: read only this many of the last rows."""
    if len(models) < 2 or len(set(models)) < len(models):
        raise OptionError("--models: give two models or more, each once, from the cheapest to the strongest")
    rows: list[_Row] = []
    for path in paths:
        reader = _csv_rows if path.suffix == ".csv" else _json_rows
        rows.extend(reader(path, models))
    if newest is not None:
        rows = rows[-newest:]
    if len(rows) < LEAST:
        raise OptionError(f"{len(rows)} examples are too few; give at least {LEAST}")
    costs, by_model = _costs(rows, models, costing)
    outcomes = np.array([row.outcomes for row in rows], np.float32)
    if float(costs[:, -1].mean()) <= float(costs[:, 0].mean()):
        raise OptionError(f"{models[-1]} costs no more than {models[0]}; list the cheapest model first")
    if len(models) == 2 and (costs[:, 1] <= costs[:, 0]).any():
        raise OptionError(
            f"{models[1]} costs no more than {models[0]} on some examples: nothing to choose there"
        )
    return Examples(
        tuple(models),
        [row.turns for row in rows],
        outcomes,
        costs,
        by_model,
        [row.group for row in rows],
        np.array([row.confidence for row in rows]),
    )


def _costs(
    rows: Sequence[_Row], models: Sequence[str], costing: Costing
) -> tuple[Floats, tuple[ModelCost, ...]]:
    for name in (*costing.requests, *costing.prices):
        if name not in models:
            raise OptionError(f"--cost and --price: {name!r} is not one of {', '.join(models)}")
    tokens_in = np.array([sum(map(len, row.turns)) / CHARS_PER_TOKEN for row in rows])
    columns, by_model = [], []
    for place, model in enumerate(models):
        own = [row.costs[place] for row in rows]
        if all(cost is not None for cost in own):
            column = np.array(own, np.float64)
            by_model.append(ModelCost(float(column.mean())))
        elif model in costing.prices:
            price = costing.prices[model]
            known = [row.tokens_out[place] for row in rows]
            told = [count for count in known if count is not None]
            usual = sum(told) / len(told) if told else OUTPUT_TOKENS
            tokens_out = np.array([usual if count is None else count for count in known])
            column = (tokens_in * price.tokens_in + tokens_out * price.tokens_out) / 1e6
            by_model.append(ModelCost(usual * price.tokens_out / 1e6, price.tokens_in / 1e6))
        elif model in costing.requests or not (costing.requests or costing.prices):
            # Costs are unknown: a call of a more expensive model counts 1, and savings are in calls.
            cost = costing.requests.get(model, place / (len(models) - 1))
            column = np.full(len(rows), cost)
            by_model.append(ModelCost(cost))
        else:
            raise OptionError(f"{model} has no cost; give --cost or --price for each model, or for none")
        columns.append(column)
    return np.stack(columns, axis=1), tuple(by_model)


def _csv_rows(path: Path, models: Sequence[str]) -> Iterator[_Row]:
    """Columns: prompt, one per model (true, false, 0 to 1), perhaps MODEL_cost, MODEL_response, group.

    MODEL_confidence, only of the cheapest model, is `cascade.confidence` of its answer.
    """
    csv.field_size_limit(FIELD_BYTES)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = [name for name in ("prompt", *models) if name not in (table.fieldnames or ())]
            if missing:
                raise OptionError(
                    f"{path}: no column {missing[0]!r}; found {', '.join(table.fieldnames or ['none'])}"
                )
            for number, cells in enumerate(table, start=2):
                where = f"{path}: row {number}: "
                yield _Row(
                    turns=(cells["prompt"] or "",),
                    outcomes=[_outcome(cells[model], where + model) for model in models],
                    costs=[_cost(cells.get(f"{model}_cost"), where + model) for model in models],
                    tokens_out=[_tokens(cells.get(f"{model}_response")) for model in models],
                    group=cells.get("group") or path.stem,
                    confidence=_confidence(cells.get(f"{models[0]}_confidence"), where + models[0]),
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise OptionError(f"{path}: cannot be read: {error}") from None


def _json_rows(path: Path, models: Sequence[str]) -> Iterator[_Row]:
    """Lines: {"prompt": … or "messages": […], "outcomes": {model: …}}, perhaps costs, group, confidence."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json_row(json.loads(line), models, f"{path}: line {number}: ", path.stem)
    except json.JSONDecodeError as error:
        raise OptionError(f"{path}: line {number}: not JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read: {error}") from None


def _json_row(line: Any, models: Sequence[str], where: str, group: str) -> _Row:
    if not isinstance(line, dict) or not isinstance(line.get("outcomes"), dict):
        raise OptionError(f"{where}must be an object with `prompt` or `messages`, and `outcomes` by model")
    messages = line.get("messages") or [{"role": "user", "content": line.get("prompt")}]
    turns = tuple(
        message["content"]
        for message in messages
        if isinstance(message, dict)
        and message.get("role") == "user"
        and isinstance(message.get("content"), str)
    )
    if not turns:
        raise OptionError(f"{where}has no user text; give `prompt`, or `messages` with a user's")
    costs = line.get("costs") or {}
    return _Row(
        turns=turns,
        outcomes=[_outcome(line["outcomes"].get(model), where + model) for model in models],
        costs=[_cost(costs.get(model), where + model) for model in models],
        tokens_out=[None] * len(models),
        group=str(line.get("group") or group),
        confidence=_confidence(line.get("confidence"), where + "confidence"),
    )


def _outcome(value: Any, where: str) -> float:
    """Whether the answer was right: true, false, or a grade from 0 to 1."""
    found = _WORDS.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
    if not 0.0 <= found <= 1.0:
        raise OptionError(f"{where}: an outcome must be true, false or a number from 0 to 1, not {value!r}")
    return found


def _cost(value: Any, where: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not (math.isfinite(found) and found >= 0):
        raise OptionError(f"{where}: a cost must be a number of US dollars, not {value!r}")
    return found


def _confidence(value: Any, where: str) -> float:
    return math.nan if value is None or value == "" else _outcome(value, where)


def _tokens(response: str | None) -> int | None:
    return None if response is None else max(1, round(len(response) / CHARS_PER_TOKEN))
