// Linear layers: a tile of rows times one panel of 16 packed outputs, for every weight format.
//
// Quantized weights are w = scale · q + minimum per group of 32, inputs x = s · (128 · high + low) or s · high. Inside a
// group the product is exact integer arithmetic; groups are added in float, in order. So one row's result depends on
// nothing but the row, the weights and the input kind: not on the tile it is computed in.
#pragma once
#include "inputs.h"

namespace {

using ridgeline::is_four_bit;

struct TileInputs {
  const uint8_t *high, *low;
  const float *scales, *sums;
};

inline TileInputs tile_inputs(const Inputs& in, int tile) {
  const size_t first = in.tiling.first(tile);
  const size_t row_bytes = size_t(in.k) * size_t(ridgeline::high_bytes(in.kind));
  const size_t scale_at = first * (in.k / kGroup);
  return {in.high + first * row_bytes, in.low + first * in.k, in.scales + scale_at,
          in.sums + scale_at * in.parts};
}

template <int R>
RL_INLINE inline void finish(const F (&acc)[R], const float* bias, int lane, float* out, size_t stride, bool add_to) {
  repeat<R>([&](auto r) RL_INLINE {
    float* at = out + r * stride + lane;
    F value = bias ? add(acc[r], load(bias + lane)) : acc[r];
    store(at, add_to ? add(load(at), value) : value);
  });
}

template <int R>
void float_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to) {
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const float* weights = reinterpret_cast<const float*>(panel) + lane;
    const float* x = reinterpret_cast<const float*>(in.high);
    F acc[R];
    repeat<R>([&](auto r) RL_INLINE { acc[r] = zero(); });
    for (int i = 0; i < k; i++, weights += kPanel, x += R) {
      const F w = load(weights);
      repeat<R>([&](auto r) RL_INLINE { acc[r] = fma(w, set(x[r]), acc[r]); });
    }
    finish<R>(acc, bias, lane, out, stride, add_to);
  }
}

template <int R>
void bf16_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to) {
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const uint8_t* weights = panel + lane * 4;
    const uint8_t* x = in.high;
    F acc[R];
    repeat<R>([&](auto r) RL_INLINE { acc[r] = zero(); });
    for (int i = 0; i < k; i += 2, weights += kPanel * 4, x += R * 4) {
      const Bytes w = load_bytes(weights);
      repeat<R>([&](auto r) RL_INLINE { acc[r] = dot_bf16(acc[r], w, x + r * 4); });
    }
    finish<R>(acc, bias, lane, out, stride, add_to);
  }
}

// Adds Σ q · x of one group to dots, for one limb of the inputs.
template <int R, bool kFourBit>
RL_INLINE inline void group_dots(I (&dots)[R], const uint8_t* quants, const uint8_t* x) {
  if constexpr (kFourBit) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const Bytes w = load_bytes(quants + j * kPanel * 4);
      const Bytes low = low_nibbles(w), high = high_nibbles(w);
      repeat<R>([&](auto r) RL_INLINE { dots[r] = dot(dots[r], low, x + (2 * j * R + r) * 4); });
      repeat<R>([&](auto r) RL_INLINE { dots[r] = dot(dots[r], high, x + ((2 * j + 1) * R + r) * 4); });
    }
  } else if constexpr (kDotTakesBytes) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      const Bytes w = load_bytes(quants + j * kPanel * 4);
      repeat<R>([&](auto r) RL_INLINE { dots[r] = dot(dots[r], w, x + (j * R + r) * 4); });
    }
  } else {
    I tops[R];
    repeat<R>([&](auto r) RL_INLINE { tops[r] = zero_int(); });
    for (int j = 0; j < 8; j++) {
      const Bytes w = load_bytes(quants + j * kPanel * 4);
      const Bytes low = low_nibbles(w), high = high_nibbles(w);
      repeat<R>([&](auto r) RL_INLINE {
        const uint8_t* inputs = x + (j * R + r) * 4;
        dots[r] = dot(dots[r], low, inputs);
        tops[r] = dot(tops[r], high, inputs);
      });
    }
    repeat<R>([&](auto r) RL_INLINE { dots[r] = add_int(dots[r], shift_left(tops[r], 4)); });
  }
}

template <int kFormat>
inline void load_scale(const uint8_t* panel, size_t minima, int index, F* scale, F* minimum) {
  if constexpr (kFormat == RL_Q4_K) {
    const uint8_t* units = panel + size_t(index / (8 * kPanel)) * ridgeline::super_bytes(RL_Q4_K);
    const int lane = index % kPanel, code = 2 * kPanel + index % (8 * kPanel);
    *scale = mul(load_half(reinterpret_cast<const uint16_t*>(units) + lane), load_unsigned(units + code));
    units += minima;
    *minimum = mul(load_half(reinterpret_cast<const uint16_t*>(units) + lane), sub(zero(), load_unsigned(units + code)));
  } else if constexpr (kFormat == RL_Q8_FM) {
    *scale = load(reinterpret_cast<const float*>(panel) + index);
    *minimum = load(reinterpret_cast<const float*>(panel + minima) + index);
  } else {
    *scale = load_half(reinterpret_cast<const uint16_t*>(panel) + index);
    if constexpr (kFormat == RL_Q4_Z)
      *minimum = mul(*scale, sub(zero(), load_unsigned(panel + minima + index)));
    else if constexpr (kFormat == RL_Q4_HM)
      *minimum = load_half(reinterpret_cast<const uint16_t*>(panel + minima) + index);
    else  // only where weights are expanded; the byte kernels add the offset to q
      *minimum = mul(*scale, set(kFormat == RL_Q4_H ? -8.0f : -128.0f));
  }
}

// Weights are asked for this many bytes before they are needed, evenly over all sections and across the ends of panels,
// which the hardware's own prefetching does not see: 30 instead of 11 GB/s from memory for one row on a Zen 4 core.
constexpr size_t kAhead = 8192;

template <int R, int kFormat, bool kTwoLimbs>
void quantized_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to) {
  constexpr bool kFourBit = is_four_bit(kFormat), kOffset = kFormat == RL_Q4_H || kFormat == RL_Q8_H;
  constexpr size_t kGroupBytes = ridgeline::group_quant_bytes(kFormat);
  const size_t minima = ridgeline::minima_offset(kFormat, k);
  const int groups = k / kGroup;
  const size_t share = ridgeline::panel_bytes(kFormat, k) / size_t(groups);
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const uint8_t* quants = panel + ridgeline::quants_offset(kFormat, k) + lane * 4;
    const uint8_t *high = in.high, *low = in.low;
    const float *scales = in.scales, *sums = in.sums;
    const uint8_t* ahead = panel + kAhead;
    F acc[R];
    repeat<R>([&](auto r) RL_INLINE { acc[r] = zero(); });
    for (int g = 0; g < groups; g++) {
      for (; ahead < panel + kAhead + size_t(g + 1) * share; ahead += 64) prefetch(ahead);
      I dots[R];
      repeat<R>([&](auto r) RL_INLINE { dots[r] = kOffset && !kTwoLimbs ? set_int(load_dword(sums + r)) : zero_int(); });
      group_dots<R, kFourBit>(dots, quants, high);
      if constexpr (kTwoLimbs) {
        repeat<R>([&](auto r) RL_INLINE {
          dots[r] = shift_left(dots[r], 7);
          if constexpr (kOffset) dots[r] = add_int(dots[r], set_int(load_dword(sums + r)));
        });
        group_dots<R, kFourBit>(dots, quants, low);
        low += kGroup * R;
      }
      F scale, minimum;
      load_scale<kFormat>(panel, minima, g * kPanel + lane, &scale, &minimum);
      repeat<R>([&](auto r) RL_INLINE {
        acc[r] = fma(to_float(dots[r]), mul(scale, set(scales[r])), acc[r]);
        if constexpr (!kOffset) acc[r] = fma(minimum, set(sums[r]), acc[r]);
      });
      quants += kGroupBytes, high += kGroup * R, scales += R, sums += R;
    }
    finish<R>(acc, bias, lane, out, stride, add_to);
  }
}

// Scales of 16 weights: each half of a group has its own sum of inputs and its own dot products.
template <int R, bool kTwoLimbs>
void six_bit_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to) {
  const int groups = k / kGroup;
  const size_t share = ridgeline::panel_bytes(RL_Q6_K, k) / size_t(groups);
  const uint8_t* quants = panel + ridgeline::quants_offset(RL_Q6_K, k);
  const uint8_t *high = in.high, *low = in.low, *ahead = panel + kAhead;
  const float *scales = in.scales, *sums = in.sums;
  F acc[kHalves][R];
  repeat<kHalves * R>([&](auto i) RL_INLINE { acc[i / R][i % R] = zero(); });
  for (int g = 0; g < groups; g++) {
    for (; ahead < panel + kAhead + size_t(g + 1) * share; ahead += 64) prefetch(ahead);
    const uint8_t* units = panel + size_t(g / 8) * ridgeline::super_bytes(RL_Q6_K);
    repeat<2 * kHalves>([&](auto part) RL_INLINE {
      constexpr int half = part % 2, lane = part / 2 * kLanes;  // of the group's inputs; of the panel's outputs
      I dots[R], tops[R];  // of the low limb, or of the only one; of the high limb
      repeat<R>([&](auto r) RL_INLINE { dots[r] = set_int(load_dword(sums + half * R + r)), tops[r] = zero_int(); });
      const Bytes uppers = load_bytes(quants + (4 + half) * kPanel * 4 + lane * 4);
      repeat<2>([&](auto j) RL_INLINE {
        const Bytes w = load_bytes(quants + (2 * half + j) * kPanel * 4 + lane * 4);
        const Bytes first = six_bits<2 * j>(low_nibbles(w), uppers), second = six_bits<2 * j + 1>(high_nibbles(w), uppers);
        repeat<R>([&](auto r) RL_INLINE {
          const int at = ((4 * half + 2 * j) * R + r) * 4, next = at + R * 4;
          dots[r] = dot(dot(dots[r], first, (kTwoLimbs ? low : high) + at), second, (kTwoLimbs ? low : high) + next);
          if constexpr (kTwoLimbs) tops[r] = dot(dot(tops[r], first, high + at), second, high + next);
        });
      });
      const F unit = load_half(reinterpret_cast<const uint16_t*>(units) + lane);
      const F scale = mul(unit, load_signed(units + (2 + g % 8 * 2 + half) * kPanel + lane));
      repeat<R>([&](auto r) RL_INLINE {
        if constexpr (kTwoLimbs) dots[r] = add_int(dots[r], shift_left(tops[r], 7));
        acc[part / 2][r] = fma(to_float(dots[r]), mul(scale, set(scales[r])), acc[part / 2][r]);
      });
    });
    quants += ridgeline::group_quant_bytes(RL_Q6_K), high += kGroup * R, scales += R, sums += 2 * R;
    if constexpr (kTwoLimbs) low += kGroup * R;
  }
  repeat<kHalves>([&](auto i) RL_INLINE { finish<R>(acc[i], bias, i * kLanes, out, stride, add_to); });
}

// One scale per output, one per input row: the group sums are only there to correct for the offset of 128.
template <int R>
void channel_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to) {
  const int groups = k / kGroup;
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const uint8_t* quants = panel + ridgeline::quants_offset(RL_Q8_C, k) + lane * 4;
    F acc[R];
    float total[R];
    repeat<R>([&](auto r) RL_INLINE { acc[r] = zero(), total[r] = 0.0f; });
    for (int g = 0; g < groups; g++, quants += ridgeline::group_quant_bytes(RL_Q8_C)) {
      I dots[R];
      repeat<R>([&](auto r) RL_INLINE { dots[r] = zero_int(); });
      group_dots<R, false>(dots, quants, in.high + size_t(g) * kGroup * R);
      repeat<R>([&](auto r) RL_INLINE { dots[r] = shift_left(dots[r], 7); });
      group_dots<R, false>(dots, quants, in.low + size_t(g) * kGroup * R);
      repeat<R>([&](auto r) RL_INLINE {
        acc[r] = fma(to_float(dots[r]), set(in.scales[r]), acc[r]);
        total[r] += in.sums[g * R + r];
      });
    }
    const F scale = load(reinterpret_cast<const float*>(panel) + lane);
    repeat<R>([&](auto r) RL_INLINE { acc[r] = mul(scale, fma(set(total[r]), set(-128.0f), acc[r])); });
    finish<R>(acc, bias, lane, out, stride, add_to);
  }
}

using TileKernel = void (*)(const uint8_t*, int, const TileInputs&, const float*, float*, size_t, bool);

template <int R>
TileKernel tile_kernel(int format, bool two_limbs) {
  switch (format) {
    case RL_F32: return float_tile<R>;
    case RL_BF16: return bf16_tile<R>;
    case RL_Q4_H: return two_limbs ? quantized_tile<R, RL_Q4_H, true> : quantized_tile<R, RL_Q4_H, false>;
    case RL_Q4_HM: return two_limbs ? quantized_tile<R, RL_Q4_HM, true> : quantized_tile<R, RL_Q4_HM, false>;
    case RL_Q4_Z: return two_limbs ? quantized_tile<R, RL_Q4_Z, true> : quantized_tile<R, RL_Q4_Z, false>;
    case RL_Q4_K: return two_limbs ? quantized_tile<R, RL_Q4_K, true> : quantized_tile<R, RL_Q4_K, false>;
    case RL_Q8_H: return two_limbs ? quantized_tile<R, RL_Q8_H, true> : quantized_tile<R, RL_Q8_H, false>;
    case RL_Q8_FM: return two_limbs ? quantized_tile<R, RL_Q8_FM, true> : quantized_tile<R, RL_Q8_FM, false>;
    case RL_Q6_K: return two_limbs ? six_bit_tile<R, true> : six_bit_tile<R, false>;
    default: return channel_tile<R>;
  }
}

template <int R>
TileKernel tile_kernel_of(int rows, int format, bool two_limbs) {
  if constexpr (R == 1) return tile_kernel<1>(format, two_limbs);
  else return rows == R ? tile_kernel<R>(format, two_limbs) : tile_kernel_of<R - 1>(rows, format, two_limbs);
}

inline void panel_product(const rl_matrix& m, int panel, const Inputs& in, int first, int end, float* out, size_t stride,
                          bool add_to) {
  const uint8_t* data = m.data + size_t(panel) * ridgeline::panel_bytes(m.format, m.k);
  const float* bias = m.bias ? m.bias + panel * kPanel : nullptr;
  for (int tile = first; tile < end; tile++)
    tile_kernel_of<kLinearRows>(in.tiling.size(tile), m.format, has_two_limbs(in.kind))(
        data, in.k, tile_inputs(in, tile), bias, out + size_t(in.tiling.first(tile)) * stride, stride, add_to);
}

}  // namespace
