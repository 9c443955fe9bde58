"""Which shapes of steps have graphs, what runs while one has none, and how an idle engine captures them: in
pieces, between which steps run. Captures themselves need a device: here a recording notes what it was
asked."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import pytest
import torch

from ridgeline.engine.run.cuda.graphs import GraphKey, StepGraphs, ladder

LAYERS = 3


@pytest.mark.parametrize(
    ("most", "first", "last"),
    [(1, [1], 1), (3, [1, 2, 4], 4), (4, [1, 2, 4], 4), (9, [1, 2, 4, 8, 16], 16), (256, [1, 2, 4, 8], 256)],
)
def test_the_ladder_begins_small_and_reaches_the_largest_batch(most, first, last):
    sizes = ladder(most)
    assert sizes[: len(first)] == first
    assert sizes[-1] == last


@pytest.mark.parametrize("most", [1, 2, 5, 17, 100, 256, 257, 288, 300, 1000])
def test_every_batch_fits_a_size_and_wastes_little(most):
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= most
    graphs = Fake(sizes=sizes, enabled=False).graphs
    for rows in range(1, most + 1):
        size = graphs.padded(rows)
        assert size in sizes
        assert rows <= size < rows + max(rows, 33)


class Fake:
    """A device that notes what runs, what is rehearsed and what is recorded."""

    def __init__(self, sizes=(1, 2, 4), tokens=0, enabled=True, fails_at: int | None = None) -> None:
        self.ran: list[GraphKey] = []  # layers
        self.rehearsed: list[GraphKey] = []
        self.recordings: list[FakeRecording] = []
        self.fails_at = fails_at
        self.open: FakeRecording | None = None
        self.graphs = StepGraphs(self.run, self.rehearse, self.record, list(sizes), tokens, enabled)

    def run(self, key: GraphKey) -> Generator[None, None, torch.Tensor]:
        for layer in range(LAYERS):
            if self.open is None:
                self.ran.append(key)
            elif layer == self.fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            else:
                self.open.layers.append(key)
            yield
        return torch.full((key.size,), float(len(self.ran)))

    def rehearse(self, key: GraphKey) -> Iterator[None]:
        for _ in range(2):
            self.rehearsed.append(key)
            yield

    def record(self) -> FakeRecording:
        self.recordings.append(FakeRecording(self))
        return self.recordings[-1]

    def captured(self) -> list[GraphKey]:
        return [recording.layers[0] for recording in self.recordings if recording.state == "executable"]


class FakeRecording:
    def __init__(self, device: Fake) -> None:
        self._device = device
        self.layers: list[GraphKey] = []
        self.state = "open"

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self._device.open = self
        yield
        self._device.open = None

    def end(self) -> None:
        assert len(self.layers) == LAYERS
        self.state = "ended"

    def instantiate(self) -> None:
        assert self.state == "ended"
        self.state = "executable"

    def replay(self) -> None:
        assert self.state == "executable"

    def abandon(self) -> None:
        self._device.open = None
        self.state = "abandoned"


def test_without_graphs_every_step_runs_eagerly():
    device = Fake(enabled=False)
    results = [float(device.graphs.step(GraphKey(2))[0]) for _ in range(3)]
    assert results == [3.0, 6.0, 9.0]
    assert (device.graphs.eager, device.graphs.replays, len(device.graphs)) == (3, 0, 0)
    assert device.graphs.missing() == []
    assert not device.graphs.advance()


def test_the_first_step_of_a_size_runs_eagerly_and_the_second_is_captured():
    """Its kernels may have to be compiled, which cannot be done while a graph is captured."""
    device = Fake()
    graphs = device.graphs
    graphs.step(GraphKey(2))
    assert device.captured() == []
    graphs.step(GraphKey(2))
    graphs.step(GraphKey(2))
    assert device.captured() == [GraphKey(2)]
    assert (graphs.eager, graphs.replays, len(graphs)) == (1, 2, 1)
    graphs.step(GraphKey(4))
    assert device.captured() == [GraphKey(2)]


def idle_until_done(graphs: StepGraphs) -> int:
    pieces = 0
    while graphs.advance():
        pieces += 1
    return pieces


def test_an_idle_engine_captures_what_is_missing_in_pieces():
    device = Fake(tokens=40)
    graphs = device.graphs
    for _ in range(2):
        graphs.step(GraphKey(1))
    pieces = idle_until_done(graphs)
    prompts = [GraphKey(0, prompt_tokens=16), GraphKey(0, prompt_tokens=32)]
    assert device.captured() == [GraphKey(1), GraphKey(2), GraphKey(4), *prompts]
    # Of each of the four: two rehearsals, each layer with the result behind the last, the end, the rest.
    assert pieces == 4 * (2 + LAYERS + 1 + 1 + 1)
    eager = graphs.eager
    graphs.step(GraphKey(4))
    assert graphs.eager == eager


def test_no_piece_is_longer_than_a_layer_or_the_end_of_a_capture():
    """A request that arrives meanwhile waits for one piece, whatever the number of layers."""
    device = Fake(sizes=[1])
    before = (0, 0, "")
    for _ in range(2 + LAYERS + 3):
        device.graphs.advance()
        recording = device.recordings[-1] if device.recordings else None
        now = (
            len(device.rehearsed),
            len(recording.layers) if recording else 0,
            recording.state if recording else "",
        )
        changes = (now[0] - before[0]) + (now[1] - before[1]) + (now[2] != before[2] and now[2] != "open")
        assert changes <= 1
        before = now
    assert before == (2, LAYERS, "executable")


@pytest.mark.parametrize("pieces", range(1, 9))
def test_steps_that_come_between_pieces_run_at_once_and_the_capture_goes_on(pieces):
    device = Fake(tokens=20)
    graphs = device.graphs
    for _ in range(2):
        graphs.step(GraphKey(1))
    for _ in range(pieces):  # of GraphKey(2)
        graphs.advance()
    recordings = len(device.recordings)
    for key in (GraphKey(1), GraphKey(0, prompt_tokens=16), GraphKey(0, prompt_tokens=16)):
        ran = len(device.ran)
        graphs.step(key)
        assert key == GraphKey(1) or len(device.ran) == ran + LAYERS or key in device.captured()
    if (
        recordings == 2 and device.recordings[1].state != "executable"
    ):  # not a second capture beside an open one
        assert len(device.recordings) == 2
    idle_until_done(graphs)
    assert sorted(device.captured()) == sorted(
        [GraphKey(1), GraphKey(2), GraphKey(4), GraphKey(0, prompt_tokens=16)]
    )


@pytest.mark.parametrize("pieces", range(1, 9))
def test_a_step_of_the_shape_that_is_being_captured_is_not_rehearsed_over(pieces):
    """A rehearsal puts padding where the step's inputs are."""
    device = Fake(sizes=[1, 2])
    graphs = device.graphs
    for _ in range(2):
        graphs.step(GraphKey(1))
    for _ in range(pieces):
        graphs.advance()
    rehearsed = len(device.rehearsed)
    for _ in range(2):
        graphs.step(GraphKey(2))
        assert len(device.rehearsed) == rehearsed
    assert device.captured() == [GraphKey(1), GraphKey(2)]


def test_what_steps_missed_most_is_captured_first():
    device = Fake(sizes=ladder(64), tokens=600)
    graphs = device.graphs
    missed = GraphKey(8, prompt_tokens=512)
    for key in (GraphKey(48), missed):
        graphs.step(key)
    graphs._missed[missed] += 1
    assert graphs.missing()[:4] == [missed, GraphKey(48), GraphKey(1), GraphKey(2)]
    while len(graphs) < 2:
        graphs.advance()
    assert device.captured() == [missed, GraphKey(48)]


def test_shapes_whose_kernels_are_not_there_are_neither_captured_nor_chosen():
    device = Fake(sizes=ladder(16), tokens=300)
    graphs = device.graphs
    loaded = {GraphKey(1), GraphKey(0, prompt_tokens=256)}
    graphs.is_loaded = loaded.__contains__
    assert graphs.padded_prompts(5, 0) == GraphKey(0, prompt_tokens=256)
    assert graphs.padded(1) == 1
    assert graphs.padded(3) == 4  # none is there: the step compiles them
    assert graphs.missing() == [GraphKey(1), GraphKey(0, prompt_tokens=256)]
    assert graphs.misses_first
    idle_until_done(graphs)
    assert not graphs.misses_first
    loaded |= {GraphKey(0, prompt_tokens=size) for size in (16, 32)} | {GraphKey(8)}
    assert graphs.padded_prompts(5, 0) == GraphKey(0, prompt_tokens=16)
    assert graphs.padded(3) == 8
    assert graphs.missing() == [GraphKey(8), GraphKey(0, prompt_tokens=16), GraphKey(0, prompt_tokens=32)]


def test_prompts_are_padded_to_a_shape_that_fits_the_buffers():
    graphs = Fake(sizes=ladder(256), tokens=512).graphs
    assert graphs.padded_prompts(130, 0) == GraphKey(0, prompt_tokens=160)
    assert graphs.padded_prompts(513, 0) is None
    assert graphs.padded_prompts(130, 3) == GraphKey(8, prompt_tokens=256)
    assert graphs.padded_prompts(130, 200) == GraphKey(256, prompt_tokens=256)
    assert graphs.padded_prompts(300, 200) is None
    assert graphs.padded_prompts(1, 300) is None
    assert Fake(tokens=0).graphs.padded_prompts(1, 0) is None


def test_a_shape_that_cannot_be_captured_runs_eagerly_from_then_on(caplog):
    device = Fake(sizes=[2], fails_at=1)
    for _ in range(3):
        device.graphs.step(GraphKey(2))
    assert device.graphs.eager == 3
    assert [recording.state for recording in device.recordings] == ["abandoned"]
    assert "run eagerly: CUDA out of memory" in caplog.text

    device = Fake(sizes=[2], fails_at=1)
    with pytest.raises(torch.OutOfMemoryError):
        idle_until_done(device.graphs)
    assert not device.graphs.advance()
    device.graphs.step(GraphKey(2))
    assert [recording.state for recording in device.recordings] == ["abandoned"]
