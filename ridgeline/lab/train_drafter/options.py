"""TrainOptions: the command-line options, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.options import OptionError, option


@dataclass(frozen=True, slots=True)
class TrainOptions:
    prompts: tuple[str, ...] = option(
        (),
        "file of prompts the model answers: .jsonl with prompt, question, text, messages or turns in each "
        "line, or .txt with one in each line; may be repeated; default: the model writes the questions too",
    )
    held_out: tuple[str, ...] = option(
        (), "prompts for the report alone; default: every 50th of --prompts; may be repeated"
    )
    own_questions: int = option(
        0, "questions that the model writes itself, beside --prompts; default: only without --prompts"
    )
    samples: int = option(2000, "answers to train on; prompts are used again when there are fewer")
    temperature: float = option(0.8, "of the answers, as users will ask for; half of them are greedy")
    tokens: int = option(192, "most tokens of an answer")
    length: int = option(320, "most tokens of a prompt with its answer")
    vocabulary: int = option(8192, "tokens that the head can guess: the most frequent ones of the answers")
    guesses: int = option(4, "tokens that the head proposes, and training unrolls")
    steps: int = option(
        0, "training steps; default: 3 passes over the answers, with --minutes as many as fit"
    )
    batch: int = option(32, "sequences of a step")
    learning_rate: float = option(1e-3, "its peak, after 4 % of the steps; falls to a tenth")
    matrix_rate: float = option(
        0.01, "the same for the head's matrices but the last, which Muon trains; 0: AdamW for all"
    )
    minutes: float = option(
        0.0, "train for this many minutes; the rate falls with the time; default: until the steps are done"
    )
    device: str = option("auto", "cuda or cpu; auto: a GPU if there is one")
    running: int = option(0, "answers generated at a time; default: as serve")
    seed: int = option(0, "of answers, order and initial weights")

    def __post_init__(self) -> None:
        least = {
            "samples": 8,
            "tokens": 8,
            "length": 16,
            "vocabulary": 16,
            "guesses": 1,
            "batch": 1,
            "steps": 0,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise OptionError(f"--{name} must be at least {value}, got {getattr(self, name)}")
        if self.guesses > 15:
            raise OptionError(f"--guesses must be at most 15, got {self.guesses}")
        if not 0.0 <= self.temperature <= 5.0:
            raise OptionError(f"--temperature must be from 0 to 5, got {self.temperature:g}")
        if self.matrix_rate < 0:
            raise OptionError(f"--matrix-rate must be at least 0, got {self.matrix_rate:g}")
        if self.learning_rate <= 0:
            raise OptionError(f"--learning-rate must be above 0, got {self.learning_rate:g}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise OptionError(f"--device must be auto, cpu or cuda, got {self.device!r}")
