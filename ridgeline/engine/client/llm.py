"""LLM: the engine in the caller's own process, for scripts, notebooks, evaluations and the command line.

    from ridgeline import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    print(llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=64)).text)

All prompts of one call are batched together. Not thread-safe: one call or open stream at a time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ridgeline.engine.client.launch import load_tokenizer
from ridgeline.engine.client.output import Completion, Generation, OutputChunk
from ridgeline.engine.client.text import TextStream
from ridgeline.engine.config import engine_config
from ridgeline.engine.errors import InvalidRequest, QueueFull, SchemaViolation, failure
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.conformance import AnswerCheck, refuse_uncheckable
from ridgeline.engine.grammar.keywords import prepared
from ridgeline.engine.schedule.request import FinishReason, Request, SamplingParams
from ridgeline.engine.start.build import BuiltEngine, build_engine
from ridgeline.models.files.pull import ensure

if TYPE_CHECKING:
    from ridgeline.engine.grammar.library import Compiled

Prompt = str | list[int]
Message = dict[str, Any]


class LLM:
    """Load a model and generate. `options` are the fields of EngineConfig (weights, kv_tokens, …)."""

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        self.config = engine_config(model, options)
        path = ensure(model).path
        self.tokenizer = load_tokenizer(path)  # before the weights are read, which may take minutes
        self.engine: BuiltEngine = build_engine(self.config, path)
        self._ids = itertools.count()
        self._streaming = False

    def get_default_sampling_params(self) -> SamplingParams:
        """As recommended by the model's generation_config.json. Change it with dataclasses.replace: a
        SamplingParams made without it has the engine's own defaults (temperature 1)."""
        return SamplingParams(**self.engine.sampling.values())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Generation]:
        """Complete every prompt (text or token ids); answers are in the order of the prompts.

        Give one SamplingParams for all prompts, or one for each; the default is the model's
        (`get_default_sampling_params`). `progress(done, total)` is called as prompts finish.
        A prompt that can never be served raises before anything is computed; one that fails later ends on its
        own, with finish_reason "error" and the reason in `error`.
        """
        batch = _as_batch(prompts)
        each = _one_for_each(self.get_default_sampling_params() if params is None else params, len(batch))
        return self._run([(self._encode(prompt), p) for prompt, p in zip(batch, each, strict=True)], progress)

    def chat(
        self,
        conversation: Sequence[Message],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Generation:
        """Answer one conversation through the model's chat template."""
        prompt_ids = self.tokenizer.encode_chat(list(conversation), **template_options)
        return self._run([(prompt_ids, params or self.get_default_sampling_params())], None)[0]

    def generate_stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[OutputChunk]:
        """Yield chunks of text as they arrive. Leaving the loop early aborts the request."""
        prompt_ids = self._encode(prompt)
        for _, chunk in self._stream([(prompt_ids, params or self.get_default_sampling_params())]):
            if chunk.error is not None:
                raise failure(chunk.error)
            yield chunk

    def chat_stream(
        self,
        conversation: Sequence[Message],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Iterator[OutputChunk]:
        return self.generate_stream(
            self.tokenizer.encode_chat(list(conversation), **template_options), params
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        outside = [i for i in prompt_ids if not 0 <= i < self.engine.spec.vocab_size]
        if outside:
            raise InvalidRequest("prompt", f"token id {outside[0]} is outside the vocabulary")
        return prompt_ids

    def _run(
        self,
        work: list[tuple[list[int], SamplingParams]],
        progress: Callable[[int, int], None] | None,
    ) -> list[Generation]:
        generations = [
            Generation(prompt_ids, [Completion(i) for i in range(params.n)]) for prompt_ids, params in work
        ]
        unfinished = [params.n for _, params in work]
        for number, chunk in self._stream(work):
            generation = generations[number]
            completion = generation.completions[chunk.index]
            completion.text += chunk.text
            completion.tokens += chunk.tokens
            completion.logprobs += chunk.logprobs
            generation.prompt_logprobs += chunk.prompt_logprobs
            if chunk.finish_reason is not None:
                completion.finish_reason = chunk.finish_reason
                completion.stop_reason = chunk.stop_reason
                completion.timing = chunk.timing
                completion.error = chunk.error
                unfinished[number] -= 1
                if progress is not None and unfinished[number] == 0:
                    progress(unfinished.count(0), len(work))
        return generations

    def _stream(self, work: list[tuple[list[int], SamplingParams]]) -> Iterator[tuple[int, OutputChunk]]:
        """Run all the work together, yielding (prompt index, chunk) as steps complete."""
        core = self.engine.core
        if self._streaming:
            raise RuntimeError(
                "another stream of this LLM is still open: read it to the end or close() it first"
            )
        for prompt_ids, params in work:  # before the first is computed, not when the last is reached
            core.refuse_unservable(Request("", prompt_ids, params))
        work = [
            (ids, replace(params, grammar=params.grammar and prepared(params.grammar)))
            for ids, params in work
        ]
        compiled = self._compiled(params.grammar for _, params in work)
        waiting = list(reversed(list(enumerate(work))))
        numbers: dict[str, int] = {}
        streams: dict[tuple[str, int], TextStream] = {}
        checks: dict[tuple[str, int], AnswerCheck] = {}
        self._streaming = True
        try:
            while waiting or core.has_work:
                self._submit_what_fits(waiting, numbers, streams, checks, compiled)
                for delta in core.step():
                    number, stream = numbers[delta.request_id], streams[delta.request_id, delta.index]
                    chunk = stream.push(delta, core.last_step_end)
                    if chunk is None:
                        continue
                    if stream.stopped_by_text:
                        core.abort(delta.request_id, delta.index)
                    yield number, _checked(chunk, checks.get((delta.request_id, delta.index)))
        finally:
            self._streaming = False
            for name in numbers:
                core.abort(name)
            core.drain()
            core.check_integrity()

    def _compiled(self, grammars: Iterable[Grammar | None]) -> dict[Grammar, Compiled]:
        """Compile all grammars. Raises InvalidRequest for one that cannot be served."""
        compiled: dict[Grammar, Compiled] = {}
        for grammar in grammars:
            if grammar is not None and grammar not in compiled:
                compiler = self.engine.core.grammars
                assert compiler is not None
                refuse_uncheckable(grammar)
                compiled[grammar] = compiler.compile(grammar)
        return compiled

    def _submit_what_fits(
        self,
        waiting: list[tuple[int, tuple[list[int], SamplingParams]]],
        numbers: dict[str, int],
        streams: dict[tuple[str, int], TextStream],
        checks: dict[tuple[str, int], AnswerCheck],
        compiled: dict[Grammar, Compiled],
    ) -> None:
        """Keep the engine's bounded queue filled; the rest is submitted after later steps."""
        while waiting:
            number, (prompt_ids, params) = waiting[-1]
            name = f"llm-{next(self._ids)}"
            request = Request(name, prompt_ids, params, time.monotonic())
            if params.grammar is not None:
                request = replace(request, compiled=compiled[params.grammar])
            try:
                self.engine.core.add(request)
            except QueueFull:
                return
            waiting.pop()
            numbers[name] = number
            for index in range(params.n):
                streams[name, index] = TextStream(self.tokenizer, params, index)
                check = AnswerCheck.of(params.grammar)
                if check is not None:
                    checks[name, index] = check


def _checked(chunk: OutputChunk, check: AnswerCheck | None) -> OutputChunk:
    """The chunk. If it completes an answer that breaks its schema, it ends with an error instead."""
    if check is None:
        return chunk
    check.add(chunk.text)
    if chunk.finish_reason is FinishReason.STOP and not isinstance(chunk.stop_reason, str):
        try:
            check.refuse_violation()
        except SchemaViolation as violation:
            return replace(chunk, finish_reason=FinishReason.ERROR, error=str(violation))
    return chunk


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def _one_for_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest("params", f"{len(params)} sampling parameters for {count} prompts")
    return list(params)
