// The kernel table of one instruction set. Compiled once per set, with its flags and RL_ISA naming it.
#include "kernels.h"

#include "kernels/attention.h"
#include "kernels/dense.h"
#include "kernels/kv_store.h"
#include "kernels/linear.h"
#include "kernels/linear_f8.h"
#include "kernels/peak.h"
#include "kernels/rows.h"
#include "kernels/text.h"
#include "kernels/text_bf16.h"
#if defined(__AMX_BF16__)
#include "kernels/attention_amx.h"
#include "kernels/linear_amx.h"
#elif defined(__AVX512F__)
#include "kernels/linear_expanded.h"
#define RL_EXPANDS_TO_BYTES
#elif defined(__AVXVNNI__)
#include "kernels/attention_words.h"
#include "kernels/linear_expanded.h"
#include "kernels/linear_pairs.h"
#define RL_ATTENDS_IN_WORDS
#define RL_EXPANDS_TO_BYTES
#define RL_IN_ONE_PASS
#elif defined(__AVX2__)
#include "kernels/attention_words.h"
#include "kernels/linear_coded.h"
#include "kernels/linear_words.h"
#define RL_ATTENDS_IN_WORDS
#define RL_CODES_SCALES
#define RL_IN_ONE_PASS
#elif defined(RL_NEON)
#include "kernels/linear_pairs.h"
#define RL_IN_ONE_PASS
#endif

#define RL_JOIN(a, b) a##b
#define RL_TABLE(isa) RL_JOIN(isa, _kernels)
#define RL_TEXT_OF(x) #x
#define RL_TEXT(x) RL_TEXT_OF(x)

namespace {

// Up to this many rows the weights' bytes are the bound, not the arithmetic: two limbs cost nothing and keep 15 bits.
constexpr int kRowsWithTwoLimbs = 1;

inline InputKind input_kind(int format, int rows, bool deterministic) {
  if (format == RL_F32) return InputKind::Float;
#if defined(__AMX_BF16__)
  if (!deterministic && amx_pays(format, rows)) return format == RL_Q8_C ? InputKind::Int16Rows : InputKind::Bf16Rows;
#endif
#if defined(RL_EXPANDS_TO_BYTES)
  if (!deterministic && (is_four_bit(format) || format == RL_Q6_K) && rows >= kRowsForExpanding) return InputKind::Int8Expanded;
#endif
#if defined(RL_CODES_SCALES)
  if (!deterministic && rows >= rows_for_coding(format)) return InputKind::Int8Coded;
#endif
  if (format == RL_BF16) return InputKind::Bf16;
  if (format == RL_F8) return kBf16AsFloats || deterministic || rows == 1 ? InputKind::Float : InputKind::Bf16;
  if (format == RL_Q8_C) return InputKind::Int16PerRow;
  if (deterministic || rows <= kRowsWithTwoLimbs) return InputKind::Int16;
#if defined(RL_CODES_SCALES)
  if (format == RL_Q8_H || format == RL_Q8_FM) return InputKind::Int8Words;
#endif
  return InputKind::Int8;
}

inline void panel_products(const rl_matrix& m, int panel, int count, const Inputs& in, int first, int end, float* out,
                           size_t stride, bool add_to, [[maybe_unused]] uint8_t* scratch) {
#if defined(__AMX_BF16__)
  if (in.kind == InputKind::Bf16Rows || in.kind == InputKind::Int16Rows) {
    const int end_row = end == in.tiling.count ? in.tiling.rows : in.tiling.first(end);
    return amx_panel_products(m, panel, count, in, in.tiling.first(first), end_row, out, stride, add_to, scratch);
  }
#endif
  for (int p = 0; p < count; p++) {
    if (m.format == RL_F8) {
      f8_panel_product(m, panel + p, in, first, end, out + p * kPanel, stride, add_to, scratch);
      continue;
    }
#if defined(RL_EXPANDS_TO_BYTES)
    if (in.kind == InputKind::Int8Expanded) {
      expanded_panel_product(m, panel + p, in, first, end, out + p * kPanel, stride, add_to, scratch);
      continue;
    }
#endif
#if defined(RL_CODES_SCALES)
    if (in.kind == InputKind::Int8Coded) {
      coded_panel_product(m, panel + p, in, first, end, out + p * kPanel, stride, add_to, scratch);
      continue;
    }
#endif
#if defined(RL_CODES_SCALES)
    if (in.kind == InputKind::Int8Words) {
      word_panel_product(m, panel + p, in, first, end, out + p * kPanel, stride, add_to);
      continue;
    }
#endif
#if defined(RL_IN_ONE_PASS)
    if (computes_in_one_pass(m.format, in.kind)) {
      pair_panel_product(m, panel + p, in, first, end, out + p * kPanel, stride, add_to, scratch);
      continue;
    }
#endif
    panel_product(m, panel + p, in, first, end, out + p * kPanel, stride, add_to);
  }
}

#if defined(RL_ATTENDS_IN_WORDS)
constexpr int kAttentionTokens = ridgeline::kRowsForExpanding;  // where the products change their arithmetic as well
#else
constexpr int kAttentionTokens = 1;
#endif

inline void attend(const KvHead& kv, const AttentionRow* rows, int count, float scale, float cap, bool deterministic) {
#if defined(__AMX_BF16__)
  if (!deterministic && amx_attention_pays(kv, count)) return amx_attend(kv, rows, count, scale, cap);
#endif
#if defined(RL_ATTENDS_IN_WORDS)
  if (!deterministic && words_pay(kv, count)) return word_attend(kv, rows, count, scale, cap);
#endif
  (void)deterministic;
  vector_attend(kv, rows, count, scale, cap);
}

#if !defined(__AMX_BF16__)
constexpr int kOwnRows = kLinearRows;
constexpr size_t kInputBlockBytes = 384 << 10;
inline size_t panel_scratch_bytes([[maybe_unused]] int k) {
  size_t bytes = f8_scratch_bytes();
#if defined(RL_EXPANDS_TO_BYTES)
  bytes = std::max(bytes, expanded_bytes(k));
#endif
#if defined(RL_CODES_SCALES)
  bytes = std::max(bytes, coded_bytes());
#endif
#if defined(RL_IN_ONE_PASS)
  bytes = std::max(bytes, expanded_scales_bytes(k));
#endif
  return bytes;
}
inline void start_thread() {}
#endif

}  // namespace

namespace ridgeline {

const Kernels* RL_TABLE(RL_ISA)() {
  static const Kernels table = {
      RL_TEXT(RL_ISA), kLinearRows, kOwnRows, input_kind, prepare_row, panel_products, kInputBlockBytes, panel_scratch_bytes,
      rms_norm,        layer_norm,  add_scaled, gate,        gate_clamped,      activate,   rope,   softcap,  keep_best,
      store_key,       store_value, attend, kAttentionTokens,
      kDenseRows,      dense,       text_scratch_floats, attend_text, text_bf16_scratch_floats, attend_text_bf16,
      peak_operations, start_thread,
  };
  return &table;
}

}  // namespace ridgeline
