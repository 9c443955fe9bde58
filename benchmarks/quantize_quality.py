"""Methods of `ridgeline quantize` against round-to-nearest at equal bits, on a real model: KL on other text.

The trained models within reach are 4-bit GGUF files. The reference is such a file's weights in bfloat16; the
target has other groups than the file, so that its grid is not the file's own. Methods learn from wikitext-2's
validation text, and the loss is measured on its test text. Prints a table and writes JSON; the ratio is to
round-to-nearest in the same run. Ends with code 1 if no method is better than round-to-nearest beyond both
95 % intervals.

    python benchmarks/quantize_quality.py [--model smollm2-135m] [--to int4] [--group 64] [--samples 64]
        [--methods rtn,gptq,awq,awq+gptq] [--layers N] [--folder DIR] [--json out.json]

For a model of 1.5B on two cores: GPTQ factors a matrix of 8,960 columns in each layer. --layers quantizes N
layers, spread over the model and the same for all methods, and leaves the others as they are:

    python benchmarks/quantize_quality.py --model qwen2.5-coder-1.5b --group 128 --methods rtn,gptq \\
        --layers 8 --samples 64 --length 64
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

WIKITEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext-2"
FEWEST_TEXTS = 4


def measure(model: Path, method: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from ridgeline.lab.quantize.driver import close, prepare, quantize
    from ridgeline.lab.quantize.options import QuantizeOptions
    from ridgeline.lab.quantize.report import make_report, write_report
    from ridgeline.models.spec.read_spec import read_spec

    spec = read_spec(model)
    count = args.layers or spec.num_layers
    chosen = {at * spec.num_layers // count for at in range(count)}
    options = QuantizeOptions(
        method=method,
        keep=tuple(f"layers.{layer}" for layer in range(spec.num_layers) if layer not in chosen),
        group=args.group,
        calibration=str(WIKITEXT / "valid.txt"),
        held_out=str(WIKITEXT / "test.txt"),
        samples=args.samples,
        length=args.length,
    )
    out = folder / f"{args.to}-{method}"
    began = time.monotonic()
    found = quantize(prepare(model, args.to, options), out, lambda *_: None)
    report = make_report(found)
    write_report(report, out)
    close(found)
    lost = found.losses
    assert lost is not None
    return {
        "method": method,
        "kl": lost.mean_kl,
        "kl_error_95": lost.kl_high - lost.mean_kl,
        "kl_p99": lost.kl_p99,
        "flips": report.flips,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "perplexity": [lost.reference_ppl, lost.reference_ppl + lost.delta_ppl],
        "positions": lost.positions,
        "texts": lost.texts,
        "seconds": time.monotonic() - began,
        "megabytes": found.written_bytes / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="a short name of a GGUF model, or a folder")
    parser.add_argument("--to", default="int4")
    parser.add_argument(
        "--group", type=int, default=64, help="SmolLM2's rows of 576 are not whole groups of 128"
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--methods", default="rtn,gptq,awq,awq+gptq")
    parser.add_argument("--layers", type=int, help="quantize this many, spread over the model (default: all)")
    parser.add_argument("--folder", type=Path, help="keep the models here (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from versus.quantized_files import write_folder

    from ridgeline.models.files.pull import ensure

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        path = ensure(args.model).path
        model = path if path.is_dir() else write_folder(path, folder / "reference")
        rows = []
        print(
            f"{args.model}, {args.to}, groups of {args.group}, {args.samples} × {args.length} tokens of text"
        )
        print("method              KL, nats     ± 95 %  of rtn   flips  perplexity       MB       s  peak MB")
        for method in args.methods.split(","):
            rows.append(measure(model, method, args, folder))
            row = rows[-1]
            row["ratio"] = row["kl"] / rows[0]["kl"]
            print(
                f"{method:<18} {row['kl']:9.5f}  {row['kl_error_95']:9.5f}  {row['ratio']:6.2f}"
                f"  {100 * row['flips']:5.2f} %  {row['perplexity'][1]:10.3f}  {row['megabytes']:7.0f}"
                f"  {row['seconds']:6.0f}  {row['peak_memory_mb']:7.0f}",
                flush=True,
            )
        print(f"the reference's perplexity: {rows[0]['perplexity'][0]:.3f}, {rows[0]['positions']} positions")
        if args.json:
            settings = {name: str(value) for name, value in vars(args).items() if name != "json"}
            args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2))
        if rows[0]["texts"] < FEWEST_TEXTS:
            sys.exit(
                f"{rows[0]['texts']} held-out texts have no interval; an eighth of --samples is held out"
            )
        if len(rows) > 1 and not any(is_better(row, rows[0]) for row in rows[1:]):
            sys.exit(f"no method is better than {rows[0]['method']} beyond both intervals")


def is_better(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(row["kl"] + row["kl_error_95"] < other["kl"] - other["kl_error_95"])


if __name__ == "__main__":
    main()
