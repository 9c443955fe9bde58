"""EvaluateOptions and GateOptions: the command-line options, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.options import OptionError, option


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    tasks: str = option(
        "perplexity,arc_easy", "tasks to run, with commas: names of the table, or files *.jsonl"
    )
    data: str | None = option(None, "folder of the data sets; default: $RIDGELINE_DATA")
    limit: int | None = option(None, "ask a random sample of this many items of each task; default: all")
    seed: int = option(0, "seed of that sample and of the bootstrap")
    concurrency: int = option(8, "items asked at once")
    samples: int = option(3, "items of each task whose prompt and answers the report shows")

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"--limit must be at least 1, got {self.limit}")
        if self.samples < 0:
            raise OptionError(f"--samples must be at least 0, got {self.samples}")
        if self.concurrency < 1:
            raise OptionError(f"--concurrency must be at least 1, got {self.concurrency}")
        if not any(name.strip() for name in self.tasks.split(",")):
            raise OptionError("--tasks is empty")

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.tasks.split(",") if name.strip()))


@dataclass(frozen=True, slots=True)
class GateOptions:
    margin: float = option(
        1.0, "non-inferiority margin of accuracies, in points: a loss within it passes, significant or not"
    )
    kl_margin: float = option(
        0.0, "allowed mean KL divergence beyond the noise floor, in nats per token (0.035: 4 bits at 8B)"
    )
    top: int = option(256, "top tokens per position that the divergence is computed from, if the subject can")
    alpha: float = option(0.05, "significance level of all accuracy tests together")
    power: float = option(0.8, "power at which the smallest detectable loss is stated")
    strict: bool = option(False, "also fail if non-inferiority is not shown: too few items for the margin")
    record_as: str | None = option(
        None,
        "record the verdict about a server for `ridgeline plan`, as MODEL,weights=FORMAT,engine=NAME; the "
        "format of a model that is loaded here is known",
    )

    def __post_init__(self) -> None:
        for name in ("alpha", "power"):
            value = getattr(self, name)
            if not 0.0 < value < 1.0:
                raise OptionError(f"--{name} must be between 0 and 1, got {value:g}")
        for name in ("margin", "kl_margin"):
            value = getattr(self, name)
            if not 0.0 <= value < 100.0:
                raise OptionError(f"--{name.replace('_', '-')} must be from 0 to 100, got {value:g}")
        if not 1 <= self.top <= 256:
            raise OptionError(f"--top must be from 1 to 256, got {self.top}")
