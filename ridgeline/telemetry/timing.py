"""TimingRecord: the only record of the timestamps of a request.

All are `time.monotonic()` seconds, comparable between processes of one machine. The engine stamps the
inference side, the server adds the end-to-end side; logs, metrics and benchmarks only read.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TimingRecord:
    arrival: float = 0.0  # the server received the request
    admitted: float | None = None  # left the queue for the first time
    first_prefill: float | None = None  # the first step that computes it was launched
    # One timestamp per step that computed a part of the prompt, or computed it again after a preemption.
    chunk_times: list[float] = field(default_factory=list)
    # One timestamp per output token, the first included.
    token_times: list[float] = field(default_factory=list)
    end: float | None = None  # the engine finished or ended it
    sent: float | None = None  # the last byte was handed to the client's socket
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    preemptions: int = 0
    recomputed_tokens: int = 0  # tokens computed again because of preemption
    drafted_tokens: int = 0  # guesses that steps verified
    accepted_tokens: int = 0  # those that were right: output tokens without a separate step
    end_reason: str = ""

    @property
    def output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def first_token(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def queue_s(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def prefill_s(self) -> float | None:
        if self.first_token is None or self.admitted is None:
            return None
        return self.first_token - self.admitted

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def decode_s(self) -> float | None:
        return self.token_times[-1] - self.token_times[0] if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def inter_token_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def inference_s(self) -> float | None:
        """Time in the engine after the queue, which the hardware determines."""
        if self.end is None or self.admitted is None:
            return None
        return self.end - self.admitted

    @property
    def e2e_s(self) -> float | None:
        """Arrival to the last byte sent (without a server, to the engine's end)."""
        last = self.sent if self.sent is not None else self.end
        return None if last is None else last - self.arrival
