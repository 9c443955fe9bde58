// Inputs of linear layers: rows of floats into the form the weights' kernel wants (see Inputs in kernels.h).
#pragma once
#include <limits>

#include "simd.h"
#include "../kernels.h"

namespace {

using ridgeline::InputKind;
using ridgeline::Inputs;
using ridgeline::kGroup;

// Where the dwords of one row lie: `stride` dwords apart.
struct RowSlot {
  size_t at;  // in dwords, from the start of the values
  int stride;
  size_t scale_at, sum_at;
};

inline RowSlot slot_of(const Inputs& in, int row, int dwords, int groups) {
  const int tile = in.tiling.tile_of(row), first = in.tiling.first(tile), size = in.tiling.size(tile);
  const size_t before = size_t(first) * groups, place = size_t(row - first);
  return {size_t(first) * dwords + place, size, before + place, before * in.parts + place};
}

inline void scatter_dwords(const void* source, int count, uint8_t* out, size_t at, int stride) {
  const uint8_t* from = static_cast<const uint8_t*>(source);
  for (int i = 0; i < count; i++) std::memcpy(out + (at + size_t(i) * stride) * 4, from + i * 4, 4);
}

// 32 values times `inverse`, rounded, as bytes or as two limbs. sums: of both halves.
inline void quantize_group(const float* x, float inverse, bool two_limbs, int8_t* high, int8_t* low, int32_t* sums) {
  I totals[2] = {zero_int(), zero_int()};
  for (int i = 0; i < kGroup; i += kLanes) {
    const I q = round_int(mul(load(x + i), set(inverse)));
    I& total = totals[i / (kGroup / 2)];
    total = add_int(total, q);
    if (!two_limbs) {
      store_int8(high + i, q);
    } else {
      const I top = shift_right(add_int(q, set_int(64)), 7);
      store_int8(high + i, top);
      store_int8(low + i, sub_int(q, shift_left(top, 7)));
    }
  }
  sums[0] = sum_int(totals[0]), sums[1] = sum_int(totals[1]);
}

// Int8Coded, and six bits on AVX2, begin 16-bit sums of pairs with these.
inline bool has_pair_sums(const Inputs& in) {
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
  if (in.kind == InputKind::Int8 && in.parts == 2) return true;
#endif
  return in.kind == InputKind::Int8Coded;
}

// offset · Σ x of the first two inputs of n / 4 quads, and of their last two, as 16-bit halves of one dword.
inline void store_pair_sums(const int8_t* x, int n, int offset, float* out) {
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < n; i += 4) sums[0] += x[i] + x[i + 1], sums[1] += x[i + 2] + x[i + 3];
  const int16_t halves[2] = {int16_t(offset * sums[0]), int16_t(offset * sums[1])};
  std::memcpy(out, halves, 4);
}

inline float largest_size(const float* x, int n) {
  F most = zero();
  for (int i = 0; i < n; i += kLanes) most = max(most, size(load(x + i)));
  return largest(most);
}

// A row that holds a NaN or an infinity must stay visibly broken: its scales become NaN, and so do its outputs.
inline bool is_finite(const float* x, int n) {
  F total = zero();
  for (int i = 0; i < n; i += kLanes) total = fma(load(x + i), zero(), total);
  return sum(total) == 0.0f;
}

inline void prepare_quantized(const float* x, const Inputs& in, int row) {
  const bool two_limbs = has_two_limbs(in.kind), per_row = has_row_scale(in.kind);
  const int groups = in.k / kGroup;
  const RowSlot slot = in.kind == InputKind::Int16Rows ? RowSlot{size_t(row) * in.k / 4, 1, size_t(row), 0}
                                                       : slot_of(in, row, in.k / 4, groups);
  const float top = two_limbs ? 16256.0f : 127.0f;  // 127 · 128: the high limb stays inside a byte
  const bool finite = is_finite(x, in.k);
  const float row_largest = per_row ? largest_size(x, in.k) : 0.0f;
  float row_sum = 0.0f;
  for (int g = 0; g < groups; g++) {
    const float most = per_row ? row_largest : largest_size(x + g * kGroup, kGroup);
    // Below the smallest normal number the inverse would overflow; such a group is zero for all purposes.
    const float inverse = finite && most > 1e-30f ? top / most : 0.0f;
    const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : inverse == 0.0f ? 0.0f : most / top;
    alignas(64) int8_t high[kGroup], low[kGroup];
    if (!finite) std::memset(high, 0, sizeof high), std::memset(low, 0, sizeof low);  // a NaN has no integer
    int32_t halves[2] = {0, 0};
    if (finite) quantize_group(x + g * kGroup, inverse, two_limbs, high, low, halves);
    const int32_t total = halves[0] + halves[1];
    const size_t at = slot.at + size_t(g) * (kGroup / 4) * slot.stride;
    scatter_dwords(high, kGroup / 4, in.high, at, slot.stride);
    if (two_limbs) scatter_dwords(low, kGroup / 4, in.low, at, slot.stride);
    if (in.kind == InputKind::Int16Rows) {
      row_sum += scale * float(total);
      in.scales[row] = scale, in.sums[row] = row_sum;
    } else {
      const size_t group_at = slot.scale_at + size_t(g) * slot.stride;
      in.scales[group_at] = scale;
      for (int part = 0; part < in.parts; part++) {
        float& at = in.sums[slot.sum_at + (size_t(g) * in.parts + part) * slot.stride];
        const int32_t corrected = in.offset * (in.parts == 2 ? halves[part] : total);
        if (in.offset && has_pair_sums(in)) store_pair_sums(high + part * kGroup / 2, kGroup / in.parts, in.offset, &at);
        else if (in.offset) std::memcpy(&at, &corrected, 4);
        else at = scale * float(total);
      }
    }
  }
}

inline void prepare_row(const float* source, int k, const Inputs& in, int row) {
  alignas(64) float padded[kGroup];
  const int whole = k / kGroup * kGroup;
  auto values = [&](int at) -> const float* {  // the last group may be short
    if (at < whole) return source + at;
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, source + whole, size_t(k - whole) * 4);
    return padded;
  };
  if (in.kind == InputKind::Float) {
    const RowSlot slot = slot_of(in, row, in.k, 0);
    for (int at = 0; at < in.k; at += kGroup)
      scatter_dwords(values(at), kGroup, in.high, slot.at + size_t(at) * slot.stride, slot.stride);
  } else if (in.kind == InputKind::Bf16 || in.kind == InputKind::Bf16Rows) {
    const RowSlot slot = slot_of(in, row, in.k / 2, 0);
    for (int at = 0; at < in.k; at += kGroup) {
      uint16_t rounded[kGroup];
      const float* x = values(at);
      for (int i = 0; i < kGroup; i += kLanes) store_bf16(rounded + i, load(x + i));
      if (in.kind == InputKind::Bf16Rows)
        std::memcpy(in.high + (size_t(row) * in.k + at) * 2, rounded, sizeof rounded);
      else
        scatter_dwords(rounded, kGroup / 2, in.high, slot.at + size_t(at / 2) * slot.stride, slot.stride);
    }
  } else if (k == in.k) {
    prepare_quantized(source, in, row);
  } else {
    alignas(64) float whole_row[1 << 14];
    std::memcpy(whole_row, source, size_t(k) * 4);
    std::memset(whole_row + k, 0, size_t(in.k - k) * 4);
    prepare_quantized(whole_row, in, row);
  }
}

}  // namespace
