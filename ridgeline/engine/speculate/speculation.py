"""Speculation: adds drafts to a planned step, and learns from its result. Driven by EngineCore.

For each decode it asks the drafter for guesses, lets `draft_lengths` decide how many are worth their time,
and gives those to the scheduler. After the step it judges the guesses and the step's time. It decides how
fast tokens come, never which: the samplers accept a guess only if it is the token they draw there anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepPlan, StepResult, StepRow
from ridgeline.engine.speculate.acceptance import Acceptance
from ridgeline.engine.speculate.asking import MOST_READING, Answer, Ask, Asking
from ridgeline.engine.speculate.draft_lengths import MOST_ON_A_DEVICE, WORTH, DraftLengths, most_of_a_row
from ridgeline.engine.speculate.drafter import MOST_DRAFTS, ComputingDrafter, Draft, Drafter
from ridgeline.engine.speculate.loss_guard import LossGuard
from ridgeline.engine.speculate.step_times import DEVICE_SLOPE, StepTimes
from ridgeline.telemetry.stats import SpeculationStats

DISTURBED = 4.0  # times as long as expected: a step of a drafter that computes counts as this much
GAIN_WEIGHT = 0.05  # of one more step in the reported gains
REASONS = ("load", "prefill", "background", "loss", "match", "acceptance", "catch_up", "room", "overlap")


class Offer(NamedTuple):
    """A draft for one row of a step, whether or not the step verifies it."""

    row: StepRow
    draft: Draft
    before: int  # tokens of the sequence before the step


@dataclass(slots=True)
class PlannedDrafts:
    """What `landed` needs to know of a step."""

    rows: int
    context: int  # KV tokens that it reads
    offers: list[Offer]
    num_drafts: int = 0
    gain: float = 1.0
    answer: Answer | None = None  # of a drafter that computes
    reading_s: float = 0.0  # of such a drafter


class Speculation:
    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        fixed_length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """fixed_length: verify this many guesses of each row whatever they cost; for tests and trials"""
        self.drafter = drafter
        self.fixed_length = fixed_length
        self.times = StepTimes()
        self.acceptance = Acceptance()
        self.lengths = DraftLengths(self.times)
        self.guard = LossGuard()  # of a drafter that costs nothing
        self.asking: Asking | None = None  # of one that computes
        if drafter.waits:
            computing = cast(ComputingDrafter, drafter)
            self.asking = Asking(computing, self.acceptance, self.lengths, clock)
        self.vocab_size = vocab_size
        self._clock = clock
        self._planned: dict[int, PlannedDrafts] = {}  # by step, until it lands
        self._off = dict.fromkeys(REASONS, 0)
        self._drafted = [0] * MOST_DRAFTS  # by position in the draft
        self._accepted = [0] * MOST_DRAFTS
        self._steps = 0
        self._rows = 0
        self._draft_s = self._reading_s = self._verify_s = 0.0
        self._predicted = self._measured = 1.0

    def extend(self, plan: StepPlan, scheduler: Scheduler, most_samples: int | None = None) -> None:
        """Add drafts to the rows of the newest plan. most_samples: that a step can take; None: any number"""
        began = self._clock()
        if most_samples is not None:  # a device
            self.lengths.most_of_a_step, self.times.prior_slope = MOST_ON_A_DEVICE, DEVICE_SLOPE
            if self.asking is not None:
                self.asking.times.expect_slope(DEVICE_SLOPE)
        for seq in plan.retired:
            self.drafter.forget(seq)
            self.acceptance.forget(seq)
        for step_id in [each for each in self._planned if each < plan.step_id - 1]:
            del self._planned[step_id]  # it was withdrawn
        planned = PlannedDrafts(len(plan.rows), sum(row.start + 1 for row in plan.rows), [])
        reason = self._reason_to_pass(plan, planned.context)
        if reason is None:
            self._offer(plan, planned, scheduler, most_samples)
        else:
            self._off[reason] += len(plan.rows)
        if reason != "prefill":
            self._planned[plan.step_id] = planned
        self._draft_s += self._clock() - began - planned.reading_s

    def landed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """The step was applied. seconds: from its start, or the end of the one before, to its end."""
        began = self._clock()
        self._observe(plan)
        observed = self._clock()
        planned = self._planned.pop(plan.step_id, None)
        if planned is not None:
            for offer in planned.offers:
                self._judge(offer)
            self._judge_time(planned, result, seconds)
        elif self.asking is not None:  # a step with prompts
            self.asking.budget.pay_in(seconds)
        self._draft_s += self._clock() - (began if self.asking is None else observed)

    def _observe(self, plan: StepPlan) -> None:
        if self.asking is None:
            self.drafter.observe(plan, False)
            return
        reads, began = self.asking.is_in_use, self._clock()
        self.drafter.observe(plan, reads)
        seconds = self._clock() - began
        self._reading_s += seconds
        self.asking.landed(seconds if reads else 0.0)

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            drafter=self.drafter.name,
            steps=self._steps,
            drafts=self._rows,
            drafted_by_position=tuple(self._drafted),
            accepted_by_position=tuple(self._accepted),
            draft_s=self._draft_s,
            reading_s=self._reading_s,
            verify_s=self._verify_s,
            predicted_gain=self._predicted,
            measured_gain=self._measured,
            off=dict(self._off),
        )

    def pays_to_wait(self, plan: StepPlan) -> bool:
        """Whether the step after this one, which is in flight, should wait for its tokens to guess on.

        The text that the host knows ends a token before those guesses: what would be proposed behind it says
        how likely they are.
        """
        if self.fixed_length is not None:
            return True
        rows = [row for row in plan.rows if row.samplers]
        if len(rows) < len(plan.rows) or any(row.seq.background for row in rows):
            return False
        context = sum(row.start + row.count for row in rows)
        if self.guard.is_paused or not self.lengths.may_pay(len(rows), context):
            return False
        if self.asking is not None:
            return self.asking.choose([row.seq for row in rows], len(rows), context) is not None
        began = self._clock()
        drafts = self.drafter.propose([row.seq for row in rows], most_of_a_row(len(rows)))
        survivals = [
            self.acceptance.survivals(row.seq, draft)
            for row, draft in zip(rows, drafts, strict=True)
            if draft is not None
        ]
        pays = bool(survivals) and self.lengths.choose(survivals, len(rows), context).gain >= WORTH
        self._draft_s += self._clock() - began
        return pays

    # ── before a step ────────────────────────────────────────────────────────────────────────────────────

    def _reason_to_pass(self, plan: StepPlan, context: int) -> str | None:
        """Why no row of this step has drafts; None: it may."""
        if self.fixed_length is not None:
            return None
        if any(row.count != 1 or not row.start for row in plan.rows):
            return "prefill"
        if self.guard.is_paused:
            return "loss"
        if not self.lengths.may_pay(len(plan.rows), context):
            return "load"
        return None

    def _offer(
        self, plan: StepPlan, planned: PlannedDrafts, scheduler: Scheduler, most_samples: int | None
    ) -> None:
        planned.offers = self._offers(plan, planned, scheduler)
        if not planned.offers:
            return
        if self.fixed_length is None:
            survivals = [self.acceptance.survivals(offer.row.seq, offer.draft) for offer in planned.offers]
            choice = self.lengths.choose(survivals, planned.rows, planned.context)
            lengths, planned.gain = choice.lengths, choice.gain
        else:
            lengths = [self.fixed_length] * len(planned.offers)
        room = scheduler.room_for_drafts(plan)
        if most_samples is not None:
            room = max(0, min(room, most_samples - sum(len(row.samplers) for row in plan.rows)))
        for offer, length in zip(planned.offers, lengths, strict=True):
            taken = 0
            if length:
                taken = scheduler.add_drafts(offer.row, offer.draft.tokens[:length], room)
            if not taken:
                self._off["room" if length else "acceptance"] += 1
            room -= taken
            planned.num_drafts += taken

    def _offers(self, plan: StepPlan, planned: PlannedDrafts, scheduler: Scheduler) -> list[Offer]:
        rows = [row for row in plan.rows if _is_decode(row)]
        self._off["overlap"] += len(plan.rows) - len(rows)
        if any(row.seq.background for row in rows) and not all(row.seq.background for row in plan.rows):
            # Interactive rows would wait for the guesses of the others.
            interactive = [row for row in rows if not row.seq.background]
            self._off["background"] += len(rows) - len(interactive)
            rows = interactive
        seqs = [row.seq for row in rows]
        if self.asking is not None:
            self._read(self.asking, plan, planned, scheduler)
            drafts = self._ask(self.asking, seqs, planned)
        else:
            drafts = self.drafter.propose(seqs, self.fixed_length or most_of_a_row(len(plan.rows)))
            self._off["match"] += drafts.count(None)
        offers: list[Offer] = []
        for row, draft in zip(rows, drafts, strict=True):
            if draft is not None:
                self._drop_unknown(draft)
                if draft.tokens:
                    offers.append(Offer(row, draft, len(row.seq.tokens)))
                else:
                    self._off["match"] += 1
        return offers

    def _read(self, asking: Asking, plan: StepPlan, planned: PlannedDrafts, scheduler: Scheduler) -> None:
        """Let a drafter that computes read tokens that it lacks; also of rows that are launched ahead."""
        seqs = [row.seq for row in plan.rows if row.samplers]
        if not all(seq.background for seq in seqs):  # interactive rows would wait for the others
            seqs = [seq for seq in seqs if not seq.background]
        if self.fixed_length is None:
            lengths = scheduler.output_lengths

            def left(seq: Sequence) -> int:
                return lengths.expected_left(seq.num_output, seq.max_len - len(seq.tokens))

            planned.reading_s = asking.catch_up(seqs, planned.rows, planned.context, left)
        else:
            planned.reading_s = asking.read(seqs, MOST_READING)
        self._reading_s += planned.reading_s

    def _ask(self, asking: Asking, seqs: list[Sequence], planned: PlannedDrafts) -> list[Draft | None]:
        """Ask it for the sequences whose guesses are expected to pay."""
        drafter, rows, context = cast(ComputingDrafter, self.drafter), planned.rows, planned.context
        if self.fixed_length is None:
            ask = asking.choose(seqs, rows, context)
        else:
            ready = [seq for seq in seqs if drafter.behind(seq) == 0]
            ask = Ask(ready, min(self.fixed_length or MOST_DRAFTS, drafter.longest)) if ready else None
        asked: set[Sequence] = set()
        drafts: dict[Sequence, Draft] = {}
        if ask is not None:
            planned.answer = asking.propose(ask, rows, context)
            asked, drafts = set(ask.seqs), planned.answer.drafts
        for seq in seqs:
            if seq not in drafts:
                behind = drafter.behind(seq)
                reason = "catch_up" if behind else asking.reason
                self._off["match" if behind is None or seq in asked else reason] += 1
        return [drafts.get(seq) for seq in seqs]

    def _drop_unknown(self, draft: Draft) -> None:
        """Cut it before the first id that the model does not have."""
        tokens, limit = draft.tokens, self.vocab_size
        del tokens[MOST_DRAFTS:]
        if tokens and (min(tokens) < 0 or max(tokens) >= limit):
            del tokens[next(place for place, token in enumerate(tokens) if not 0 <= token < limit) :]

    # ── after it ─────────────────────────────────────────────────────────────────────────────────────────

    def _judge(self, offer: Offer) -> None:
        """Compare the guesses with the tokens that were drawn, those that were not verified too."""
        row, guesses = offer.row, offer.draft.tokens
        drawn = row.seq.tokens[offer.before :]
        verified = len(row.drafts)
        right, most = 0, min(len(drawn), len(guesses))
        while right < most and drawn[right] == guesses[right]:
            right += 1
        # After a wrong one nothing is known of the others, nor after the last token that was drawn.
        judged = min(right + 1, len(drawn), len(guesses))
        self.acceptance.note(row.seq, offer.draft, right, judged)
        if verified:
            self._rows += 1
            for place in range(verified):
                self._drafted[place] += 1
                self._accepted[place] += place < min(right, len(drawn) - 1)  # the last one is drawn anyway

    def _judge_time(self, planned: PlannedDrafts, result: StepResult, seconds: float) -> None:
        rows, context, is_verified = planned.rows, planned.context, planned.num_drafts > 0
        drafting_s = planned.answer.seconds if planned.answer is not None else 0.0
        step_s = max(seconds - drafting_s - planned.reading_s, 1e-6)
        plain_s = None
        if is_verified or self.asking is not None:
            plain_s = self.lengths.plain_s(rows, context)
        replaced_s = (plain_s or 0.0) * sum(len(row.samples) for row in result.rows) / rows
        if self.asking is not None:
            self._settle(self.asking, planned, replaced_s, step_s, plain_s or step_s)
        elif not is_verified:
            self.guard.pass_step()
        elif plain_s is not None:
            self.guard.note(replaced_s, seconds)
        if not planned.reading_s:  # else part of it may have run beside the step before
            self.times.observe(rows + planned.num_drafts, context, step_s)
        if not is_verified:
            return
        self._steps += 1
        self._verify_s += seconds - planned.reading_s
        if plain_s is not None:
            self._predicted += GAIN_WEIGHT * (planned.gain - self._predicted)
            self._measured += GAIN_WEIGHT * (replaced_s / seconds - self._measured)

    def _settle(
        self, asking: Asking, planned: PlannedDrafts, replaced_s: float, step_s: float, plain_s: float
    ) -> None:
        """Book what the drafter's part in this step saved or lost."""
        answer, reading_s = planned.answer, planned.reading_s
        asking.budget.limit(plain_s)
        if answer is None and not reading_s:
            asking.budget.pay_in(min(step_s, DISTURBED * plain_s))
            return
        saved_s = -reading_s
        if answer is not None:
            expected_s = self.times.seconds(planned.rows + planned.num_drafts, planned.context)
            counted_s = step_s if expected_s is None else min(step_s, DISTURBED * expected_s)
            saved_s += replaced_s - counted_s - answer.counted_s
        asking.budget.settle(saved_s)


def _is_decode(row: StepRow) -> bool:
    """Its tokens are all known, and the row computes the last of them."""
    seq: Sequence = row.seq
    return row.count == 1 and row.start + 1 == len(seq.tokens) and seq.num_output > 0
