// Activations of an FFN, elementwise on vectors.
#pragma once
#include "simd.h"

namespace {

// erf by Abramowitz and Stegun 7.1.26: off by 1.5e-7 at most, which is float32's own rounding for what it is added to.
inline F gelu_erf(F x) {
  const F z = mul(size(x), set(0.70710678118654752f));
  const F t = div(set(1.0f), fma(z, set(0.3275911f), set(1.0f)));
  F p = fma(t, set(1.061405429f), set(-1.453152027f));
  p = fma(p, t, set(1.421413741f));
  p = fma(p, t, set(-0.284496736f));
  p = mul(fma(p, t, set(0.254829592f)), t);
  const F tail = mul(mul(p, exp_negative(mul(z, sub(zero(), z)))), set(0.5f));  // 1 - Φ(|x|)
  return mul(x, choose_sign(x, tail, sub(set(1.0f), tail)));
}

inline F gelu_tanh(F x) {
  const F inner = mul(x, fma(mul(x, x), set(0.79788456080286536f * 0.044715f), set(0.79788456080286536f)));
  return mul(x, sigmoid(add(inner, inner)));
}

inline F relu(F x) { return max(zero(), x); }  // a NaN stays one
inline F silu(F x) { return mul(x, sigmoid(x)); }

}  // namespace
