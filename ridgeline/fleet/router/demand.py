"""DemandBook: one router's demand for each model since its last report, and the totals for its metrics."""

from __future__ import annotations

from collections import Counter

from ridgeline.fleet.messages import ModelDemand, VersionOutcome

MOST_SAMPLES = 64
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Version:
    __slots__ = ("ended", "errors", "ttft_ms")

    def __init__(self) -> None:
        self.ended = self.errors = 0
        self.ttft_ms: list[float] = []


class ModelBook:
    """The demand for one model. Fields without an underscore are totals since the start."""

    def __init__(self) -> None:
        self.arrived = self.prompt_tokens = self.output_tokens = self.errors = 0
        self.outcomes: Counter[str] = Counter()  # ok, failed, refused, cancelled
        self.moves: Counter[str] = Counter()  # by cause
        self.quarantined = 0  # requests that replicas may have died of
        self.held = 0
        self.held_s = 0.0
        self.ttft_counts = [0] * (len(BUCKETS_S) + 1)
        self.ttft_s = 0.0
        self._told = (0, 0, 0, 0)  # totals at the last report
        self._ttft_ms: list[float] = []
        self._versions: dict[str, _Version] = {}

    def first_token(self, version: str, seconds: float) -> None:
        self.ttft_s += seconds
        place = next((at for at, edge in enumerate(BUCKETS_S) if seconds <= edge), len(BUCKETS_S))
        self.ttft_counts[place] += 1
        if len(self._ttft_ms) < MOST_SAMPLES:
            self._ttft_ms.append(seconds * 1e3)
        of_version = self._version(version).ttft_ms
        if len(of_version) < MOST_SAMPLES:
            of_version.append(seconds * 1e3)

    def ended(self, version: str, error: bool) -> None:
        """A replica of this version answered, or failed."""
        book = self._version(version)
        book.ended += 1
        book.errors += error
        self.errors += error

    def report(self, model: str, held: int, oldest_held_s: float, in_flight: int) -> ModelDemand:
        """The demand since the last report. Begins a new interval."""
        now = (self.arrived, self.prompt_tokens, self.output_tokens, self.errors)
        arrived, prompt, output, errors = (new - old for new, old in zip(now, self._told, strict=True))
        demand = ModelDemand(
            model=model,
            arrived=arrived,
            prompt_tokens=prompt,
            output_tokens=output,
            held=held,
            oldest_held_s=oldest_held_s,
            in_flight=in_flight,
            errors=errors,
            ttft_ms=tuple(self._ttft_ms),
            versions=tuple(
                VersionOutcome(name, one.ended, one.errors, tuple(one.ttft_ms))
                for name, one in self._versions.items()
            ),
        )
        self._told = now
        self._ttft_ms, self._versions = [], {}
        return demand

    def take_back(self, demand: ModelDemand) -> None:
        """The controller did not get this report: the next one counts it too."""
        told = (demand.arrived, demand.prompt_tokens, demand.output_tokens, demand.errors)
        arrived, prompt, output, errors = (old - new for old, new in zip(self._told, told, strict=True))
        self._told = (arrived, prompt, output, errors)
        self._ttft_ms = [*demand.ttft_ms, *self._ttft_ms][:MOST_SAMPLES]
        for one in demand.versions:
            book = self._version(one.version)
            book.ended += one.ended
            book.errors += one.errors
            book.ttft_ms = [*one.ttft_ms, *book.ttft_ms][:MOST_SAMPLES]

    def _version(self, name: str) -> _Version:
        book = self._versions.get(name)
        if book is None:
            book = self._versions[name] = _Version()
        return book
