// How many operations a second this set can do from registers alone: the ceiling that figures stand beside.
#pragma once
#include "simd.h"
#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kChains = 12;  // independent accumulators: more than latency times units

inline double vector_operations(int kind, int64_t rounds) {
  F floats[kChains];
  I ints[kChains];
  repeat<kChains>([&](auto c) RL_INLINE { floats[c] = set(float(c)), ints[c] = set_int(c); });
  const F w = set(1.0000001f);
  Bytes bytes;
  std::memset(&bytes, 1, sizeof bytes);
  alignas(4) uint8_t inputs[4] = {1, 0, 1, 0};
  for (int64_t i = 0; i < rounds; i++) {
    if (kind == RL_PEAK_F32) repeat<kChains>([&](auto c) RL_INLINE { floats[c] = fma(floats[c], w, w); });
    else if (kind == RL_PEAK_BF16) repeat<kChains>([&](auto c) RL_INLINE { floats[c] = dot_bf16(floats[c], bytes, inputs); });
    else repeat<kChains>([&](auto c) RL_INLINE { ints[c] = dot(ints[c], bytes, inputs); });
  }
  F all = zero();
  repeat<kChains>([&](auto c) RL_INLINE { all = add(all, add(floats[c], to_float(ints[c]))); });
  volatile float keep = sum(all);
  (void)keep;
  const double per_lane = kind == RL_PEAK_F32 ? 2 : kind == RL_PEAK_BF16 ? 4 : 8;
  return double(rounds) * kChains * kLanes * per_lane;
}

inline double peak_operations(int kind, int64_t rounds) {
#if defined(__AMX_BF16__)
  if (kind != RL_PEAK_F32) {
    const int64_t tiles = (rounds + 15) / 16;
    for (int64_t i = 0; i < tiles; i++) {
      if (kind == RL_PEAK_BF16) {
        _tile_dpbf16ps(0, 6, 7); _tile_dpbf16ps(1, 6, 7); _tile_dpbf16ps(2, 6, 7); _tile_dpbf16ps(3, 6, 7);
      } else {
        _tile_dpbsud(0, 6, 7); _tile_dpbsud(1, 6, 7); _tile_dpbsud(2, 6, 7); _tile_dpbsud(3, 6, 7);
      }
    }
    return double(tiles) * 4 * 16 * 16 * (kind == RL_PEAK_BF16 ? 32 : 64) * 2;
  }
#endif
  return vector_operations(kind, rounds);
}

}  // namespace
