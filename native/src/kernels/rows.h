// What is computed row by row between the matrix products: norms, rotary embedding, gates, caps; and
// the best of the logits after them. All in float.
#pragma once
#include "activations.h"
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

inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  F total = zero();
  for (int i = 0; i < n; i += kLanes) total = add(total, load_some(x + i, n - i));
  const float mean = sum(total) / float(n);
  F squares = zero();
  for (int i = 0; i < n; i += kLanes) {
    alignas(64) float lanes[kLanes];
    store(lanes, sub(load_some(x + i, n - i), set(mean)));
    const F off = load_some(lanes, n - i);  // lanes beyond the row do not count for the variance
    squares = fma(off, off, squares);
  }
  const F inverse = set(1.0f / std::sqrt(sum(squares) / float(n) + eps)), shift = set(-mean);
  for (int i = 0; i < n; i += kLanes) {
    const F normed = mul(add(load_some(x + i, n - i), shift), inverse), w = load_some(weight + i, n - i);
    store_some(out + i, bias ? fma(normed, w, load_some(bias + i, n - i)) : mul(normed, w), n - i);
  }
}

inline void add_scaled(const float* x, float scale, int n, float* out) {
  for (int i = 0; i < n; i += kLanes)
    store_some(out + i, fma(load_some(x + i, n - i), set(scale), load_some(out + i, n - i)), n - i);
}

template <typename Activation>
inline void gate_with(const Activation& activation, const float* gates, const float* ups, int n, float* out) {
  for (int i = 0; i < n; i += kLanes) store(out + i, mul(activation(load(gates + i)), load(ups + i)));
}

// activation(gate) · up
inline void gate(int activation, const float* gates, const float* ups, int n, float* out) {
  switch (activation) {
    case RL_SILU: return gate_with(silu, gates, ups, n, out);
    case RL_GELU_TANH: return gate_with(gelu_tanh, gates, ups, n, out);
    case RL_GELU_ERF: return gate_with(gelu_erf, gates, ups, n, out);
    default: return gate_with(relu, gates, ups, n, out);
  }
}

inline F at_most(F x, float limit) { return sub(zero(), max(set(-limit), sub(zero(), x))); }  // a NaN stays one

inline void gate_clamped(float limit, const float* gates, const float* ups, int n, float* out) {
  for (int i = 0; i < n; i += kLanes) {
    const F g = at_most(load(gates + i), limit), u = max(set(-limit), at_most(load(ups + i), limit));
    store(out + i, mul(mul(g, sigmoid(mul(g, set(1.702f)))), add(u, set(1.0f))));
  }
}

template <typename Activation>
inline void activate_with(const Activation& activation, float* x, int n) {
  for (int i = 0; i < n; i += kLanes) store(x + i, activation(load(x + i)));
}

inline void activate(int activation, float* x, int n) {
  switch (activation) {
    case RL_SILU: return activate_with(silu, x, n);
    case RL_GELU_TANH: return activate_with(gelu_tanh, x, n);
    case RL_GELU_ERF: return activate_with(gelu_erf, x, n);
    default: return activate_with(relu, x, n);
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
