// The sums of a group on AVX-VNNI, in the place of those that linear_pairs.h has for AVX2 alone.
//
// vpdpbusd adds four products of an unsigned weight and a signed input to 32 bits; a group's sum is at most
// 32 · 255 · 128 < 2^21 in size, and nothing saturates. Weights are whole bytes or nibbles, inputs within ±127 or -64 … 63.
#pragma once
#include "linear.h"

namespace {

// dots += Σ over quad number `quad` of V vectors of weights, for R rows of inputs.
template <int R, int V>
RL_INLINE inline void dot_quad(I (&dots)[V][R], const Bytes (&w)[V], const uint8_t* x, int quad) {
  repeat<R>([&](auto r) RL_INLINE {
    const I inputs = broadcast(x + (quad * R + r) * 4);
    repeat<V>([&](auto v) RL_INLINE { dots[v][r] = dot_bytes(dots[v][r], w[v], inputs); });
  });
}

// The same for a group of whole bytes, on top of what dots hold.
template <int R, int V>
RL_INLINE inline void dot_byte_group(I (&dots)[V][R], const uint8_t* quants, const uint8_t* x) {
  repeat<8>([&](auto j) RL_INLINE {
    Bytes w[V];
    repeat<V>([&](auto v) RL_INLINE { w[v] = load_bytes(quants + j * kPanel * 4 + v * 32); });
    dot_quad<R, V>(dots, w, x, j);
  });
}

// Σ q · x of one group for V vectors of 8 outputs, R rows and L limbs of the inputs (x[0], x[1]).
template <int R, int V, int L, bool kFourBit>
struct GroupSums {
  I sums[L][V][R];

  RL_INLINE inline void add(const uint8_t* quants, const uint8_t* const* x) {
    repeat<L * V * R>([&](auto i) RL_INLINE { sums[i / (V * R)][i / R % V][i % R] = zero_int(); });
    if constexpr (kFourBit) {
      repeat<4>([&](auto j) RL_INLINE {
        Bytes low[V], high[V];
        repeat<V>([&](auto v) RL_INLINE { low[v] = low_nibbles(load_bytes(quants + j * kPanel * 4 + v * 32)); });
        repeat<L>([&](auto limb) RL_INLINE { dot_quad<R, V>(sums[limb], low, x[limb], 2 * j); });
        repeat<V>([&](auto v) RL_INLINE { high[v] = high_nibbles(load_bytes(quants + j * kPanel * 4 + v * 32)); });
        repeat<L>([&](auto limb) RL_INLINE { dot_quad<R, V>(sums[limb], high, x[limb], 2 * j + 1); });
      });
    } else {
      repeat<L>([&](auto limb) RL_INLINE { dot_byte_group<R, V>(sums[limb], quants, x[limb]); });
    }
  }

  // factor: of the first limb, 128 where another follows.
  template <int kFactor>
  RL_INLINE inline I total(int v, int r) const {
    const I first = kFactor == 128 ? shift_left(sums[0][v][r], 7) : sums[0][v][r];
    if constexpr (L == 2) return add_int(first, sums[1][v][r]);
    else return first;
  }
};

}  // namespace
