"""CudaRunner: executes a StepPlan as one forward pass on a CUDA device, launched without waiting for it.

Sequences have permanent rows on the device. For each step the host sends one block of integers (block table
updates, positions, known tokens) and gets token ids back. A decode whose input token is still being sampled
by the previous step reads it on the device, so `launch` may be called again before `collect`. If a grammar or
a thinking budget must see that token first, `launch` starts the forward pass and `complete` launches the
rest. All work is on one stream: a step sees everything that earlier steps wrote. The runner never decides
what runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from ridgeline.engine.errors import DeviceLost, DeviceOutOfMemory
from ridgeline.engine.run.cuda.graphs import DecodeGraphs, GraphKey, ladder
from ridgeline.engine.run.cuda.inputs import CudaInputs
from ridgeline.engine.run.cuda.rows import DeviceRow, DeviceRows
from ridgeline.engine.run.cuda.sampler import DeviceSampler, Pick, SampleTicket
from ridgeline.engine.run.cuda.shared_rows import SharedRows
from ridgeline.engine.run.prompt_scores import PromptScores
from ridgeline.engine.schedule.request import SamplingParams, Sequence
from ridgeline.engine.schedule.step import RowResult, StepPlan, StepResult, StepRow
from ridgeline.models.decoders.cuda import CudaDecoder
from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import Weights
from ridgeline.ops.cuda.attention.prefill_attention import tile_tokens_of
from ridgeline.ops.cuda.attention.shared_prefix import rows_per_tile
from ridgeline.ops.cuda.blocks import copy_blocks


@dataclass(slots=True)
class LaunchedStep:
    """A launched step: the plan's rows in the order they were computed, and their results.

    samples, scores: set when the step has been completed; scores has one entry per row
    """

    plan: StepPlan
    order: list[int]  # positions in the plan
    rows: list[StepRow]
    logits: Tensor | None  # until they have been sampled
    picks: list[Pick]
    staged: tuple[Tensor, Tensor]  # device rows and positions of the picks, on the device
    scored: list[range | None]  # for each row, the tokens to score
    samples: SampleTicket | None = None
    scores: list[PromptScores | None] = field(default_factory=list)


class CudaRunner:
    name = "cuda"
    lookahead = 1

    def __init__(
        self,
        *,
        spec: ModelSpec,
        weights: Weights,
        max_context: int,
        num_blocks: int,
        block_size: int,
        max_running: int,
        step_tokens: int,
        deterministic: bool = False,
        cuda_graphs: bool = True,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        device, dtype = weights.embed.device, weights.embed.tensor.dtype
        on_gpu = device.type == "cuda"
        sizes = ladder(max_running)
        tokens = max(step_tokens, sizes[-1])
        kv_shape = (spec.num_layers, num_blocks, spec.num_kv_heads, 2, block_size, spec.head_dim)
        # cuBLAS reduces split sums in full precision, so that the batch size changes results as little as
        # possible.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._counting = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.kv = torch.empty(kv_shape, dtype=kv_dtype or dtype, device=device)
        buffers = Buffers.allocate(spec, dtype, device, tokens, sizes[-1], max_context)
        self.decoder = CudaDecoder(spec, weights, self.kv, buffers, max_context, deterministic)
        # Twice max_running rows: finished sequences keep theirs until the step in flight has landed.
        num_rows = 2 * sizes[-1] + 8
        self._rows = DeviceRows(num_rows, -(-max_context // block_size))
        tile_tokens = tile_tokens_of(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
        self._inputs = CudaInputs(
            device, self._rows, num_rows, tokens, block_size, tile_tokens, spec.num_heads, spec.num_kv_heads
        )
        self._shared = SharedRows(rows_per_tile(spec.num_heads, spec.num_kv_heads), block_size)
        self._sampler = DeviceSampler(spec.eos_ids, spec.vocab_size, num_rows, sizes[-1], device)
        # Set by the build, which compiles kernels ahead.
        self.kernels_are_ready: Callable[[], bool] = lambda: True
        # In deterministic mode decodes are computed like other rows, so no batch size needs a graph.
        self.graphs = DecodeGraphs(self._run_decodes, sizes, cuda_graphs and on_gpu and not deterministic)
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()

    # ── the runner's contract ────────────────────────────────────────────────────────────────────────────

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start the plan on the device and return at once. KV writes are idempotent."""
        with self._launching(plan):
            launched = self._launch(plan)
            if not any(map(_awaits_its_token, launched.rows)):
                self._choose(launched)
            return launched

    def complete(self, launched: LaunchedStep) -> None:
        """Sample the tokens of a step in which a grammar or a budget had to see the previous token."""
        if launched.logits is not None:
            with self._launching(launched.plan):
                self._choose(launched)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for the step and return its tokens, in the order of the plan's rows."""
        try:
            samples = iter(launched.samples.collect() if launched.samples is not None else [])
        except Exception as error:
            self._raise_if_lost(error)
            raise
        results = [RowResult()] * len(launched.rows)
        for place, row, scores in zip(launched.order, launched.rows, launched.scores, strict=True):
            own = [next(samples) for _ in row.samplers]
            if own or scores is not None:
                results[place] = RowResult(own, scores.collect() if scores is not None else [])
        return StepResult(results)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))

    def refusal(self, params: SamplingParams) -> tuple[str, str] | None:
        return self._sampler.refusal(params)

    def idle(self) -> bool:
        """Nothing to compute: capture one more graph. Returns True while there is more to capture.

        Not before the kernels are compiled: a request arriving now would wait for the compiler.
        """
        key = self.graphs.next_missing()
        if key is None or not self.kernels_are_ready():
            return False
        try:
            with self._on_stream():
                self._inputs.stage_decodes([], key.size)
                self._inputs.send(key.size)
                self.graphs.prepare(key)
        except Exception as error:
            self._raise_if_lost(error)
            self.graphs.disable(key, error)
        return True

    def expert_counts(self) -> dict[int, list[int]]:
        """Read on a separate stream: a step in flight is not waited for, and may be counted in part."""
        counters = self.decoder.expert_counts()
        if not counters:
            return {}
        with torch.cuda.stream(self._counting):
            read = iter(torch.cat(list(counters.values())).tolist())
        return {layer: list(islice(read, len(counter))) for layer, counter in counters.items()}

    def drop_sequences(self) -> None:
        """Drop the state of every sequence that ran here, after the warm-up."""
        for seq in self._rows.sequences():
            self._release(seq)

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _launching(self, plan: StepPlan) -> Iterator[None]:
        """Run a launch on the stream. If it fails, drop the device rows of all its sequences."""
        try:
            with self._on_stream():
                yield
        except BaseException as error:
            self._drop_rows(plan)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
                raise DeviceOutOfMemory(str(error)) from error
            if isinstance(error, Exception):
                self._raise_if_lost(error)
            raise

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.inference_mode():
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        for seq in plan.retired:
            self._release(seq)
        order = sorted(range(len(plan.rows)), key=lambda place: _launch_order(plan.rows[place]))
        rows = [plan.rows[place] for place in order]
        for row in rows:
            self._note(row)
        self._sampler.flush()
        # In deterministic mode decodes are computed like other rows, so that all use the same arithmetic.
        num_decodes = 0 if self.decoder.deterministic else sum(map(_is_decode, rows))
        if num_decodes == len(rows):
            return self._launch_decodes(plan, order, rows)
        return self._launch_mixed(plan, order, rows, num_decodes)

    def _launch_decodes(self, plan: StepPlan, order: list[int], rows: list[StepRow]) -> LaunchedStep:
        size = self.graphs.padded(len(rows))
        arrangement = self._shared.arrange(rows, size)
        tiles = arrangement.tiles
        if tiles is not None:
            order = [order[place] for place in arrangement.order]
            rows = [rows[place] for place in arrangement.order]
        self._inputs.stage_decodes(rows, size, tiles)
        picks, staged = self._stage_picks(rows)
        self._send(plan, size)
        logits = self.graphs.step(GraphKey(size, tiles is not None))
        return LaunchedStep(plan, order, rows, logits, picks, staged, [None] * len(rows))

    def _run_decodes(self, key: GraphKey) -> Tensor:
        """Compute a padded decode batch from the permanent buffers. This is what graphs capture."""
        prefix = (
            self._inputs.prefix(key.size, self._shared.num_tiles(key.size)) if key.shares_prefix else None
        )
        return self.decoder.forward(self._inputs.step(key.size, key.size, key.size, prefix=prefix))

    def _launch_mixed(
        self, plan: StepPlan, order: list[int], rows: list[StepRow], num_decodes: int
    ) -> LaunchedStep:
        logit_tokens, scored = _wanted_tokens(rows)
        prefill, logit_rows = self._inputs.stage_mixed(rows, num_decodes, logit_tokens)
        picks, staged = self._stage_picks(rows)
        tokens = sum(row.count for row in rows)
        self._send(plan, tokens)
        step = self._inputs.step(tokens, num_decodes, len(picks), prefill, logit_rows)
        return LaunchedStep(plan, order, rows, self.decoder.forward(step), picks, staged, scored)

    def _send(self, plan: StepPlan, tokens: int) -> None:
        """Upload the step's integers, build its inputs from them, and copy blocks before they are written."""
        sources = self._inputs.stage([copy.source for copy in plan.copies])
        targets = self._inputs.stage([copy.target for copy in plan.copies])
        self._inputs.send(tokens)
        copy_blocks(self.kv, sources, targets)

    def _stage_picks(self, rows: list[StepRow]) -> tuple[list[Pick], tuple[Tensor, Tensor]]:
        picks = [
            Pick(self._rows.index_of(seq), seq, row.start + row.count - seq.prompt_len)
            for row in rows
            for seq in row.samplers
        ]
        device_rows = self._inputs.stage([pick.row for pick in picks])
        return picks, (device_rows, self._inputs.stage([pick.position for pick in picks]))

    def _choose(self, launched: LaunchedStep) -> None:
        """Sample the step's tokens from its logits, then score the prompts, which overwrites the logits."""
        picks, logits = launched.picks, launched.logits
        if picks and logits is not None:
            last_tokens = self._inputs.last_tokens
            launched.samples = self._sampler.sample(
                logits[: len(picks)], picks, *launched.staged, last_tokens
            )
        launched.scores = [
            None if where is None else self._score(row, where)
            for row, where in zip(launched.rows, launched.scored, strict=True)
        ]
        launched.logits = None

    def _score(self, row: StepRow, where: range) -> PromptScores:
        """Log-probabilities of the row's prompt tokens. Synchronous: its sequence is never planned ahead."""
        targets = row.seq.tokens[row.start + 1 : min(row.start + row.count + 1, row.seq.prompt_len)]
        hidden = self.decoder.buffers.normed[where.start : where.start + len(targets)]
        return PromptScores.of(hidden, targets, row.seq.params.prompt_logprobs or 0, self.decoder)

    # ── device rows ──────────────────────────────────────────────────────────────────────────────────────

    def _note(self, row: StepRow) -> None:
        known = self._rows.of(row.seq) or self._take(row.seq)
        self._rows.note_blocks(known, row.seq.block_table)
        for seq in row.samplers:
            if (
                seq is not row.seq and self._rows.of(seq) is None
            ):  # siblings: their first token is sampled now
                self._take(seq)

    def _take(self, seq: Sequence) -> DeviceRow:
        row = self._rows.take(seq)
        self._sampler.set_row(row.index, seq)
        return row

    def _release(self, seq: Sequence) -> None:
        row = self._rows.of(seq)
        if row is not None:
            self._sampler.clear_row(row.index)
            self._rows.release(seq)

    def _drop_rows(self, plan: StepPlan) -> None:
        """A launch failed part-way, so the device state of these sequences is undefined. If they run again,
        they get new rows; all their tokens are known by then."""
        self._rows.take_differences()
        for row in plan.rows:
            for seq in (row.seq, *row.samplers):
                self._release(seq)
        with contextlib.suppress(Exception), self._on_stream():
            self._sampler.clear_scratch()

    def _raise_if_lost(self, error: Exception) -> None:
        """After a fault in a kernel every later call fails: only a new process helps."""
        if self._stream is None:
            return
        try:
            self._stream.synchronize()
        except Exception as fault:
            raise DeviceLost(f"the GPU no longer responds: {fault}") from error


def _is_decode(row: StepRow) -> bool:
    """One token in, one sample out. (A prompt may end in a row of one token that siblings sample from.)"""
    return row.count == 1 and len(row.samplers) == 1 and not row.prompt_logprobs


def _awaits_its_token(row: StepRow) -> bool:
    """Its last token is still being sampled and decides which tokens are allowed next."""
    return row.seq.needs_last_token(row.start + row.count - len(row.seq.tokens))


def _launch_order(row: StepRow) -> int:
    """Decodes first, long contexts before short ones, so that the device's work ends evenly."""
    return -row.start if _is_decode(row) else 1


def _wanted_tokens(rows: list[StepRow]) -> tuple[list[int], list[range | None]]:
    """Tokens of the step whose hidden states are needed: one per sample, then those of scored prompts.

    Also the position of each row's scored tokens among them.
    """
    wanted: list[int] = []
    end = 0
    for row in rows:
        end += row.count
        wanted += [end - 1] * len(row.samplers)
    scored: list[range | None] = []
    end = 0
    for row in rows:
        end += row.count
        if row.prompt_logprobs:
            scored.append(range(len(wanted), len(wanted) + row.count))
            wanted += range(end - row.count, end)
        else:
            scored.append(None)
    return wanted, scored
