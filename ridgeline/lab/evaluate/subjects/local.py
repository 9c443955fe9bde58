"""LocalSubject: an engine in this process. Batches of items are scheduled as requests are."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.engine.schedule.request import MAX_PROMPT_LOGPROBS, SamplingParams
from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.lab.errors import LabError
from ridgeline.lab.evaluate.scoring.likelihood import Likelihood, Pair
from ridgeline.lab.evaluate.statistics.divergence import TokenScores
from ridgeline.lab.evaluate.subjects.subject import Completion, Prompt, Scored, SubjectSpec
from ridgeline.lab.evaluate.subjects.tokens import TokenPair, token_pair
from ridgeline.lab.evaluate.verdicts import STORED, ServedFormat
from ridgeline.lab.model_identity import identify
from ridgeline.lab.tune.space import parse_settings
from ridgeline.models.spec.precision import WHOLE

if TYPE_CHECKING:
    from ridgeline.engine.client.llm import LLM
    from ridgeline.engine.client.output import Generation
    from ridgeline.models.text.tokenizer import Tokenizer


class LocalSubject:
    """Loads the model; `close` frees it."""

    chat_only = False

    def __init__(self, spec: SubjectSpec) -> None:
        from ridgeline.engine.client.llm import LLM
        from ridgeline.models.files.pull import ensure

        self.name = spec.text
        settings = engine_settings(spec)
        started = time.monotonic()
        self._llm: LLM | None = LLM(spec.name, **settings)
        engine = self._llm.engine
        self.facts: dict[str, Any] = {
            "model": spec.name,
            "identity": identity_of(ensure(spec.name).path),
            "settings": settings,
            "engine": engine.summary,
            "load_s": round(time.monotonic() - started, 2),
            "weights_bytes": engine.plan.weights_bytes,
            "kv_bytes": engine.plan.kv_bytes,
        }
        self.served: ServedFormat | None = None
        if settings.get("load_format", "auto") == "auto":  # random weights are not a model
            self.served = ServedFormat(
                identify(spec.name),
                served_weights(settings),
                engine.kv_dtype,
                engine.backend,
                engine.summary,
            )
        self.most_top = min(MAX_PROMPT_LOGPROBS, engine.spec.vocab_size)
        tokenizer = self._llm.tokenizer
        self._encode = lambda text, special: tokenizer.encode(text, add_special=special, allow_special=False)
        self.prefix = prefix_of(tokenizer)
        self._longest = engine.plan.max_context - 1  # one token is generated

    def refuse_scoring(self) -> str | None:
        return None

    def score(self, pairs: Sequence[Pair], top: int, concurrency: int) -> list[Scored]:
        cut = [token_pair(pair, self._encode, self.prefix, self._longest) for pair in pairs]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top, ignore_eos=True)
        found: list[Scored] = []
        for start in range(0, len(cut), concurrency):
            batch = cut[start : start + concurrency]
            answers = self._open().generate([one.ids for one in batch], params)
            found += [
                scored(one, _complete(answer, one), top, self.prefix)
                for one, answer in zip(batch, answers, strict=True)
            ]
        return found

    def complete(self, prompts: Sequence[Prompt], concurrency: int) -> list[Completion]:
        found: list[Completion] = []
        for start in range(0, len(prompts), concurrency):
            batch = prompts[start : start + concurrency]
            params = [
                SamplingParams(max_tokens=one.max_tokens, temperature=0.0, stop=one.stops) for one in batch
            ]
            for answer in self._open().generate([one.text for one in batch], params):
                _refuse_error(answer)
                found.append(Completion(answer.text, len(answer.completions[0].tokens)))
        return found

    def close(self) -> None:
        self._llm = None
        gc.collect()

    def _open(self) -> LLM:
        if self._llm is None:
            raise LabError(f"{self.name} is closed")
        return self._llm


def engine_settings(spec: SubjectSpec) -> dict[str, Any]:
    """The settings as the engine's types; an unknown one is an error that names the known ones."""
    return {**parse_settings([f"{key}={value}" for key, value in spec.settings.items()], spec.name)}


def served_weights(settings: dict[str, Any]) -> str:
    """As a verdict names the format: matrices that --quantization-keep leaves in 16 bits are part of it."""
    weights = str(settings.get("weights", "auto"))
    name = STORED if weights == "auto" else weights
    kept = sorted(settings.get("quantization_keep", ()))
    return f"{name}, kept {' '.join(kept)}" if kept and weights not in WHOLE else name


def prefix_of(tokenizer: Tokenizer) -> int | None:
    """The token before a text: BOS, else EOS."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def identity_of(path: Path) -> str:
    """Of a model's file or folder: its size and the time of its last change."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    stats = [one.stat() for one in files]
    size, changed = sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)
    return f"{size} bytes, changed at {changed / 1e9:.6f}"


def scored(pair: TokenPair, entries: Sequence[TokenLogprob], top: int, prefix: int | None) -> Scored:
    """entries: of the second token on."""
    own = entries[pair.start - 1 :]
    likelihood = Likelihood(
        float(sum(entry.logprob for entry in own)), all(entry.rank == 1 for entry in own), len(own)
    )
    if not top:
        return Scored(likelihood, None)
    ids = np.full((len(own), top), -1, np.int64)
    values = np.full((len(own), top), -np.inf, np.float32)
    for place, entry in enumerate(own):
        best = entry.top[:top]
        ids[place, : len(best)] = [token for token, _ in best]
        values[place, : len(best)] = [value for _, value in best]
    tokens = np.array([entry.token for entry in own], np.int64)
    logprobs = np.array([entry.logprob for entry in own], np.float32)
    return Scored(likelihood, TokenScores(tokens, logprobs, ids, values, -1 if prefix is None else prefix))


def _complete(answer: Generation, pair: TokenPair) -> list[TokenLogprob]:
    _refuse_error(answer)
    if len(answer.prompt_logprobs) != len(pair.ids) - 1:
        raise LabError(
            f"the engine scored {len(answer.prompt_logprobs)} of {len(pair.ids) - 1} tokens of a prompt"
        )
    return answer.prompt_logprobs


def _refuse_error(answer: Generation) -> None:
    error = answer.completions[0].error
    if error is not None:
        raise LabError(f"the engine failed on an item: {error}")
