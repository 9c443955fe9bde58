// Paged attention: query heads of one KV head, for a few tokens of one sequence, over its blocks of 16 tokens.
//
// Keys are taken 64 at a time ("chunk", at absolute positions, so that a row's arithmetic does not depend on the rows
// computed with it): scores, then an online softmax, then the weighted sum of the values. Masked keys are replaced, never
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
  alignas(64) float value_offset[kAttentionRows];  // added to every element of the sum of a chunk's values
  alignas(64) float out[kAttentionRows][kMaxHeadDim + 16];
  float most[kAttentionRows], total[kAttentionRows], correction[kAttentionRows];
  // A chunk in another form: INT4 as bytes in the layout of INT8, with scales and minima; bf16 as words (attention_words.h).
  alignas(64) uint8_t key_bytes[kChunk * kMaxHeadDim * 2], value_bytes[kChunk * kMaxHeadDim * 2];
  alignas(64) float key_scales[kChunk], key_minima[kChunk], value_scales[kChunk], value_minima[kChunk];
};

template <int kKv>
constexpr bool is_integer() {
  return kKv == RL_KV_INT8 || kKv == RL_KV_INT4;
}

template <int kKv>
struct KvLayout {
  static constexpr int kPack = kKv == RL_KV_F32 ? 1 : kKv == RL_KV_BF16 ? 2 : 4;  // elements that share a dword
  // Bytes of the queries or weights that a dword is multiplied with. bf16 pairs may be kept as floats, rounded to bf16.
  static constexpr int kInputBytes = kKv == RL_KV_BF16 && kBf16AsFloats ? 8 : 4;
};

inline void quantize_limbs(const float* x, int n, int8_t* high, int8_t* low, float* scale, float* sum) {
  const float most = largest_size(x, n);
  if (!is_finite(x, n)) {  // must stay visibly broken
    std::memset(high, 0, size_t(n)), std::memset(low, 0, size_t(n));
    *scale = *sum = std::numeric_limits<float>::quiet_NaN();
    return;
  }
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
  } else if constexpr (kKv == RL_KV_BF16 && kBf16AsFloats) {
    for (int i = 0; i < dim; i += kLanes) store(reinterpret_cast<float*>(s.queries[0][row]) + i, rounded_bf16(load(query + i)));
  } else if constexpr (kKv == RL_KV_BF16) {
    for (int i = 0; i < dim; i += kLanes) store_bf16(reinterpret_cast<uint16_t*>(s.queries[0][row]) + i, load(query + i));
  } else {
    quantize_limbs(query, dim, reinterpret_cast<int8_t*>(s.queries[0][row]), reinterpret_cast<int8_t*>(s.queries[1][row]),
                   &s.query_scale[row], &s.query_sum[row]);
  }
}

// Accumulators are numbered acc[(r · B + b) · V + v]: row r, block b, vector v of the block's dwords.
template <int kKv, int R, int B, int V>
RL_INLINE inline void dot_rows(I (&dots)[R * B * V], const uint8_t* const (&packed)[B], size_t at, const uint8_t* x, size_t x_stride) {
  repeat<B * V>([&](auto j) RL_INLINE {
    const Bytes w = load_bytes(packed[j / V] + at + j % V * kLanes * 4);
    repeat<R>([&](auto r) RL_INLINE {
      I& sum = dots[r * B * V + j];
      if constexpr (kDotTakesBytes || kKv == RL_KV_INT4) {
        sum = dot(sum, w, x + r * x_stride);
      } else {
        const I high = dot(zero_int(), high_nibbles(w), x + r * x_stride);
        sum = add_int(dot(sum, low_nibbles(w), x + r * x_stride), shift_left(high, 4));
      }
    });
  });
}

// acc += Σ over `count` dwords of packed[b][i][vector v] · x[row r][i]; dwords of one vector lie `next` bytes apart. Bytes
// are multiplied with both limbs; the sum is exact, acc is overwritten.
template <int kKv, int R, int B, int V>
RL_INLINE inline void products(F (&acc)[R * B * V], const uint8_t* const (&packed)[B], size_t next, int count,
                               const uint8_t* x_high, const uint8_t* x_low, size_t x_stride) {
  if constexpr (is_integer<kKv>()) {
    I dots[R * B * V];
    repeat<R * B * V>([&](auto j) RL_INLINE { dots[j] = zero_int(); });
    for (int i = 0; i < count; i++) dot_rows<kKv, R, B, V>(dots, packed, i * next, x_high + i * 4, x_stride);
    repeat<R * B * V>([&](auto j) RL_INLINE { dots[j] = shift_left(dots[j], 7); });
    for (int i = 0; i < count; i++) dot_rows<kKv, R, B, V>(dots, packed, i * next, x_low + i * 4, x_stride);
    repeat<R * B * V>([&](auto j) RL_INLINE { acc[j] = to_float(dots[j]); });
  } else if constexpr (KvLayout<kKv>::kInputBytes == 8) {
    for (int i = 0; i < count; i++) {
      F low[B * V], high[B * V];
      repeat<B * V>([&](auto j) RL_INLINE {
        const Bytes w = load_bytes(packed[j / V] + i * next + j % V * kLanes * 4);
        low[j] = low_bf16(w), high[j] = high_bf16(w);
      });
      repeat<R>([&](auto r) RL_INLINE {
        const float* x = reinterpret_cast<const float*>(x_high + i * 8 + r * x_stride);
        const F first = set(x[0]), second = set(x[1]);
        repeat<B * V>([&](auto j) RL_INLINE { acc[r * B * V + j] = fma(low[j], first, acc[r * B * V + j]); });
        repeat<B * V>([&](auto j) RL_INLINE { acc[r * B * V + j] = fma(high[j], second, acc[r * B * V + j]); });
      });
    }
  } else {
    for (int i = 0; i < count; i++) {
      const uint8_t* x = x_high + i * 4;
      repeat<B * V>([&](auto j) RL_INLINE {
        const uint8_t* weights = packed[j / V] + i * next + j % V * kLanes * 4;
        if constexpr (kKv == RL_KV_F32) {
          const F w = load(reinterpret_cast<const float*>(weights));
          repeat<R>([&](auto r) RL_INLINE {
            acc[r * B * V + j] = fma(w, set(*reinterpret_cast<const float*>(x + r * x_stride)), acc[r * B * V + j]);
          });
        } else {
          const Bytes w = load_bytes(weights);
          repeat<R>([&](auto r) RL_INLINE { acc[r * B * V + j] = dot_bf16(acc[r * B * V + j], w, x + r * x_stride); });
        }
      });
    }
  }
}

// Scores of rows [row, row + R) with the 16 keys of each of B neighbouring blocks, the chunk's `first` block on; not yet
// scaled. Few rows take several blocks at once: one sum after the other would wait for each addition.
template <int kKv, int R, int B>
inline void block_scores(const KvHead& kv, const int32_t* blocks, AttentionScratch& s, int row, int first) {
  constexpr int V = kHalves;
  const int dwords = kv.head_dim / KvLayout<kKv>::kPack;
  const uint8_t* keys[B];
  repeat<B>([&](auto b) RL_INLINE { keys[b] = kv.keys + size_t(blocks[first + b]) * kv.block_bytes; });
  F acc[R * B * V];
  repeat<R * B * V>([&](auto j) RL_INLINE { acc[j] = zero(); });
  products<kKv, R, B, V>(acc, keys, kBlock * 4, dwords, s.queries[0][row], s.queries[1][row], sizeof s.queries[0][0]);
  repeat<R * B * V>([&](auto j) RL_INLINE {
    constexpr int r = j / (B * V), b = j / V % B, lane = j % V * kLanes;
    F value = acc[j];
    if constexpr (kKv == RL_KV_INT8) {  // (Σ q·(k + 128) · scale - 128 · Σ q · scale) · key scale
      value = fma(value, set(s.query_scale[row + r]), set(-128.0f * s.query_sum[row + r]));
      value = mul(value, load(kv.key_scales + size_t(blocks[first + b]) * kv.scale_stride + lane));
    } else if constexpr (kKv == RL_KV_INT4) {  // Σ q·k · scale · key scale + Σ q · scale · key minimum
      const int token = (first + b) * kBlock + lane;
      const F minima = mul(load(s.key_minima + token), set(s.query_sum[row + r]));
      value = fma(mul(value, set(s.query_scale[row + r])), load(s.key_scales + token), minima);
    }
    store(&s.scores[row + r][(first + b) * kBlock + lane], value);
  });
}

// Masks, scales and exponentiates one row of a chunk that begins at position `base`, and moves its running maximum. bf16
// weights end where they are multiplied, others in the place of the scores.
template <int kKv>
inline void exponentiate(const AttentionRow& row, AttentionScratch& s, int r, int base, int blocks, float scale, float cap) {
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
  const bool empty = row.first >= base + keys || row.last < base;  // nothing to attend to: a chunk before the row's window
  s.correction[r] = now == before ? 1.0f : before == kNothing ? 0.0f : std::exp(before - now);
  s.most[r] = now;
  F sums = zero();
  for (int i = 0; i < keys; i += kLanes) {
    const F p = empty ? zero() : exp_negative(sub(load(scores + i), set(now)));  // a NaN stays one
    sums = add(sums, p);
    if constexpr (kKv == RL_KV_BF16 && kBf16AsFloats)
      store(reinterpret_cast<float*>(s.weights[0][r]) + i, rounded_bf16(p));
    else if constexpr (kKv == RL_KV_BF16)
      store_bf16(reinterpret_cast<uint16_t*>(s.weights[0][r]) + i, p);
    else
      store(scores + i, p);
  }
  s.total[r] = s.total[r] * s.correction[r] + sum(sums);
}

// The same, and the weights in the form that values are multiplied with. `table`: where the scales of the chunk's blocks are;
// for integers only.
template <int kKv>
inline void chunk_softmax(const KvHead& kv, const int32_t* table, const AttentionRow& row, AttentionScratch& s, int r, int base, int blocks,
                          float scale, float cap) {
  exponentiate<kKv>(row, s, r, base, blocks, scale, cap);
  float* scores = s.scores[r];
  const int keys = blocks * kBlock;
  if constexpr (kKv == RL_KV_F32) {
    std::memcpy(s.weights[0][r], scores, size_t(keys) * 4);
  } else if constexpr (is_integer<kKv>()) {
    F minima = zero();
    for (int b = 0; b < blocks; b++) {
      const float* value_scales = kv.value_scales + size_t(table[b]) * kv.scale_stride;
      for (int i = 0; i < kBlock; i += kLanes) {
        const int token = b * kBlock + i;
        const F p = load(scores + token);
        if constexpr (kKv == RL_KV_INT4)
          minima = add(minima, inside(mul(p, load(s.value_minima + token)), base + token, row.first, row.last, 0.0f));
        store(scores + token, inside(mul(p, load(value_scales + i)), base + token, row.first, row.last, 0.0f));
      }
    }
    quantize_limbs(scores, keys, reinterpret_cast<int8_t*>(s.weights[0][r]), reinterpret_cast<int8_t*>(s.weights[1][r]),
                   &s.weight_scale[r], &s.weight_sum[r]);
    s.value_offset[r] = kKv == RL_KV_INT4 ? sum(minima) : -128.0f * s.weight_sum[r];
  }
}

// out = out · correction + Σ over the chunk's valid tokens of weight · value, for R rows and V vectors of the head.
template <int kKv, int R, int V>
inline void chunk_values(const KvHead& kv, const int32_t* blocks, AttentionScratch& s, int row, int valid, int at) {
  constexpr int kPack = KvLayout<kKv>::kPack, kPerBlock = kBlock / kPack, kInputBytes = KvLayout<kKv>::kInputBytes;
  constexpr size_t kRowBytes = sizeof s.weights[0][0];
  const size_t next = size_t(kv.head_dim) * 4, offset = size_t(at) * 4;
  F acc[R * V];
  repeat<R * V>([&](auto j) RL_INLINE {
    acc[j] = mul(load(&s.out[row + j / V][at + j % V * kLanes]), set(s.correction[row + j / V]));
  });
  for (int done = 0; done < valid; done += kBlock) {
    const uint8_t* const values[1] = {kv.values + size_t(blocks[done / kBlock]) * kv.block_bytes + offset};
    const int tokens = std::min(kBlock, valid - done), whole = tokens / kPack;
    const uint8_t* x = s.weights[0][row] + done / kPack * kInputBytes;
    if constexpr (is_integer<kKv>()) {  // bytes beyond the last token are multiplied with zeros, exactly
      F part[R * V];
      products<kKv, R, 1, V>(part, values, next, kPerBlock, x, s.weights[1][row] + done / kPack * 4, kRowBytes);
      repeat<R * V>([&](auto j) RL_INLINE { acc[j] = fma(part[j], set(s.weight_scale[row + j / V]), acc[j]); });
    } else {
      products<kKv, R, 1, V>(acc, values, next, whole, x, x, kRowBytes);
      if (kKv == RL_KV_BF16 && tokens % 2)  // the odd one's neighbour may hold anything
        repeat<V>([&](auto v) RL_INLINE {
          const Bytes w = low_halves(load_bytes(values[0] + whole * next + v * kLanes * 4));
          repeat<R>([&](auto r) RL_INLINE {
            const uint8_t* last = x + r * kRowBytes + whole * kInputBytes;
            if constexpr (kInputBytes == 8) acc[r * V + v] = fma(low_bf16(w), set(*reinterpret_cast<const float*>(last)), acc[r * V + v]);
            else acc[r * V + v] = dot_bf16(acc[r * V + v], w, last);
          });
        });
    }
  }
  repeat<R * V>([&](auto j) RL_INLINE {
    if constexpr (is_integer<kKv>()) acc[j] = add(acc[j], set(s.value_offset[row + j / V]));
    store(&s.out[row + j / V][at + j % V * kLanes], acc[j]);
  });
}

// Blocks, or vectors of a head, that R rows take at once: as many as there are registers for.
template <int R>
constexpr int at_once() {
  return std::max(1, std::min(kChunkBlocks, kAttentionSums / (R * kHalves)));
}

template <int kKv, int R>
void score_rows(const KvHead& kv, const int32_t* blocks, AttentionScratch& s, int row, int count) {
  constexpr int B = at_once<R>();
  int b = 0;
  for (; b + B <= count; b += B) block_scores<kKv, R, B>(kv, blocks, s, row, b);
  for (; b < count; b++) block_scores<kKv, R, 1>(kv, blocks, s, row, b);
}

template <int kKv, int R>
void weigh_rows(const KvHead& kv, const int32_t* blocks, AttentionScratch& s, int row, int valid) {
  constexpr int V = kHalves * at_once<R>();
  int at = 0;
  for (; at + V * kLanes <= kv.head_dim; at += V * kLanes) chunk_values<kKv, R, V>(kv, blocks, s, row, valid, at);
  for (; at < kv.head_dim; at += kPanel) chunk_values<kKv, R, kHalves>(kv, blocks, s, row, valid, at);
}

// Calls one(number of rows, first row) for tiles of at most kAttentionTile rows.
template <int R, typename One>
inline void tile_of(int rows, int row, const One& one) {
  if constexpr (R == 1) one(std::integral_constant<int, 1>{}, row);
  else if (rows >= R) one(std::integral_constant<int, R>{}, row);
  else tile_of<R - 1>(rows, row, one);
}
template <typename One>
inline void for_tiles(int count, const One& one) {
  for (int row = 0; row < count; row += kAttentionTile) tile_of<kAttentionTile>(std::min(count - row, kAttentionTile), row, one);
}

// Keys and values of a decode come from memory, block by block from anywhere: no hardware sees that coming.
inline void prefetch_blocks(const uint8_t* heads, const KvHead& kv, const int32_t* blocks, int count) {
  const size_t bytes = ridgeline::kv_bytes(kv.format, kv.head_dim);
  for (int b = 0; b < count; b++)
    for (size_t line = 0; line < bytes; line += 64) prefetch(heads + size_t(blocks[b]) * kv.block_bytes + line);
}

// Prepares the queries and empties the sums; the positions any of the rows attends to. prepare(row number)
template <typename Prepare>
inline void begin_rows(const KvHead& kv, const AttentionRow* rows, int count, AttentionScratch& s, int* first, int* last,
                       const Prepare& prepare) {
  *first = rows[0].first, *last = rows[0].last;
  for (int r = 0; r < count; r++) {
    *first = std::min(*first, rows[r].first), *last = std::max(*last, rows[r].last);
    prepare(r);
    s.most[r] = rows[r].sink, s.total[r] = rows[r].sink == kNothing ? 0.0f : 1.0f;
    std::memset(s.out[r], 0, size_t(kv.head_dim) * 4);
  }
}

inline void end_rows(const KvHead& kv, const AttentionRow* rows, int count, const AttentionScratch& s) {
  for (int r = 0; r < count; r++) {
    const F inverse = set(1.0f / s.total[r]);
    for (int i = 0; i < kv.head_dim; i += kLanes) store(rows[r].out + i, mul(load(&s.out[r][i]), inverse));
  }
}

inline int blocks_of(int valid) { return (valid + kBlock - 1) / kBlock; }

// Both halves of N bytes, each as N bytes.
template <int N>
inline void split_halves(const uint8_t* from, uint8_t* low, uint8_t* high) {
  constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
  for (int i = 0; i < N; i += 8) {
    uint64_t both, first, second;
    std::memcpy(&both, from + i, 8);
    first = both & kLow, second = both >> 4 & kLow;
    std::memcpy(low + i, &first, 8), std::memcpy(high + i, &second, 8);
  }
}

inline void split_words(const float* from, float* scales, float* minima) {
  for (int i = 0; i < kBlock; i++) {
    uint32_t word, scale, minimum;
    std::memcpy(&word, from + i, 4);
    scale = word & 0xffff0000, minimum = word << 16;
    std::memcpy(scales + i, &scale, 4), std::memcpy(minima + i, &minimum, 4);
  }
}

constexpr int32_t kInOrder[kChunkBlocks] = {0, 1, 2, 3};

// The blocks of a chunk in INT4 as bytes in the layout of INT8, which many rows then read; blocks are numbered from 0.
inline KvHead expanded(const KvHead& kv, const int32_t* blocks, int count, AttentionScratch& s) {
  const int dim = kv.head_dim;
  const size_t block_bytes = size_t(dim) * kBlock;
  for (int b = 0; b < count; b++) {
    const uint8_t* keys = kv.keys + size_t(blocks[b]) * kv.block_bytes;
    uint8_t* key_bytes = s.key_bytes + b * block_bytes;
    for (int i = 0; i < dim / 8; i++) split_halves<64>(keys + i * 64, key_bytes + i * 128, key_bytes + i * 128 + 64);
    const uint8_t* values = kv.values + size_t(blocks[b]) * kv.block_bytes;
    uint8_t* value_bytes = s.value_bytes + b * block_bytes;
    for (int i = 0; i < dim / 4; i++) split_halves<32>(values + i * 32, value_bytes + i * 64, value_bytes + i * 64 + 32);
    const size_t at = size_t(blocks[b]) * kv.scale_stride;
    split_words(kv.key_scales + at, s.key_scales + b * kBlock, s.key_minima + b * kBlock);
    split_words(kv.value_scales + at, s.value_scales + b * kBlock, s.value_minima + b * kBlock);
  }
  return {RL_KV_INT4, dim, s.key_bytes, s.value_bytes, s.key_scales, s.value_scales, block_bytes, size_t(kBlock), kInOrder};
}

template <int kKv>
void attend_kv(const KvHead& kv, const AttentionRow* rows, int count, float scale, float cap, AttentionScratch& s) {
  int first, last;
  begin_rows(kv, rows, count, s, &first, &last, [&](int r) { prepare_query<kKv>(rows[r].query, kv.head_dim, s, r); });
  const int begin = first / kChunk * kChunk;
  const bool few = count <= kAttentionTile;
  if (few) prefetch_blocks(kv.keys, kv, kv.block_table + begin / kBlock, blocks_of(std::min(kChunk, last + 1 - begin)));
  for (int base = begin; base <= last; base += kChunk) {
    const int valid = std::min(kChunk, last + 1 - base), count_blocks = blocks_of(valid);
    const int32_t* blocks = kv.block_table + base / kBlock;
    if (few) {
      prefetch_blocks(kv.values, kv, blocks, count_blocks);
      const int next = base + kChunk;
      if (next <= last) prefetch_blocks(kv.keys, kv, blocks + kChunkBlocks, blocks_of(std::min(kChunk, last + 1 - next)));
    }
    KvHead chunk = kv;
    if constexpr (kKv == RL_KV_INT4) chunk = expanded(kv, blocks, count_blocks, s), blocks = kInOrder;
    for_tiles(count, [&](auto tile, int row) { score_rows<kKv, tile>(chunk, blocks, s, row, count_blocks); });
    for (int r = 0; r < count; r++) chunk_softmax<kKv>(chunk, blocks, rows[r], s, r, base, count_blocks, scale, cap);
    for_tiles(count, [&](auto tile, int row) { weigh_rows<kKv, tile>(chunk, blocks, s, row, valid); });
  }
  end_rows(kv, rows, count, s);
}

inline AttentionScratch& attention_scratch() {
  static thread_local AttentionScratch scratch;
  return scratch;
}

inline void vector_attend(const KvHead& kv, const AttentionRow* rows, int count, float scale, float cap) {
  AttentionScratch& s = attention_scratch();
  switch (kv.format) {
    case RL_KV_F32: return attend_kv<RL_KV_F32>(kv, rows, count, scale, cap, s);
    case RL_KV_BF16: return attend_kv<RL_KV_BF16>(kv, rows, count, scale, cap, s);
    case RL_KV_INT8: return attend_kv<RL_KV_INT8>(kv, rows, count, scale, cap, s);
    default: return attend_kv<RL_KV_INT4>(kv, rows, count, scale, cap, s);
  }
}

}  // namespace
