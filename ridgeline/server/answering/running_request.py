"""RunningRequest: one accepted request, from the engine's first chunk to the record of how it ended.

Whole and streamed answers both take their pieces here. Leaving the context manager for any reason closes the
engine's requests, which aborts unfinished ones, and books the request exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from ridgeline.engine.client.inbox import Inbox
from ridgeline.engine.client.open_request import OpenRequest
from ridgeline.engine.errors import InvalidRequest, QueueFull, RequestFailed
from ridgeline.engine.grammar.conformance import refuse_uncheckable
from ridgeline.engine.schedule.request import is_background
from ridgeline.server.answering.job import Job
from ridgeline.server.answering.pieces import Choices, Piece
from ridgeline.server.answering.schema_checks import Client, SchemaChecks
from ridgeline.server.answering.submission import Part, Submission, continued_parts, parts_of
from ridgeline.server.console.request_log import LoggedRequest, request_log
from ridgeline.server.errors import ClientGone, DeadlineExceeded, ErrorReply, SlowReader, reply_to
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.records.recording import EndedRequest, TrafficRecorder
from ridgeline.server.records.usage_book import UsageBook
from ridgeline.server.replica.feed import ReplicaFeeds
from ridgeline.server.replica.resumable import ResumableStream, Writer
from ridgeline.server.served_models import ServedModels
from ridgeline.telemetry.logs import log_request
from ridgeline.telemetry.timing import TimingRecord

REPLAY_COST = 16  # bytes of body that take as long as a replayed token


class RunningRequest:
    def __init__(
        self,
        served_models: ServedModels,
        context: RequestContext,
        job: Job,
        stream: ResumableStream | None = None,
    ) -> None:
        """stream: of a request whose answer a peer could continue, or that continues another server's."""
        self.context = context
        self.job = job
        self.choices = Choices(
            job.prompts, job.params, job.new_parser, job.running_usage, job.new_count, job.return_token_ids
        )
        if served_models.recorder is not None and served_models.recorder.texts:
            self.choices.outputs = {}
        self.inbox = Inbox(whole=not job.stream)
        self._served_models = served_models
        self._metrics = job.served.metrics
        self.stream = self.choices.progress = stream
        self._submission: Submission | None = None
        grammar = job.params.grammar
        self._checks = served_models.part(SchemaChecks) if grammar is not None and grammar.check else None
        self._client = Client(context.client, job.cache_namespace)
        self._unchecked_schema = grammar
        self._usages = served_models.part(UsageBook)
        self._requests = served_models.part(request_log)
        self._priority = max(job.priority, context.least_priority)
        # A background request may be queued for hours: it has no deadline.
        self._is_background = is_background(self._priority)
        limit_s = None if self._is_background else served_models.config.request_timeout_s
        self._deadline = None if limit_s is None else context.arrival + limit_s

    def __enter__(self) -> RunningRequest:
        if self._checks is not None:
            self._checks.enter(self._client)
        try:
            self._used = self._usages.begin(self.context.request_id, lambda: self.choices.usage(False))
            self._logged = self._requests.begin(self._log_entry())
            self._submission = Submission(
                self._parts(), self.job.client.hello.max_running, self.inbox, self._submit
            )
            self._submission.begin()
            if self.context.body:
                self._name_prefix()
        except BaseException:
            self._leave_checks()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._submission is not None:
            self._submission.close()
        self._leave_checks()
        with contextlib.suppress(RequestFailed):  # chunks that were received but not read count too
            for arrival in self.inbox.close():
                self.choices.add(*arrival, [])
        self._book(error)

    def _name_prefix(self) -> None:
        """A fleet follows the prefix cache: the prompt's blocks get the names that its routers know."""
        body, self.context.body = self.context.body, b""
        if len(self.job.prompts) == 1:
            feed = self._served_models.part(ReplicaFeeds).of(self.job.served.model)
            feed.asked(body, self.job.prompts[0].ids, self.job.cache_namespace)

    async def replay(self, shape: Writer) -> None:
        """Of a continued stream, before the request begins: what the client has is not written again."""
        stream = self.stream
        if stream is not None and (state := stream.state) is not None:
            await off_loop(REPLAY_COST * state.num_tokens, lambda: stream.replay(self.choices, shape))

    def _parts(self) -> list[Part]:
        job, stream = self.job, self.stream
        prompts, params = len(job.prompts), job.params
        if stream is None or stream.state is None:
            seeds = None if stream is None else stream.seeds
            return parts_of(prompts, params, job.client.hello.max_running, seeds)
        outputs = {choice: output.tokens for choice, output in stream.state.outputs.items()}
        ended = self.choices.finish_reasons
        return continued_parts(prompts, params, stream.seeds, outputs, stream.texts, ended)

    def _submit(self, part: Part, inbox: Inbox) -> OpenRequest:
        number = part.prompt
        continued: dict[str, Any] = (
            {} if part.text is None else {"output_ids": part.output_ids, "text": part.text}
        )
        return self.job.client.submit(
            self.job.prompts[number].ids,
            part.params,
            inbox,
            number,
            request_id=self.context.request_id,
            arrival=self.context.arrival,
            priority=self._priority,
            cache_namespace=self.job.cache_namespace,
            **continued,
        )

    async def next_pieces(self, patience_s: float | None = None) -> list[Piece] | None:
        """The next pieces, at least one; [] if none arrived within `patience_s`; None after the last."""
        while True:
            try:
                await self._refuse_uncheckable()
                arrivals = await self.inbox.take(self._wait_s(patience_s))
            except InvalidRequest as error:
                if error.field == "grammar":
                    raise InvalidRequest(self.job.grammar_field, error.message) from None
                raise
            if arrivals is None:
                self.choices.check_complete()
                return None
            if not arrivals:
                self._check_deadline()
                return []
            pieces: list[Piece] = []
            for number, chunk in arrivals:
                self.choices.add(number, chunk, pieces)
            await self._refuse_violations()
            if pieces:
                return pieces

    async def _refuse_uncheckable(self) -> None:
        """Once, before the first pieces: refuse a schema that only the validator rejects."""
        grammar, self._unchecked_schema = self._unchecked_schema, None
        if grammar is not None and grammar.check:
            await self._in_time(lambda: refuse_uncheckable(grammar))

    async def _refuse_violations(self) -> None:
        """Check complete answers against what their grammar could not enforce; raises SchemaViolation."""
        due, self.choices.due_checks = self.choices.due_checks, []
        for check in due:
            await self._in_time(check.refuse_violation)

    async def _in_time(self, check: Callable[[], None]) -> None:
        """A check in a thread, within the request's deadline."""
        assert self._checks is not None  # without a grammar to check there is no check
        try:
            async with asyncio.timeout(self._wait_s(None)):
                await self._checks.run(self._client, check)
        except TimeoutError:
            limit_s = self._served_models.config.request_timeout_s
            assert limit_s is not None
            raise DeadlineExceeded(limit_s) from None

    def _leave_checks(self) -> None:
        if self._checks is not None:
            self._checks.leave(self._client)

    def book_refusal(self, reply: ErrorReply) -> None:
        """Record in metrics and log that the engine refused the request, unless already recorded."""
        if not self.context.booked:
            self._served_models.book_refusal(self.context, reply, self._metrics)

    def _wait_s(self, patience_s: float | None) -> float | None:
        if self._deadline is None:
            return patience_s
        left_s = max(0.0, self._deadline - time.monotonic())
        return left_s if patience_s is None else min(left_s, patience_s)

    def _check_deadline(self) -> None:
        limit_s = self._served_models.config.request_timeout_s
        if self._deadline is not None and limit_s is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceeded(limit_s)

    def _book(self, error: BaseException | None) -> None:
        """Record in metrics and log how every choice ended, or that the engine refused the request."""
        if isinstance(error, InvalidRequest | QueueFull):
            self._usages.refuse(self._used)
            self._requests.refuse(self._logged)
            reply = reply_to(error)
            assert reply is not None  # both are in the table
            self.book_refusal(reply)
            return
        self.context.booked = True
        status, failure = outcome(error)
        self._usages.end(self._used, status)
        if isinstance(error, SlowReader):
            self._metrics.stream_cut()
        now = time.monotonic()
        if self._served_models.recorder is not None and not self._is_background:
            self._record(self._served_models.recorder, failure)
        timings = []
        for index in range(self.choices.count):
            timing = self.choices.timings.get(index) or self._unbegun(index)
            timings.append(timing)
            if index not in self.choices.finish_reasons:
                timing.end, timing.end_reason = now, failure
            elif timing.end is None:  # it ended on another server, which this one continues
                timing.end, timing.end_reason = now, self.choices.finish_reasons[index]
            timing.sent = now
            reason = failure or self.choices.finish_reasons[index]
            self._metrics.request_finished(timing, self.context.path, reason, self._is_background)
            log_request(self.context.request_id, self.context.path, status, timing, reason)
        self._requests.end(self._logged, status, timings)
        if self._served_models.tracing is not None:
            self._served_models.tracing.book(self.context, timings, self.job.served.name, status, failure)

    def _record(self, recorder: TrafficRecorder, failure: str) -> None:
        """One line per choice. Background requests are skipped: their arrival times cannot be replayed."""
        for index in range(self.choices.count):
            recorder.add(
                EndedRequest(
                    self.context.arrival,
                    self.job.prompts[index // self.job.params.n].ids,
                    self.choices.output_tokens(index),
                    self.context.path,
                    self.job.served.model.names[0],
                    self.job.cache_namespace,
                    failure or self.choices.finish_reasons[index],
                    self._text(index),
                )
            )

    def _text(self, index: int) -> Callable[[], str] | None:
        """Prompt and output of a choice with all special tokens, as the model sees them."""
        if self.choices.outputs is None:
            return None
        prompt, output = self.job.prompts[index // self.job.params.n].ids, self.choices.outputs.get(index, [])
        tokenizer = self.job.client.tokenizer
        return lambda: tokenizer.decode([*prompt, *output], skip_special=False)

    def _log_entry(self) -> LoggedRequest:
        context, trace = self.context, self.context.trace
        return LoggedRequest(
            context.request_id,
            self.job.served.model.names[0],
            context.path,
            context.arrival,
            tuple(len(prompt.ids) for prompt in self.job.prompts),
            self.choices,
            trace.trace_id if trace is not None and trace.sampled else "",
        )

    def _unbegun(self, index: int) -> TimingRecord:
        prompt = self.job.prompts[index // self.job.params.n]
        return TimingRecord(self.context.arrival, prompt_tokens=len(prompt.ids))


def outcome(error: BaseException | None) -> tuple[int, str]:
    """Status and reason for the log; 499 is the usual code for a client that disconnected."""
    if error is None:
        return 200, ""
    if isinstance(error, ClientGone | asyncio.CancelledError):
        return 499, "abort"
    if isinstance(error, SlowReader):
        return 499, "slow_reader"
    if isinstance(error, DeadlineExceeded):
        return 504, "timeout"
    reply = reply_to(error)
    return (reply.status if reply else 500), "error"
