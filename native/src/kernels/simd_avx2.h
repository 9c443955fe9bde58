// AVX2 with FMA and F16C, and AVX-VNNI where it is compiled for: 8 lanes.
#pragma once
#include <immintrin.h>

namespace {

constexpr int kLanes = 8;
#if defined(__AVXVNNI__)
constexpr int kLinearRows = 6;  // times two vectors of 32-bit sums; 16 registers
#else
constexpr int kLinearRows = 4;
#endif
constexpr int kAttentionTile = 4;
constexpr int kAttentionSums = 12;   // accumulators an attention loop may hold
constexpr int kDenseRows = 6;     // rows of a dense layer that are computed together, times two vectors of outputs

using F = __m256;
using I = __m256i;
using Bytes = __m256i;

inline F zero() { return _mm256_setzero_ps(); }
inline F set(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F size(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F negative_size(F a) { return _mm256_or_ps(a, _mm256_set1_ps(-0.0f)); }
inline F choose_sign(F sign, F below, F above) { return _mm256_blendv_ps(above, below, sign); }
inline F zero_up_to(F value, F a, F b) { return _mm256_and_ps(value, _mm256_cmp_ps(a, b, _CMP_NLE_UQ)); }  // value, or 0 where a ≤ b
inline float sum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float largest(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline I zero_int() { return _mm256_setzero_si256(); }
inline I set_int(int32_t x) { return _mm256_set1_epi32(x); }
inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline I round_int(F a) { return _mm256_cvtps_epi32(a); }
inline I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
inline I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I shift_left(I a, int bits) { return _mm256_slli_epi32(a, bits); }
inline I shift_right(I a, int bits) { return _mm256_srai_epi32(a, bits); }
inline F times_power_of_two(F a, I n) {  // n ≥ -126
  return mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)));
}
inline F inside(F value, int base, int first, int last, float other) {
  const I index = _mm256_add_epi32(_mm256_set1_epi32(base), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const I out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), index), _mm256_cmpgt_epi32(index, _mm256_set1_epi32(last)));
  return _mm256_blendv_ps(value, _mm256_set1_ps(other), _mm256_castsi256_ps(out));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes low_nibbles(Bytes a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
// Quads of six bits: the nibbles, and two bits from position 2 · kPlace of `uppers`.
template <int kPlace>
inline Bytes six_bits(Bytes nibbles, Bytes uppers) {
  const I moved = kPlace < 2 ? _mm256_slli_epi16(uppers, 4 - 2 * kPlace) : _mm256_srli_epi16(uppers, 2 * kPlace - 4);
  return _mm256_or_si256(nibbles, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
}
inline F load_unsigned(const uint8_t* p) { return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
inline F load_signed(const uint8_t* p) { return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }

// In assembler, and volatile: GCC 12 would load the inputs of all rows of a tile at once, and then store what 16 registers
// cannot hold.
RL_INLINE inline I broadcast(const uint8_t* dword) {
  I out;
  asm volatile("vpbroadcastd %1, %0" : "=x"(out) : "m"(*reinterpret_cast<const Dword*>(dword)));
  return out;
}
// sums += products of two pairs of signed 16-bit numbers.
RL_INLINE inline void add_words(I& sums, I weights, I inputs) {
#if defined(__AVXVNNI__)
  asm volatile("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(inputs));
#else
  I pairs;
  asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(pairs) : "x"(weights), "x"(inputs));
#endif
}

#if defined(__AVXVNNI__)
// Four products of an unsigned weight and a signed input, added to 32 bits without saturation. In assembler, and volatile: see
// broadcast().
constexpr bool kDotTakesBytes = true;
inline I dot_bytes(I acc, Bytes weights, I inputs) {
  asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(weights), "x"(inputs));
  return acc;
}
inline I dot(I acc, Bytes weights, const uint8_t* inputs) { return dot_bytes(acc, weights, _mm256_set1_epi32(load_dword(inputs))); }
#else
// Weights must be below 129: two products of a larger byte would overflow the 16 bits they are added in. Kernels give
// whole bytes as two nibbles.
constexpr bool kDotTakesBytes = false;
inline I dot(I acc, Bytes weights, const uint8_t* inputs) {
  const I pairs = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(load_dword(inputs)));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

inline F dot_bf16(F acc, Bytes weights, const uint8_t* inputs) {
  const I pair = _mm256_set1_epi32(load_dword(inputs)), high = _mm256_set1_epi32(int32_t(0xffff0000));
  acc = fma(_mm256_castsi256_ps(_mm256_slli_epi32(weights, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), acc);
  return fma(_mm256_castsi256_ps(_mm256_and_si256(weights, high)), _mm256_castsi256_ps(_mm256_and_si256(pair, high)), acc);
}
// Both bf16 values of each dword as floats; and floats rounded to bf16, as store_bf16 rounds them.
constexpr bool kBf16AsFloats = true;  // inputs of bf16 products are floats: there is no instruction for pairs
inline F low_bf16(Bytes a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
inline F high_bf16(Bytes a) { return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int32_t(0xffff0000)))); }
inline F rounded_bf16(F a) {
  const I bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const I up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const F kept = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int32_t(0xffff0000))));
  return _mm256_blendv_ps(kept, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
inline Bytes low_halves(Bytes a) { return _mm256_and_si256(a, _mm256_set1_epi32(0xffff)); }

inline void store_bf16(uint16_t* p, F a) {
  const I bits = _mm256_castps_si256(a);
  const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const I rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const I nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));  // rounding up could make it an infinity
  const I safe = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(safe, safe), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store_int8(int8_t* p, I a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline int32_t sum_int(I a) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
