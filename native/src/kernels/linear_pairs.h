// Quantized linear layers on AVX2, which has no byte dot product: pairs of byte products are added in 16 bits.
//
// vpmaddubsw multiplies unsigned weights with signed inputs and adds two products, with saturation. A weight is given as one
// or two nibbles (at most 15), an input is within ±127 (one limb, or the high one) or -64 … 63 (the low one). A pair is then at
// most 2 · 15 · 127 = 3,810 in size, and the eight pairs of a group in a 16-bit lane 30,480: neither can saturate or wrap, so that
// they are widened to 32 bits once per group instead of once per pair. The integers are the same as in linear.h, and so is the order of the
// float sums.
//
// Both halves of a panel are computed in one pass: a second pass would leave the memory idle.
#pragma once
#include "linear.h"

namespace {

constexpr int kPairSums = 8;  // of 16 registers

// The bytes of weights that a pass over a panel asks for on its way.
struct Ahead {
  const uint8_t* from;
  size_t bytes;
};

// In assembler, and volatile: GCC 12 would load the inputs of both halves of a panel at once, and then store what 16 registers
// cannot hold.
RL_INLINE inline I broadcast(const uint8_t* inputs) {
  I out;
  asm volatile("vpbroadcastd %1, %0" : "=x"(out) : "m"(*reinterpret_cast<const Dword*>(inputs)));
  return out;
}
RL_INLINE inline void add_pairs(I& sums, Bytes weights, I inputs) {
  I pairs;
  asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(pairs) : "x"(weights), "x"(inputs));
}
RL_INLINE inline void first_pairs(I& sums, Bytes weights, I inputs) {
  asm volatile("vpmaddubsw %2, %1, %0" : "=x"(sums) : "x"(weights), "x"(inputs));
}
inline I widen(I sums, int16_t factor) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(factor)); }

// Σ q · x of one group for V vectors of 8 outputs, R rows and L limbs of the inputs (x[0], x[1]), in pairs.
template <int R, int V, int L, bool kFourBit>
struct GroupSums {
  static constexpr int kParts = kFourBit ? 1 : 2;  // of a weight: one nibble, or the low and the high one
  I sums[L][kParts][V][R];

  template <int kPart, bool kFirst>
  RL_INLINE inline void multiply(const Bytes (&w)[V], const uint8_t* const* x, int quad) {
    repeat<L>([&](auto limb) RL_INLINE {
      repeat<R>([&](auto r) RL_INLINE {
        const I inputs = broadcast(x[limb] + (quad * R + r) * 4);
        repeat<V>([&](auto v) RL_INLINE {
          I& sum = sums[limb][kPart][v][r];
          if constexpr (kFirst) first_pairs(sum, w[v], inputs);
          else add_pairs(sum, w[v], inputs);
        });
      });
    });
  }

  RL_INLINE inline void add(const uint8_t* quants, const uint8_t* const* x) {
    repeat<kFourBit ? 4 : 8>([&](auto j) RL_INLINE {
      Bytes low[V], high[V];
      repeat<V>([&](auto v) RL_INLINE { low[v] = low_nibbles(load_bytes(quants + j * kPanel * 4 + v * 32)); });
      multiply<0, j == 0>(low, x, kFourBit ? 2 * j : int(j));
      repeat<V>([&](auto v) RL_INLINE { high[v] = high_nibbles(load_bytes(quants + j * kPanel * 4 + v * 32)); });
      multiply<kParts - 1, !kFourBit && j == 0>(high, x, kFourBit ? 2 * j + 1 : int(j));
    });
  }

  // factor: of the first limb, 128 where another follows.
  template <int kFactor>
  RL_INLINE inline I total(int v, int r) const {
    I total = widen(sums[0][0][v][r], kFactor);
    if constexpr (kParts == 2) total = add_int(total, widen(sums[0][1][v][r], 16 * kFactor));
    if constexpr (L == 2) total = add_int(total, widen(sums[1][0][v][r], 1));
    if constexpr (L == 2 && kParts == 2) total = add_int(total, widen(sums[1][1][v][r], 16));
    return total;
  }
};

// The same as integers, for one limb or two. Two are computed at once for one row, else one after the other: 16 registers.
template <int R, int V, bool kTwoLimbs, bool kFourBit>
RL_INLINE inline void group_totals(I (&totals)[V][R], const uint8_t* quants, const uint8_t* const (&x)[2]) {
  constexpr bool kAtOnce = kTwoLimbs && R == 1;
  GroupSums<R, V, kAtOnce ? 2 : 1, kFourBit> sums;
  sums.add(quants, x);
  repeat<V * R>([&](auto i) RL_INLINE { totals[i / R][i % R] = sums.template total<kTwoLimbs ? 128 : 1>(i / R, i % R); });
  if constexpr (kTwoLimbs && !kAtOnce) {
    sums.add(quants, x + 1);
    repeat<V * R>([&](auto i) RL_INLINE {
      totals[i / R][i % R] = add_int(totals[i / R][i % R], sums.template total<1>(i / R, i % R));
    });
  }
}

template <int R, int kFormat, bool kTwoLimbs>
void pair_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to,
               Ahead ahead) {
  constexpr bool kFourBit = kFormat <= RL_Q4_FM, kOffset = kFormat == RL_Q4_H || kFormat == RL_Q8_H;
  constexpr int V = R * (kFourBit ? 1 : 2) <= kPairSums / 2 ? 2 : 1;  // vectors of outputs at once
  const size_t minima = ridgeline::minima_offset(kFormat, k);
  const int groups = k / kGroup;
  const size_t share = (ahead.bytes + size_t(groups) - 1) / size_t(groups);
  const uint8_t *quants = panel + ridgeline::quants_offset(kFormat, k), *asked = ahead.from;
  const uint8_t* x[2] = {in.high, in.low};
  const float *scales = in.scales, *sums = in.sums;
  F acc[kHalves][R];
  repeat<kHalves * R>([&](auto i) RL_INLINE { acc[i / R][i % R] = zero(); });
  for (int g = 0; g < groups; g++) {
    for (ahead.from += share; asked < ahead.from; asked += 64) prefetch(asked);
    repeat<kHalves / V>([&](auto step) RL_INLINE {
      I totals[V][R];
      group_totals<R, V, kTwoLimbs, kFourBit>(totals, quants + step * V * 32, x);
      repeat<V>([&](auto v) RL_INLINE {
        constexpr int half = step * V + v;
        F scale, minimum;
        load_scale<kFormat>(panel, minima, g * kPanel + half * kLanes, &scale, &minimum);
        repeat<R>([&](auto r) RL_INLINE {
          if constexpr (kOffset) totals[v][r] = add_int(totals[v][r], set_int(load_dword(sums + r)));
          acc[half][r] = fma(to_float(totals[v][r]), mul(scale, set(scales[r])), acc[half][r]);
          if constexpr (!kOffset) acc[half][r] = fma(minimum, set(sums[r]), acc[half][r]);
        });
      });
    });
    quants += ridgeline::group_quant_bytes(kFourBit), x[0] += kGroup * R, x[1] += kGroup * R, scales += R, sums += R;
  }
  repeat<kHalves>([&](auto half) RL_INLINE { finish<R>(acc[half], bias, half * kLanes, out, stride, add_to); });
}

using PairKernel = void (*)(const uint8_t*, int, const TileInputs&, const float*, float*, size_t, bool, Ahead);

template <int R>
PairKernel pair_kernel(int format, bool two_limbs) {
  switch (format) {
    case RL_Q4_H: return two_limbs ? pair_tile<R, RL_Q4_H, true> : pair_tile<R, RL_Q4_H, false>;
    case RL_Q4_HM: return two_limbs ? pair_tile<R, RL_Q4_HM, true> : pair_tile<R, RL_Q4_HM, false>;
    case RL_Q4_FM: return two_limbs ? pair_tile<R, RL_Q4_FM, true> : pair_tile<R, RL_Q4_FM, false>;
    case RL_Q8_H: return two_limbs ? pair_tile<R, RL_Q8_H, true> : pair_tile<R, RL_Q8_H, false>;
    default: return two_limbs ? pair_tile<R, RL_Q8_FM, true> : pair_tile<R, RL_Q8_FM, false>;
  }
}

template <int R>
PairKernel pair_kernel_of(int rows, int format, bool two_limbs) {
  if constexpr (R == 1) return pair_kernel<1>(format, two_limbs);
  else return rows == R ? pair_kernel<R>(format, two_limbs) : pair_kernel_of<R - 1>(rows, format, two_limbs);
}

// The product of a panel of quantized weights with group scales; as panel_product.
inline void pair_panel_product(const rl_matrix& m, int panel, const Inputs& in, int first, int end, float* out, size_t stride,
                               bool add_to) {
  const size_t bytes = ridgeline::panel_bytes(m.format, m.k);
  const uint8_t* data = m.data + size_t(panel) * bytes;
  const float* bias = m.bias ? m.bias + panel * kPanel : nullptr;
  for (int tile = first; tile < end; tile++) {
    // One pass asks for what is a few kilobytes ahead of it. Of several, each asks for its part of the next panel.
    const size_t part = bytes / size_t(end - first);
    const Ahead ahead = end - first == 1 ? Ahead{data + kAhead, bytes} : Ahead{data + bytes + size_t(tile - first) * part, part};
    pair_kernel_of<kLinearRows>(in.tiling.size(tile), m.format, has_two_limbs(in.kind))(
        data, in.k, tile_inputs(in, tile), bias, out + size_t(in.tiling.first(tile)) * stride, stride, add_to, ahead);
  }
}

}  // namespace
