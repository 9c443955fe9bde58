"""VerifiedRows: the samples of rows with drafts, on the device: one at each of the row's tokens.

Used by the CUDA runner. The sample behind draft i must be the one that its sequence draws after i drafts: its
noise comes from its position; its grammar and thinking budget from a copy of the sequence that has advanced
over the drafts; its penalties from a spare row of the sampler that has counted them. Which of the samples
count is decided on the host, when the step is collected.
"""

from __future__ import annotations

from ridgeline.engine.run.cuda.rows import DeviceRows
from ridgeline.engine.run.cuda.sampler import DeviceSampler, Pick
from ridgeline.engine.run.sequence_mask import continues
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import Sampled, StepRow

SPARE_ROWS = 64  # of the sampler: drafts of sequences with penalties that one step can verify
NOT_SAMPLED = -1  # the device row of a draft that no sample is taken behind


class VerifiedRows:
    def __init__(self, rows: DeviceRows, sampler: DeviceSampler, first_spare: int) -> None:
        self._rows = rows
        self._sampler = sampler
        self._spares = range(first_spare, first_spare + SPARE_ROWS)
        self._used: list[int] = []
        self._counted: set[Sequence] = set()  # whose row lacks tokens that were drawn in spare rows

    def begin(self) -> None:
        """A new step: the spare rows of the last one are free."""
        for row in self._used:
            self._sampler.clear_row(row)
        self._used = []

    def note(self, seq: Sequence) -> None:
        """The sequence is in this step: its penalties must count all tokens drawn so far."""
        if seq in self._counted:
            self._counted.discard(seq)
            self._sampler.set_row(self._rows.index_of(seq), seq)

    def forget(self, seq: Sequence) -> None:
        self._counted.discard(seq)

    def picks(self, row: StepRow) -> list[Pick]:
        """A pick for each of the row's tokens. Behind the first draft that would end the sequence, or that
        its grammar refuses, no sample is taken."""
        seq, index = row.seq, self._rows.index_of(row.seq)
        first = row.start + 1 - seq.prompt_len
        picks = [Pick(index, seq, first)]
        if seq.is_constrained or seq.params.needs_penalties:
            self._add_copies(row, picks)
        else:
            for place, draft in enumerate(row.drafts):
                if _ends(seq, place, draft):
                    break
                picks.append(Pick(index, seq, first + place + 1))
        missing = row.count - len(picks)
        return picks + [Pick(NOT_SAMPLED, seq, 0)] * missing

    def _add_copies(self, row: StepRow, picks: list[Pick]) -> None:
        seq, ahead = row.seq, row.seq
        is_counted = seq.params.needs_penalties
        for draft in row.drafts:
            ahead = ahead.ahead()
            index = picks[0].row
            if is_counted and len(self._used) == SPARE_ROWS:
                return
            if not continues(ahead, draft):
                return
            if is_counted:
                index = self._spares[len(self._used)]
                self._used.append(index)
                self._sampler.set_row(index, ahead)
                self._counted.add(seq)
            picks.append(Pick(index, ahead, ahead.num_output))


def _ends(seq: Sequence, place: int, draft: int) -> bool:
    """Whether the draft at this place, if it is drawn, ends the sequence."""
    if draft in seq.end_ids and seq.num_output + place >= seq.params.min_tokens:
        return True
    return len(seq.tokens) + place + 1 >= seq.max_len


def until_wrong(row: StepRow, picks: list[Pick], samples: list[Sampled]) -> list[Sampled]:
    """The row's samples up to the first one that is not the draft behind it."""
    taken = sum(pick.row != NOT_SAMPLED for pick in picks)
    for place in range(taken):
        sampled = samples[place]
        is_last = place + 1 == taken
        if is_last or sampled.error is not None or sampled.token != row.drafts[place]:
            return samples[: place + 1]
    raise AssertionError("a row has at least one sample")
