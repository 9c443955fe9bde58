"""Speculation: adds drafts to a planned step, and learns from its result. Driven by EngineCore.

For each decode it asks the drafter for guesses, lets `draft_lengths` decide how many are worth their time,
and gives those to the scheduler. After the step it judges the guesses and the step's time. It decides how
fast tokens come, never which: the samplers accept a guess only if it is the token they draw there anyway.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepPlan, StepResult, StepRow
from ridgeline.engine.speculate.acceptance import Acceptance
from ridgeline.engine.speculate.draft_lengths import MOST_ON_A_DEVICE, WORTH, DraftLengths, most_of_a_row
from ridgeline.engine.speculate.drafter import MOST_DRAFTS, Draft, Drafter
from ridgeline.engine.speculate.loss_guard import LossGuard
from ridgeline.engine.speculate.step_times import DEVICE_SLOPE, StepTimes
from ridgeline.telemetry.stats import SpeculationStats

TYPICAL_LENGTH = 4  # guesses of a drafter that is asked only if it pays
LOOK_EVERY = 128  # steps after which it is asked even if it seems not to
ASKED = 9  # times of drafting that are kept
FIRST_LOOKS = 8  # times that a drafter is asked, whatever is expected: until then chances are guesses
GAIN_WEIGHT = 0.05  # of one more step in the reported gains
REASONS = ("load", "prefill", "background", "loss", "match", "acceptance", "room", "overlap")


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
    asked_s: float = 0.0  # time of a drafter that computes, before the step


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
        self.guard = LossGuard()
        self._vocab_size = vocab_size
        self._clock = clock
        self._planned: dict[int, PlannedDrafts] = {}  # by step, until it lands
        self._off = dict.fromkeys(REASONS, 0)
        self._drafted = [0] * MOST_DRAFTS  # by position in the draft
        self._accepted = [0] * MOST_DRAFTS
        self._unlooked = 0
        self._looks = False  # the next step asks, whatever is expected
        self._num_asked = 0
        self._asked_s: deque[float] = deque(maxlen=ASKED)
        self._steps = 0
        self._rows = 0
        self._draft_s = self._verify_s = 0.0
        self._predicted = self._measured = 1.0

    def extend(self, plan: StepPlan, scheduler: Scheduler, most_samples: int | None = None) -> None:
        """Add drafts to the rows of the newest plan. most_samples: that a step can take; None: any number"""
        began = self._clock()
        if most_samples is not None:  # a device
            self.lengths.most_of_a_step, self.times.prior_slope = MOST_ON_A_DEVICE, DEVICE_SLOPE
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
        self._draft_s += self._clock() - began

    def landed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """The step was applied. seconds: from its start, or the end of the one before, to its end."""
        began = self._clock()
        self.drafter.observe(plan)
        planned = self._planned.pop(plan.step_id, None)
        if planned is None:
            self._draft_s += self._clock() - began
            return
        for offer in planned.offers:
            self._judge(offer)
        self._judge_time(planned, result, seconds)
        self._draft_s += self._clock() - began

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            drafter=self.drafter.name,
            steps=self._steps,
            drafts=self._rows,
            drafted_by_position=tuple(self._drafted),
            accepted_by_position=tuple(self._accepted),
            draft_s=self._draft_s,
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
        most = most_of_a_row(len(rows))
        if self.drafter.waits:
            return self._is_worth_asking(len(rows), context)
        began = self._clock()
        drafts = self.drafter.propose([row.seq for row in rows], most)
        survivals = [
            self.acceptance.survivals(row.seq, draft)
            for row, draft in zip(rows, drafts, strict=True)
            if draft is not None
        ]
        pays = bool(survivals) and self.lengths.choose(survivals, len(rows), context).gain >= WORTH
        self._draft_s += self._clock() - began
        return pays

    def _is_worth_asking(self, rows: int, context: int) -> bool:
        """Whether guesses of a drafter that computes will pay for its own time too, or a look is due."""
        if self._looks or self._num_asked < FIRST_LOOKS:
            return True
        expected = [self.acceptance.typical(min(most_of_a_row(rows), TYPICAL_LENGTH))] * rows
        plain_s = self.lengths.plain_s(rows, context)
        share = statistics.median(self._asked_s) / plain_s if plain_s and self._asked_s else 0.0
        if self.lengths.choose(expected, rows, context).gain >= WORTH * (1 + share):
            return True
        self._unlooked += 1
        if self._unlooked >= LOOK_EVERY:
            self._unlooked, self._looks = 0, True
        return self._looks

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
        if self.drafter.waits and any(map(_is_decode, plan.rows)):
            return None if self._is_worth_asking(len(plan.rows), context) else "acceptance"
        return None

    def _offer(
        self, plan: StepPlan, planned: PlannedDrafts, scheduler: Scheduler, most_samples: int | None
    ) -> None:
        planned.offers = self._offers(plan, planned)
        if not planned.offers:
            return
        if self.fixed_length is None:
            survivals = [self.acceptance.survivals(offer.row.seq, offer.draft) for offer in planned.offers]
            lengths, planned.gain = self.lengths.choose(survivals, planned.rows, planned.context)
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

    def _offers(self, plan: StepPlan, planned: PlannedDrafts) -> list[Offer]:
        rows = [row for row in plan.rows if _is_decode(row)]
        self._off["overlap"] += len(plan.rows) - len(rows)
        if any(row.seq.background for row in rows) and not all(row.seq.background for row in plan.rows):
            # Interactive rows would wait for the guesses of the others.
            interactive = [row for row in rows if not row.seq.background]
            self._off["background"] += len(rows) - len(interactive)
            rows = interactive
        most = self.fixed_length or most_of_a_row(len(plan.rows))
        began = self._clock()
        drafts = self.drafter.propose([row.seq for row in rows], most)
        if rows and self.drafter.waits:
            planned.asked_s = self._clock() - began
            self._asked_s.append(planned.asked_s)
            self._num_asked += 1
            self._looks = False
        offers: list[Offer] = []
        for row, draft in zip(rows, drafts, strict=True):
            if draft is not None:
                self._drop_unknown(draft)
                if draft.tokens:
                    offers.append(Offer(row, draft, len(row.seq.tokens)))
        self._off["match"] += len(rows) - len(offers)
        return offers

    def _drop_unknown(self, draft: Draft) -> None:
        """Cut it before the first id that the model does not have."""
        tokens, limit = draft.tokens, self._vocab_size
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
        plain_s = self.lengths.plain_s(planned.rows, planned.context) if planned.num_drafts else None
        step_s = max(seconds - planned.asked_s, 1e-6)
        self.times.observe(planned.rows + planned.num_drafts, planned.context, step_s)
        if not planned.num_drafts:
            self.guard.pass_step()
            return
        self._steps += 1
        self._verify_s += seconds
        if plain_s is None:
            return
        emitted = sum(len(row.samples) for row in result.rows)
        replaced_s = plain_s * emitted / planned.rows
        self.guard.note(replaced_s, seconds)
        self._predicted += GAIN_WEIGHT * (planned.gain - self._predicted)
        self._measured += GAIN_WEIGHT * (replaced_s / seconds - self._measured)


def _is_decode(row: StepRow) -> bool:
    """Its tokens are all known, and the row computes the last of them."""
    seq: Sequence = row.seq
    return row.count == 1 and row.start + 1 == len(seq.tokens) and seq.num_output > 0
