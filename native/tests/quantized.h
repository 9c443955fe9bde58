// What the kernels' inputs become before they are multiplied, written here a second time: the references compute with
// these values in double precision, so that what is left to tolerate is the rounding of float sums alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr double kUnit = 0x1p-24;  // the relative error of one rounding to float

// To nearest, ties to even.
inline float as_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

// n values as whole steps of their largest one's size / top: 127 for a byte, 16256 = 127 · 128 for two.
inline void as_steps(const float* x, int n, float top, double* out) {
  float most = 0.0f;
  for (int i = 0; i < n; i++) most = std::max(most, std::fabs(x[i]));
  const float inverse = most > 1e-30f ? top / most : 0.0f;  // smaller groups count as zero
  for (int i = 0; i < n; i++) out[i] = double(std::nearbyint(x[i] * inverse)) * most / top;
}
