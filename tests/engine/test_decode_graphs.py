"""Which batch sizes have graphs, and what runs while a size has none. Captures themselves need a device."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.run.cuda.graphs import DecodeGraphs, GraphKey, ladder


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
    graphs = DecodeGraphs(lambda key: torch.zeros(key.size), sizes, enabled=False)
    for rows in range(1, most + 1):
        size = graphs.padded(rows)
        assert size in sizes
        assert rows <= size < rows + max(rows, 33)


class Counted(DecodeGraphs):
    """Remembers what it ran, and captures nothing: there is no device."""

    def __init__(self, enabled: bool) -> None:
        self.ran: list[GraphKey] = []
        self.captured: list[GraphKey] = []
        super().__init__(self._note, [1, 2, 4], enabled)

    def _note(self, key: GraphKey) -> torch.Tensor:
        self.ran.append(key)
        return torch.full((key.size,), float(len(self.ran)))

    def _capture(self, key):
        class Replayed:
            def replay(graph) -> None:
                pass

        self.captured.append(key)
        self._graphs[key] = Replayed(), self._run(key)
        return self._graphs[key]


def test_without_graphs_every_step_runs_eagerly():
    graphs = Counted(enabled=False)
    results = [float(graphs.step(GraphKey(2))[0]) for _ in range(3)]
    assert results == [1.0, 2.0, 3.0]
    assert (graphs.eager, graphs.replays, len(graphs)) == (3, 0, 0)
    assert graphs.next_missing() is None


def test_the_first_step_of_a_size_runs_eagerly_and_the_second_is_captured():
    """Its kernels may have to be compiled, which cannot be done while a graph is captured."""
    graphs = Counted(enabled=True)
    graphs.step(GraphKey(2))
    assert graphs.captured == []
    graphs.step(GraphKey(2))
    graphs.step(GraphKey(2))
    assert graphs.captured == [GraphKey(2)]
    assert (graphs.eager, graphs.replays, len(graphs)) == (1, 2, 1)
    graphs.step(GraphKey(4))
    assert graphs.captured == [GraphKey(2)]


def test_an_idle_engine_captures_the_sizes_that_are_missing_one_at_a_time():
    graphs = Counted(enabled=True)
    graphs.step(GraphKey(1))
    graphs.step(GraphKey(1))
    missing = []
    while (key := graphs.next_missing()) is not None:
        missing.append(key)
        graphs.prepare(key)
    assert missing == [GraphKey(2), GraphKey(4)]
    assert graphs.captured == [GraphKey(1), GraphKey(2), GraphKey(4)]
    eager = graphs.eager
    graphs.step(GraphKey(4))
    assert graphs.eager == eager
