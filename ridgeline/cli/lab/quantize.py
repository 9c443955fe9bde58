"""`ridgeline quantize`: a 16-bit model becomes an 8- or 4-bit one, with a report of what was lost."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ridgeline.cli.parsing import Verbs, add_verb, path_argument
from ridgeline.lab.errors import LabError
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.options import add_flags, build, given_flags

# As `lab.quantize.targets` has them; the parser must not import numpy. A test compares the two.
TARGETS = ("fp8", "fp8-block", "int8", "w8a16", "int4", "mxfp4", "nvfp4")
# As `models.gguf_output.recipes` has them.
GGUF_TARGETS = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_0", "q5_1", "q5_k_s", "q5_k_m", "q4_0", "q4_1", "q4_k_s"),
    "q4_k_m",
)

DESCRIPTION = """\
Round a model's weights to 8 or 4 bits, and write them as a checkpoint that `ridgeline serve` and other
engines read (compressed-tensors). Embeddings, norms, routers and the head stay in 16 bits. Memory holds one
layer.

  --to fp8      8-bit floats; rtn is enough           --to int4     4-bit integers in groups of --group
  --to int8     8-bit integers, inputs too (W8A8)     --to mxfp4    4-bit floats, groups of 32
  --to w8a16    8-bit integers, inputs in 16 bits     --to nvfp4    4-bit floats, groups of 16
  --to fp8-block  8-bit floats, blocks of 128×128

  --to q4_k_m, q4_k_s, q4_0, q4_1, q5_k_m, q5_k_s, q5_0, q5_1, q6_k, q8_0, bf16, f16, f32
                a GGUF file, tokenizer included, for `ridgeline serve` and llama.cpp. --out is the file or its
                folder. With --calibration, columns that read large inputs count more (an importance matrix),
                and the file's metadata says what was lost. MODEL may be a GGUF file of 16 bits; --requantize
                accepts others. An interrupted run starts over.

  --method rtn          round to nearest: no data, fast
  --method gptq         later columns correct the error of earlier ones; best for 4 bits
  --method awq          channels with large inputs get finer steps; then rounded to nearest
  --method smoothquant  moves outliers of inputs into weights, for int8
  --method hadamard     rotates the model so that no channel stands out; RMSNorm models
Methods can be joined: awq+gptq, smoothquant+gptq, hadamard+gptq.

With --calibration, every eighth sample is held out and the loss on it is reported: KL divergence, flips of
the most likely token, perplexity; in the folder as report.json and report.html. --held-out names other
text. A killed run continues when the same command is repeated, but for GGUF files."""

EXAMPLES = """\
  ridgeline quantize Qwen/Qwen3-8B --to fp8 --out qwen3-8b-fp8
  ridgeline quantize ./my-model --to int4 --method gptq --calibration wiki.txt --out my-model-int4
  ridgeline quantize ./my-model --to int8 --method smoothquant --calibration chats.jsonl --out my-model-int8
  ridgeline quantize ./my-model --to int4 --scan --calibration wiki.txt --out scan
  ridgeline quantize ./my-model --to q4_k_m --calibration wiki.txt --out my-model-q4_k_m.gguf
  ridgeline quantize ./my-model --to int4 --keep layers.0 --keep down_proj --out my-model-int4
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "quantize", "make an 8- or 4-bit model of a 16-bit one", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder with 16-bit .safetensors, or org/name of the hub; for GGUF also a .gguf file",
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help=", ".join(TARGETS) + "; GGUF: " + ", ".join(GGUF_TARGETS),
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        type=path_argument,
        help="folder to write; new or empty. For GGUF a .gguf file, or a folder for it",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_flags(parser, "quantize", QuantizeOptions, title="method and data")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = build(QuantizeOptions, given_flags(args, "quantize"))
    if args.to.lower() in GGUF_TARGETS and not options.calibration:
        return _gguf(args, options)  # needs no torch
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise LabError("quantize computes with torch: pip install 'ridgeline[torch]'") from None
    if args.to.lower() in GGUF_TARGETS:
        return _gguf(args, options)
    from ridgeline.cli.progress import fetch
    from ridgeline.lab.evaluate.progress import shown
    from ridgeline.lab.quantize.driver import close, prepare, quantize
    from ridgeline.lab.quantize.report import JSON, make_report, report_text, write_report

    job = prepare(fetch(args.model, sys.stderr).path, args.to, options)
    if options.scan:
        return _scan(job, args)
    with shown(sys.stderr) as on_progress:
        found = quantize(job, args.out, on_progress)
    report = make_report(found)
    write_report(report, args.out)
    close(found)
    print((args.out / JSON).read_text() if args.json else report_text(report, args.out))
    return 0


def _gguf(args: argparse.Namespace, options: QuantizeOptions) -> int:
    import json

    from ridgeline.cli.progress import fetch
    from ridgeline.lab.evaluate.progress import shown
    from ridgeline.lab.quantize.gguf import quantize_to_gguf, report_text

    model = fetch(args.model, sys.stderr).path
    with shown(sys.stderr) as on_progress:
        found = quantize_to_gguf(model, args.to.lower(), args.out, options, on_progress)
    print(json.dumps(found.as_json(), default=str) if args.json else report_text(found))
    return 0


def _scan(job: Any, args: argparse.Namespace) -> int:
    from ridgeline.lab.evaluate.progress import shown
    from ridgeline.lab.quantize.scan import HTML, JSON, advice, scan

    with shown(sys.stderr) as on_progress:
        found = scan(job, args.out, on_progress)
    print((args.out / JSON).read_text() if args.json else advice(found))
    print(f"picture: {args.out / HTML}", file=sys.stderr)
    return 0
