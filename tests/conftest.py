"""Shared by all tests: one environment variable that must be set before torch is imported."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
