// 64-bit ARM: 4 lanes in 32 registers. NEON alone, with dot products of signed bytes (ARMv8.2 dotprod), or with those of
// unsigned and signed bytes and products of 2 × 8 with 8 × 2 bytes (i8mm).
//
// bf16 products are float multiplications on every set: the bf16 instructions round their sums another way.
#pragma once
#include <arm_neon.h>

namespace {

constexpr int kLanes = 4;
constexpr int kLinearRows = 4;
constexpr int kAttentionTile = 4;
constexpr int kAttentionSums = 16;   // accumulators an attention loop may hold
constexpr int kDenseRows = 8;     // rows of a dense layer that are computed together, times two vectors of outputs

using F = float32x4_t;
using I = int32x4_t;
using Bytes = uint8x16_t;

inline F set(float x) { return vdupq_n_f32(x); }
inline F zero() { return set(0.0f); }
inline F load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, F x) { vst1q_f32(p, x); }
inline F load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F add(F a, F b) { return vaddq_f32(a, b); }
inline F sub(F a, F b) { return vsubq_f32(a, b); }
inline F mul(F a, F b) { return vmulq_f32(a, b); }
inline F div(F a, F b) { return vdivq_f32(a, b); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where either is NaN, as on the other sets
inline F size(F a) { return vabsq_f32(a); }
inline F negative_size(F a) { return vnegq_f32(vabsq_f32(a)); }
inline F choose_sign(F sign, F below, F above) { return vbslq_f32(vcltzq_s32(vreinterpretq_s32_f32(sign)), below, above); }
inline F zero_up_to(F value, F a, F b) {  // value, or 0 where a ≤ b
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcleq_f32(a, b)));
}
inline float sum(F a) { return vaddvq_f32(a); }
inline float largest(F a) { return vmaxnmvq_f32(a); }

inline I set_int(int32_t x) { return vdupq_n_s32(x); }
inline I zero_int() { return set_int(0); }
inline F to_float(I a) { return vcvtq_f32_s32(a); }
inline I round_int(F a) { return vcvtnq_s32_f32(a); }
inline I add_int(I a, I b) { return vaddq_s32(a, b); }
inline I sub_int(I a, I b) { return vsubq_s32(a, b); }
inline I shift_left(I a, int bits) { return vshlq_s32(a, vdupq_n_s32(bits)); }
inline I shift_right(I a, int bits) { return vshlq_s32(a, vdupq_n_s32(-bits)); }
inline F times_power_of_two(F a, I n) {  // n ≥ -126
  return mul(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)));
}
inline F inside(F value, int base, int first, int last, float other) {
  const int32_t lanes[4] = {0, 1, 2, 3};
  const I index = vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(base));
  const uint32x4_t out = vorrq_u32(vcltq_s32(index, vdupq_n_s32(first)), vcgtq_s32(index, vdupq_n_s32(last)));
  return vbslq_f32(out, set(other), value);
}

inline Bytes load_bytes(const uint8_t* p) { return vld1q_u8(p); }
inline Bytes low_nibbles(Bytes a) { return vandq_u8(a, vdupq_n_u8(15)); }
inline Bytes high_nibbles(Bytes a) { return vshrq_n_u8(a, 4); }
// Quads of six bits: the nibbles, and two bits from position 2 · kPlace of `uppers`.
template <int kPlace>
inline Bytes six_bits(Bytes nibbles, Bytes uppers) {
  Bytes moved = uppers;
  if constexpr (kPlace < 2) moved = vshlq_n_u8(uppers, 4 - 2 * kPlace);
  if constexpr (kPlace > 2) moved = vshrq_n_u8(uppers, 2);
  return vorrq_u8(nibbles, vandq_u8(moved, vdupq_n_u8(0x30)));
}
inline uint16x8_t load_four(const uint8_t* p) { return vmovl_u8(vreinterpret_u8_s32(vdup_n_s32(load_dword(p)))); }
inline F load_unsigned(const uint8_t* p) { return vcvtq_f32_u32(vmovl_u16(vget_low_u16(load_four(p)))); }
inline F load_signed(const uint8_t* p) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(load_dword(p))));
  return to_float(vmovl_s16(vget_low_s16(wide)));
}

// ---- products of bytes: four to each lane, inputs the same quad for all lanes ----

// Both signed. Without the instruction, four products are added in pairs in 16 bits: at most 2 · 127 · 127 in size.
inline I dot_signed(I acc, int8x16_t weights, int8x16_t inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, weights, inputs);
#else
  const int16x8_t first = vmull_s8(vget_low_s8(weights), vget_low_s8(inputs)), second = vmull_high_s8(weights, inputs);
  return vpadalq_s16(acc, vpaddq_s16(first, second));
#endif
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kDotTakesBytes = true;
inline I dot_vectors(I acc, Bytes weights, int8x16_t inputs) { return vusdotq_s32(acc, weights, inputs); }
#else
// Weights must be below 128, to be signed bytes. Kernels give whole bytes as two nibbles.
constexpr bool kDotTakesBytes = false;
inline I dot_vectors(I acc, Bytes weights, int8x16_t inputs) { return dot_signed(acc, vreinterpretq_s8_u8(weights), inputs); }
#endif
inline int8x16_t quad_in_all(const uint8_t* inputs) { return vreinterpretq_s8_s32(vdupq_n_s32(load_dword(inputs))); }
inline I dot(I acc, Bytes weights, const uint8_t* inputs) { return dot_vectors(acc, weights, quad_in_all(inputs)); }

// ---- bf16 ----

constexpr bool kBf16AsFloats = true;
inline F low_bf16(Bytes a) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(a), 16)); }
inline F high_bf16(Bytes a) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(a), vdupq_n_u32(0xffff0000u))); }
inline F dot_bf16(F acc, Bytes weights, const uint8_t* inputs) {
  const Bytes pair = vreinterpretq_u8_s32(vdupq_n_s32(load_dword(inputs)));
  acc = fma(low_bf16(weights), low_bf16(pair), acc);
  return fma(high_bf16(weights), high_bf16(pair), acc);
}
inline Bytes low_halves(Bytes a) { return vreinterpretq_u8_u32(vandq_u32(vreinterpretq_u32_u8(a), vdupq_n_u32(0xffff))); }

// To nearest, ties to even; in the upper half of each lane.
inline uint32x4_t rounded_bits(F a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
inline F rounded_bf16(F a) {  // as store_bf16 rounds
  const F rounded = vreinterpretq_f32_u32(vandq_u32(rounded_bits(a), vdupq_n_u32(0xffff0000u)));
  return vbslq_f32(vceqq_f32(a, a), rounded, a);
}
inline void store_bf16(uint16_t* p, F a) {
  const uint16x4_t rounded = vshrn_n_u32(rounded_bits(a), 16);
  const uint16x4_t number = vmovn_u32(vceqq_f32(a, a));  // rounding up could make a NaN an infinity
  vst1_u16(p, vbsl_u16(number, rounded, vdup_n_u16(0x7fc0)));
}

inline void store_int8(int8_t* p, I a) {
  const int16x4_t words = vqmovn_s32(a);
  const int32_t bytes = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
  std::memcpy(p, &bytes, 4);
}
inline int32_t sum_int(I a) { return vaddvq_s32(a); }
inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace
