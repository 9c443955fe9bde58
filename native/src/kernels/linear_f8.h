// Linear layers of FP8 weights (E4M3, a float scale per 128 inputs of an output). Weights stay at 8 bits in memory and become
// floats, or bf16 where a set has bf16 products, on the way to the multiplication. Every E4M3 number is a float16 and a bf16
// number: nothing is rounded but the inputs, and those only as bf16. On AMX, from 48 rows, scale times weight is (linear_amx.h).
//
// A sum of 128 inputs is multiplied with its scale once. Panels are taken in slices of inputs; for more than one tile of rows a
// slice is decoded once, into the first-level cache. Both ways have the same arithmetic, so that a row's bits do not depend on
// the rows beside it.
#pragma once
#include "linear.h"

namespace {

using ridgeline::kF8Inputs;

constexpr int kF8Slice = 2 * kF8Inputs;
constexpr size_t f8_scratch_bytes() { return size_t(kF8Slice) * kPanel * sizeof(float); }

// ---- codes to numbers: 32 at a time, two neighbouring inputs of 16 outputs ----

// As floats, times 2^-8: a code is the upper part of a float16 whose exponent has another offset. Subnormal numbers included.
constexpr float kF8Factor = 256.0f;
#if defined(__AVX512F__)
RL_INLINE inline void decode_floats(const uint8_t* codes, F (&even)[kHalves], F (&odd)[kHalves]) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), kept = _mm256_set1_epi16(int16_t(0xbf80));
  even[0] = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 1), kept));
  odd[0] = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(both, 1), kept));
}
#elif defined(__AVX2__)
RL_INLINE inline void decode_floats(const uint8_t* codes, F (&even)[kHalves], F (&odd)[kHalves]) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), kept = _mm256_set1_epi16(int16_t(0xbf80));
  const __m256i first = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 1), kept);
  const __m256i second = _mm256_and_si256(_mm256_srai_epi16(both, 1), kept);
  even[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(first)), even[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(first, 1));
  odd[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(second)), odd[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(second, 1));
}
#else
RL_INLINE inline void decode_floats(const uint8_t* codes, F (&even)[kHalves], F (&odd)[kHalves]) {
  uint16_t halves[2][kPanel];
  for (int i = 0; i < 2 * kPanel; i++) halves[i % 2][i / 2] = uint16_t((codes[i] & 0x80) << 8 | (codes[i] & 0x7f) << 7);
  repeat<kHalves>([&](auto v) RL_INLINE { even[v] = load_half(halves[0] + v * kLanes), odd[v] = load_half(halves[1] + v * kLanes); });
}
#endif

#if defined(__AVX512BF16__)
// As bf16 pairs. The exponent's offset is added; where it is zero the number is subnormal, and a table has what to add instead.
RL_INLINE inline Bytes decode_bf16(const uint8_t* codes) {
  alignas(64) static constexpr uint16_t kSubnormal[32] = {0x0000, 0x3af0, 0x3b60, 0x3b90, 0x3bc0, 0x3bd0, 0x3be0, 0x3bf0};
  const I wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const I moved = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(int16_t(0x87f0)));
  const __mmask32 subnormal = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
  return _mm512_add_epi16(moved, _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(0x3c00), subnormal, wide, _mm512_load_si512(kSubnormal)));
}
#endif

// ---- slices: `inputs` of them, whose codes or numbers begin at `w`, and whose scales at `scales` ----

// One row, from the codes.
inline void f8_row(const uint8_t* w, const float* scales, int inputs, const float* x, const float* bias, float* out, size_t stride,
                   bool add_to) {
  F acc[kHalves][1];
  repeat<kHalves>([&](auto v) RL_INLINE { acc[v][0] = zero(); });
  for (int at = 0; at < inputs; at += kF8Inputs, scales += kPanel) {
    F even[kHalves], odd[kHalves];
    repeat<kHalves>([&](auto v) RL_INLINE { even[v] = zero(), odd[v] = zero(); });
    for (int i = at; i < std::min(at + kF8Inputs, inputs); i += 4) {
      prefetch(w + kAhead);
      repeat<2>([&](auto) RL_INLINE {
        F first[kHalves], second[kHalves];
        decode_floats(w, first, second);
        repeat<kHalves>([&](auto v) RL_INLINE {
          even[v] = fma(first[v], set(x[0]), even[v]);
          odd[v] = fma(second[v], set(x[1]), odd[v]);
        });
        w += 2 * kPanel, x += 2;
      });
    }
    repeat<kHalves>([&](auto v) RL_INLINE {
      acc[v][0] = fma(add(even[v], odd[v]), mul(load(scales + v * kLanes), set(kF8Factor)), acc[v][0]);
    });
  }
  repeat<kHalves>([&](auto v) RL_INLINE { finish<1>(acc[v], bias, v * kLanes, out, stride, add_to); });
}

inline void decode_slice(const uint8_t* codes, int inputs, float* out) {
  for (int i = 0; i < inputs; i += 2, codes += 2 * kPanel, out += 2 * kPanel) {
    F even[kHalves], odd[kHalves];
    decode_floats(codes, even, odd);
    repeat<kHalves>([&](auto v) RL_INLINE { store(out + v * kLanes, even[v]), store(out + kPanel + v * kLanes, odd[v]); });
  }
}

// R rows, from floats [input][16].
template <int R>
void f8_float_tile(const uint8_t* w, const float* scales, int inputs, const uint8_t* x, const float* bias, float* out, size_t stride,
                   bool add_to) {
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const float *weights = reinterpret_cast<const float*>(w) + lane, *from = reinterpret_cast<const float*>(x);
    F acc[R];
    repeat<R>([&](auto r) RL_INLINE { acc[r] = zero(); });
    for (int at = 0; at < inputs; at += kF8Inputs) {
      F even[R], odd[R];
      repeat<R>([&](auto r) RL_INLINE { even[r] = zero(), odd[r] = zero(); });
      for (int i = at; i < std::min(at + kF8Inputs, inputs); i += 2, weights += 2 * kPanel, from += 2 * R) {
        const F first = load(weights), second = load(weights + kPanel);
        repeat<R>([&](auto r) RL_INLINE { even[r] = fma(first, set(from[r]), even[r]); });
        repeat<R>([&](auto r) RL_INLINE { odd[r] = fma(second, set(from[R + r]), odd[r]); });
      }
      const F scale = mul(load(scales + at / kF8Inputs * kPanel + lane), set(kF8Factor));
      repeat<R>([&](auto r) RL_INLINE { acc[r] = fma(add(even[r], odd[r]), scale, acc[r]); });
    }
    finish<R>(acc, bias, lane, out, stride, add_to);
  }
}

#if defined(__AVX512BF16__)
inline void decode_slice_to_bf16(const uint8_t* codes, int inputs, uint8_t* out) {
  for (int i = 0; i < inputs; i += 2, codes += 2 * kPanel, out += 4 * kPanel) _mm512_store_si512(out, decode_bf16(codes));
}

// R rows of bf16 pairs, from the codes or from bf16 pairs.
template <int R, bool kFromCodes>
void f8_bf16_tile(const uint8_t* w, const float* scales, int inputs, const uint8_t* x, const float* bias, float* out, size_t stride,
                  bool add_to) {
  F acc[R];
  repeat<R>([&](auto r) RL_INLINE { acc[r] = zero(); });
  for (int at = 0; at < inputs; at += kF8Inputs, scales += kPanel) {
    F sums[R];
    repeat<R>([&](auto r) RL_INLINE { sums[r] = zero(); });
    for (int i = at; i < std::min(at + kF8Inputs, inputs); i += 4) {
      if constexpr (kFromCodes) prefetch(w + kAhead);
      repeat<2>([&](auto) RL_INLINE {
        const Bytes pairs = kFromCodes ? decode_bf16(w) : load_bytes(w);
        repeat<R>([&](auto r) RL_INLINE { sums[r] = dot_bf16(sums[r], pairs, x + r * 4); });
        w += kFromCodes ? 2 * kPanel : 4 * kPanel, x += R * 4;
      });
    }
    const F scale = load(scales);
    repeat<R>([&](auto r) RL_INLINE { acc[r] = fma(sums[r], scale, acc[r]); });
  }
  finish<R>(acc, bias, 0, out, stride, add_to);
}
#endif

using F8Kernel = void (*)(const uint8_t*, const float*, int, const uint8_t*, const float*, float*, size_t, bool);

template <int R>
F8Kernel f8_kernel_of(int rows, [[maybe_unused]] bool floats, [[maybe_unused]] bool from_codes) {
  if constexpr (R > 1)
    if (rows < R) return f8_kernel_of<R - 1>(rows, floats, from_codes);
#if defined(__AVX512BF16__)
  if (!floats) return from_codes ? f8_bf16_tile<R, true> : f8_bf16_tile<R, false>;
#endif
  return f8_float_tile<R>;
}

// Of a panel's slices; inputs are floats or bf16 pairs.
inline void f8_panel_product(const rl_matrix& m, int panel, const Inputs& in, int first, int end, float* out, size_t stride,
                             bool add_to, uint8_t* scratch) {
  const uint8_t* data = m.data + size_t(panel) * ridgeline::panel_bytes(RL_F8, m.k);
  const uint8_t* codes = data + ridgeline::quants_offset(RL_F8, m.k);
  const float* scales = reinterpret_cast<const float*>(data);
  const bool floats = in.kind == InputKind::Float, lone = end - first == 1;
  const bool from_codes = lone && (!floats || in.tiling.size(first) == 1);
  const size_t input_bytes = size_t(ridgeline::bytes_per_input(in.kind));
  for (int at = 0; at < in.k; at += kF8Slice, codes += kF8Slice * kPanel, scales += kF8Slice / kF8Inputs * kPanel) {
    const int inputs = std::min(kF8Slice, in.k - at);
    if (!from_codes) {
      for (int ahead = 0; ahead < inputs * kPanel; ahead += 64) prefetch(codes + kF8Slice * kPanel + ahead);
#if defined(__AVX512BF16__)
      if (!floats) decode_slice_to_bf16(codes, inputs, scratch);
#endif
      if (floats) decode_slice(codes, inputs, reinterpret_cast<float*>(scratch));
    }
    for (int tile = first; tile < end; tile++) {
      const int rows = in.tiling.size(tile);
      const uint8_t* x = in.high + (size_t(in.tiling.first(tile)) * in.k + size_t(at) * rows) * input_bytes;
      const float* bias = at || !m.bias ? nullptr : m.bias + panel * kPanel;
      float* to = out + size_t(in.tiling.first(tile)) * stride;
      if (from_codes && floats) f8_row(codes, scales, inputs, reinterpret_cast<const float*>(x), bias, to, stride, add_to || at);
      else f8_kernel_of<kLinearRows>(rows, floats, from_codes)(from_codes ? codes : scratch, scales, inputs, x, bias, to, stride, add_to || at);
    }
  }
}

}  // namespace
