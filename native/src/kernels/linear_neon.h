// The sums of a group on 64-bit ARM, in the place of those that linear_pairs.h has for AVX2.
//
// A group's 8 quads of R rows are 2 · R vectors: a dot product takes its row's quad from a lane. With i8mm, two rows are
// multiplied at once, 8 inputs of 2 outputs each; both quads of a pair of nibbles are side by side after one zip. Sums are 32 bits and
// exact: a group is at most 32 · 255 · 128 < 2^21 in size. Without i8mm weights are signed: bytes go in as two nibbles.
#pragma once
#include "linear.h"

namespace {

template <int kLane>
RL_INLINE inline I dot_lane(I acc, Bytes weights, int8x16_t inputs) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_laneq_s32(acc, weights, inputs, kLane);
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(weights), inputs, kLane);
#else
  return dot_vectors(acc, weights, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(inputs), kLane)));
#endif
}

// Σ q · x of one group for V vectors of 4 outputs, R rows and L limbs of the inputs (x[0], x[1]).
template <int R, int V, int L, bool kFourBit>
struct GroupSums {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int kPaired = R / 2 * 2;  // rows that are multiplied two at a time
#else
  static constexpr int kPaired = 0;
#endif
  // Of paired rows 2p and 2p + 1: [2p] holds outputs 0 and 1 of both rows, [2p + 1] outputs 2 and 3.
  I sums[L][V][R];

  // Adds quad number kQuad of V vectors of weights, for the rows from kFirst on.
  template <int kQuad, int kFirst>
  RL_INLINE inline void multiply(I (&dots)[V][R], const Bytes (&w)[V], const uint8_t* x) {
    repeat<R - kFirst>([&](auto i) RL_INLINE {
      constexpr int r = kFirst + i, at = kQuad * R + r;
      const int8x16_t inputs = vld1q_s8(reinterpret_cast<const int8_t*>(x) + at / 4 * 16);
      repeat<V>([&](auto v) RL_INLINE { dots[v][r] = dot_lane<at % 4>(dots[v][r], w[v], inputs); });
    });
  }

  // Adds quads kQuad and kQuad + 1.
  template <int kQuad>
  RL_INLINE inline void multiply_two(I (&dots)[V][R], const Bytes (&low)[V], const Bytes (&high)[V], const uint8_t* x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    repeat<kPaired / 2>([&](auto pair) RL_INLINE {
      constexpr int at = (kQuad * R + 2 * pair) * 4;
      const uint32x2_t first = vreinterpret_u32_u8(vld1_u8(x + at)), second = vreinterpret_u32_u8(vld1_u8(x + at + R * 4));
      const int8x16_t inputs = vreinterpretq_s8_u32(vcombine_u32(vzip1_u32(first, second), vzip2_u32(first, second)));
      repeat<V>([&](auto v) RL_INLINE {
        const uint32x4_t a = vreinterpretq_u32_u8(low[v]), b = vreinterpretq_u32_u8(high[v]);
        I &outputs01 = dots[v][2 * pair], &outputs23 = dots[v][2 * pair + 1];
        outputs01 = vusmmlaq_s32(outputs01, vreinterpretq_u8_u32(vzip1q_u32(a, b)), inputs);
        outputs23 = vusmmlaq_s32(outputs23, vreinterpretq_u8_u32(vzip2q_u32(a, b)), inputs);
      });
    });
#endif
    multiply<kQuad, kPaired>(dots, low, x);
    multiply<kQuad + 1, kPaired>(dots, high, x);
  }

  // Bytes on sets that need them as nibbles: kHigh of each.
  template <bool kHigh>
  RL_INLINE inline void multiply_halves(I (&dots)[V][R], const uint8_t* quants, const uint8_t* x) {
    repeat<4>([&](auto j) RL_INLINE {
      Bytes first[V], second[V];
      repeat<V>([&](auto v) RL_INLINE {
        const Bytes a = load_bytes(quants + 2 * j * kPanel * 4 + v * 16), b = load_bytes(quants + (2 * j + 1) * kPanel * 4 + v * 16);
        first[v] = kHigh ? high_nibbles(a) : low_nibbles(a), second[v] = kHigh ? high_nibbles(b) : low_nibbles(b);
      });
      multiply_two<2 * j>(dots, first, second, x);
    });
  }

  RL_INLINE inline void add(const uint8_t* quants, const uint8_t* const* x) {
    repeat<L * V * R>([&](auto i) RL_INLINE { sums[i / (V * R)][i / R % V][i % R] = zero_int(); });
    repeat<L>([&](auto limb) RL_INLINE {
      I(&dots)[V][R] = sums[limb];
      if constexpr (!kFourBit && !kDotTakesBytes) {
        multiply_halves<true>(dots, quants, x[limb]);
        repeat<V * R>([&](auto i) RL_INLINE { dots[i / R][i % R] = vshlq_n_s32(dots[i / R][i % R], 4); });
        multiply_halves<false>(dots, quants, x[limb]);
      } else {
        repeat<4>([&](auto j) RL_INLINE {
          Bytes low[V], high[V];
          repeat<V>([&](auto v) RL_INLINE {
            if constexpr (kFourBit) {
              const Bytes w = load_bytes(quants + j * kPanel * 4 + v * 16);
              low[v] = low_nibbles(w), high[v] = high_nibbles(w);
            } else {
              low[v] = load_bytes(quants + 2 * j * kPanel * 4 + v * 16);
              high[v] = load_bytes(quants + (2 * j + 1) * kPanel * 4 + v * 16);
            }
          });
          multiply_two<2 * j>(dots, low, high, x[limb]);
        });
      }
    });
  }

  RL_INLINE inline I dots_of(int limb, int v, int r) const {
    if (r >= kPaired) return sums[limb][v][r];
    const I outputs01 = sums[limb][v][r / 2 * 2], outputs23 = sums[limb][v][r / 2 * 2 + 1];
    return r % 2 ? vuzp2q_s32(outputs01, outputs23) : vuzp1q_s32(outputs01, outputs23);
  }

  // factor: of the first limb, 128 where another follows.
  template <int kFactor>
  RL_INLINE inline I total(int v, int r) const {
    const I first = kFactor == 128 ? vshlq_n_s32(dots_of(0, v, r), 7) : dots_of(0, v, r);
    if constexpr (L == 2) return add_int(first, dots_of(1, v, r));
    else return first;
  }
};

}  // namespace
