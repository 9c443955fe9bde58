// How packed matrices lie in memory. Everything that reads or writes packed weights agrees here.
//
// A matrix [n, k] is cut into panels of 16 output rows, k padded to a multiple of 32 and n to one of 16, with zeros.
// A panel holds, for its 16 rows side by side, so that one vector holds the same inputs of neighbouring outputs:
//
//   F32    [k][16] floats
//   BF16   [k / 2][16][2]: pairs of neighbouring inputs, as the bf16 dot product and AMX tiles want them
//   Q8     scales, minima, then [k / 4][16][4] bytes: quads of neighbouring inputs, as the byte dot product wants them
//   Q4     scales, minima, then [k / 8][16][4] bytes: the low nibbles are one quad, the high nibbles the next
//
//   Q4_Z   scales, zero points ([k / 32][16] bytes), then as Q4
//   F8     scales, then [k / 2][16][2] bytes: pairs of neighbouring inputs, as E4M3 numbers
//   Q6_K   scales, then for each group of 32 the low nibbles as in Q4 and [2][16][4] bytes of the upper two bits: of quad j
//          of the group in row j / 4, at bit 2 · (j % 4)
//
// Scales and minima are [k / 32][16], half precision or float; one scale per row ([16] floats) for Q8_C,
// [k / 128][16] floats for F8. Those of Q4_K and Q6_K
// are, for each 256 inputs, 16 half-precision units and the integers to multiply them with: [8][16] or [16][16] bytes. Each
// section begins at a multiple of 64 bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../include/ridgeline_native.h"

namespace ridgeline {

constexpr int kPanel = RL_PANEL;
constexpr int kGroup = RL_GROUP;
constexpr int kSuper = 256;  // weights that share a unit of their scales, in Q4_K and Q6_K
constexpr int kF8Inputs = 128;  // weights that share a scale, in F8
constexpr int kBlock = RL_BLOCK_TOKENS;
constexpr int kMaxHeadDim = 256;

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr size_t round_up64(size_t bytes) { return (bytes + 63) / 64 * 64; }

inline bool known_format(int format) { return format >= RL_F32 && format <= RL_F8; }
inline bool is_quantized(int format) { return format >= RL_Q4_H; }
constexpr bool is_four_bit(int format) { return format >= RL_Q4_H && format <= RL_Q4_Z; }
inline bool has_float_scales(int format) { return format == RL_Q8_FM; }
inline bool has_minima(int format) { return format == RL_Q4_HM || format == RL_Q4_K || format == RL_Q8_FM; }
inline bool has_zeros(int format) { return format == RL_Q4_Z; }
// Without stored minima or zero points, the minimum is this times the scale: what q = 0 stands for.
inline float zero_point(int format) { return is_four_bit(format) ? -8.0f : format == RL_Q6_K ? -32.0f : -128.0f; }
// The same for the kernels that add it to q: only weights with a scale per group or half group, and neither.
constexpr int32_t group_offset(int format) {
  return format == RL_Q4_H ? -8 : format == RL_Q6_K ? -32 : format == RL_Q8_H ? -128 : 0;
}

inline int padded_k(int k) { return round_up(k, kGroup); }
inline int num_panels(int n) { return (n + kPanel - 1) / kPanel; }

// Of the scales of 256 inputs, their unit included; 0 for formats without units.
constexpr size_t super_bytes(int format) {
  return format == RL_Q4_K ? kPanel * (2 + kSuper / kGroup) : format == RL_Q6_K ? kPanel * (2 + kSuper / 16) : 0;
}
inline size_t scale_section(int format, int k) {
  if (format == RL_Q8_C) return kPanel * sizeof(float);
  if (format == RL_F8) return size_t((padded_k(k) + kF8Inputs - 1) / kF8Inputs) * kPanel * sizeof(float);
  if (super_bytes(format)) return round_up64(size_t((padded_k(k) + kSuper - 1) / kSuper) * super_bytes(format));
  return round_up64(size_t(padded_k(k) / kGroup) * kPanel * (has_float_scales(format) ? 4 : 2));
}
inline size_t minima_offset(int format, int k) { return scale_section(format, k); }  // or of the zero points
inline size_t quants_offset(int format, int k) {
  const size_t zeros = has_zeros(format) ? round_up64(size_t(padded_k(k) / kGroup) * kPanel) : 0;
  return scale_section(format, k) * (has_minima(format) ? 2 : 1) + zeros;
}
constexpr size_t group_quant_bytes(int format) {
  return kGroup * kPanel * (is_four_bit(format) ? 4 : format == RL_Q6_K ? 6 : 8) / 8;
}

inline size_t panel_bytes(int format, int k) {
  const size_t elements = size_t(padded_k(k)) * kPanel;
  if (format == RL_F32) return elements * 4;
  if (format == RL_BF16) return elements * 2;
  return quants_offset(format, k) + elements / kGroup / kPanel * group_quant_bytes(format);
}

// Where the byte that holds quant `k` (of 32) of row `o` lies inside a group's quants: all of it, or the nibble.
inline size_t quant_byte(bool nibbles, int o, int k) {
  const int quad = k / 4;
  return size_t(nibbles ? quad / 2 : quad) * kPanel * 4 + size_t(o * 4 + k % 4);
}
// The upper two bits of Q6_K: behind the nibbles, at bit 2 · (quad % 4).
inline size_t upper_byte(int o, int k) { return kGroup * kPanel / 2 + size_t(k / 16) * kPanel * 4 + size_t(o * 4 + k % 4); }

inline uint16_t to_bf16(float value) {  // to nearest, ties to even; the caller's values are finite
  union { float f; uint32_t u; } bits{value};
  return uint16_t((bits.u + 0x7fff + ((bits.u >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t value) {
  union { uint32_t u; float f; } bits{uint32_t(value) << 16};
  return bits.f;
}

// Where the code of row `o`, input `k` of an F8 panel lies, behind its scales.
inline size_t f8_byte(int o, int k) { return (size_t(k / 2) * kPanel + size_t(o)) * 2 + size_t(k % 2); }

float from_e4m3(uint8_t code);
uint8_t to_e4m3(float value);  // to nearest, ties to even; beyond ±448 that
float from_half(uint16_t value);
uint16_t to_half(float value);

}  // namespace ridgeline
