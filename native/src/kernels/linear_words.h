// 8-bit weights times two rows and more on AVX2: weights and inputs as 16-bit integers, of which vpmaddwd adds two products in
// 32 bits.
//
// As two nibbles (linear_pairs.h) a byte costs as many multiplications, but twice the registers for sums, so that the halves of a panel
// are computed one after the other. Bytes 0 and 2 of a quad make one pair, bytes 1 and 3 the other: a mask and a shift take
// them apart. A group's sum is at most 32 · 255 · 127 in size. The integers and the order of the float sums are those of linear.h.
#pragma once
#include "linear_pairs.h"

namespace {

template <int R, int kFormat>
void word_tile(const uint8_t* panel, int k, const TileInputs& in, const float* bias, float* out, size_t stride, bool add_to,
               Ahead ahead) {
  constexpr bool kOffset = kFormat == RL_Q8_H;
  const size_t minima = ridgeline::minima_offset(kFormat, k);
  const int groups = k / kGroup;
  const size_t share = (ahead.bytes + size_t(groups) - 1) / size_t(groups);
  const uint8_t *quants = panel + ridgeline::quants_offset(kFormat, k), *asked = ahead.from, *x = in.high;
  const float *scales = in.scales, *sums = in.sums;
  const I even = _mm256_set1_epi16(0xff);
  F acc[kHalves][R];
  repeat<kHalves * R>([&](auto i) RL_INLINE { acc[i / R][i % R] = zero(); });
  for (int g = 0; g < groups; g++) {
    for (ahead.from += share; asked < ahead.from; asked += 64) prefetch(asked);
    I totals[kHalves][R];
    repeat<R>([&](auto r) RL_INLINE {
      const I start = kOffset ? broadcast(reinterpret_cast<const uint8_t*>(sums + r)) : zero_int();
      repeat<kHalves>([&](auto half) RL_INLINE { totals[half][r] = start; });
    });
    repeat<8>([&](auto quad) RL_INLINE {
      Bytes w[kHalves];
      repeat<kHalves>([&](auto half) RL_INLINE { w[half] = load_bytes(quants + quad * kPanel * 4 + half * 32); });
      repeat<2>([&](auto odd) RL_INLINE {
        I words[kHalves];
        repeat<kHalves>([&](auto half) RL_INLINE { words[half] = odd ? _mm256_srli_epi16(w[half], 8) : _mm256_and_si256(w[half], even); });
        repeat<R>([&](auto r) RL_INLINE {
          const I inputs = broadcast(x + ((2 * quad + odd) * R + r) * 4);
          repeat<kHalves>([&](auto half) RL_INLINE { add_words(totals[half][r], words[half], inputs); });
        });
      });
    });
    repeat<kHalves>([&](auto half) RL_INLINE {
      F scale, minimum;
      load_scale<kFormat>(panel, minima, g * kPanel + half * kLanes, &scale, &minimum);
      repeat<R>([&](auto r) RL_INLINE {
        acc[half][r] = fma(to_float(totals[half][r]), mul(scale, set(scales[r])), acc[half][r]);
        if constexpr (!kOffset) acc[half][r] = fma(minimum, set(sums[r]), acc[half][r]);
      });
    });
    quants += ridgeline::group_quant_bytes(kFormat), x += kGroup * 2 * R, scales += R, sums += R;
  }
  repeat<kHalves>([&](auto half) RL_INLINE { finish<R>(acc[half], bias, half * kLanes, out, stride, add_to); });
}

using WordKernel = void (*)(const uint8_t*, int, const TileInputs&, const float*, float*, size_t, bool, Ahead);

template <int R>
WordKernel word_kernel_of(int rows, int format) {
  if constexpr (R > 1)
    if (rows < R) return word_kernel_of<R - 1>(rows, format);
  return format == RL_Q8_H ? word_tile<R, RL_Q8_H> : word_tile<R, RL_Q8_FM>;
}

inline void word_panel_product(const rl_matrix& m, int panel, const Inputs& in, int first, int end, float* out, size_t stride,
                               bool add_to) {
  const size_t bytes = ridgeline::panel_bytes(m.format, m.k);
  const uint8_t* data = m.data + size_t(panel) * bytes;
  const float* bias = m.bias ? m.bias + panel * kPanel : nullptr;
  for (int tile = first; tile < end; tile++)
    word_kernel_of<kLinearRows>(in.tiling.size(tile), m.format)(
        data, in.k, tile_inputs(in, tile), bias, out + size_t(in.tiling.first(tile)) * stride, stride, add_to,
        ahead_of(data, bytes, tile - first, end - first));
}

}  // namespace
