// One instruction set's vectors under common names, so that each kernel is written once. Included by kernels_isa.cpp,
// which is compiled once per instruction set; everything here has internal linkage for that reason.
//
// F: kLanes floats. I: kLanes 32-bit integers. Bytes: kLanes quads of bytes. Every multiplication that feeds an
// addition is written as fma(): the compiler contracts nothing by itself, so that a row's arithmetic is the same in
// every kernel shape.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../formats.h"

namespace {

#define RL_INLINE __attribute__((always_inline))

typedef int32_t Dword __attribute__((may_alias, aligned(1)));

inline int32_t load_dword(const void* at) {
  int32_t value;
  std::memcpy(&value, at, 4);
  return value;
}

}  // namespace

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(RL_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace {

// Writes work(0), work(1), … work(N - 1) out, with constant indices from the start: accumulators in arrays then live in
// registers whatever the optimizer thinks of the loops around them.
template <typename Work, int... kIndex>
RL_INLINE inline void write_out(const Work& work, std::integer_sequence<int, kIndex...>) {
  (work(std::integral_constant<int, kIndex>{}), ...);
}
template <int N, typename Work>
RL_INLINE inline void repeat(const Work& work) {
  write_out(work, std::make_integer_sequence<int, N>{});
}

constexpr int kHalves = ridgeline::kPanel / kLanes;  // vectors that make up the 16 outputs of a panel

// e to the power x, for x ≤ 0: relative error below 2e-7, exactly 0 from -87 down, NaN for NaN.
inline F exp_negative(F x) {
  const F log2e = set(1.44269504088896341f), ln2_high = set(-0.693359375f), ln2_low = set(2.12194440e-4f);
  const F floor = set(-87.0f);
  const F clamped = max(floor, x);  // of these two, x where it is NaN
  const I whole = round_int(mul(clamped, log2e));
  const F n = to_float(whole);
  F r = fma(n, ln2_high, clamped);
  r = fma(n, ln2_low, r);
  F p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = fma(mul(r, r), p, add(r, set(1.0f)));
  return zero_up_to(times_power_of_two(p, whole), x, floor);
}

// 1 / (1 + exp(-x)), without overflow for either sign.
inline F sigmoid(F x) {
  const F small = exp_negative(negative_size(x));  // exp(-|x|)
  const F below = div(small, add(small, set(1.0f)));
  return choose_sign(x, below, sub(set(1.0f), below));
}

inline F tanh_of(F x) {  // 2 · sigmoid(2x) - 1
  return fma(sigmoid(add(x, x)), set(2.0f), set(-1.0f));
}

}  // namespace
