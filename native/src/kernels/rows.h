// What is computed row by row between the matrix products: norms, rotary embedding, gates, caps; and
// the best of the logits after them. All in float.
#pragma once
#include "simd.h"
#include "../kernels.h"

namespace {

using ridgeline::Best;
using ridgeline::kPanel;

// Loads up to kLanes floats; lanes beyond `count` are zero.
inline F load_some(const float* p, int count) {
  if (count >= kLanes) return load(p);
  alignas(64) float lanes[kLanes] = {};
  std::memcpy(lanes, p, size_t(count) * 4);
  return load(lanes);
}
inline void store_some(float* p, F value, int count) {
  if (count >= kLanes) return store(p, value);
  alignas(64) float lanes[kLanes];
  store(lanes, value);
  std::memcpy(p, lanes, size_t(count) * 4);
}

inline void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  F squares = zero();
  for (int i = 0; i < n; i += kLanes) {
    const F value = load_some(x + i, n - i);
    squares = fma(value, value, squares);
  }
  const F inverse = set(1.0f / std::sqrt(sum(squares) / float(n) + eps));
  for (int i = 0; i < n; i += kLanes)
    store_some(out + i, mul(mul(load_some(x + i, n - i), inverse), load_some(weight + i, n - i)), n - i);
}

inline void add_rows(const float* x, int n, float* out) {
  for (int i = 0; i < n; i += kLanes) store_some(out + i, add(load_some(out + i, n - i), load_some(x + i, n - i)), n - i);
}

// activation(gate) · up
inline void gate(int activation, const float* gates, const float* ups, int n, float* out) {
  for (int i = 0; i < n; i += kLanes) {
    const F x = load(gates + i);
    F active;
    if (activation == RL_SILU) {
      active = mul(x, sigmoid(x));
    } else {  // 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))
      const F inner = mul(set(0.7978845608028654f), fma(mul(mul(x, x), x), set(0.044715f), x));
      active = mul(mul(set(0.5f), x), add(set(1.0f), tanh_of(inner)));
    }
    store(out + i, mul(active, load(ups + i)));
  }
}

// Pairs (i, i + rotary_dim / 2) turn by the angle of their position.
inline void rope(float* head, const float* cosine, const float* sine, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const int count = half - i;
    const F c = load_some(cosine + i, count), s = load_some(sine + i, count);
    const F first = load_some(head + i, count), second = load_some(head + half + i, count);
    store_some(head + i, sub(mul(first, c), mul(second, s)), count);
    store_some(head + half + i, fma(second, c, mul(first, s)), count);
  }
}

inline void softcap(float* x, int n, float cap) {
  for (int i = 0; i < n; i += kLanes)
    store_some(x + i, mul(tanh_of(div(load_some(x + i, n - i), set(cap))), set(cap)), n - i);
}

inline void keep_best(const float* x, size_t stride, int rows, int n, int first, Best* best) {
  for (; rows > 0; rows--, x += stride, best++) {
    F above = zero();
    for (int i = 0; i < kPanel; i += kLanes) above = max(above, zero_up_to(set(1.0f), load(x + i), set(best->value)));
    if (largest(above) == 0.0f) continue;  // nearly always
    for (int i = 0; i < n; i++)            // a NaN is not below either
      if (!(x[i] <= best->value)) *best = x[i] < INFINITY ? Best{x[i], first + i} : Best{INFINITY, -1};
  }
}

}  // namespace
