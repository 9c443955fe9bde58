// Any machine with a C++ compiler that knows vector types (GCC, Clang): 4 lanes, which is NEON's and SSE2's width.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int kLanes = 4;
constexpr int kLinearRows = 4;
constexpr int kAttentionTile = 4;
constexpr int kAttentionSums = 12;   // accumulators an attention loop may hold
constexpr int kDenseRows = 6;     // rows of a dense layer that are computed together, times two vectors of outputs

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));

inline F set(float x) { return F{x, x, x, x}; }
inline F zero() { return set(0.0f); }
inline F load(const float* p) {
  F x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
inline F load_half(const uint16_t* p) {  // finite ones: the exponent's offset is mended by a multiplication
  const U bits = U{p[0], p[1], p[2], p[3]};
  const F value = (F)((bits & 0x7fffu) << 13) * set(5.192296858534828e33f);  // 2^112
  return (F)((U)value | (bits & 0x8000u) << 16);
}
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F max(F a, F b) { return a > b ? a : b; }
inline F size(F a) { return (F)((U)a & 0x7fffffffu); }
inline F negative_size(F a) { return (F)((U)a | 0x80000000u); }
inline F choose_sign(F sign, F below, F above) { return (I)sign < 0 ? below : above; }
inline F zero_up_to(F value, F a, F b) { return a <= b ? zero() : value; }  // value, or 0 where a ≤ b
inline float sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float largest(F a) { return std::fmax(std::fmax(a[0], a[2]), std::fmax(a[1], a[3])); }

inline I set_int(int32_t x) { return I{x, x, x, x}; }
inline I zero_int() { return set_int(0); }
inline F to_float(I a) { return __builtin_convertvector(a, F); }
inline I round_int(F a) {  // to nearest, ties to even, for |a| < 2^22: the sum's last bits are the integer
  const F shifter = set(12582912.0f);
  return (I)(a + shifter) - (I)shifter;
}
inline I add_int(I a, I b) { return a + b; }
inline I sub_int(I a, I b) { return a - b; }
inline I shift_left(I a, int bits) { return (I)((U)a << uint32_t(bits)); }
inline I shift_right(I a, int bits) { return a >> bits; }
inline F times_power_of_two(F a, I n) { return a * (F)shift_left(n + 127, 23); }  // n ≥ -126
inline F inside(F value, int base, int first, int last, float other) {
  const I index = I{0, 1, 2, 3} + base;
  return ((index < first) | (index > last)) ? set(other) : value;
}

inline Bytes load_bytes(const uint8_t* p) {
  Bytes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Bytes low_nibbles(Bytes a) { return a & 15; }
inline Bytes high_nibbles(Bytes a) { return a >> 4; }
template <int kPlace>
inline Bytes six_bits(Bytes nibbles, Bytes uppers) { return nibbles | (((uppers >> (2 * kPlace)) & 3) << 4); }
inline F load_unsigned(const uint8_t* p) { return F{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
inline F load_signed(const uint8_t* p) { return F{float(int8_t(p[0])), float(int8_t(p[1])), float(int8_t(p[2])), float(int8_t(p[3]))}; }
constexpr bool kDotTakesBytes = true;
#if defined(__SSE2__)  // every x86-64: pairs of 16-bit products are added in one instruction
inline I dot(I acc, Bytes weights, const uint8_t* inputs) {
  const int8_t* x = reinterpret_cast<const int8_t*>(inputs);
  const I w = (I)weights, bytes = set_int(0x00ff00ff);
  const I even = set_int(uint16_t(int16_t(x[0])) | int32_t(uint32_t(uint16_t(int16_t(x[2]))) << 16));
  const I odd = set_int(uint16_t(int16_t(x[1])) | int32_t(uint32_t(uint16_t(int16_t(x[3]))) << 16));
  acc += (I)_mm_madd_epi16((__m128i)(w & bytes), (__m128i)even);
  return acc + (I)_mm_madd_epi16((__m128i)((w >> 8) & bytes), (__m128i)odd);
}
#else
inline I dot(I acc, Bytes weights, const uint8_t* inputs) {
  const int8_t* x = reinterpret_cast<const int8_t*>(inputs);
  const I w = (I)weights;
  acc += (w & 255) * x[0] + ((w >> 8) & 255) * x[1];
  return acc + (((w >> 16) & 255) * x[2] + ((w >> 24) & 255) * x[3]);
}
#endif

inline float low_float(int32_t pair) {
  const uint32_t bits = uint32_t(pair) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float high_float(int32_t pair) {
  const uint32_t bits = uint32_t(pair) & 0xffff0000u;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline F dot_bf16(F acc, Bytes weights, const uint8_t* from) {
  const int32_t inputs = load_dword(from);
  acc = fma((F)((U)weights << 16), set(low_float(inputs)), acc);
  return fma((F)((U)weights & 0xffff0000u), set(high_float(inputs)), acc);
}
inline Bytes low_halves(Bytes a) { return (Bytes)((U)a & 0xffffu); }

constexpr bool kBf16AsFloats = true;
inline F low_bf16(Bytes a) { return (F)((U)a << 16); }
inline F high_bf16(Bytes a) { return (F)((U)a & 0xffff0000u); }
inline F rounded_bf16(F a) {  // as store_bf16 rounds
  F out;
  for (int i = 0; i < kLanes; i++) out[i] = a[i] == a[i] ? ridgeline::from_bf16(ridgeline::to_bf16(a[i])) : a[i];
  return out;
}

inline void store_bf16(uint16_t* p, F a) {
  for (int i = 0; i < kLanes; i++) p[i] = a[i] == a[i] ? ridgeline::to_bf16(a[i]) : uint16_t(0x7fc0);
}
inline void store_int8(int8_t* p, I a) {
  for (int i = 0; i < kLanes; i++) p[i] = int8_t(a[i]);
}
inline int32_t sum_int(I a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace
