"""`ridgeline doctor`: checks this machine for missing and slow parts, with advice."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ridgeline.cli.doctor import calibrate, machine, measure
from ridgeline.cli.doctor.finding import Finding
from ridgeline.cli.doctor.native_set import check_native
from ridgeline.cli.parsing import DEFAULT_MODEL, MODEL_HELP, Verbs, add_verb
from ridgeline.machine import cache_dir
from ridgeline.models.files.pull import needed_bytes
from ridgeline.models.files.registry import cached_file, find_known
from ridgeline.options import OptionError
from ridgeline.running import state_home

GB, GIB = 1e9, 1 << 30
MIN_MEMORY_BYTES = 2 * GIB  # for the default model, its KV cache and activations
SLOW_READ_BYTES_PER_S = 10 * GB  # a laptop of the last ten years reads faster
HUB_URL, HUB_TIMEOUT_S = "https://huggingface.co", 5

DESCRIPTION = """\
Check this machine: what is present, what is slow, what is missing, and what to do about it. Measures memory
bandwidth and matrix rates (a few seconds, in child processes) and prints the decode speed they allow.
Exit code 0: models can be served here.

With --calibrate: measure the rates of this machine's caches, memory and arithmetic units and the time of a
model's steps (about half a minute, best on an idle machine), choose step sizes from them, and store both for
every later start."""

EXAMPLES = """\
  ridgeline doctor
  ridgeline doctor --quick --json
  ridgeline doctor --online
  ridgeline doctor --calibrate --model smollm2-135m
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "doctor", "check this machine", DESCRIPTION, EXAMPLES)
    parser.add_argument("--quick", action="store_true", help="skip the measurements")
    parser.add_argument("--online", action="store_true", help="also try to reach the Hugging Face hub")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure limits and step sizes for 25 s, and keep them"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help=f"what to calibrate with: {MODEL_HELP} (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.calibrate:
        if args.quick or args.online:
            raise OptionError("--calibrate can be combined only with --model and --json")
        return calibrate.run(args.model or DEFAULT_MODEL, as_json=args.json)
    if args.model:
        raise OptionError("--model requires --calibrate")
    findings = []
    for finding in examine(quick=args.quick, online=args.online):
        findings.append(finding)
        if not args.json:
            print(line(finding), flush=True)
    usable = not any(finding.fatal for finding in findings)
    if args.json:
        print(json.dumps({"usable": usable, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print("usable: models can be served here" if usable else "not usable: see what is missing above")
    return 0 if usable else 1


def line(finding: Finding) -> str:
    text = f"{finding.status:<8} {finding.subject:<13} {finding.value}"
    return f"{text}\n{'':<22} → {finding.advice}" if finding.advice else text


def examine(*, quick: bool = False, online: bool = False) -> Iterator[Finding]:
    """All findings, the cheap ones first."""
    chip = machine.processor()
    yield check_python(sys.version_info[:3])
    yield Finding("ok", "processor", chip.model)
    yield check_instruction_sets(chip)
    yield check_cores(machine.cores())
    yield check_memory(machine.memory())
    yield check_disk(cache_dir())
    yield check_cache(cache_dir())
    yield check_state(state_home())
    yield check_default_model()
    yield check_compiler()
    yield check_pip()
    yield check_calibration()
    if online:
        yield check_hub()
    native = measure.in_child("native", *(() if quick else ("native-rates",)))
    yield check_native(native)
    serves = "native_isa" in native.values
    torch = measure.in_child("torch", *(() if quick or serves else ("bandwidth", "float32")))
    yield from check_torch(torch, needed=not serves)
    gpu = measure.in_child("gpu")
    yield from check_gpu(gpu)
    if quick:
        return
    if gpu.values.get("gpu") and not gpu.failure and gpu.values.get("refusal") is None:
        yield check_gpu_rates(measure.in_child("gpu-rates"))
    if serves:
        yield from check_native_rates(native)
    elif "torch" in torch.values:
        yield from check_torch_rates(torch, measure.in_child("bfloat16"))
    if "torch" in torch.values and "AMX" in chip.sets:
        yield check_amx(measure.in_child("bfloat16", isa=None))


def check_python(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("missing", "python", text, "ridgeline needs Python 3.11 or newer", fatal=True)
    return Finding("ok", "python", text)


def check_instruction_sets(chip: machine.Processor) -> Finding:
    value = f"{', '.join(chip.sets) or 'none known'}; not there: {', '.join(chip.missing_sets) or 'none'}"
    if chip.is_x86 and "AVX2" not in chip.sets:
        return Finding("slow", "instructions", value, "without AVX2 everything is several times slower")
    return Finding("ok", "instructions", value)


def check_cores(found: machine.Cores) -> Finding:
    quota = "none" if found.quota is None else f"{found.quota:g}"
    usable = f"{found.usable} usable of {found.present}, {found.threads} threads"
    value = f"{usable} (affinity {found.affinity}, quota {quota})"
    if found.usable < 2:
        return Finding(
            "slow", "cores", value, "give the process more cores: taskset, docker --cpus, cpu limits"
        )
    return Finding("ok", "cores", value)


def check_memory(found: machine.Memory) -> Finding:
    limit = "none" if found.group_limit_bytes is None else f"{found.group_limit_bytes / GIB:.1f} GiB"
    value = (
        f"{found.usable_bytes / GIB:.1f} GiB usable of {found.total_bytes / GIB:.1f} (group limit {limit})"
    )
    if found.usable_bytes < MIN_MEMORY_BYTES:
        needed = f"{MIN_MEMORY_BYTES / GIB:.0f} GiB"
        advice = f"the default model needs about {needed}: end other programs or raise the limit"
        return Finding("missing", "memory", value, advice, fatal=True)
    return Finding("ok", "memory", value)


def check_disk(cache: Path) -> Finding:
    known = find_known(DEFAULT_MODEL)
    assert known is not None
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    value = f"{free / GB:.1f} GB free in {cache}"
    needed = 0 if cached_file(known).is_file() else needed_bytes(known)
    if free < needed:
        advice = f"pulling the default model needs {needed / GB:.1f} GB; RIDGELINE_CACHE names another place"
        return Finding("missing", "disk", value, advice, fatal=True)
    return Finding("ok", "disk", value)


def check_cache(cache: Path) -> Finding:
    """The cache must be writable to fetch models; a fetched model is only read."""
    reason = why_not_writable(cache)
    if reason is None:
        return Finding("ok", "cache", f"{cache} is writable")
    known = find_known(DEFAULT_MODEL)
    assert known is not None
    advice = "no model can be fetched into it: set RIDGELINE_CACHE to a writable directory"
    is_needed = not cached_file(known).is_file()
    return Finding("missing", "cache", f"{cache}: {reason}", advice, fatal=is_needed)


def check_state(folder: Path) -> Finding:
    reason = why_not_writable(folder)
    if reason is None:
        return Finding("ok", "state", f"{folder} is writable")
    advice = "`ridgeline serve` keeps files, batches and responses there: give it --state-dir"
    return Finding("missing", "state", f"{folder}: {reason}", advice, fatal=True)


def why_not_writable(folder: Path) -> str | None:
    """None if a file can be created in `folder` or in its nearest existing parent. Tries it."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        return f"{existing} is not writable ({error.strerror})"
    return None


def check_default_model() -> Finding:
    known = find_known(DEFAULT_MODEL)
    assert known is not None
    if cached_file(known).is_file():
        return Finding("ok", "model", f"{known.name}, {known.bytes / 1e6:.0f} MB")
    advice = f"fetched when first used, or now: ridgeline models pull {known.name}"
    return Finding("missing", "model", f"{known.name} is not in the cache", advice)


def check_compiler() -> Finding:
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            done = subprocess.run([name, "--version"], capture_output=True, text=True)
            first = done.stdout.splitlines()[:1]
            return Finding("ok", "compiler", first[0] if first else name)
    from ridgeline.ops.cpu import interface

    if interface.LIBRARY_PATH.exists():
        return Finding("ok", "compiler", "none, and none is needed: the native library is built")
    return Finding(
        "missing", "compiler", "no c++, g++ or clang++", "needed to build native kernels: install g++"
    )


def check_pip() -> Finding:
    if importlib.util.find_spec("pip") is None:
        advice = f"needed by `ridgeline models pull`: {sys.executable} -m ensurepip"
        return Finding("missing", "pip", f"not in {sys.executable}", advice)
    from importlib.metadata import version

    return Finding("ok", "pip", version("pip"))


def check_calibration() -> Finding:
    from ridgeline.engine.limits.calibration import load_calibration
    from ridgeline.ops.cpu.library import NativeError

    advice = (
        "limits are measured briefly at each start, step sizes are defaults: ridgeline doctor --calibrate"
    )
    try:
        found = load_calibration()
    except NativeError as error:  # RIDGELINE_ISA names what does not run here
        return Finding("missing", "calibration", str(error), "unset RIDGELINE_ISA")
    if found is None:
        return Finding("missing", "calibration", "none for this machine", advice)
    read, models = found.ceilings.reads[-1].bytes_per_s, "; ".join(found.choices) or "no model yet"
    return Finding("ok", "calibration", f"{found.machine.isa}, memory read {read / GB:.1f} GB/s; {models}")


def check_hub(url: str = HUB_URL) -> Finding:
    from ridgeline.proxy.blocking_client import BlockingClient
    from ridgeline.proxy.errors import Unreachable

    try:
        with BlockingClient(url, timeout_s=HUB_TIMEOUT_S).open("HEAD", "") as answer:
            said = "" if answer.status < 400 else f" ({answer.status})"
    except Unreachable as error:
        advice = "org/name cannot be fetched from the hub; short names, directories and .gguf files work"
        return Finding("missing", "hub", f"{url}: {error}", advice)
    return Finding("ok", "hub", f"{url} answers{said}")


def check_native_rates(measured: measure.Measured) -> Iterator[Finding]:
    found = measured.values
    if "read_bytes_per_s" not in found:
        advice = "the native library fails on this processor; use --backend torch"
        yield Finding("missing", "memory read", measured.failure, advice)
        return
    yield memory_read(found["read_bytes_per_s"])
    for name in ("float32", "bfloat16", "int8"):
        rate = found.get(f"{name}_flops_per_s")
        if rate is not None:
            yield Finding("ok", name, f"{rate / 1e9:.0f} GFLOP/s at most")
    yield decode_limit(found["read_bytes_per_s"])


def check_torch(measured: measure.Measured, *, needed: bool) -> Iterator[Finding]:
    """needed: no other backend is available."""
    found = measured.values
    if "torch" not in found:
        why = (
            "no other backend is available"
            if needed
            else "for models that the native backend does not support"
        )
        advice = f"{why}: pip install 'ridgeline[torch]' (the CPU build of torch is enough)"
        yield Finding("missing", "torch", measured.failure or "not found", advice, fatal=needed)
        return
    yield Finding("ok", "torch", f"{found['torch']}, {found['threads']} threads")


def check_gpu(measured: measure.Measured) -> Iterator[Finding]:
    found = measured.values
    gpu = found.get("gpu")
    if gpu is None:
        yield Finding("ok", "gpu", "none is visible; models run on the CPU")
        return
    free = f", {found['free_bytes'] / GIB:.1f} free" if "free_bytes" in found else ""
    versions = [f"{name} {found[name]}" for name in ("torch", "triton") if name in found]
    driver = machine.gpu_driver()
    value = ", ".join(
        [
            f"{gpu['name']}, {gpu['total_bytes'] / GIB:.1f} GiB{free}",
            f"compute capability {'.'.join(map(str, gpu['capability']))}",
            f"driver {driver or 'of unknown version'} (CUDA {'.'.join(map(str, gpu['driver_cuda']))})",
            *versions,
        ]
    )
    refusal = measured.failure or found.get("refusal")
    if refusal:
        yield Finding("missing", "gpu", value, f"models do not run on it: {refusal}")
        return
    yield Finding("ok", "gpu", value)


def check_gpu_rates(measured: measure.Measured) -> Finding:
    found = measured.values
    if measured.failure:
        advice = "the GPU does not compute: stop other programs that use it, and check nvidia-smi"
        return Finding("missing", "gpu rates", measured.failure, advice)
    read, rate = found["gpu_read_bytes_per_s"] / 1e12, found["gpu_flops_per_s"] / 1e12
    return Finding("ok", "gpu rates", f"reads {read:.2f} TB/s, {rate:.0f} TFLOP/s in bfloat16")


def check_torch_rates(measured: measure.Measured, bfloat16: measure.Measured) -> Iterator[Finding]:
    read = measured.values.get("read_bytes_per_s")
    float32 = measured.values.get("float32_flops_per_s")
    if read is None or float32 is None:
        advice = "torch does not compute on this processor; try another torch build"
        yield Finding("missing", "float32", measured.failure, advice, fatal=True)
        return
    yield memory_read(read)
    yield Finding("ok", "float32", f"{float32 / 1e9:.0f} GFLOP/s")
    yield check_bfloat16(bfloat16, float32)
    yield decode_limit(read)


def memory_read(bytes_per_s: float) -> Finding:
    slow = bytes_per_s < SLOW_READ_BYTES_PER_S
    advice = "decoding is bound by this: use more cores, or a smaller or quantized model" if slow else ""
    return Finding("slow" if slow else "ok", "memory read", f"{bytes_per_s / GB:.1f} GB/s", advice)


def check_bfloat16(measured: measure.Measured, float32_flops_per_s: float) -> Finding:
    rate = measured.values.get("bfloat16_flops_per_s")
    if rate is None:
        advice = f"keep --weights float32, or set {measure.ISA_VARIABLE} lower before torch is imported"
        return Finding("missing", "bfloat16", measured.failure, advice)
    value = f"{rate / 1e9:.0f} GFLOP/s"
    if rate < float32_flops_per_s:
        advice = "slower than float32 here: keep --backend torch at --weights float32"
        return Finding("slow", "bfloat16", value, advice)
    return Finding("ok", "bfloat16", value)


def check_amx(measured: measure.Measured) -> Finding:
    """AMX is advertised, but a hypervisor may hide the CPUID leaf of its tiles; only a test shows it."""
    if measured.failure:
        advice = (
            "the torch backend does not use AMX; in your own programs, set "
            f"{measure.ISA_VARIABLE}={measure.SAFE_ISA} before torch is imported"
        )
        return Finding("missing", "amx", f"advertised, but using it {measured.failure}", advice)
    rate = measured.values["bfloat16_flops_per_s"]
    advice = f"to use it: {measure.ISA_VARIABLE}=AVX512_CORE_AMX with --backend torch --weights bfloat16"
    return Finding("ok", "amx", f"works, {rate / 1e9:.0f} GFLOP/s in bfloat16", advice)


def decode_limit(read_bytes_per_s: float) -> Finding:
    """Each token reads every weight once, so bandwidth over bytes is an upper limit for any engine."""
    known = find_known(DEFAULT_MODEL)
    assert known is not None
    sizes = {"as stored": known.bytes}
    if cached_file(known).is_file():
        from ridgeline.models.spec.read_spec import read_spec

        sizes["in float32"] = read_spec(cached_file(known)).weight_bytes("float32")
    limits = [
        f"{read_bytes_per_s / size:.0f} tok/s {how} ({size / 1e6:.0f} MB per token)"
        for how, size in sizes.items()
    ]
    return Finding("ok", "decode limit", f"{known.name}: at most {', '.join(limits)}")
