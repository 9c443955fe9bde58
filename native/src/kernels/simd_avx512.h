// AVX-512: 16 lanes. VNNI for byte dot products; bf16 dot products where the set has them.
#pragma once
#include <immintrin.h>

namespace {

constexpr int kLanes = 16;
constexpr int kLinearRows = 12;    // rows one linear kernel computes together: two accumulators each of 32 registers
constexpr int kAttentionTile = 8;  // query rows per inner attention loop
constexpr int kAttentionSums = 24;   // accumulators an attention loop may hold
constexpr int kDenseRows = 12;     // rows of a dense layer that are computed together, times two vectors of outputs

using F = __m512;
using I = __m512i;
using Bytes = __m512i;

inline F zero() { return _mm512_setzero_ps(); }
inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F size(F a) { return _mm512_abs_ps(a); }
inline F negative_size(F a) { return _mm512_or_ps(a, _mm512_set1_ps(-0.0f)); }
inline F choose_sign(F sign, F below, F above) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign)), above, below);
}
inline F zero_up_to(F value, F a, F b) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ), value); }  // value, or 0 where a ≤ b
inline float sum(F a) { return _mm512_reduce_add_ps(a); }
inline float largest(F a) { return _mm512_reduce_max_ps(a); }

inline I zero_int() { return _mm512_setzero_si512(); }
inline I set_int(int32_t x) { return _mm512_set1_epi32(x); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I round_int(F a) { return _mm512_cvtps_epi32(a); }
inline I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
inline I shift_left(I a, int bits) { return _mm512_slli_epi32(a, unsigned(bits)); }
inline F times_power_of_two(F a, I n) { return _mm512_scalef_ps(a, _mm512_cvtepi32_ps(n)); }
// Lanes whose index i satisfies first ≤ base + i ≤ last keep their value; the others become `other`.
inline F inside(F value, int base, int first, int last, float other) {
  const I index = _mm512_add_epi32(_mm512_set1_epi32(base), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __mmask16 in = _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(first)) & _mm512_cmple_epi32_mask(index, _mm512_set1_epi32(last));
  return _mm512_mask_blend_ps(in, _mm512_set1_ps(other), value);
}

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low_nibbles(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
// Quads of six bits: the nibbles, and two bits from position 2 · kPlace of `uppers`.
template <int kPlace>
inline Bytes six_bits(Bytes nibbles, Bytes uppers) {
  const I moved = kPlace < 2 ? _mm512_slli_epi16(uppers, kPlace < 2 ? 4 - 2 * kPlace : 0) : _mm512_srli_epi16(uppers, kPlace < 2 ? 0 : 2 * kPlace - 4);
  return _mm512_or_si512(nibbles, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)));
}
inline F load_unsigned(const uint8_t* p) { return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
inline F load_signed(const uint8_t* p) { return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
// acc[lane] += Σ of 4 unsigned weights · 4 signed inputs; the inputs, a dword in memory, are the same for every lane.
// In assembler: GCC 12 knows no broadcast from memory for these two and would spend a register and an instruction on it.
constexpr bool kDotTakesBytes = true;
inline I dot(I acc, Bytes weights, const uint8_t* inputs) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*reinterpret_cast<const Dword*>(inputs)));
  return acc;
}

// acc[lane] += Σ of 2 bf16 weights · 2 bf16 inputs.
#if defined(__AVX512BF16__)
inline F dot_bf16(F acc, Bytes weights, const uint8_t* inputs) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*reinterpret_cast<const Dword*>(inputs)));
  return acc;
}
#else
inline F dot_bf16(F acc, Bytes weights, const uint8_t* inputs) {
  const I pair = _mm512_set1_epi32(load_dword(inputs)), high = _mm512_set1_epi32(int32_t(0xffff0000));
  acc = fma(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), acc);
  return fma(_mm512_castsi512_ps(_mm512_and_si512(weights, high)), _mm512_castsi512_ps(_mm512_and_si512(pair, high)), acc);
}
#endif

// 16 floats to bf16, ties to even.
inline void store_bf16(uint16_t* p, F a) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
#else
  const I bits = _mm512_castps_si512(a);
  const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const I rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);  // rounding up could make it an infinity
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0))));
#endif
}
inline void store_int8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
inline I shift_right(I a, int bits) { return _mm512_srai_epi32(a, unsigned(bits)); }
inline I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
inline int32_t sum_int(I a) { return _mm512_reduce_add_epi32(a); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
#if defined(__AVX512BF16__)
constexpr bool kBf16AsFloats = false;
#else
constexpr bool kBf16AsFloats = true;  // inputs of bf16 products are floats: there is no instruction for pairs
#endif
inline F low_bf16(Bytes a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
inline F high_bf16(Bytes a) { return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int32_t(0xffff0000)))); }
inline F rounded_bf16(F a) {  // as store_bf16 rounds
  alignas(32) uint16_t rounded[kLanes];
  store_bf16(rounded, a);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(rounded))), 16));
}
inline Bytes low_halves(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xffff)); }

}  // namespace
