// 4- and 6-bit weights times many rows: a panel is first expanded to bytes with one scale per output, once for all rows of a block.
//
// A group of 32 inputs then costs eight dot products and one multiply-add, where scales per group cost a multiplication
// more and minima another. The price is a rounding: a weight is off by up to half a 127th of the largest of its output.
#pragma once
#if defined(__AVXVNNI__)
#include "linear_vnni.h"
#else
#include "linear.h"
#endif

namespace {

using ridgeline::kRowsForExpanding;

// A panel as bytes: [k / 4][16][4] unsigned, offset by 128, behind the scales of the 16 outputs.
inline size_t expanded_bytes(int k) { return kPanel * sizeof(float) + size_t(k) * kPanel; }

// ---- 16-bit lanes ----

#if defined(__AVX512F__)
inline I shorts(int x) { return _mm512_set1_epi16(int16_t(x)); }
inline I bits_of(I a, I mask) { return _mm512_and_si512(a, mask); }
inline I left(I a, int bits) { return _mm512_slli_epi16(a, unsigned(bits)); }
inline I right(I a, int bits) { return _mm512_srli_epi16(a, unsigned(bits)); }
inline I rounded_product(I a, I b) { return _mm512_mulhrs_epi16(a, b); }  // · 2^-15
inline I add_shorts(I a, I b) { return _mm512_add_epi16(a, b); }
inline void store_bytes(uint8_t* p, I a) { _mm512_store_si512(p, a); }
inline I low_and_masked(I low, I high, I mask) {
  constexpr int kFirstOrBothOthers = 0xf8;
  return _mm512_ternarylogic_epi32(low, high, mask, kFirstOrBothOthers);
}
#else
inline I shorts(int x) { return _mm256_set1_epi16(int16_t(x)); }
inline I bits_of(I a, I mask) { return _mm256_and_si256(a, mask); }
inline I left(I a, int bits) { return _mm256_slli_epi16(a, bits); }
inline I right(I a, int bits) { return _mm256_srli_epi16(a, bits); }
inline I rounded_product(I a, I b) { return _mm256_mulhrs_epi16(a, b); }  // · 2^-15
inline I add_shorts(I a, I b) { return _mm256_add_epi16(a, b); }
inline void store_bytes(uint8_t* p, I a) { _mm256_store_si256(reinterpret_cast<I*>(p), a); }
inline I low_and_masked(I low, I high, I mask) { return _mm256_or_si256(low, _mm256_and_si256(high, mask)); }
#endif

inline I in_both_halves(F value) {  // small integers, in both 16-bit halves of their lanes
  const I whole = round_int(value);
  return add_int(bits_of(whole, set_int(0xffff)), shift_left(whole, 16));
}

// nibbles: 16-bit lanes of q · 2^11. Returns (q · step + offset) in 64ths.
inline I steps_of(I nibbles, I step, I offset) { return add_shorts(rounded_product(nibbles, step), offset); }

// 64ths of even and odd bytes, rounded down to whole ones, side by side.
inline I as_bytes(I even, I odd) { return low_and_masked(right(even, 6), left(odd, 2), shorts(0xff00)); }

// Stores the scales of the outputs of one vector; returns their inverses.
inline F store_output_scale(F most, F broken, float* out) {
  store(out, fma(most, set(1.0f / 127.0f), broken));
  // Below the smallest normal number the inverse would overflow; such an output is zero for all purposes.
  return zero_up_to(div(set(127.0f), most), most, set(1e-30f));
}

template <int kFormat>
void expand_to_bytes(const uint8_t* panel, int k, uint8_t* out) {
  const size_t minima = ridgeline::minima_offset(kFormat, k);
  const uint8_t* quants = panel + ridgeline::quants_offset(kFormat, k);
  const int groups = k / kGroup;
  F scale, minimum, inverse[kHalves];
  repeat<kHalves>([&](auto half) RL_INLINE {
    F most = zero(), broken = zero();  // a maximum forgets a NaN, the output must not
    for (int g = 0; g < groups; g++) {
      load_scale<kFormat>(panel, minima, g * kPanel + half * kLanes, &scale, &minimum);
      most = max(most, max(size(minimum), size(fma(scale, set(15.0f), minimum))));
      broken = fma(scale, zero(), fma(minimum, zero(), broken));
    }
    inverse[half] = store_output_scale(most, broken, reinterpret_cast<float*>(out) + half * kLanes);
  });
  out += kPanel * sizeof(float);
  for (int g = 0; g < groups; g++, out += kGroup * kPanel, quants += ridgeline::group_quant_bytes(kFormat))
    repeat<kHalves>([&](auto half) RL_INLINE {
      load_scale<kFormat>(panel, minima, g * kPanel + half * kLanes, &scale, &minimum);
      const I step = in_both_halves(mul(mul(scale, inverse[half]), set(1024.0f)));  // · 2^11 / 2^15 = 64
      const I offset = in_both_halves(fma(mul(minimum, inverse[half]), set(64.0f), set(128.0f * 64 + 32)));
      repeat<4>([&](auto j) RL_INLINE {
        const I w = load_bytes(quants + j * kPanel * 4 + half * kLanes * 4);
        uint8_t* to = out + 2 * j * kPanel * 4 + half * kLanes * 4;
        const I low_even = steps_of(left(bits_of(w, shorts(0x000f)), 11), step, offset);
        const I low_odd = steps_of(left(bits_of(w, shorts(0x0f00)), 3), step, offset);
        const I high_even = steps_of(left(bits_of(w, shorts(0x00f0)), 7), step, offset);
        const I high_odd = steps_of(right(bits_of(w, shorts(0xf000)), 1), step, offset);
        store_bytes(to, as_bytes(low_even, low_odd));
        store_bytes(to + kPanel * 4, as_bytes(high_even, high_odd));
      });
    });
}

// As expand_to_bytes: q is 6 bits wide, and has a scale per 16.
inline void expand_six_bits(const uint8_t* panel, int k, uint8_t* out) {
  const uint8_t* quants = panel + ridgeline::quants_offset(RL_Q6_K, k);
  const int groups = k / kGroup;
  auto scale_of = [&](int g, int part, int lane) RL_INLINE {
    const uint8_t* units = panel + size_t(g / 8) * ridgeline::super_bytes(RL_Q6_K);
    return mul(load_half(reinterpret_cast<const uint16_t*>(units) + lane), load_signed(units + (2 + g % 8 * 2 + part) * kPanel + lane));
  };
  F inverse[kHalves];
  repeat<kHalves>([&](auto half) RL_INLINE {
    F most = zero(), broken = zero();
    for (int g = 0; g < 2 * groups; g++) {
      const F scale = scale_of(g / 2, g % 2, half * kLanes);
      most = max(most, mul(size(scale), set(32.0f)));
      broken = fma(scale, zero(), broken);
    }
    inverse[half] = store_output_scale(most, broken, reinterpret_cast<float*>(out) + half * kLanes);
  });
  out += kPanel * sizeof(float);
  for (int g = 0; g < groups; g++, quants += ridgeline::group_quant_bytes(RL_Q6_K), out += kGroup * kPanel)
    repeat<2 * kHalves>([&](auto i) RL_INLINE {
      constexpr int part = i % 2, half = i / 2, lane = half * kLanes;
      const F scale = mul(scale_of(g, part, lane), inverse[half]);
      const I step = in_both_halves(mul(scale, set(4096.0f)));  // · 2^9 / 2^15 = 64
      const I offset = in_both_halves(fma(scale, set(-32.0f * 64), set(128.0f * 64 + 32)));
      const Bytes uppers = load_bytes(quants + (4 + part) * kPanel * 4 + lane * 4);
      repeat<4>([&](auto quad) RL_INLINE {
        const Bytes w = load_bytes(quants + (2 * part + quad / 2) * kPanel * 4 + lane * 4);
        const Bytes six = six_bits<quad>(quad % 2 ? high_nibbles(w) : low_nibbles(w), uppers);
        const I even = steps_of(left(bits_of(six, shorts(0x00ff)), 9), step, offset);
        const I odd = steps_of(left(bits_of(six, shorts(0xff00)), 1), step, offset);
        store_bytes(out + (4 * part + quad) * kPanel * 4 + lane * 4, as_bytes(even, odd));
      });
    });
}

template <int R>
void expanded_tile(const uint8_t* expanded, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to) {
  const uint8_t *quants = expanded + kPanel * sizeof(float), *x = in.high;
  const float *scales = in.scales, *sums = in.sums;
  F acc[kHalves][R];
  repeat<kHalves * R>([&](auto i) RL_INLINE { acc[i / R][i % R] = zero(); });
  for (int g = 0; g < k / kGroup; g++, quants += kGroup * kPanel, x += kGroup * R, scales += R, sums += R) {
    I dots[kHalves][R];
    repeat<kHalves * R>([&](auto i) RL_INLINE { dots[i / R][i % R] = set_int(load_dword(sums + i % R)); });
#if defined(__AVX512F__)
    group_dots<R, false>(dots[0], quants, x);
#else
    dot_byte_group<R, kHalves>(dots, quants, x);
#endif
    repeat<kHalves * R>([&](auto i) RL_INLINE {
      acc[i / R][i % R] = fma(to_float(dots[i / R][i % R]), set(scales[i % R]), acc[i / R][i % R]);
    });
  }
  repeat<kHalves>([&](auto half) RL_INLINE {
    const F scale = load(reinterpret_cast<const float*>(expanded) + half * kLanes);
    repeat<R>([&](auto r) RL_INLINE { acc[half][r] = mul(acc[half][r], scale); });
    finish<R>(acc[half], bias, half * kLanes, out, stride, add_to);
  });
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
  else if (m.format == RL_Q4_Z) expand_to_bytes<RL_Q4_Z>(data, in.k, scratch);
  else if (m.format == RL_Q6_K) expand_six_bits(data, in.k, scratch);
  else expand_to_bytes<RL_Q4_K>(data, in.k, scratch);
  for (int tile = first; tile < end; tile++)
    expanded_kernel_of<kLinearRows>(in.tiling.size(tile))(scratch, in.k, tile_inputs(in, tile), bias,
                                                          out + size_t(in.tiling.first(tile)) * stride, stride, add_to);
}

}  // namespace
