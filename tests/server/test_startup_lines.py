"""What `ridgeline serve` prints when it is ready: what computes, where the start went, memory and limits."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from ridgeline.engine.link.messages import Hello
from ridgeline.engine.start.memory_receipt import PARTS, MemoryReceipt
from ridgeline.models.files.generation_config import SamplingDefaults
from ridgeline.server.process.startup_text import serving_line, startup_lines

HELLO = Hello(
    pid=1,
    model="smollm2-135m",
    backend="native (avx512, 2 threads), weights int4 (Q4_1) and int8, KV bfloat16",
    max_context=8192,
    max_running=64,
    kv_tokens=65_536,
    vocab_size=49_152,
    block_size=16,
    seconds={"import": 0.2, "plan": 0.05},
    bytes={"weights": 1 << 28, "kv": 1 << 30, "rest": 1 << 27},
    limits={
        "read_bytes_per_s": 40e9,
        "flops_per_s": 900e9,
        "decode_tokens_per_s": 410.0,
        "prefill_tokens_per_s": 3900.0,
    },
    notes=("torch because of a test", "a second note"),
)


def test_the_lines_say_what_computes_why_and_at_what_limits():
    lines = startup_lines(SimpleNamespace(hello=HELLO), "smollm2-135m").splitlines()
    first, backend, why, second, start, memory, limits = lines
    assert "smollm2-135m" in first
    assert backend == f"  backend  {HELLO.backend}"
    assert (why.strip(), second.strip()) == HELLO.notes
    assert "import 0.20 · plan 0.05 · ready" in start
    assert "weights 0.25 · KV cache 1.00 (65,536 tokens)" in memory
    assert "decode 410 tok/s for one stream (40.0 GB/s read) · prefill 3900 tok/s" in limits
    assert "http://127.0.0.1:8000/v1" in serving_line("http://127.0.0.1:8000")


def test_limits_that_were_measured_on_a_busy_machine_are_marked():
    hello = msgspec.structs.replace(HELLO, limits=HELLO.limits | {"uncertainty": 0.4})
    *_, limits, why = startup_lines(SimpleNamespace(hello=hello), "smollm2-135m").splitlines()
    assert "decode ~410 tok/s for one stream (~40.0 GB/s read) · prefill ~3900 tok/s (~900 GFLOP/s)" in limits
    assert "at least 40% uncertain" in why
    assert "doctor --calibrate" in why
    sure = msgspec.structs.replace(HELLO, limits=HELLO.limits | {"uncertainty": 0.03})
    assert "~" not in startup_lines(SimpleNamespace(hello=sure), "smollm2-135m")


def test_the_lines_name_the_models_sampling_defaults_and_their_source():
    defaults = SamplingDefaults(temperature=0.2, top_p=0.9, source="the model card")
    hello = msgspec.structs.replace(HELLO, sampling=defaults)
    last = startup_lines(SimpleNamespace(hello=hello), "smollm2-135m").splitlines()[-1]
    assert last == "  sampling temperature 0.2, top_p 0.9 by default (the model card)"


def test_the_lines_of_a_gpu_show_its_receipt_and_its_limits_in_their_units():
    receipt = MemoryReceipt(
        planned=dict.fromkeys(PARTS, 1 << 30),
        observed=dict.fromkeys(PARTS, 3 << 29),
        peak_tensor_bytes=7 << 30,
        peak_reserved_bytes=8 << 30,
        device_free_bytes=9 << 30,
        device_total_bytes=140 << 30,
    )
    limits = HELLO.limits | {"read_bytes_per_s": 4.27e12, "flops_per_s": 791e12}
    hello = msgspec.structs.replace(HELLO, bytes={**receipt.as_bytes(), "rest": 1 << 20}, limits=limits)
    lines = startup_lines(SimpleNamespace(hello=hello), "smollm2-135m").splitlines()
    memory, whole, rates = lines[5:8]
    assert "memory   weights 1.50 (planned 1.00) · KV cache 1.50 (planned 1.00)" in memory
    assert "KV cache of 65,536 tokens · peak 7.00 of 8.00 GiB held · device 9.00 of 140.00" in whole
    assert "(4.27 TB/s read)" in rates
    assert "(791.00 TFLOP/s)" in rates
