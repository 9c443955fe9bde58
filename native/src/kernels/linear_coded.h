// 4- and 6-bit weights times many rows on AVX2: a panel is first expanded, a slice of its inputs at a time, once for all rows
// of a block. Quants become bytes; scales become 16-bit integers ("codes") times a float unit per output and slice.
//
// As in linear_pairs.h, vpmaddubsw multiplies unsigned weights with signed inputs and adds two products in 16 bits. One vpmaddwd
// then both widens a group's sums to 32 bits and multiplies them with the group's code. What bounds the sizes (tested at
// the extremes by native/tests/linear_cases.h):
//
//   pair    2 · 15 · 127 = 3,810 or 2 · 63 · 127 = 16,002: below 2^15, so that vpmaddubsw never saturates
//   sum     with minima: 16 products of a lane, 16 · 15 · 127 = 30,480. With an offset, sums begin with offset · Σ x of the
//           lane's inputs; they may wrap on the way, the result is 16 · 8 · 127 = 16,256 at most, or 8 · 32 · 127 = 32,512
//   total   two lanes times the code: 2 · 30,480 · 32,767 < 2^31; six bits, two halves of a group: 4 · 32,512 · 16,383 < 2^31
//
// A scale is off by up to a 65,534th (six bits: a 32,766th) of the largest scale of its output and slice.
#pragma once
#include "linear_pairs.h"

namespace {

// 12 rows (six bits: 8) would pay for expanding a panel. 2 to 95 rows have one arithmetic: a batch that grows keeps its bits.
inline int rows_for_coding(int format) { return is_four_bit(format) || format == RL_Q6_K ? ridgeline::kRowsForExpanding : 1 << 30; }

constexpr int kSliceGroups = 24;  // an expanded slice of 15 kB stays in the first-level cache beside a tile's inputs
constexpr int kCodedGroupBytes = kGroup * kPanel + 2 * kPanel * 4;  // quants; codes; minima in units, or the second half's codes
inline size_t coded_bytes() { return kPanel * sizeof(float) + size_t(kSliceGroups) * kCodedGroupBytes; }

inline I in_both_halves(F value) {  // small integers, in both 16-bit halves of their lanes
  const I whole = round_int(value);
  return _mm256_or_si256(_mm256_and_si256(whole, set_int(0xffff)), _mm256_slli_epi32(whole, 16));
}

inline F six_bit_scale(const uint8_t* panel, int g, int half, int lane) {
  const uint8_t* units = panel + size_t(g / 8) * ridgeline::super_bytes(RL_Q6_K);
  return mul(load_half(reinterpret_cast<const uint16_t*>(units) + lane), load_signed(units + (2 + g % 8 * 2 + half) * kPanel + lane));
}

// The scales of group g: one, and a minimum; or those of both halves.
template <int kFormat>
inline void load_scales(const uint8_t* panel, size_t minima, int g, int lane, F* first, F* second) {
  if constexpr (kFormat == RL_Q6_K) *first = six_bit_scale(panel, g, 0, lane), *second = six_bit_scale(panel, g, 1, lane);
  else load_scale<kFormat>(panel, minima, g * kPanel + lane, first, second);
}

template <int kFormat>
inline void expand_quants(const uint8_t* quants, uint8_t* out) {
  constexpr bool kSix = kFormat == RL_Q6_K;
  repeat<4>([&](auto j) RL_INLINE {
    repeat<kHalves>([&](auto half) RL_INLINE {
      const Bytes w = load_bytes(quants + j * kPanel * 4 + half * 32);
      Bytes low = low_nibbles(w), high = high_nibbles(w);
      if constexpr (kSix) {
        const Bytes uppers = load_bytes(quants + (4 + j / 2) * kPanel * 4 + half * 32);
        low = six_bits<2 * j % 4>(low, uppers), high = six_bits<(2 * j + 1) % 4>(high, uppers);
      }
      _mm256_store_si256(reinterpret_cast<I*>(out + 2 * j * kPanel * 4 + half * 32), low);
      _mm256_store_si256(reinterpret_cast<I*>(out + (2 * j + 1) * kPanel * 4 + half * 32), high);
    });
  });
}

// Groups [first, end) of a panel: the units of the 16 outputs, then group after group.
template <int kFormat>
void expand_slice(const uint8_t* panel, int k, int first, int end, uint8_t* out) {
  constexpr bool kSix = kFormat == RL_Q6_K;
  constexpr float kMost = kSix ? 16383.0f : 32767.0f;
  const size_t minima = ridgeline::minima_offset(kFormat, k);
  const uint8_t* quants = panel + ridgeline::quants_offset(kFormat, k) + size_t(first) * ridgeline::group_quant_bytes(kFormat);
  F inverse[kHalves];
  repeat<kHalves>([&](auto half) RL_INLINE {
    F one, two, most = zero(), broken = zero();  // a maximum forgets a NaN, the output must not
    for (int g = first; g < end; g++) {
      load_scales<kFormat>(panel, minima, g, half * kLanes, &one, &two);
      most = max(most, kSix ? max(size(one), size(two)) : size(one));
      broken = fma(one, zero(), fma(two, zero(), broken));
    }
    // Below the smallest normal number the inverse would overflow; such scales are zero for all purposes.
    const F tiny = set(1e-30f);
    most = max(most, tiny);
    inverse[half] = div(set(kMost), most);
    store(reinterpret_cast<float*>(out) + half * kLanes, add(div(most, set(kMost)), broken));
  });
  out += kPanel * sizeof(float);
  for (int g = first; g < end; g++, quants += ridgeline::group_quant_bytes(kFormat), out += kCodedGroupBytes) {
    expand_quants<kFormat>(quants, out);
    repeat<kHalves>([&](auto half) RL_INLINE {
      F one, two;
      load_scales<kFormat>(panel, minima, g, half * kLanes, &one, &two);
      two = mul(two, inverse[half]);
      uint8_t* codes = out + kGroup * kPanel + half * 32;
      _mm256_store_si256(reinterpret_cast<I*>(codes), in_both_halves(mul(one, inverse[half])));
      if constexpr (kSix) _mm256_store_si256(reinterpret_cast<I*>(codes + kPanel * 4), in_both_halves(two));
      else store(reinterpret_cast<float*>(codes + kPanel * 4), two);
    });
  }
}

// Sums of pairs in 32 bits, times the codes of 8 outputs.
RL_INLINE inline I times_codes(I pairs, const uint8_t* codes) { return _mm256_madd_epi16(pairs, load_bytes(codes)); }

// Adds the pairs of quads [kFirst, kEnd) of a group to the sums of R rows; the sums begin with `starts`, or with nothing.
template <int R, int kFirst, int kEnd, bool kOffset>
RL_INLINE inline void add_quads(I (&sums)[kHalves][R], const uint8_t* quants, const uint8_t* x, const float* starts) {
  repeat<kEnd - kFirst>([&](auto i) RL_INLINE {
    constexpr int quad = kFirst + i;
    Bytes w[kHalves];
    repeat<kHalves>([&](auto half) RL_INLINE { w[half] = load_bytes(quants + quad * kPanel * 4 + half * 32); });
    repeat<R>([&](auto r) RL_INLINE {
      const I inputs = broadcast(x + (quad * R + r) * 4);
      repeat<kHalves>([&](auto half) RL_INLINE {
        if constexpr (i == 0 && kOffset) sums[half][r] = broadcast(reinterpret_cast<const uint8_t*>(starts + r));
        if constexpr (i == 0 && !kOffset) first_pairs(sums[half][r], w[half], inputs);
        else add_pairs(sums[half][r], w[half], inputs);
      });
    });
  });
}

template <int R, bool kMinima, bool kTwoCodes>
void coded_tile(const uint8_t* slice, int groups, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to) {
  const uint8_t *group = slice + kPanel * sizeof(float), *x = in.high;
  const float *scales = in.scales, *sums = in.sums;
  F acc[kHalves][R];
  repeat<kHalves * R>([&](auto i) RL_INLINE { acc[i / R][i % R] = zero(); });
  for (int g = 0; g < groups; g++, group += kCodedGroupBytes, x += kGroup * R, scales += R, sums += R * (kTwoCodes ? 2 : 1)) {
    const uint8_t* codes = group + kGroup * kPanel;
    I pairs[kHalves][R], before[kHalves][R];  // before: the first half's, widened
    if constexpr (kTwoCodes) {
      add_quads<R, 0, 4, true>(pairs, group, x, sums);
      repeat<kHalves * R>([&](auto i) RL_INLINE { before[i / R][i % R] = times_codes(pairs[i / R][i % R], codes + i / R * 32); });
      add_quads<R, 4, 8, true>(pairs, group, x, sums + R);
    } else {
      add_quads<R, 0, 8, !kMinima>(pairs, group, x, sums);
    }
    repeat<kHalves * R>([&](auto i) RL_INLINE {
      constexpr int half = i / R, r = i % R;
      I total = times_codes(pairs[half][r], codes + (kTwoCodes ? kPanel * 4 : 0) + half * 32);
      if constexpr (kTwoCodes) total = add_int(total, before[half][r]);
      acc[half][r] = fma(to_float(total), set(scales[r]), acc[half][r]);
      if constexpr (kMinima)
        acc[half][r] = fma(load(reinterpret_cast<const float*>(codes) + kPanel + half * kLanes), set(sums[r]), acc[half][r]);
    });
  }
  repeat<kHalves>([&](auto half) RL_INLINE {
    const F unit = load(reinterpret_cast<const float*>(slice) + half * kLanes);
    repeat<R>([&](auto r) RL_INLINE { acc[half][r] = mul(acc[half][r], unit); });
    finish<R>(acc[half], bias, half * kLanes, out, stride, add_to);
  });
}

template <int R>
TileKernel coded_kernel_of(int rows, int format) {
  if constexpr (R > 1)
    if (rows < R) return coded_kernel_of<R - 1>(rows, format);
  if (format == RL_Q6_K) return coded_tile<R, false, true>;
  return format == RL_Q4_H ? coded_tile<R, false, false> : coded_tile<R, true, false>;
}

inline void coded_panel_product(const rl_matrix& m, int panel, const Inputs& in, int first, int end, float* out, size_t stride,
                                bool add_to, uint8_t* scratch) {
  const size_t bytes = ridgeline::panel_bytes(m.format, m.k);
  const uint8_t *data = m.data + size_t(panel) * bytes, *asked = data + bytes;
  const int groups = in.k / kGroup, tiles = end - first, slices = (groups + kSliceGroups - 1) / kSliceGroups;
  const size_t share = bytes / size_t(tiles * slices);
  for (int g = 0; g < groups; g += kSliceGroups) {
    const int last = std::min(groups, g + kSliceGroups);
    if (m.format == RL_Q4_H) expand_slice<RL_Q4_H>(data, in.k, g, last, scratch);
    else if (m.format == RL_Q4_HM) expand_slice<RL_Q4_HM>(data, in.k, g, last, scratch);
    else if (m.format == RL_Q4_Z) expand_slice<RL_Q4_Z>(data, in.k, g, last, scratch);
    else if (m.format == RL_Q6_K) expand_slice<RL_Q6_K>(data, in.k, g, last, scratch);
    else expand_slice<RL_Q4_K>(data, in.k, g, last, scratch);
    for (int tile = first; tile < end; tile++) {
      for (const uint8_t* until = asked + share; asked < until; asked += 64) prefetch(asked);  // of the next panel
      const int rows = in.tiling.size(tile);
      TileInputs inputs = tile_inputs(in, tile);
      inputs.high += size_t(g) * kGroup * rows, inputs.scales += g * rows, inputs.sums += g * rows * in.parts;
      coded_kernel_of<kLinearRows>(rows, m.format)(scratch, last - g, inputs, g || !m.bias ? nullptr : m.bias + panel * kPanel,
                                                   out + size_t(in.tiling.first(tile)) * stride, stride, add_to || g);
    }
  }
}

}  // namespace
