"""An overlapped engine on a fake device, checked after every turn of its loop; for the tests of overlap."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.forecast import OutputLengths
from ridgeline.engine.schedule.request import FinishReason, Request
from ridgeline.engine.schedule.scheduler import Scheduler, SchedulerLimits
from ridgeline.engine.schedule.step import SeqDelta
from tests.engine.fake_device import Failure, FakeDevice
from tests.engine.simulated_engine import answer_alone


class Overlapped:
    """An engine on a fake device that is checked after every turn of its loop."""

    def __init__(
        self,
        figures: SchedulerLimits,
        *requests: Request,
        forecast: OutputLengths | None = None,
        timing: random.Random | None = None,
        lookahead: int | None = None,
        **failures: Failure,
    ) -> None:
        self.device = FakeDevice(figures.block_size, timing=timing, **failures)
        self.scheduler = Scheduler(figures, rng=random.Random(1), output_lengths=forecast)
        ticks = itertools.count()
        self.core = EngineCore(
            self.scheduler, self.device, clock=lambda: float(next(ticks)), lookahead=lookahead
        )
        self.requests: dict[str, Request] = {}
        self.output: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.final: dict[tuple[str, int], SeqDelta] = {}
        for req in requests:
            self.add(req)

    def add(self, req: Request) -> None:
        self.core.add(req)
        self.requests[req.request_id] = req

    def abort(self, name: str) -> None:
        self._record(self.core.abort(name))

    def step(self) -> list[SeqDelta]:
        deltas = self.core.step()
        self._record(deltas)
        return deltas

    def run(self, most_steps: int = 5000) -> Overlapped:
        for _ in range(most_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"not done after {most_steps} steps"
        self.core.check_integrity()
        return self

    def check_answers(self, *errors: str) -> None:
        """Everything accepted ended; what was said is what it would have said alone, or its beginning.

        errors: how those begin that were made to happen
        """
        told = 0
        for req in self.requests.values():
            for index in range(req.params.n):
                key = (req.request_id, index)
                alone, reason = answer_alone(req, index, self.scheduler.limits.context)
                output, final = self.output[key], self.final[key]
                told += len(output)
                assert final.error is None or final.error.startswith(errors), final.error
                if final.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    assert output == alone[: len(output)]
                else:
                    assert (output, final.finish_reason) == (alone, reason)
        assert self.scheduler.counters.output_tokens == told
        assert self.scheduler.pool.num_held == 0
        assert set(self.device.newest) == set(self.scheduler._sequences.retired), "rows are kept for nobody"

    def _record(self, deltas: list[SeqDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.final, f"{key} speaks after its end"
            self.output[key] += delta.tokens
            if delta.finish_reason is not None:
                assert delta.timing is not None
                assert delta.timing.output_tokens == len(self.output[key])
                self.final[key] = delta
        self.scheduler.check_integrity()
        self.device.check()
