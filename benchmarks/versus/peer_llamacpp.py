"""llama.cpp as the peer of a comparison: finding its programs, making its models, running its benchmarks.

Called by cpu_vs_llamacpp.py. It builds nothing: `find` says how to get a build when there is none. All of its
speeds come from llama.cpp's own tools, at the flags given; `tune` finds the best flags for each case.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server")
FORMATS = ("Q4_0", "Q4_1", "Q8_0")
TIMEOUT_S = 300
Extras = tuple[tuple[str, ...], ...]

HOW_TO_GET = """\
No llama.cpp found ({missing} missing). Give its folder with --llama-cpp DIR, or put its programs on PATH.
To build one (10 to 20 minutes on 2 cores; for rows of AVX2 with GGML_NATIVE=OFF and GGML_AVX2, GGML_FMA,
GGML_F16C and GGML_BMI2 ON), from the sources that the PyPI package llama-cpp-python carries:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B llama-build -DCMAKE_BUILD_TYPE=Release \\
          -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF
    cmake --build llama-build -j2 --target llama-bench llama-batched-bench llama-quantize llama-server
    python benchmarks/cpu_vs_llamacpp.py --llama-cpp llama-build/bin

On a CPU with AMX, gcc 12 may move the store of the tile configuration behind the instruction that loads it:
Q4 and Q8 prompts then die with SIGILL. Put `asm volatile("" ::: "memory");` before `_tile_loadconfig` in
ggml/src/ggml-cpu/amx/mmq.cpp (llama.cpp PR #26954) before building; a build with AMX off is not a fair peer.
"""


class PeerFailed(Exception):
    """A llama.cpp program failed; the message has its command and its last words."""


@dataclass(frozen=True)
class Variant:
    """One way to run the peer: a model file's format, and flags."""

    format: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.format, *self.flags))


@dataclass(frozen=True)
class LlamaCpp:
    folder: Path
    threads: int

    def program(self, name: str) -> str:
        return str(self.folder / name)

    def version(self) -> str:
        done = subprocess.run(
            [self.program("llama-server"), "--version"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return " ".join((done.stdout + done.stderr).split("\n", 1)[0].split())

    def has_avx512(self) -> bool | None:
        """Whether the build uses AVX-512; None if it has no library to ask, as static builds do."""
        library = self.folder / "libggml-cpu.so"
        if not library.exists():
            return None
        ask = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ggml_cpu_has_avx512())"
        command = [sys.executable, "-c", ask, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return None if done.returncode else done.stdout.strip() == "1"

    def quantize(self, source: Path, target: Path, format: str, embedding: str = "") -> Path:
        """Requantizes an already quantized file where needed: speed is compared here, not quality.

        embedding: the type of the embedding, which is also the head of a model with tied embeddings
        """
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            kept = ("--token-embedding-type", embedding) if embedding else ()
            self._run("llama-quantize", "--allow-requantize", *kept, str(source), str(partial), format)
            partial.rename(target)
        return target

    def decode_rate(
        self, model: Path, streams: int, prompt: int, tokens: int, flags: tuple[str, ...]
    ) -> float:
        """Tokens per second of all streams together, every stream with its own prompt behind it."""
        context = streams * (prompt + tokens) + 256
        out = self._run(
            "llama-batched-bench", "-m", str(model), *self._threads(), "-c", str(context),
            "-npp", str(prompt), "-ntg", str(tokens), "-npl", str(streams),
            "--output-format", "jsonl", *flags,
        )  # fmt: skip
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if len(rows) != 1:
            raise PeerFailed(f"llama-batched-bench printed {len(rows)} results instead of 1: {out[-500:]}")
        return float(rows[0]["speed_tg"])

    def prefill_rate(self, model: Path, prompt: int, flags: tuple[str, ...]) -> float:
        """Prompt tokens per second, one prompt, after the tool's own warm-up."""
        out = self._run(
            "llama-bench", "-m", str(model), "-t", str(self.threads), "-p", str(prompt), "-n", "0",
            "-r", "1", "-o", "json", *(_for_llama_bench(flags)),
        )  # fmt: skip
        return float(json.loads(out)[0]["avg_ts"])

    def _threads(self) -> tuple[str, ...]:
        return ("-t", str(self.threads), "-tb", str(self.threads))

    def _run(self, program: str, *arguments: str) -> str:
        command = [self.program(program), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise PeerFailed(f"{' '.join(command)}: no end after {TIMEOUT_S} s") from error
        if done.returncode != 0:
            raise PeerFailed(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-500:]}")
        return done.stdout


def find(folder: Path | None, threads: int) -> LlamaCpp:
    """The build in `folder`, or the one on PATH; SystemExit with the way to get one when there is none."""
    if folder is None:
        on_path = shutil.which(PROGRAMS[0])
        folder = Path(on_path).parent if on_path else Path("llama-build/bin")
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    if missing:
        raise SystemExit(HOW_TO_GET.format(missing=", ".join(str(folder / name) for name in missing)))
    return LlamaCpp(folder.resolve(), threads)


def _for_llama_bench(flags: tuple[str, ...]) -> tuple[str, ...]:
    """llama-bench spells one of the flags its own way."""
    return tuple(part for flag in flags for part in (("--repack", "0") if flag == "--no-repack" else (flag,)))


# ---- the best flags ----

CACHES = (
    ("-fa", "on", "-ctk", "f16", "-ctv", "f16"),
    ("-fa", "on", "-ctk", "bf16", "-ctv", "bf16"),
    ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"),
    ("-fa", "off", "-ctk", "f16", "-ctv", "f16"),
    ("-fa", "off", "-ctk", "bf16", "-ctv", "bf16"),
)
DECODE_EXTRAS: Extras = (("--no-repack",), ("-kvu",), ("--poll", "0"), ("--poll", "100"))
PREFILL_EXTRAS: Extras = (
    ("--no-repack",), ("-ub", "128"), ("-ub", "256"), ("--poll", "0"), ("--poll", "100"),
)  # fmt: skip
HOPELESS = 0.7  # of the best so far: such a variant is not measured a second time
FINALIST = 0.93  # of the best: within the noise of two samples, so it is measured again beside it
MAX_FINALISTS = 2


@dataclass(frozen=True)
class Tuned:
    """What was tried for one case, and which variants are worth a real measurement."""

    finalists: tuple[Variant, ...]
    tried: dict[str, float]


def every_cache(formats: tuple[str, ...]) -> list[Variant]:
    return [Variant(format, cache) for format in formats for cache in CACHES]


def tune(
    rate: Callable[[Variant], float], variants: list[Variant], extras: Extras = (), higher_wins: bool = True
) -> Tuned:
    """Tries the variants, then the extra flags on top of the best of them.

    Each is measured twice and the better one counts: this looks for the peer's best, not for its median. The
    finalists are then measured in the real run, so that luck here costs the peer nothing there.
    """
    sign = 1.0 if higher_wins else -1.0
    scores: dict[Variant, float] = {}

    def try_out(variant: Variant) -> None:
        score = sign * rate(variant)
        best = max(scores.values(), default=score)
        hopeless = score < HOPELESS * best if higher_wins else score < best / HOPELESS
        scores[variant] = score if hopeless else max(score, sign * rate(variant))

    for variant in variants:
        try_out(variant)
    base = max(scores, key=lambda one: scores[one])
    for extra in extras:
        try_out(Variant(base.format, (*base.flags, *extra)))
    ranked = sorted(scores, key=lambda one: scores[one], reverse=True)
    bound = scores[ranked[0]] * (FINALIST if higher_wins else 1 / FINALIST)
    finalists = tuple(one for one in ranked if scores[one] >= bound)[:MAX_FINALISTS]
    return Tuned(finalists, {str(variant): sign * scores[variant] for variant in ranked})
