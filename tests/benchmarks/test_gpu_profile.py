"""The profile knows every kernel of the engine by its name, and says what a part achieved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.gpu.profile import part_of, rate


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_decode_attend", "attention of decodes"),
        ("_attend_prefix", "attention of decodes"),
        ("_prefill_attend", "attention of prompts"),
        ("_attend_specialized", "attention of prompts"),
        ("_gather_kv", "attention of prompts"),
        ("_gemv_kernel", "linears"),
        ("_stream_kernel", "linears"),
        ("_gated_linear_kernel", "linears"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "linears"),
        ("_add_norm_kernel", "norms, rope, KV write, activation"),
        ("_gated_kernel", "norms, rope, KV write, activation"),
        ("_draw", "sampling"),
        ("_prepare", "inputs"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("an unknown kernel", "other"),
    ],
)
def test_a_kernel_belongs_to_its_part(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_attention_of_prompts_is_counted_below_the_diagonal() -> None:
    spec = SimpleNamespace(num_heads=2, head_dim=8, num_layers=3)
    whole = SimpleNamespace(prefill_tokens=4, prefill_rows=1, prefill_context_product=16)
    # 4 · 2 · 8 · 3 = 192 operations a pair, 16 - 8 pairs, in a millionth of a second
    assert rate(spec, [whole], "attention of prompts", 192 * 8 / 1e12) == "1 TFLOP/s"
