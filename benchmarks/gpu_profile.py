"""The GPU engine's steps, kernel by kernel and part by part, beside the device's ceilings.

    python benchmarks/gpu_profile.py                              qwen3-0.6b and qwen3-8b, random weights
    python benchmarks/gpu_profile.py --models qwen3-8b --sequences 64 --context 1024 --out profiles

Needs a CUDA GPU and torch, triton and numpy alone. Each shape is profiled in both phases, as `ridgeline
profile` does it; the tables are printed, the traces for https://ui.perfetto.dev and profile.json go to --out.
RIDGELINE_PDL=0 shows every kernel alone; --no-graphs and --no-overlap show what launches cost.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.workloads import SHAPES, write_config


def main() -> int:
    args = _arguments()
    models = args.models.split(",")
    if len(models) == 1:
        return _profile(models[0], args)
    # Each in its own process: an engine takes all of the device's memory.
    codes = [
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--models", model]).returncode
        for model in models
    ]
    return max(codes)


def _profile(model: str, args: argparse.Namespace) -> int:
    from ridgeline.engine.config import EngineConfig
    from ridgeline.engine.start.build import build_engine
    from ridgeline.lab.profile.load import PHASES, Shape
    from ridgeline.lab.profile.run import ProfileRequest, profile_engine
    from ridgeline.lab.profile.table import profile_lines

    config = EngineConfig(
        model=model,
        backend=args.backend,
        load_format="dummy",
        overlap=not args.no_overlap,
        cuda_graphs=not args.no_graphs,
        step_tokens=args.step_tokens,
        kv_tokens=args.kv_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        built = build_engine(config, write_config(model, Path(folder)))
    shape = Shape(args.sequences, args.context, args.prompt_tokens)
    wishes = ProfileRequest(PHASES, args.steps, shape, seconds=args.seconds, out=args.out / model)
    found = profile_engine(built, model, wishes, lambda text: print(text, file=sys.stderr, flush=True))
    print("\n".join(profile_lines(found, args.top)), flush=True)
    print(f"wrote {found.save(args.out / model)}", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="shapes, by comma (default: all)")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "torch"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=64, help="that decode together (default 64)")
    parser.add_argument("--context", type=int, default=1024, help="tokens each looks back on (default 1024)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of a prompt (default 2048)")
    parser.add_argument("--seconds", type=int, default=0, help="of sampling by py-spy (default 0: none)")
    parser.add_argument("--step-tokens", type=int, help="most tokens of one step")
    parser.add_argument("--kv-tokens", type=int, help="KV cache size (default: all that fits)")
    parser.add_argument("--top", type=int, default=15, help="kernels to list (default 15)")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench-results/gpu-profile"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
