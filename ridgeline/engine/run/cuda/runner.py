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
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice

import torch
from torch import Tensor

from ridgeline.engine.errors import DeviceLost, DeviceOutOfMemory
from ridgeline.engine.run.cuda.graph_recording import GraphRecorder
from ridgeline.engine.run.cuda.graphs import GraphKey, StepGraphs, drained, ladder
from ridgeline.engine.run.cuda.inputs import CudaInputs
from ridgeline.engine.run.cuda.launched_step import (
    LaunchedStep,
    awaits_its_token,
    in_plan_order,
    is_decode,
    kept_states,
    launch_order,
    num_picks,
    wanted_tokens,
)
from ridgeline.engine.run.cuda.padded_steps import PaddedSteps
from ridgeline.engine.run.cuda.rows import DeviceRow, DeviceRows
from ridgeline.engine.run.cuda.sampler import DeviceSampler, Pick
from ridgeline.engine.run.cuda.shared_rows import SharedRows
from ridgeline.engine.run.cuda.verified_rows import SPARE_ROWS, VerifiedRows, until_wrong
from ridgeline.engine.run.prompt_scores import PromptScores
from ridgeline.engine.schedule.request import SamplingParams, Sequence
from ridgeline.engine.schedule.step import RowResult, StepPlan, StepResult, StepRow
from ridgeline.models.decoders.cuda import CudaDecoder
from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.low_bits.plan import NOTHING_LOW, LowBitPlan
from ridgeline.models.weights.torch_weights import Weights
from ridgeline.ops.cuda.attention.eight_bit_kv import allocate_kv
from ridgeline.ops.cuda.attention.prefill_attention import tile_tokens_of
from ridgeline.ops.cuda.attention.shared_prefix import rows_per_tile
from ridgeline.ops.cuda.blocks import copy_blocks


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
        low: LowBitPlan = NOTHING_LOW,
        kv_format: str = "",
    ) -> None:
        """low: of the weights. kv_format: fp8 or int8, of a KV cache in 8 bits."""
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
        self.kv_steps: Tensor | None = None
        if kv_format:
            self.kv, self.kv_steps = allocate_kv(kv_shape, kv_format, device)
        else:
            self.kv = torch.empty(kv_shape, dtype=kv_dtype or dtype, device=device)
        buffers = Buffers.allocate(spec, dtype, device, tokens, sizes[-1], max_context, low)
        self.decoder = CudaDecoder(
            spec, weights, self.kv, buffers, max_context, deterministic, kv_steps=self.kv_steps
        )
        # Twice max_running rows: finished sequences keep theirs until the step in flight has landed.
        num_rows = 2 * sizes[-1] + 8
        self._rows = DeviceRows(num_rows, -(-max_context // block_size))
        tile_tokens = tile_tokens_of(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
        self._inputs = CudaInputs(
            device,
            self._rows,
            num_rows,
            tokens,
            block_size,
            tile_tokens,
            spec.num_heads,
            spec.num_kv_heads,
            SPARE_ROWS,
        )
        self.most_samples = sizes[-1]
        self._shared = SharedRows(rows_per_tile(spec.num_heads, spec.num_kv_heads), block_size)
        self._sampler = DeviceSampler(spec.eos_ids, spec.vocab_size, num_rows + SPARE_ROWS, sizes[-1], device)
        self._verified = VerifiedRows(self._rows, self._sampler, num_rows)
        self._tapped: list[Tensor] = []
        self._padded = PaddedSteps(self._inputs, self._rows, tile_tokens, sizes[-1])
        # In deterministic mode every row is computed alike, in steps of any number of tokens: without graphs.
        self.graphs = StepGraphs(
            self._pieces,
            self._rehearse,
            GraphRecorder(device, dtype),
            sizes,
            0 if deterministic else tokens,
            cuda_graphs and on_gpu and not deterministic,
        )
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()

    @property
    def kv_bytes(self) -> int:
        return self.kv.nbytes + (0 if self.kv_steps is None else self.kv_steps.nbytes)

    # ── the runner's contract ────────────────────────────────────────────────────────────────────────────

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start the plan on the device and return at once. KV writes are idempotent."""
        with self._launching(plan):
            launched = self._launch(plan)
            if self.decoder.tapped is not None:
                launched.tapped = kept_states(self.decoder.tapped, plan.num_tokens, launched.prompts_at)
            if not any(map(awaits_its_token, launched.rows)):
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
            samples = launched.samples.collect() if launched.samples is not None else []
        except Exception as error:
            self._raise_if_lost(error)
            raise
        results = [RowResult()] * len(launched.rows)
        end = 0
        for place, row, scores in zip(launched.order, launched.rows, launched.scores, strict=True):
            begin, end = end, end + num_picks(row)
            own = samples[begin:end]
            if row.drafts:
                own = until_wrong(row, launched.picks[begin:end], own)
            if own or scores is not None:
                results[place] = RowResult(own, scores.collect() if scores is not None else [])
        self._tapped = in_plan_order(launched)
        return StepResult(results)

    def tap(self, layers: tuple[int, ...]) -> None:
        with self._on_stream():
            self.decoder.tap(layers)

    def tapped(self) -> list[Tensor]:
        return self._tapped

    def on_stream(self) -> AbstractContextManager[None]:
        return self._on_stream()

    def execute(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))

    def refusal(self, params: SamplingParams) -> tuple[str, str] | None:
        return self._sampler.refusal(params)

    def idle(self) -> bool:
        """Nothing to compute: one small piece of capturing the next graph. Returns True while there is
        more."""
        try:
            with self._on_stream():
                return self.graphs.advance()
        except Exception as error:
            self._raise_if_lost(error)
            return True

    def capture_first(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Capture the graphs that a few users need, before the engine is ready; no longer than `seconds`."""
        until = clock() + seconds
        while clock() < until and self.graphs.misses_first and self.idle():
            pass
        if self._stream is not None:
            self._stream.synchronize()

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
        self._verified.begin()
        order = sorted(range(len(plan.rows)), key=lambda place: launch_order(plan.rows[place]))
        rows = [plan.rows[place] for place in order]
        for row in rows:
            self._note(row)
        # In deterministic mode decodes are computed like other rows, so that all use the same arithmetic.
        num_decodes = 0 if self.decoder.deterministic else sum(map(is_decode, rows))
        if num_decodes == len(rows):
            return self._launch_decodes(plan, order, rows)
        picks = self._picks(rows)
        if self._are_only_decoded(rows):
            return self._launch_verified(plan, order, rows, picks)
        return self._launch_mixed(plan, order, rows, num_decodes, picks)

    def _are_only_decoded(self, rows: list[StepRow]) -> bool:
        """Decodes, some with drafts, of no more tokens than a graph can have."""
        if self.decoder.deterministic or sum(row.count for row in rows) > self.most_samples:
            return False
        return all(row.drafts or is_decode(row) for row in rows)

    def _launch_decodes(self, plan: StepPlan, order: list[int], rows: list[StepRow]) -> LaunchedStep:
        size = self.graphs.padded(len(rows))
        arrangement = self._shared.arrange(rows, size)
        tiles = arrangement.tiles if self.kv_steps is None else None
        if tiles is not None:
            order = [order[place] for place in arrangement.order]
            rows = [rows[place] for place in arrangement.order]
        self._inputs.stage_decodes(rows, size, tiles)
        picks = self._picks(rows)
        staged = self._stage_picks(picks)
        self._send(plan)
        logits = self.graphs.step(GraphKey(size, tiles is not None))
        return LaunchedStep(plan, order, rows, logits, picks, staged, [None] * len(rows))

    def _launch_verified(
        self, plan: StepPlan, order: list[int], rows: list[StepRow], picks: list[Pick]
    ) -> LaunchedStep:
        """Tokens and their drafts as a decode batch: its graph depends on their number alone."""
        size = self.graphs.padded(len(picks))
        self._inputs.stage_verified(rows, size)
        staged = self._stage_picks(picks)
        self._send(plan)
        logits = self.graphs.step(GraphKey(size, verifies=True))
        return LaunchedStep(plan, order, rows, logits, picks, staged, [None] * len(rows))

    def _device_step(self, key: GraphKey) -> DeviceStep:
        """A padded step's inputs, in the permanent buffers."""
        if key.prompt_tokens:
            return self._padded.step(key)
        tiles = self._shared.num_tiles(key.size)
        prefix = self._inputs.prefix(key.size, tiles) if key.shares_prefix else None
        return self._inputs.step(key.size, key.size, key.size, prefix=prefix, verifies=key.verifies)

    def _pieces(self, key: GraphKey, only: list[int] | None = None) -> Generator[None, None, Tensor]:
        """Compute a padded step from what was sent. This is what graphs capture."""
        self._inputs.prepare(key.size + key.prompt_tokens)
        return (yield from self.decoder.pieces(self._device_step(key), only))

    def _rehearse(self, key: GraphKey) -> Iterator[None]:
        """Launch each kernel of a padded step once, on padding. The buffers may hold the inputs of another
        step when this continues, so every piece brings its own."""
        for number in self.decoder.kinds_of_layers:
            if key.prompt_tokens:
                self._padded.stage_padding(key)
            else:
                self._inputs.stage_decodes([], key.size)
            self._inputs.send()
            drained(self._pieces(key, only=[number]))
            yield

    def _launch_mixed(
        self,
        plan: StepPlan,
        order: list[int],
        rows: list[StepRow],
        num_decodes: int,
        picks: list[Pick],
    ) -> LaunchedStep:
        logit_tokens, scored = wanted_tokens(rows)
        key, decodes = self._padded.shape(self.graphs, rows, num_decodes, len(logit_tokens))
        if key is not None:
            self._padded.stage(key, rows, decodes, logit_tokens)
            staged = self._stage_picks(picks)
            self._send(plan)
            logits, at = self.graphs.step(key), (decodes, key.size)
            return LaunchedStep(plan, order, rows, logits, picks, staged, scored, prompts_at=at)
        prefill, logit_rows = self._inputs.stage_mixed(rows, num_decodes, logit_tokens)
        staged = self._stage_picks(picks)
        tokens = sum(row.count for row in rows)
        self._send(plan)
        self._inputs.prepare(tokens)
        step = self._inputs.step(tokens, num_decodes, len(picks), prefill, logit_rows)
        return LaunchedStep(plan, order, rows, self.decoder.forward(step), picks, staged, scored)

    def _send(self, plan: StepPlan) -> None:
        """Upload the step's integers, and copy blocks before they are written."""
        sources = self._inputs.stage([copy.source for copy in plan.copies])
        targets = self._inputs.stage([copy.target for copy in plan.copies])
        self._inputs.send()
        copy_blocks(self.kv, sources, targets)
        if self.kv_steps is not None:
            copy_blocks(self.kv_steps, sources, targets)

    def _picks(self, rows: list[StepRow]) -> list[Pick]:
        picks: list[Pick] = []
        for row in rows:
            if row.drafts:
                picks += self._verified.picks(row)
            else:
                position = row.start + row.count - row.seq.prompt_len
                picks += [Pick(self._rows.index_of(seq), seq, position) for seq in row.samplers]
        return picks

    def _stage_picks(self, picks: list[Pick]) -> tuple[Tensor, Tensor]:
        device_rows = self._inputs.stage([pick.row for pick in picks])
        return device_rows, self._inputs.stage([pick.position for pick in picks])

    def _choose(self, launched: LaunchedStep) -> None:
        """Sample the step's tokens from its logits, then score the prompts, which overwrites the logits."""
        picks, logits = launched.picks, launched.logits
        self._sampler.flush()  # here, while the forward pass runs
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
        self._verified.note(row.seq)
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
            self._verified.forget(seq)

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
