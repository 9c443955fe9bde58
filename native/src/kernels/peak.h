// How many operations a second this set can do from registers alone: the ceiling that figures stand beside.
#pragma once
#include "simd.h"
#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kChains = 12;  // independent accumulators: more than latency times units

// The cheapest way this set has to add 4 products of bytes to a sum. AVX2 alone adds pairs in 16 bits, and of nibbles it must
// widen them after every eighth pair, as linear_coded.h does.
inline I add_products(I sums, Bytes weights, [[maybe_unused]] const uint8_t* inputs, [[maybe_unused]] int round) {
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
  asm volatile("" : "+x"(weights));  // else the products are computed once, before the loop
  sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, _mm256_set1_epi32(load_dword(inputs))));
  return round % 8 == 7 ? _mm256_madd_epi16(sums, weights) : sums;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return vusmmlaq_s32(sums, weights, vreinterpretq_s8_u8(weights));
#else
#if defined(RL_NEON)
  asm volatile("" : "+w"(weights));
#endif
  return dot(sums, weights, inputs);
#endif
}

// A function for each kind: sums of the other kinds would take registers.
template <typename Sum, typename Round>
inline double vector_operations(int64_t rounds, double per_lane, const Sum& start, const Round& round) {
  Sum sums[kChains];
  repeat<kChains>([&](auto c) RL_INLINE { sums[c] = start; });
  for (int64_t i = 0; i < rounds; i++) repeat<kChains>([&](auto c) RL_INLINE { sums[c] = round(sums[c], int(i)); });
  unsigned char keep[sizeof sums];
  std::memcpy(keep, sums, sizeof sums);
  volatile unsigned char one = keep[rounds % int64_t(sizeof sums)];
  (void)one;
  return double(rounds) * kChains * kLanes * per_lane;
}

inline double vector_operations(int kind, int64_t rounds) {
  Bytes bytes;
  std::memset(&bytes, 1, sizeof bytes);
  alignas(4) uint8_t inputs[4] = {1, 0, 1, 0};
  const F w = set(1.0000001f);
  if (kind == RL_PEAK_F32) return vector_operations(rounds, 2, w, [&](F sum, int) RL_INLINE { return fma(sum, w, w); });
  if (kind == RL_PEAK_BF16) return vector_operations(rounds, 4, w, [&](F sum, int) RL_INLINE { return dot_bf16(sum, bytes, inputs); });
#if defined(__ARM_FEATURE_MATMUL_INT8)
  constexpr double kPerLane = 16;
#else
  constexpr double kPerLane = 8;
#endif
  return vector_operations(rounds, kPerLane, zero_int(), [&](I sum, int i) RL_INLINE { return add_products(sum, bytes, inputs, i); });
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
