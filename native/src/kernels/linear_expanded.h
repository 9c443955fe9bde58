// 4- and 6-bit weights times many rows: a panel is first expanded to bytes with one scale per output, once for all rows of a block.
//
// A group of 32 inputs then costs eight dot products and one multiply-add, where scales per group cost a multiplication
// more and minima another. The price is a rounding: a weight is off by up to half a 127th of the largest of its output.
#pragma once
#include "linear.h"

namespace {

using ridgeline::kRowsForExpanding;

// A panel as bytes: [k / 4][16][4] unsigned, offset by 128, behind the scales of the 16 outputs.
inline size_t expanded_bytes(int k) { return kPanel * sizeof(float) + size_t(k) * kPanel; }

inline __m512i in_both_halves(F value) {  // small integers, in both 16-bit halves of their lanes
  const __m512i low = _mm512_and_si512(round_int(value), set_int(0xffff));
  return _mm512_or_si512(low, _mm512_slli_epi32(low, 16));
}

// nibbles: 16-bit lanes of q · 2^11. Returns (q · step + offset) in 64ths.
inline __m512i steps_of(__m512i nibbles, __m512i step, __m512i offset) {
  return _mm512_add_epi16(_mm512_mulhrs_epi16(nibbles, step), offset);
}

// 64ths of even and odd bytes, rounded down to whole ones, side by side.
inline __m512i as_bytes(__m512i even, __m512i odd) {
  constexpr int kFirstOrBothOthers = 0xf8;
  return _mm512_ternarylogic_epi32(_mm512_srli_epi16(even, 6), _mm512_slli_epi16(odd, 2),
                                   _mm512_set1_epi16(int16_t(0xff00)), kFirstOrBothOthers);
}

template <int kFormat>
void expand_to_bytes(const uint8_t* panel, int k, uint8_t* out) {
  const size_t minima = ridgeline::minima_offset(kFormat, k);
  const uint8_t* quants = panel + ridgeline::quants_offset(kFormat, k);
  const int groups = k / kGroup;
  F scale, minimum, most = zero(), broken = zero();  // a maximum forgets a NaN, the output must not
  for (int g = 0; g < groups; g++) {
    load_scale<kFormat>(panel, minima, g * kPanel, &scale, &minimum);
    most = max(most, max(size(minimum), size(fma(scale, set(15.0f), minimum))));
    broken = fma(scale, zero(), fma(minimum, zero(), broken));
  }
  store(reinterpret_cast<float*>(out), fma(most, set(1.0f / 127.0f), broken));
  // Below the smallest normal number the inverse would overflow; such an output is zero for all purposes.
  const F inverse = zero_up_to(div(set(127.0f), most), most, set(1e-30f));
  out += kPanel * sizeof(float);
  for (int g = 0; g < groups; g++, out += kGroup * kPanel) {
    load_scale<kFormat>(panel, minima, g * kPanel, &scale, &minimum);
    const __m512i step = in_both_halves(mul(mul(scale, inverse), set(1024.0f)));  // · 2^11 / 2^15 = 64
    const __m512i offset = in_both_halves(fma(mul(minimum, inverse), set(64.0f), set(128.0f * 64 + 32)));
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++, quants += kPanel * 4) {
      const __m512i w = load_bytes(quants);
      auto masked = [&](int mask) { return _mm512_and_si512(w, _mm512_set1_epi16(int16_t(mask))); };
      const __m512i low_even = steps_of(_mm512_slli_epi16(masked(0x000f), 11), step, offset);
      const __m512i low_odd = steps_of(_mm512_slli_epi16(masked(0x0f00), 3), step, offset);
      const __m512i high_even = steps_of(_mm512_slli_epi16(masked(0x00f0), 7), step, offset);
      const __m512i high_odd = steps_of(_mm512_srli_epi16(masked(0xf000), 1), step, offset);
      _mm512_store_si512(out + 2 * j * kPanel * 4, as_bytes(low_even, low_odd));
      _mm512_store_si512(out + (2 * j + 1) * kPanel * 4, as_bytes(high_even, high_odd));
    }
  }
}

// As expand_to_bytes: q is 6 bits wide, and has a scale per 16.
inline void expand_six_bits(const uint8_t* panel, int k, uint8_t* out) {
  const uint8_t* quants = panel + ridgeline::quants_offset(RL_Q6_K, k);
  const int groups = k / kGroup;
  auto scale_of = [&](int g, int half) {
    const uint8_t* units = panel + size_t(g / 8) * ridgeline::super_bytes(RL_Q6_K);
    return mul(load_half(reinterpret_cast<const uint16_t*>(units)), load_signed(units + (2 + g % 8 * 2 + half) * kPanel));
  };
  F most = zero(), broken = zero();
  for (int g = 0; g < 2 * groups; g++) {
    const F scale = scale_of(g / 2, g % 2);
    most = max(most, mul(size(scale), set(32.0f)));
    broken = fma(scale, zero(), broken);
  }
  store(reinterpret_cast<float*>(out), fma(most, set(1.0f / 127.0f), broken));
  const F inverse = zero_up_to(div(set(127.0f), most), most, set(1e-30f));
  out += kPanel * sizeof(float);
  for (int g = 0; g < groups; g++, quants += ridgeline::group_quant_bytes(RL_Q6_K)) {
    repeat<2>([&](auto half) RL_INLINE {
      const F scale = mul(scale_of(g, half), inverse);
      const __m512i step = in_both_halves(mul(scale, set(4096.0f)));  // · 2^9 / 2^15 = 64
      const __m512i offset = in_both_halves(fma(scale, set(-32.0f * 64), set(128.0f * 64 + 32)));
      const Bytes uppers = load_bytes(quants + (4 + half) * kPanel * 4);
      repeat<4>([&](auto quad) RL_INLINE {
        const Bytes w = load_bytes(quants + (2 * half + quad / 2) * kPanel * 4);
        const Bytes six = six_bits<quad>(quad % 2 ? high_nibbles(w) : low_nibbles(w), uppers);
        auto masked = [&](int mask) { return _mm512_and_si512(six, _mm512_set1_epi16(int16_t(mask))); };
        const __m512i even = steps_of(_mm512_slli_epi16(masked(0x00ff), 9), step, offset);
        const __m512i odd = steps_of(_mm512_slli_epi16(masked(0xff00), 1), step, offset);
        _mm512_store_si512(out, as_bytes(even, odd));
        out += kPanel * 4;
      });
    });
  }
}

template <int R>
void expanded_tile(const uint8_t* expanded, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to) {
  const uint8_t *quants = expanded + kPanel * sizeof(float), *x = in.high;
  const float *scales = in.scales, *sums = in.sums;
  F acc[R];
  repeat<R>([&](auto r) RL_INLINE { acc[r] = zero(); });
  for (int g = 0; g < k / kGroup; g++, quants += kGroup * kPanel, x += kGroup * R, scales += R, sums += R) {
    I dots[R];
    repeat<R>([&](auto r) RL_INLINE { dots[r] = set_int(load_dword(sums + r)); });
    group_dots<R, false>(dots, quants, x);
    repeat<R>([&](auto r) RL_INLINE { acc[r] = fma(to_float(dots[r]), set(scales[r]), acc[r]); });
  }
  const F scale = load(reinterpret_cast<const float*>(expanded));
  repeat<R>([&](auto r) RL_INLINE { acc[r] = mul(acc[r], scale); });
  finish<R>(acc, bias, 0, out, stride, add_to);
}

template <int R>
TileKernel expanded_kernel_of(int rows) {
  if constexpr (R == 1) return expanded_tile<1>;
  else return rows == R ? expanded_tile<R> : expanded_kernel_of<R - 1>(rows);
}

inline void expanded_panel_product(const rl_matrix& m, int panel, const Inputs& in, int first, int end, float* out, size_t stride,
                                   bool add_to, uint8_t* scratch) {
  const uint8_t* data = m.data + size_t(panel) * ridgeline::panel_bytes(m.format, m.k);
  const float* bias = m.bias ? m.bias + panel * kPanel : nullptr;
  if (m.format == RL_Q4_H) expand_to_bytes<RL_Q4_H>(data, in.k, scratch);
  else if (m.format == RL_Q4_HM) expand_to_bytes<RL_Q4_HM>(data, in.k, scratch);
  else if (m.format == RL_Q6_K) expand_six_bits(data, in.k, scratch);
  else expand_to_bytes<RL_Q4_K>(data, in.k, scratch);
  for (int tile = first; tile < end; tile++)
    expanded_kernel_of<kLinearRows>(in.tiling.size(tile))(scratch, in.k, tile_inputs(in, tile), bias,
                                                          out + size_t(in.tiling.first(tile)) * stride, stride, add_to);
}

}  // namespace
