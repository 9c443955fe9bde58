"""DeviceSampler: samples a step's tokens on the device; they are fetched when the step is collected.

Used by the CUDA runner. Only token ids, and log-probabilities where requested, are copied to the host.
Parameters are kept in the sequence's device row; `ops.cuda.sampling.sampling` has the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeline.engine.run.cuda.masks import DeviceMasks, SentMasks
from ridgeline.engine.run.sequence_mask import needs_mask
from ridgeline.engine.schedule.request import SamplingParams, SeqState, Sequence
from ridgeline.engine.schedule.step import Sampled, TokenLogprob
from ridgeline.ops.cuda.sampling.logprobs import LogprobBuffers
from ridgeline.ops.cuda.sampling.sampling import SampleScratch, sample
from ridgeline.ops.cuda.sampling.state import MAX_BIASED, MAX_SUPPRESSED, RowParams, SamplerState

_RING_SIZE = 4  # result buffers, used in rotation: more than steps that can be in flight
MAX_STOP_IDS = MAX_SUPPRESSED - 128  # the rest is reserved for the model's own end tokens
NOT_FINITE = "sampling failed: the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class Pick:
    """A sample to take: its sequence's device row, and the sequence's length before it."""

    row: int
    seq: Sequence
    position: int


class DeviceSampler:
    def __init__(
        self, eos_ids: tuple[int, ...], vocab: int, num_rows: int, most_picks: int, device: torch.device
    ) -> None:
        self._eos_ids = eos_ids
        self._state = SamplerState(num_rows, vocab, device)
        self._scratch = SampleScratch(most_picks, vocab, device)
        self._logprobs: LogprobBuffers | None = None  # created on first use
        self._masks: DeviceMasks | None = None  # likewise
        self._constrained: set[int] = set()  # rows
        self._sizes = most_picks, vocab, device
        on_gpu = device.type == "cuda"
        self._tokens = torch.zeros(_RING_SIZE, most_picks, dtype=torch.int32, device=device)
        self._fetched = torch.zeros(_RING_SIZE, most_picks, dtype=torch.int32, pin_memory=on_gpu)
        self._slot = 0

    def set_row(self, row: int, seq: Sequence) -> None:
        """Assign a row to a sequence. It may already have output from before a preemption."""
        self._state.set_row(
            row, self._row_params(seq), seq.tokens[: seq.prompt_len], seq.tokens[seq.prompt_len :]
        )
        if seq.is_constrained:
            self._constrained.add(row)

    def clear_row(self, row: int) -> None:
        self._state.clear_row(row)
        self._constrained.discard(row)

    def clear_scratch(self) -> None:
        """A step failed part-way: reset the counters its kernels share."""
        self._scratch.filters.gathered.zero_()
        self._scratch.filters.arrived.zero_()

    @staticmethod
    def refusal(params: SamplingParams) -> tuple[str, str] | None:
        """(field, reason) if a request asks for more than the device's tables hold."""
        if len(params.logit_bias) > MAX_BIASED:
            return "logit_bias", f"has {len(params.logit_bias)} entries; the limit is {MAX_BIASED}"
        if params.min_tokens and len(params.stop_token_ids) > MAX_STOP_IDS:
            most = f"the limit together with min_tokens is {MAX_STOP_IDS}"
            return "stop_token_ids", f"has {len(params.stop_token_ids)} entries; {most}"
        return None

    def flush(self) -> None:
        """Send the rows' changed parameters, before the step's own launches."""
        self._state.flush()

    def sample(
        self, logits: Tensor, picks: list[Pick], rows: Tensor, positions: Tensor, last_tokens: Tensor
    ) -> SampleTicket:
        """Launch sampling, one token per row of logits. `rows`, `positions`: the picks', on the device."""
        slot = self._slot = (self._slot + 1) % _RING_SIZE
        count = len(picks)
        tokens, fetched = self._tokens[slot, :count], self._fetched[slot, :count]
        plan = self._state.plan([pick.row for pick in picks], [pick.position for pick in picks])
        masks = self._send_masks(picks) if self._constrained else None
        if plan.logprobs is not None and self._logprobs is None:
            self._logprobs = LogprobBuffers(*self._sizes)
        sample(
            logits,
            rows,
            positions,
            self._state,
            last_tokens,
            tokens,
            self._scratch,
            plan,
            self._logprobs if plan.logprobs is not None else None,
            None if masks is None else masks.on_device,
        )
        fetched.copy_(tokens, non_blocking=True)
        logprobs = None if plan.logprobs is None else self._fetch_logprobs(count)
        failures = {} if masks is None else masks.failures
        return SampleTicket(picks, fetched, logprobs, _record(logits.device), failures)

    def _send_masks(self, picks: list[Pick]) -> SentMasks | None:
        """Computed while the device runs the forward pass. A sequence that finished since the launch gets no
        mask: its token is discarded."""
        places = [
            place
            for place, pick in enumerate(picks)
            if pick.row in self._constrained
            and pick.seq.state is not SeqState.FINISHED
            and needs_mask(pick.seq)
        ]
        if not places:
            return None
        if self._masks is None:
            self._masks = DeviceMasks(*self._sizes)
        return self._masks.send([pick.seq for pick in picks], places)

    def _fetch_logprobs(self, count: int) -> FetchedLogprobs:
        """Allocated per call: rare, so not kept."""
        found = self._logprobs
        assert found is not None
        columns = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        hosts = []
        for column in columns:
            host = torch.empty_like(column[:count], device="cpu", pin_memory=column.is_cuda)
            hosts.append(host.copy_(column[:count], non_blocking=True))
        return FetchedLogprobs(*hosts)

    def _row_params(self, seq: Sequence) -> RowParams:
        params = seq.params
        ends = params.stop_token_ids + (() if params.ignore_eos else self._eos_ids)
        if params.thinking is not None:  # a closing tag that is forced cannot be barred by min_tokens
            ends = tuple(end for end in ends if end not in params.thinking.tags.closer.ids)
        return RowParams(
            seed=seq.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens if seq.matcher is None else 0,  # its masks enforce min_tokens
            suppressed=ends,
            bias=params.logit_bias,
            logprobs=params.logprobs,
            constrained=seq.is_constrained,
        )


@dataclass(frozen=True, slots=True)
class FetchedLogprobs:
    """For each pick, on the host when its step is done; undefined for picks without logprobs."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def of(self, place: int, token: int, count: int) -> TokenLogprob:
        ids, values = self.top_ids[place, :count].tolist(), self.top_logprobs[place, :count].tolist()
        top = list(zip(ids, values, strict=True))
        return TokenLogprob(token, float(self.logprobs[place]), int(self.ranks[place]), top)


@dataclass(frozen=True, slots=True)
class SampleTicket:
    """Samples being copied from the device."""

    picks: list[Pick]
    tokens: Tensor  # on the host, when `done`
    logprobs: FetchedLogprobs | None
    done: torch.cuda.Event | None
    failures: dict[int, str] = field(default_factory=dict)  # by place: why no token is allowed

    def collect(self) -> list[Sampled]:
        """Wait for the step and return one Sampled per pick."""
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.tokens.tolist()
        if self.logprobs is None and min(tokens) >= 0:  # nearly always
            return [Sampled(token) for token in tokens]
        return [self._sampled(place, token) for place, token in enumerate(tokens)]

    def _sampled(self, place: int, token: int) -> Sampled:
        if token < 0:
            return Sampled(-1, error=self.failures.get(place, NOT_FINITE))
        count = self.picks[place].seq.params.logprobs
        if count is None or self.logprobs is None:
            return Sampled(token)
        return Sampled(token, self.logprobs.of(place, token, count))


def _record(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
