// What an encoder computes beside its dense layers and norms: attention of a text's tokens to all of them.
#pragma once
#include "dense.h"

namespace {

using ridgeline::TextAttention;

// Scores of one query to all tokens, `n` of them, become probabilities; what lies up to `padded` becomes 0.
inline void softmax(float* scores, int n, int padded) {
  for (int i = n; i < padded; i++) scores[i] = -INFINITY;
  F most = load(scores);
  for (int i = kLanes; i < padded; i += kLanes) most = max(most, load(scores + i));
  const F top = set(largest(most));
  F total = zero();
  for (int i = 0; i < padded; i += kLanes) {
    const F p = exp_negative(sub(load(scores + i), top));
    total = add(total, p);
    store(scores + i, p);
  }
  const F share = set(1.0f / sum(total));
  for (int i = 0; i < padded; i += kLanes) store(scores + i, mul(load(scores + i), share));
}

inline size_t text_scratch_floats(int tokens, int head_dim) {
  const size_t keys = ridgeline::round_up(tokens, kPanel), dim = ridgeline::round_up(head_dim, kPanel);
  return keys * size_t(head_dim) + kDenseRows * (keys + dim);
}

// Keys become the panels of a matrix, so that scores are a dense layer; values are one as they lie.
inline void attend_text(const TextAttention& text, float* scratch) {
  const int keys = ridgeline::round_up(text.tokens, kPanel), dim = text.head_dim, padded_dim = ridgeline::round_up(dim, kPanel);
  float* panels = scratch;
  float* scores = panels + size_t(keys) * dim;
  float* mixed = scores + size_t(kDenseRows) * keys;
  for (int key = 0; key < keys; key += kPanel)
    for (int lane = 0; lane < kPanel; lane++) {
      const float* from = text.keys + size_t(key + lane) * text.stride;
      float* to = panels + size_t(key) * dim + lane;
      for (int i = 0; i < dim; i++) to[i * kPanel] = key + lane < text.tokens ? from[i] : 0.0f;
    }
  for (int first = text.first; first < text.end; first += kDenseRows) {
    const int rows = std::min(kDenseRows, text.end - first);
    const float* queries = text.queries + size_t(first) * text.stride;
    dense({queries, text.stride, rows, dim, keys, panels, kPanel, size_t(dim) * kPanel, nullptr, nullptr, text.scale,
           Follow::Nothing, scores, size_t(keys)});
    for (int row = 0; row < rows; row++) softmax(scores + size_t(row) * keys, text.tokens, keys);
    dense({scores, size_t(keys), rows, text.tokens, padded_dim, text.values, text.stride, kPanel, nullptr, nullptr, 1.0f,
           Follow::Nothing, mixed, size_t(padded_dim)});
    for (int row = 0; row < rows; row++)
      std::memcpy(text.out + size_t(first + row) * text.out_stride, mixed + size_t(row) * padded_dim, size_t(dim) * 4);
  }
}

}  // namespace
