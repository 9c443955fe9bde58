// Paged attention: query heads of one KV head, for a few tokens of one sequence, over its blocks of 16 tokens.
//
// Keys are taken 64 at a time ("chunk", at absolute positions, so that a row's arithmetic does not depend on who it is
// computed with): scores, then an online softmax, then the weighted sum of the values. Masked keys are replaced, never
// multiplied away: memory beyond a sequence may hold anything.
#pragma once
#include <limits>

#include "inputs.h"

namespace {

using ridgeline::AttentionRow;
using ridgeline::kAttentionRows;
using ridgeline::kBlock;
using ridgeline::kPanel;
using ridgeline::KvHead;
using ridgeline::kMaxHeadDim;

constexpr int kChunk = 64;
constexpr int kChunkBlocks = kChunk / kBlock;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// One call's working memory. Rows are a cache line longer than the longest head: at a power of two apart they would all
// fall into the same few sets of the first-level cache.
struct AttentionScratch {
  alignas(64) uint8_t queries[2][kAttentionRows][kMaxHeadDim * 4 + 64];  // floats, bf16 pairs, or two limbs of bytes
  alignas(64) float query_scale[kAttentionRows], query_sum[kAttentionRows];
  alignas(64) float scores[kAttentionRows][kChunk];
  alignas(64) uint8_t weights[2][kAttentionRows][kChunk * 4 + 64];  // the softmax's numerators, in the form of the queries
  alignas(64) float weight_scale[kAttentionRows], weight_sum[kAttentionRows];
  alignas(64) float out[kAttentionRows][kMaxHeadDim + 16];
  float most[kAttentionRows], total[kAttentionRows], correction[kAttentionRows];
};

template <int kKv>
struct KvLayout {
  static constexpr int kPack = kKv == RL_KV_F32 ? 1 : kKv == RL_KV_BF16 ? 2 : 4;  // elements that share a dword
};

inline void quantize_limbs(const float* x, int n, int8_t* high, int8_t* low, float* scale, float* sum) {
  const float most = largest_size(x, n);
  const float inverse = most > 1e-30f ? 16256.0f / most : 0.0f;
  int32_t total = 0;
  for (int i = 0; i < n; i += kLanes) {
    const I q = round_int(mul(load(x + i), set(inverse)));
    const I top = shift_right(add_int(q, set_int(64)), 7);
    store_int8(high + i, top);
    store_int8(low + i, sub_int(q, shift_left(top, 7)));
    total += sum_int(q);
  }
  *scale = inverse == 0.0f ? 0.0f : most / 16256.0f;
  *sum = *scale * float(total);
}

template <int kKv>
inline void prepare_query(const float* query, int dim, AttentionScratch& s, int row) {
  if constexpr (kKv == RL_KV_F32) {
    std::memcpy(s.queries[0][row], query, size_t(dim) * 4);
  } else if constexpr (kKv == RL_KV_BF16) {
    for (int i = 0; i < dim; i += kLanes) store_bf16(reinterpret_cast<uint16_t*>(s.queries[0][row]) + i, load(query + i));
  } else {
    quantize_limbs(query, dim, reinterpret_cast<int8_t*>(s.queries[0][row]), reinterpret_cast<int8_t*>(s.queries[1][row]),
                   &s.query_scale[row], &s.query_sum[row]);
  }
}

template <int R, int V>
RL_INLINE inline void dot_rows(I (&dots)[R * V], const uint8_t* weights, const uint8_t* x, size_t x_stride) {
  repeat<V>([&](auto v) RL_INLINE {
    const Bytes w = load_bytes(weights + v * kLanes * 4);
    repeat<R>([&](auto r) RL_INLINE {
      if constexpr (kDotTakesBytes) {
        dots[r * V + v] = dot(dots[r * V + v], w, x + r * x_stride);
      } else {
        const I high = dot(zero_int(), high_nibbles(w), x + r * x_stride);
        dots[r * V + v] = add_int(dot(dots[r * V + v], low_nibbles(w), x + r * x_stride), shift_left(high, 4));
      }
    });
  });
}

// acc[r · V + v] += Σ over `count` dwords of packed[i][lanes of vector v] · x[row r][i]. Vectors are kLanes dwords apart,
// dwords of one vector `next` bytes. Bytes are multiplied with both limbs; the sum is exact, acc is overwritten.
template <int kKv, int R, int V>
RL_INLINE inline void products(F (&acc)[R * V], const uint8_t* packed, size_t next, int count, const uint8_t* x_high,
                               const uint8_t* x_low, size_t x_stride) {
  if constexpr (kKv == RL_KV_INT8) {
    I dots[R * V];
    repeat<R * V>([&](auto j) RL_INLINE { dots[j] = zero_int(); });
    for (int i = 0; i < count; i++) dot_rows<R, V>(dots, packed + i * next, x_high + i * 4, x_stride);
    repeat<R * V>([&](auto j) RL_INLINE { dots[j] = shift_left(dots[j], 7); });
    for (int i = 0; i < count; i++) dot_rows<R, V>(dots, packed + i * next, x_low + i * 4, x_stride);
    repeat<R * V>([&](auto j) RL_INLINE { acc[j] = to_float(dots[j]); });
  } else {
    for (int i = 0; i < count; i++) {
      const uint8_t *weights = packed + i * next, *x = x_high + i * 4;
      if constexpr (kKv == RL_KV_F32) {
        repeat<R * V>([&](auto j) RL_INLINE {
          acc[j] = fma(load(reinterpret_cast<const float*>(weights) + j % V * kLanes),
                       set(*reinterpret_cast<const float*>(x + j / V * x_stride)), acc[j]);
        });
      } else {
        repeat<V>([&](auto v) RL_INLINE {
          const Bytes w = load_bytes(weights + v * kLanes * 4);
          repeat<R>([&](auto r) RL_INLINE { acc[r * V + v] = dot_bf16(acc[r * V + v], w, x + r * x_stride); });
        });
      }
    }
  }
}

// Scores of rows [row, row + R) with one block's 16 keys, not yet scaled.
template <int kKv, int R>
inline void block_scores(const KvHead& kv, int block, AttentionScratch& s, int row, int at) {
  const uint8_t* keys = kv.keys + size_t(block) * kv.block_bytes;
  const int dwords = kv.head_dim / KvLayout<kKv>::kPack;
  F acc[R * kHalves];
  repeat<R * kHalves>([&](auto j) RL_INLINE { acc[j] = zero(); });
  products<kKv, R, kHalves>(acc, keys, kBlock * 4, dwords, s.queries[0][row], s.queries[1][row], sizeof s.queries[0][0]);
  repeat<R * kHalves>([&](auto j) RL_INLINE {
    constexpr int r = j / kHalves, lane = j % kHalves * kLanes;
    F value = acc[j];
    if constexpr (kKv == RL_KV_INT8) {  // (Σ q·(k + 128) · scale - 128 · Σ q · scale) · key scale
      value = fma(value, set(s.query_scale[row + r]), set(-128.0f * s.query_sum[row + r]));
      value = mul(value, load(kv.key_scales + size_t(block) * kv.scale_stride + lane));
    }
    store(&s.scores[row + r][at + lane], value);
  });
}

// Masks, scales and exponentiates one row of a chunk that begins at position `base`, and moves its running maximum.
template <int kKv>
inline void chunk_softmax(const KvHead& kv, const AttentionRow& row, AttentionScratch& s, int r, int base, int blocks,
                          float scale, float cap) {
  float* scores = s.scores[r];
  const int keys = blocks * kBlock;
  const bool masked = row.first > base || row.last < base + keys - 1;
  F most = set(kNothing);
  for (int i = 0; i < keys; i += kLanes) {
    F x = mul(load(scores + i), set(scale));
    if (cap > 0) x = mul(tanh_of(div(x, set(cap))), set(cap));
    if (masked) x = inside(x, base + i, row.first, row.last, kNothing);
    store(scores + i, x);
    most = max(x, most);
  }
  const float before = s.most[r], now = std::max(before, largest(most));
  const bool empty = now == kNothing;  // nothing to attend to yet: a chunk before the row's window
  s.correction[r] = now == before ? 1.0f : before == kNothing ? 0.0f : std::exp(before - now);
  s.most[r] = now;
  F sums = zero();
  for (int i = 0; i < keys; i += kLanes) {
    const F p = empty ? zero() : exp_negative(sub(load(scores + i), set(now)));  // a NaN stays one
    sums = add(sums, p);
    if constexpr (kKv == RL_KV_BF16)
      store_bf16(reinterpret_cast<uint16_t*>(s.weights[0][r]) + i, p);
    else
      store(scores + i, p);
  }
  s.total[r] = s.total[r] * s.correction[r] + sum(sums);
  if constexpr (kKv == RL_KV_F32) {
    std::memcpy(s.weights[0][r], scores, size_t(keys) * 4);
  } else if constexpr (kKv == RL_KV_INT8) {
    for (int b = 0; b < blocks; b++) {
      const float* value_scales = kv.value_scales + size_t(kv.block_table[base / kBlock + b]) * kv.scale_stride;
      for (int i = 0; i < kBlock; i += kLanes) {
        float* p = scores + b * kBlock + i;
        store(p, inside(mul(load(p), load(value_scales + i)), base + b * kBlock + i, row.first, row.last, 0.0f));
      }
    }
    quantize_limbs(scores, keys, reinterpret_cast<int8_t*>(s.weights[0][r]), reinterpret_cast<int8_t*>(s.weights[1][r]),
                   &s.weight_scale[r], &s.weight_sum[r]);
  }
}

// out = out · correction + Σ over the chunk's valid tokens of weight · value, for R rows and V vectors of the head.
template <int kKv, int R, int V>
inline void chunk_values(const KvHead& kv, AttentionScratch& s, int row, int base, int valid, int at) {
  constexpr int kPack = KvLayout<kKv>::kPack, kPerBlock = kBlock / kPack;  // dwords of a block
  constexpr size_t kRowBytes = sizeof s.weights[0][0];
  const size_t next = size_t(kv.head_dim) * 4, offset = size_t(at) * 4;
  F acc[R * V];
  repeat<R * V>([&](auto j) RL_INLINE {
    acc[j] = mul(load(&s.out[row + j / V][at + j % V * kLanes]), set(s.correction[row + j / V]));
  });
  for (int done = 0; done < valid; done += kBlock) {
    const uint8_t* values = kv.values + size_t(kv.block_table[(base + done) / kBlock]) * kv.block_bytes + offset;
    const int tokens = std::min(kBlock, valid - done), whole = tokens / kPack;
    const uint8_t* x = s.weights[0][row] + done / kPack * 4;
    if constexpr (kKv == RL_KV_INT8) {  // bytes beyond the last token are multiplied with zeros, exactly
      F part[R * V];
      products<kKv, R, V>(part, values, next, kPerBlock, x, s.weights[1][row] + done / kPack * 4, kRowBytes);
      repeat<R * V>([&](auto j) RL_INLINE { acc[j] = fma(part[j], set(s.weight_scale[row + j / V]), acc[j]); });
    } else {
      products<kKv, R, V>(acc, values, next, whole, x, x, kRowBytes);
      if (kKv == RL_KV_BF16 && tokens % 2)  // the odd one's neighbour may hold anything
        repeat<V>([&](auto v) RL_INLINE {
          const Bytes w = low_halves(load_bytes(values + whole * next + v * kLanes * 4));
          repeat<R>([&](auto r) RL_INLINE { acc[r * V + v] = dot_bf16(acc[r * V + v], w, x + r * kRowBytes + whole * 4); });
        });
    }
  }
  repeat<R * V>([&](auto j) RL_INLINE {
    if constexpr (kKv == RL_KV_INT8) acc[j] = add(acc[j], set(-128.0f * s.weight_sum[row + j / V]));
    store(&s.out[row + j / V][at + j % V * kLanes], acc[j]);
  });
}

template <int kKv, int R>
void attend_chunk_rows(const KvHead& kv, AttentionScratch& s, int row, int base, int valid, bool scores) {
  if (scores) {
    for (int b = 0; b * kBlock < valid; b++)
      block_scores<kKv, R>(kv, kv.block_table[base / kBlock + b], s, row, b * kBlock);
  } else {
    for (int at = 0; at < kv.head_dim; at += kPanel) chunk_values<kKv, R, kHalves>(kv, s, row, base, valid, at);
  }
}

template <int kKv, int R>
inline void attend_some(int rows, const KvHead& kv, AttentionScratch& s, int row, int base, int valid, bool scores) {
  if constexpr (R == 1) attend_chunk_rows<kKv, 1>(kv, s, row, base, valid, scores);
  else if (rows >= R) attend_chunk_rows<kKv, R>(kv, s, row, base, valid, scores);
  else attend_some<kKv, R - 1>(rows, kv, s, row, base, valid, scores);
}

template <int kKv>
inline void attend_all(const KvHead& kv, AttentionScratch& s, int count, int base, int valid, bool scores) {
  for (int row = 0; row < count; row += kAttentionTile)
    attend_some<kKv, kAttentionTile>(std::min(count - row, kAttentionTile), kv, s, row, base, valid, scores);
}

template <int kKv>
void attend_kv(const KvHead& kv, const AttentionRow* rows, int count, float scale, float cap) {
  static thread_local AttentionScratch s;
  int first = rows[0].first, last = rows[0].last;
  for (int r = 0; r < count; r++) {
    first = std::min(first, rows[r].first), last = std::max(last, rows[r].last);
    prepare_query<kKv>(rows[r].query, kv.head_dim, s, r);
    s.most[r] = kNothing, s.total[r] = 0.0f;
    std::memset(s.out[r], 0, size_t(kv.head_dim) * 4);
  }
  for (int base = first / kChunk * kChunk; base <= last; base += kChunk) {
    const int valid = std::min(kChunk, last + 1 - base), blocks = (valid + kBlock - 1) / kBlock;
    attend_all<kKv>(kv, s, count, base, valid, true);
    for (int r = 0; r < count; r++) chunk_softmax<kKv>(kv, rows[r], s, r, base, blocks, scale, cap);
    attend_all<kKv>(kv, s, count, base, valid, false);
  }
  for (int r = 0; r < count; r++)
    for (int i = 0; i < kv.head_dim; i += kLanes) store(rows[r].out + i, div(load(&s.out[r][i]), set(s.total[r])));
}

inline void attend(const KvHead& kv, const AttentionRow* rows, int count, float scale, float cap) {
  switch (kv.format) {
    case RL_KV_F32: return attend_kv<RL_KV_F32>(kv, rows, count, scale, cap);
    case RL_KV_BF16: return attend_kv<RL_KV_BF16>(kv, rows, count, scale, cap);
    default: return attend_kv<RL_KV_INT8>(kv, rows, count, scale, cap);
  }
}

// ---- writing the cache ----

// The value's scale, and the value as bytes offset by 128.
inline float offset_bytes(const float* value, int dim, uint8_t* bytes) {
  const float most = largest_size(value, dim);
  if (!is_finite(value, dim)) {
    std::memset(bytes, 128, size_t(dim));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  for (int i = 0; i < dim; i += kLanes) {
    int8_t rounded[kLanes];
    store_int8(rounded, round_int(mul(load(value + i), set(inverse))));
    for (int j = 0; j < kLanes; j++) bytes[i + j] = uint8_t(rounded[j] ^ 0x80);
  }
  return inverse == 0.0f ? 0.0f : most / 127.0f;
}

inline void store_key(const KvHead& kv, int block, int slot, const float* value) {
  uint8_t* keys = const_cast<uint8_t*>(kv.keys) + size_t(block) * kv.block_bytes + slot * 4;
  const int dim = kv.head_dim;
  alignas(64) uint8_t packed[kMaxHeadDim * 4];
  int dwords = dim;
  if (kv.format == RL_KV_F32) {
    std::memcpy(packed, value, size_t(dim) * 4);
  } else if (kv.format == RL_KV_BF16) {
    for (int i = 0; i < dim; i += kLanes) store_bf16(reinterpret_cast<uint16_t*>(packed) + i, load(value + i));
    dwords = dim / 2;
  } else {
    const_cast<float*>(kv.key_scales)[size_t(block) * kv.scale_stride + slot] = offset_bytes(value, dim, packed);
    dwords = dim / 4;
  }
  for (int i = 0; i < dwords; i++) std::memcpy(keys + size_t(i) * kBlock * 4, packed + i * 4, 4);
}

inline void store_value(const KvHead& kv, int block, int slot, const float* value) {
  uint8_t* values = const_cast<uint8_t*>(kv.values) + size_t(block) * kv.block_bytes;
  const int dim = kv.head_dim;
  if (kv.format == RL_KV_F32) {
    std::memcpy(values + size_t(slot) * dim * 4, value, size_t(dim) * 4);
  } else if (kv.format == RL_KV_BF16) {
    alignas(64) uint16_t rounded[kMaxHeadDim];
    for (int i = 0; i < dim; i += kLanes) store_bf16(rounded + i, load(value + i));
    uint16_t* out = reinterpret_cast<uint16_t*>(values) + size_t(slot / 2) * dim * 2 + slot % 2;
    for (int i = 0; i < dim; i++) out[i * 2] = rounded[i];
  } else {
    alignas(64) uint8_t bytes[kMaxHeadDim];
    const_cast<float*>(kv.value_scales)[size_t(block) * kv.scale_stride + slot] = offset_bytes(value, dim, bytes);
    uint8_t* out = values + size_t(slot / 4) * dim * 4 + slot % 4;
    for (int i = 0; i < dim; i++) out[i * 4] = bytes[i];
  }
}

}  // namespace
