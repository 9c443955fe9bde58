"""FrontTimes: client-side time beyond the engine: from the request to the engine, and from tokens back.

Fitted to measurements (`fit_front`): a bench's timestamps against the server's timings of the same requests.
`simulate` adds them around the engine's timestamps.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ridgeline.lab.bench.figures.record import RequestRecord

FEWEST = 5  # requests with the server's own timings


class FrontTimes(msgspec.Struct, frozen=True):
    """dispatch_s:  from the moment a request is due to its first byte sent
    request_s:   from the first byte sent to the request in the engine's queue; more by prompt token
    first_s:     from the first token in the engine to its chunk at the client
    chunk_s:     likewise of every later one
    end_s:       from the last chunk to the end of the answer
    """

    dispatch_s: float = 0.0
    request_s: float = 0.0
    request_token_s: float = 0.0
    first_s: float = 0.0
    chunk_s: float = 0.0
    end_s: float = 0.0

    def to_engine(self, input_tokens: int) -> float:
        return self.request_s + self.request_token_s * input_tokens


def fit_front(records: Sequence[RequestRecord], idle: Sequence[RequestRecord] = ()) -> FrontTimes:
    """records: of ordinary traffic; idle: of requests sent one at a time, without queueing.

    The return time is the client's TTFT beyond the server's; the inbound time is the server's queue time of
    an empty queue. Unknown times are 0.
    """
    timed = [r for r in records if _is_timed(r)]
    alone = [r for r in idle if _is_timed(r)]
    if len(timed) < FEWEST:
        return FrontTimes()
    back = float(np.median([_beyond_s(r) for r in timed]))
    if len(alone) >= FEWEST:
        tokens = np.array([r.n_in or r.planned_in for r in alone], float)
        request_s, token_s = _line(tokens, np.array([_queue_s(r) for r in alone]))
    else:  # requests with the shortest queue time hardly waited for others
        request_s, token_s = float(np.quantile([_queue_s(r) for r in timed], 0.1)), 0.0
    ends = [r.t_end - r.t_last for r in timed if r.t_end is not None and r.t_last is not None]
    # The server's clock starts after it has read a request's head; before that, half of the remainder.
    return FrontTimes(
        dispatch_s=float(np.median([(r.t_send or r.t_sched) - r.t_sched for r in timed])),
        request_s=request_s + back / 2,
        request_token_s=token_s,
        first_s=back / 2,
        chunk_s=back / 2,
        end_s=float(np.median(ends)),
    )


def _is_timed(record: RequestRecord) -> bool:
    return record.status == "ok" and record.server is not None and record.server.ttft_ms is not None


def _beyond_s(record: RequestRecord) -> float:
    assert record.server is not None
    assert record.server.ttft_ms is not None
    assert record.t_first is not None
    assert record.t_send is not None
    return max(0.0, record.t_first - record.t_send - record.server.ttft_ms / 1000)


def _queue_s(record: RequestRecord) -> float:
    assert record.server is not None
    return (record.server.queue_ms or 0.0) / 1000


def _line(tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Through the median of the shorter and the median of the longer prompts; never falling."""
    order = np.argsort(tokens)
    short, long = np.array_split(order, 2)
    rise = float(np.median(seconds[long]) - np.median(seconds[short]))
    run = float(np.median(tokens[long]) - np.median(tokens[short]))
    slope = max(0.0, rise / run) if run > 0 else 0.0
    return max(0.0, float(np.median(seconds[short])) - slope * float(np.median(tokens[short]))), slope
