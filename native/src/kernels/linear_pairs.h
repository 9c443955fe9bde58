// Quantized linear layers on AVX2, which has no byte dot product: pairs of byte products are added in 16 bits.
//
// vpmaddubsw multiplies unsigned weights with signed inputs and adds two products, with saturation. A weight is given as one
// or two nibbles (at most 15), an input is within ±127 (one limb, or the high one) or -64 … 63 (the low one). A pair is then at
// most 2 · 15 · 127 = 3,810 in size, and the eight pairs of a group in a 16-bit lane 30,480: neither can saturate or wrap, so that
// they are widened to 32 bits once per group instead of once per pair. The integers are the same as in linear.h, and so is the order of the
// float sums.
//
// All outputs of a panel are computed in one pass: a second pass would leave the memory idle. AVX-VNNI and ARM have the same passes
// over other sums of a group (linear_vnni.h, linear_neon.h).
#pragma once
#if defined(__AVXVNNI__)
#include "linear_vnni.h"
#elif defined(RL_NEON)
#include "linear_neon.h"
#else
#include "linear.h"
#endif

namespace {

// Vectors of outputs that are multiplied at once: as many as there are registers for.
template <int R, bool kFourBit>
constexpr int vectors_at_once() {
#if defined(RL_NEON)
  return R == 1 ? 4 : 2;
#else
  constexpr int kPairSums = 8;  // of 16 registers
  return kDotTakesBytes || R * (kFourBit ? 1 : 2) <= kPairSums / 2 ? 2 : 1;
#endif
}

// The bytes of weights that a pass over a panel asks for on its way.
struct Ahead {
  const uint8_t* from;
  size_t bytes;
};
// One pass asks for what is a few kilobytes ahead of it. Of several, each asks for its part of the next panel.
inline Ahead ahead_of(const uint8_t* panel, size_t bytes, int pass, int passes) {
  const size_t part = bytes / size_t(passes);
  return passes == 1 ? Ahead{panel + kAhead, bytes} : Ahead{panel + bytes + size_t(pass) * part, part};
}

#if !defined(__AVXVNNI__) && !defined(RL_NEON)
#define RL_ADDS_PAIRS
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

#endif

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

// Scales and minima of a panel as floats, [k / 32][2][16]: made once where several tiles read them.
template <int kFormat>
void expand_scales(const uint8_t* panel, int k, float* out) {
  const size_t minima = ridgeline::minima_offset(kFormat, k);
  for (int g = 0; g < k / kGroup; g++, out += 2 * kPanel)
    repeat<kHalves>([&](auto half) RL_INLINE {
      F scale, minimum;
      load_scale<kFormat>(panel, minima, g * kPanel + half * kLanes, &scale, &minimum);
      store(out + half * kLanes, scale), store(out + kPanel + half * kLanes, minimum);
    });
}
inline size_t expanded_scales_bytes(int k) { return size_t(k / kGroup) * 2 * kPanel * sizeof(float); }
constexpr int kTilesForExpandedScales = 3;

template <int R, int kFormat, bool kTwoLimbs>
void pair_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to,
               Ahead ahead, const float* expanded) {
  constexpr bool kFourBit = is_four_bit(kFormat), kOffset = kFormat == RL_Q4_H || kFormat == RL_Q8_H;
  constexpr int V = vectors_at_once<R, kFourBit>();
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
      group_totals<R, V, kTwoLimbs, kFourBit>(totals, quants + step * V * kLanes * 4, x);
      repeat<V>([&](auto v) RL_INLINE {
        constexpr int half = step * V + v;
        F scale, minimum;
        if (kFormat == RL_Q4_K && expanded)
          scale = load(expanded + g * 2 * kPanel + half * kLanes), minimum = load(expanded + (g * 2 + 1) * kPanel + half * kLanes);
        else
          load_scale<kFormat>(panel, minima, g * kPanel + half * kLanes, &scale, &minimum);
        repeat<R>([&](auto r) RL_INLINE {
          if constexpr (kOffset) totals[v][r] = add_int(totals[v][r], set_int(load_dword(sums + r)));
          acc[half][r] = fma(to_float(totals[v][r]), mul(scale, set(scales[r])), acc[half][r]);
          if constexpr (!kOffset) acc[half][r] = fma(minimum, set(sums[r]), acc[half][r]);
        });
      });
    });
    quants += ridgeline::group_quant_bytes(kFormat), x[0] += kGroup * R, x[1] += kGroup * R, scales += R, sums += R;
  }
  repeat<kHalves>([&](auto half) RL_INLINE { finish<R>(acc[half], bias, half * kLanes, out, stride, add_to); });
}

// ---- six bits: a scale for 16 weights ----

#if defined(RL_ADDS_PAIRS)

// Two limbs: weights less 32 are -32 … 31; their sizes are multiplied with the inputs under the weights' signs. Four pairs are at
// most 4 · 2 · 32 · 127 = 32,512 in size, and are widened by the 16 weights' scale itself. A group's sum of integers is at most
// 2 · 16 · 32 · 16,256 · 128 < 2^31 in size. One limb: sums begin with -32 · Σ x of their lane's inputs, and weights of 0 … 63
// are multiplied as they are: a pair is at most 2 · 63 · 127 = 16,002; sums may wrap on the way to the same 32,512 at most.
RL_INLINE inline void add_signed_pairs(I& sums, Bytes weights, Bytes sizes, I inputs) {
  I pairs;
  asm volatile("vpsignb %2, %4, %1\n\tvpmaddubsw %1, %3, %1\n\tvpaddw %1, %0, %0"
               : "+x"(sums), "=&x"(pairs) : "x"(weights), "x"(sizes), "x"(inputs));
}

// Scales of 8 outputs, each in both halves of its lane.
inline I load_codes(const uint8_t* codes) {
  const I wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(wide, 0xa0), 0xa0);
}

// Adds scale · Σ (q - 32) · x of half a group to totals, for L limbs. codes: scales; those of the first of two limbs are times 128.
template <int R, int V, int L, int kHalf>
RL_INLINE inline void add_six_bits(I (&totals)[V][R], const uint8_t* quants, const uint8_t* const* x, const I (&codes)[L][V]) {
  I sums[L][V][R];
  repeat<L * V * R>([&](auto i) RL_INLINE { sums[i / (V * R)][i / R % V][i % R] = zero_int(); });
  repeat<4>([&](auto quad) RL_INLINE {
    Bytes weights[V], sizes[V];
    repeat<V>([&](auto v) RL_INLINE {
      const Bytes w = load_bytes(quants + (2 * kHalf + quad / 2) * kPanel * 4 + v * 32);
      const Bytes uppers = load_bytes(quants + (4 + kHalf) * kPanel * 4 + v * 32);
      const Bytes six = six_bits<quad>(quad % 2 ? high_nibbles(w) : low_nibbles(w), uppers);
      weights[v] = _mm256_sub_epi8(six, _mm256_set1_epi8(32));
      sizes[v] = _mm256_abs_epi8(weights[v]);
    });
    repeat<L * R>([&](auto i) RL_INLINE {
      const I inputs = broadcast(x[i / R] + ((4 * kHalf + quad) * R + i % R) * 4);
      repeat<V>([&](auto v) RL_INLINE { add_signed_pairs(sums[i / R][v][i % R], weights[v], sizes[v], inputs); });
    });
  });
  repeat<L * V * R>([&](auto i) RL_INLINE {
    constexpr int limb = i / (V * R), v = i / R % V, r = i % R;
    totals[v][r] = add_int(totals[v][r], _mm256_madd_epi16(sums[limb][v][r], codes[limb][v]));
  });
}

// The same for the only limb; `starts`: of the sums, for each row.
template <int R, int V, int kHalf>
RL_INLINE inline void add_six_bits(I (&totals)[V][R], const uint8_t* quants, const uint8_t* x, const float* starts, const I (&codes)[V]) {
  I sums[V][R];
  repeat<V * R>([&](auto i) RL_INLINE { sums[i / R][i % R] = broadcast(reinterpret_cast<const uint8_t*>(starts + i % R)); });
  repeat<4>([&](auto quad) RL_INLINE {
    Bytes weights[V];
    repeat<V>([&](auto v) RL_INLINE {
      const Bytes w = load_bytes(quants + (2 * kHalf + quad / 2) * kPanel * 4 + v * 32);
      const Bytes uppers = load_bytes(quants + (4 + kHalf) * kPanel * 4 + v * 32);
      weights[v] = six_bits<quad>(quad % 2 ? high_nibbles(w) : low_nibbles(w), uppers);
    });
    repeat<R>([&](auto r) RL_INLINE {
      const I inputs = broadcast(x + ((4 * kHalf + quad) * R + r) * 4);
      repeat<V>([&](auto v) RL_INLINE { add_pairs(sums[v][r], weights[v], inputs); });
    });
  });
  repeat<V * R>([&](auto i) RL_INLINE {
    totals[i / R][i % R] = add_int(totals[i / R][i % R], _mm256_madd_epi16(sums[i / R][i % R], codes[i / R]));
  });
}

template <int R, bool kTwoLimbs>
void six_bit_pair_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to,
                       Ahead ahead, const float*) {
  constexpr int L = kTwoLimbs ? 2 : 1, V = R <= 2 ? 2 : 1;
  const int groups = k / kGroup;
  const size_t share = (ahead.bytes + size_t(groups) - 1) / size_t(groups);
  const uint8_t *quants = panel + ridgeline::quants_offset(RL_Q6_K, k), *asked = ahead.from;
  const uint8_t* x[2] = {in.high, in.low};
  const float *scales = in.scales, *sums = in.sums;
  F acc[kHalves][R];
  repeat<kHalves * R>([&](auto i) RL_INLINE { acc[i / R][i % R] = zero(); });
  for (int g = 0; g < groups; g++) {
    for (ahead.from += share; asked < ahead.from; asked += 64) prefetch(asked);
    const uint8_t* units = panel + size_t(g / 8) * ridgeline::super_bytes(RL_Q6_K);
    repeat<kHalves / V>([&](auto step) RL_INLINE {
      I totals[V][R];
      repeat<V * R>([&](auto i) RL_INLINE { totals[i / R][i % R] = zero_int(); });
      repeat<2>([&](auto half) RL_INLINE {
        I codes[L][V];
        repeat<V>([&](auto v) RL_INLINE {
          codes[L - 1][v] = load_codes(units + (2 + g % 8 * 2 + half) * kPanel + (step * V + v) * kLanes);
          if constexpr (L == 2) codes[0][v] = _mm256_slli_epi16(codes[1][v], 7);
        });
        if constexpr (L == 2) add_six_bits<R, V, L, half>(totals, quants + step * V * 32, x, codes);
        else add_six_bits<R, V, half>(totals, quants + step * V * 32, x[0], sums + half * R, codes[0]);
      });
      repeat<V>([&](auto v) RL_INLINE {
        constexpr int half = step * V + v;
        const F unit = load_half(reinterpret_cast<const uint16_t*>(units) + half * kLanes);
        repeat<R>([&](auto r) RL_INLINE {
          acc[half][r] = fma(to_float(totals[v][r]), mul(unit, set(scales[r])), acc[half][r]);
        });
      });
    });
    quants += ridgeline::group_quant_bytes(RL_Q6_K), x[0] += kGroup * R, x[1] += kGroup * R, scales += R, sums += 2 * R;
  }
  repeat<kHalves>([&](auto half) RL_INLINE { finish<R>(acc[half], bias, half * kLanes, out, stride, add_to); });
}

#endif

using PairKernel = void (*)(const uint8_t*, int, const TileInputs&, const float*, float*, size_t, bool, Ahead, const float*);

template <int R>
PairKernel pair_kernel(int format, bool two_limbs) {
  switch (format) {
    case RL_Q4_H: return two_limbs ? pair_tile<R, RL_Q4_H, true> : pair_tile<R, RL_Q4_H, false>;
    case RL_Q4_HM: return two_limbs ? pair_tile<R, RL_Q4_HM, true> : pair_tile<R, RL_Q4_HM, false>;
    case RL_Q4_Z: return two_limbs ? pair_tile<R, RL_Q4_Z, true> : pair_tile<R, RL_Q4_Z, false>;
    case RL_Q4_K: return two_limbs ? pair_tile<R, RL_Q4_K, true> : pair_tile<R, RL_Q4_K, false>;
#if defined(RL_ADDS_PAIRS)  // one limb times whole bytes: linear_words.h
    case RL_Q6_K: return two_limbs ? six_bit_pair_tile<R, true> : six_bit_pair_tile<R, false>;
    case RL_Q8_H: return pair_tile<R, RL_Q8_H, true>;
    default: return pair_tile<R, RL_Q8_FM, true>;
#else
    case RL_Q8_H: return two_limbs ? pair_tile<R, RL_Q8_H, true> : pair_tile<R, RL_Q8_H, false>;
    default: return two_limbs ? pair_tile<R, RL_Q8_FM, true> : pair_tile<R, RL_Q8_FM, false>;
#endif
  }
}

template <int R>
PairKernel pair_kernel_of(int rows, int format, bool two_limbs) {
  if constexpr (R == 1) return pair_kernel<1>(format, two_limbs);
  else return rows == R ? pair_kernel<R>(format, two_limbs) : pair_kernel_of<R - 1>(rows, format, two_limbs);
}

// AVX-VNNI and ARM multiply six bits as every set with a byte dot product does (linear.h).
inline bool computes_in_one_pass([[maybe_unused]] int format, InputKind kind) {
#if !defined(RL_ADDS_PAIRS)
  if (format == RL_Q6_K) return false;
#endif
  return kind == InputKind::Int8 || kind == InputKind::Int16;
}

// The product of a panel of quantized weights with group scales; as panel_product.
inline void pair_panel_product(const rl_matrix& m, int panel, const Inputs& in, int first, int end, float* out, size_t stride,
                               bool add_to, uint8_t* scratch) {
  const size_t bytes = ridgeline::panel_bytes(m.format, m.k);
  const uint8_t* data = m.data + size_t(panel) * bytes;
  const float* bias = m.bias ? m.bias + panel * kPanel : nullptr;
  float* expanded = nullptr;
  if (m.format == RL_Q4_K && end - first >= kTilesForExpandedScales)
    expand_scales<RL_Q4_K>(data, in.k, expanded = reinterpret_cast<float*>(scratch));
  for (int tile = first; tile < end; tile++)
    pair_kernel_of<kLinearRows>(in.tiling.size(tile), m.format, has_two_limbs(in.kind))(
        data, in.k, tile_inputs(in, tile), bias, out + size_t(in.tiling.first(tile)) * stride, stride, add_to,
        ahead_of(data, bytes, tile - first, end - first), expanded);
}

}  // namespace
