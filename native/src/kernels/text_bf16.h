// Attention of a text in bfloat16: queries, keys, values and probabilities are rounded to pairs; scores, softmax and sums
// are floats. For encoders whose weights are bfloat16. A row's sums run over the pairs in order, whatever its neighbours are.
#pragma once
#include "text.h"

namespace {

// Rows of pairs times a matrix of pairs, which lies as `weight_step` dwords from one pair to the next; `panel_dwords` lead to the
// next 16 columns.
struct PairTask {
  const uint32_t* x;
  size_t x_stride;
  int rows, pairs, columns;
  const uint32_t* weights;
  size_t weight_step, panel_dwords;
  float scale;
  float* out;
  size_t out_stride;
};

template <int R, int V>
void pair_rows_tile(const PairTask& task, int row, int column) {
  const uint32_t* w = task.weights + size_t(column / kPanel) * task.panel_dwords + column % kPanel;
  const size_t next = kLanes == kPanel ? task.panel_dwords : size_t(kLanes), stride = task.x_stride;
  constexpr int kBases = (R + 2) / 3;  // as in dense_tile
  const uint32_t* bases[kBases];
  repeat<kBases>([&](auto b) RL_INLINE { bases[b] = task.x + (size_t(row) + 3 * b) * stride; });
  F acc[R][V];
  repeat<R>([&](auto r) RL_INLINE { repeat<V>([&](auto v) RL_INLINE { acc[r][v] = zero(); }); });
  for (int i = 0; i < task.pairs; i++, w += task.weight_step) {
    Bytes weights[V];
    repeat<V>([&](auto v) RL_INLINE { weights[v] = load_bytes(reinterpret_cast<const uint8_t*>(w + v * next)); });
    repeat<R>([&](auto r) RL_INLINE {
      const uint8_t* x = reinterpret_cast<const uint8_t*>(bases[r / 3] + (r % 3) * stride);
      repeat<V>([&](auto v) RL_INLINE { acc[r][v] = dot_bf16(acc[r][v], weights[v], x); });
    });
    repeat<kBases>([&](auto b) RL_INLINE { bases[b]++; });
  }
  repeat<R>([&](auto r) RL_INLINE {
    repeat<V>([&](auto v) RL_INLINE {
      store(task.out + (size_t(row) + r) * task.out_stride + size_t(column) + v * kLanes, mul(acc[r][v], set(task.scale)));
    });
  });
}

template <int R = kDenseRows>
void pair_rows(const PairTask& task, int row, int column, int vectors) {
  if constexpr (R > 1)
    if (task.rows - row < R) return pair_rows<R - 1>(task, row, column, vectors);
  if (vectors == 2) return pair_rows_tile<R, 2>(task, row, column);
  pair_rows_tile<R, 1>(task, row, column);
}

inline void pair_product(const PairTask& task) {
  for (int column = 0; column < task.columns; column += 2 * kLanes)
    for (int row = 0; row < task.rows; row += kDenseRows) pair_rows(task, row, column, column + kLanes < task.columns ? 2 : 1);
}

// `n` floats as bf16 into `out`, zeros up to `padded`, a multiple of 16. `row`: room for `padded` floats.
inline void round_row(const float* from, int n, int padded, float* row, uint16_t* out) {
  std::memset(row + n / kPanel * kPanel, 0, size_t(padded - n / kPanel * kPanel) * sizeof(float));
  std::memcpy(row, from, size_t(n) * sizeof(float));
  for (int i = 0; i < padded; i += kLanes) store_bf16(out + i, load(row + i));
}

// The parts of the scratch memory, in dwords.
struct PairScratch {
  size_t keys, values, queries, scores, shares, mixed, row, total;

  PairScratch(int tokens, int head_dim) {
    const size_t padded = size_t(ridgeline::round_up(tokens, kPanel)), dim = size_t(ridgeline::round_up(head_dim, kPanel));
    size_t at = 0;
    auto take = [&](size_t dwords) { return at += dwords, at - dwords; };
    keys = take(padded * dim / 2), values = take(padded / 2 * dim), queries = take(kDenseRows * dim / 2);
    scores = take(kDenseRows * padded), shares = take(kDenseRows * padded / 2), mixed = take(kDenseRows * dim);
    row = take(2 * dim), total = at;
  }
};

inline size_t text_bf16_scratch_floats(int tokens, int head_dim) { return PairScratch(tokens, head_dim).total; }

// Keys as panels of pairs of their numbers, values as rows of pairs of tokens.
inline void gather_pairs(const TextAttention& text, const PairScratch& at, uint32_t* scratch) {
  const int dim = ridgeline::round_up(text.head_dim, kPanel), pairs = dim / 2, padded = ridgeline::round_up(text.tokens, kPanel);
  uint32_t *keys = scratch + at.keys, *values = scratch + at.values;
  float* row = reinterpret_cast<float*>(scratch + at.row);
  uint32_t* rounded = scratch + at.row + dim;
  uint16_t* halves = reinterpret_cast<uint16_t*>(rounded);
  std::memset(values, 0, size_t(padded / 2) * dim * 4);
  for (int token = 0; token < padded; token++) {
    uint32_t* to = keys + size_t(token / kPanel) * kPanel * pairs + token % kPanel;
    if (token < text.tokens) round_row(text.keys + size_t(token) * text.stride, text.head_dim, dim, row, halves);
    else std::memset(rounded, 0, size_t(pairs) * 4);
    for (int i = 0; i < pairs; i++) to[i * kPanel] = rounded[i];
  }
  for (int token = 0; token < text.tokens; token++) {
    round_row(text.values + size_t(token) * text.stride, text.head_dim, dim, row, halves);
    uint16_t* to = reinterpret_cast<uint16_t*>(values + size_t(token / 2) * dim) + token % 2;
    for (int i = 0; i < dim; i++) to[2 * i] = halves[i];
  }
}

inline void attend_text_bf16(const TextAttention& text, float* memory) {
  const PairScratch at(text.tokens, text.head_dim);
  uint32_t* scratch = reinterpret_cast<uint32_t*>(memory);
  const int padded = ridgeline::round_up(text.tokens, kPanel), dim = ridgeline::round_up(text.head_dim, kPanel), pairs = dim / 2;
  uint32_t *queries = scratch + at.queries, *shares = scratch + at.shares;
  float *scores = memory + at.scores, *mixed = memory + at.mixed, *row = memory + at.row;
  gather_pairs(text, at, scratch);
  for (int first = text.first; first < text.end; first += kDenseRows) {
    const int rows = std::min(kDenseRows, text.end - first);
    for (int r = 0; r < rows; r++)
      round_row(text.queries + size_t(first + r) * text.stride, text.head_dim, dim, row, reinterpret_cast<uint16_t*>(queries + size_t(r) * pairs));
    pair_product({queries, size_t(pairs), rows, pairs, padded, scratch + at.keys, kPanel, size_t(kPanel) * pairs, text.scale, scores,
                  size_t(padded)});
    for (int r = 0; r < rows; r++) {
      float* of_row = scores + size_t(r) * padded;
      softmax(of_row, text.tokens, padded);
      uint16_t* to = reinterpret_cast<uint16_t*>(shares + size_t(r) * padded / 2);
      for (int i = 0; i < padded; i += kLanes) store_bf16(to + i, load(of_row + i));
    }
    pair_product({shares, size_t(padded) / 2, rows, (text.tokens + 1) / 2, dim, scratch + at.values, size_t(dim), kPanel, 1.0f, mixed,
                  size_t(dim)});
    for (int r = 0; r < rows; r++)
      std::memcpy(text.out + size_t(first + r) * text.out_stride, mixed + size_t(r) * dim, size_t(text.head_dim) * 4);
  }
}

}  // namespace
