// Dense layers in float32: many rows times a matrix, with what follows a row's sum done while it is at hand.
//
// Inputs are rows of floats as they lie, not interleaved: an encoder's rows pass through a dense layer four times per
// layer, and most of that arithmetic binds. The matrix lies in panels of 16 outputs (formats.h, F32), or in place as rows
// of a buffer, which is how attention multiplies by values. A row's sums run over k in order, whatever its neighbours are.
#pragma once
#include <algorithm>

#include "activations.h"
#include "../kernels.h"

namespace {

using ridgeline::DenseTask;
using ridgeline::Follow;
using ridgeline::kPanel;

// R rows times V vectors of outputs.
template <int R, int V>
void dense_tile(const DenseTask& task, int row, int column) {
  const float* w = task.weights + size_t(column / kPanel) * task.panel_floats + column % kPanel;
  const size_t next = kLanes == kPanel ? task.panel_floats : size_t(kLanes), step = task.weight_step, stride = task.x_stride;
  // Three rows are reached from one pointer, which keeps all of them in registers.
  constexpr int kBases = (R + 2) / 3;
  const float* bases[kBases];
  repeat<kBases>([&](auto b) RL_INLINE { bases[b] = task.x + (size_t(row) + 3 * b) * stride; });
  F acc[R][V];
  repeat<R>([&](auto r) RL_INLINE { repeat<V>([&](auto v) RL_INLINE { acc[r][v] = zero(); }); });
  for (int i = 0; i < task.k; i++, w += step) {
    F weights[V];
    repeat<V>([&](auto v) RL_INLINE { weights[v] = load(w + v * next); });
    repeat<R>([&](auto r) RL_INLINE {
      const F x = set(bases[r / 3][(r % 3) * stride]);
      repeat<V>([&](auto v) RL_INLINE { acc[r][v] = fma(weights[v], x, acc[r][v]); });
    });
    repeat<kBases>([&](auto b) RL_INLINE { bases[b]++; });
  }
  const F scale = set(task.scale);
  repeat<R>([&](auto r) RL_INLINE {
    repeat<V>([&](auto v) RL_INLINE {
      const size_t at = (size_t(row) + r) * task.out_stride + size_t(column) + v * kLanes;
      F sum = mul(acc[r][v], scale);
      if (task.bias) sum = add(sum, load(task.bias + column + v * kLanes));
      store(task.out + at, task.follow == Follow::Add ? add(sum, load(task.residual + at)) : sum);
    });
  });
}

template <int R = kDenseRows>
void dense_rows(const DenseTask& task, int row, int column, int vectors) {
  if constexpr (R > 1)
    if (task.rows - row < R) return dense_rows<R - 1>(task, row, column, vectors);
  if (vectors == 2) return dense_tile<R, 2>(task, row, column);
  dense_tile<R, 1>(task, row, column);
}

// On sums that were stored a moment ago, and are in the nearest cache: in the tiles it would be written out 24 times.
template <typename Activation>
inline void activate_tile(const DenseTask& task, int row, int column, int vectors, const Activation& activation) {
  for (int r = row; r < std::min(task.rows, row + kDenseRows); r++) {
    float* at = task.out + size_t(r) * task.out_stride + size_t(column);
    for (int v = 0; v < vectors; v++) store(at + v * kLanes, activation(load(at + v * kLanes)));
  }
}

inline void follow_tile(const DenseTask& task, int row, int column, int vectors) {
  switch (task.follow) {
    case Follow::GeluErf: return activate_tile(task, row, column, vectors, gelu_erf);
    case Follow::GeluTanh: return activate_tile(task, row, column, vectors, gelu_tanh);
    case Follow::Relu: return activate_tile(task, row, column, vectors, relu);
    default: return;
  }
}

// A pair of vectors' weights stays in cache while all rows pass over it.
inline void dense(const DenseTask& task) {
  for (int column = 0; column < task.columns; column += 2 * kLanes) {
    const int vectors = column + kLanes < task.columns ? 2 : 1;
    for (int row = 0; row < task.rows; row += kDenseRows) {
      dense_rows(task, row, column, vectors);
      follow_tile(task, row, column, vectors);
    }
  }
}

}  // namespace
