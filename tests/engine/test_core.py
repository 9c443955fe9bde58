"""The core's fault isolation: a failed pass is run again row by row, and only what fails alone ends."""

from ridgeline.engine.kv.block_pool import PIECE_BLOCKS
from ridgeline.engine.run.core import QUIET_S, EngineCore
from ridgeline.engine.schedule.request import FinishReason, Request, SamplingParams, Sequence
from ridgeline.engine.schedule.scheduler import Scheduler, SchedulerLimits
from ridgeline.engine.schedule.step import BlockCopy, StepPlan, StepResult, StepRow
from tests.engine.prompts import PROMPTS

PARAMS = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=12, ignore_eos=True)


class FailingRunner:
    """The real runner, but passes of several rows fail once computed, and `poison` always fails."""

    name = "failing"

    def __init__(self, runner, poison: str = "", fail_batches: bool = True) -> None:
        self._runner = runner
        self._poison = poison
        self._fail_batches = fail_batches
        self.failures = 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        poisoned = any(row.seq.request.request_id == self._poison for row in plan.rows)
        if poisoned or (self._fail_batches and len(plan.rows) > 1):
            self.failures += 1
            raise MemoryError("made to fail")
        return result


def run(
    core: EngineCore, work: dict[str, list[int]]
) -> dict[tuple[str, int], tuple[list[int], FinishReason]]:
    for name, prompt_ids in work.items():
        core.add(Request(name, prompt_ids, PARAMS))
    tokens: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], FinishReason] = {}
    while core.has_work:
        for delta in core.step():
            key = (delta.request_id, delta.index)
            tokens.setdefault(key, []).extend(delta.tokens)
            if delta.finish_reason is not None:
                reasons[key] = delta.finish_reason
    core.check_integrity()
    return {key: (tokens[key], reasons[key]) for key in reasons}


def test_a_failed_pass_run_row_by_row_gives_the_same_tokens(llm):
    """Three samples of a prompt that ends inside a block: their copies must be made once, and first."""
    limits = llm.engine.core.scheduler.limits
    work = {f"r{i}": llm.tokenizer.encode(PROMPTS[i] + " and so on") for i in range(3)}
    expected = run(EngineCore(Scheduler(limits), llm.engine.core.runner), work)
    failing = FailingRunner(llm.engine.core.runner)
    assert run(EngineCore(Scheduler(limits), failing), work) == expected
    assert failing.failures > 10


def test_a_request_that_fails_alone_ends_alone(llm):
    limits = llm.engine.core.scheduler.limits
    work = {f"r{i}": llm.tokenizer.encode(PROMPTS[i]) for i in range(3)}
    healthy = run(EngineCore(Scheduler(limits), llm.engine.core.runner), work)
    failing = FailingRunner(llm.engine.core.runner, poison="r1", fail_batches=False)
    outcome = run(EngineCore(Scheduler(limits), failing), work)
    for (name, index), (tokens, reason) in outcome.items():
        if name == "r1":
            assert reason is FinishReason.ERROR
        else:
            assert (tokens, reason) == healthy[name, index]
    assert len(outcome) == 9


class CopylessOnce:
    """The real runner, but the first row that is run alone fails before its blocks are copied."""

    name = "failing"

    def __init__(self, runner) -> None:
        self._runner = runner
        self.victim = ""

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.copies and len(plan.rows) > 1:
            raise MemoryError("made to fail")
        if plan.copies and self.victim in ("", plan.rows[0].seq.name):
            self.victim = plan.rows[0].seq.name
            raise MemoryError("made to fail")
        return self._runner.execute(plan)


def fill_every_block(runner, num_blocks: int) -> None:
    """With the keys and values of tokens that no test uses."""
    tokens = [7] * 17
    seq = Sequence(Request("filler", tokens, PARAMS), 0, tokens, 17, 18, 0, block_table=[0])
    plan = StepPlan(step_id=0, budget=16, rows=[StepRow(seq, 0, 16)])
    runner.execute(plan)
    plan.copies = [BlockCopy(0, block) for block in range(1, num_blocks)]
    runner.execute(plan)


def test_a_row_that_fails_before_the_copies_does_not_leave_others_without_theirs(llm):
    """Three samples share the prompt's last block; whoever lacks its copy reads what lay in the new one."""
    limits = llm.engine.core.scheduler.limits
    work = {"r0": llm.tokenizer.encode(PROMPTS[0] + " and so on")}
    assert len(work["r0"]) % limits.block_size
    healthy = run(EngineCore(Scheduler(limits), llm.engine.core.runner), work)
    failing = CopylessOnce(llm.engine.core.runner)
    fill_every_block(
        llm.engine.core.runner, limits.num_blocks
    )  # what a block holds that nothing was copied into
    outcome = run(EngineCore(Scheduler(limits), failing), work)
    ended = [key for key, (_, reason) in outcome.items() if reason is FinishReason.ERROR]
    assert [f"{name}/{index}" for name, index in ended] == [failing.victim]
    for key in outcome.keys() - set(ended):
        assert outcome[key] == healthy[key]


class IdleRunner:
    """A device that has idle work, and counts its pieces."""

    name, lookahead = "idle", 1

    def __init__(self) -> None:
        self.pieces = 0

    def idle(self) -> bool:
        self.pieces += 1
        return self.pieces < 3

    def launch(self, plan: object) -> None: ...
    def complete(self, launched: object) -> None: ...
    def collect(self, launched: object) -> None: ...
    def execute(self, plan: object) -> None: ...
    def refusal(self, params: object) -> None: ...


def test_idle_work_waits_until_the_engine_has_been_quiet_and_comes_in_pieces():
    """The integrity check of a large pool, then the runner's own work. A request that comes waits for one."""
    now, runner = [100.0], IdleRunner()
    limits = SchedulerLimits(
        step_tokens=64,
        prefill_chunk=64,
        max_running=4,
        max_waiting=8,
        block_size=16,
        num_blocks=100 * PIECE_BLOCKS,
        max_context=128,
    )
    core = EngineCore(Scheduler(limits), runner, clock=lambda: now[0])
    core._device = runner
    pool = core.scheduler.pool
    pool.release([pool.allocate() for _ in range(10 * PIECE_BLOCKS)])
    core._checked, core.last_step_end = False, now[0]
    for _ in range(5):  # just after a step: nothing
        assert core.idle()
    assert (core._check, runner.pieces) == (None, 0)
    now[0] += 2 * QUIET_S
    pieces = 0
    while not core._checked:
        assert core.idle()
        pieces += 1
        if pieces == 3:  # a step comes in between: the check starts again
            pool.release([pool.allocate()])
    assert pieces > 30
    assert runner.pieces == 0
    assert [core.idle() for _ in range(3)] == [True, True, False]
