"""QuantizeOptions: the command-line options, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.options import OptionError, nearest, option

# Steps in the order in which they may be joined: at most one of each line.
ROTATIONS = ("hadamard",)
SCALINGS = ("awq", "smoothquant")
ROUNDINGS = ("rtn", "gptq")
METHODS = (*ROTATIONS, *SCALINGS, *ROUNDINGS)
CALIBRATED = ("gptq", "awq", "smoothquant")


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    method: str = option(
        "rtn", "rtn, gptq, awq, smoothquant, hadamard, or several joined with +: smoothquant+gptq"
    )
    group: int = option(128, "weights of a row that share a scale, for int4")
    zero_points: bool = option(False, "int4 and int8: store an offset for each scale")
    keep: tuple[str, ...] = option(
        (), "leave these modules in 16 bits: lm_head, layers.0, down_proj; may be repeated"
    )
    calibration: str | None = option(
        None, "text the model reads to choose weights: .txt, .jsonl, or a recording with --record-texts"
    )
    held_out: str | None = option(
        None, "text for the report alone: .txt or .jsonl; default: every eighth sample of --calibration"
    )
    samples: int = option(128, "sequences of calibration text")
    length: int = option(512, "tokens of each sequence")
    damping: float = option(0.01, "gptq: added to the diagonal, as a share of its mean")
    act_order: bool = option(True, "gptq: round the columns with the largest inputs first")
    alpha: float = option(0.5, "smoothquant: how much of the inputs' range moves into weights, 0 to 1")
    seed: int = option(0, "hadamard: seed of the rotation's signs")
    requantize: bool = option(
        False, "GGUF: accept a model that is quantized already; its error stays, and a second one is added"
    )
    scan: bool = option(False, "measure the loss of each layer alone; write a picture, no model")

    def __post_init__(self) -> None:
        steps = self.steps
        for step in steps:
            if step not in METHODS:
                raise OptionError(f"--method {self.method}: unknown method {step!r}{nearest(step, METHODS)}")
        for line in (ROTATIONS, SCALINGS, ROUNDINGS):
            if sum(step in line for step in steps) > 1:
                raise OptionError(f"--method {self.method}: choose one of {' and '.join(line)}")
        for name, least in (("group", 1), ("samples", 2), ("length", 2)):
            if getattr(self, name) < least:
                raise OptionError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if not 0.0 < self.damping <= 1.0:
            raise OptionError(f"--damping must be above 0 and at most 1, got {self.damping:g}")
        if not 0.0 <= self.alpha <= 1.0:
            raise OptionError(f"--alpha must be from 0 to 1, got {self.alpha:g}")
        needs = [step for step in steps if step in CALIBRATED]
        if needs and not self.calibration:
            raise OptionError(
                f"--method {self.method} needs text that the model reads: pass --calibration FILE.txt, or "
                "FILE.jsonl with prompt, text or messages in each line (some 50,000 words like those it will "
                "serve); --method rtn needs none"
            )
        if self.held_out and not self.calibration:
            raise OptionError("--held-out is read beside --calibration: pass both")
        if self.scan and not self.calibration:
            raise OptionError("--scan measures the loss on text: pass --calibration FILE.txt or FILE.jsonl")
        if self.scan and self.rotates:
            raise OptionError("--scan looks at layers alone, and hadamard rotates all: leave one of them out")

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(step.strip().lower() for step in self.method.split("+"))

    @property
    def rotates(self) -> bool:
        return "hadamard" in self.steps

    @property
    def scaling(self) -> str:
        """awq, smoothquant, or empty."""
        return next((step for step in self.steps if step in SCALINGS), "")

    @property
    def rounding(self) -> str:
        return "gptq" if "gptq" in self.steps else "rtn"
