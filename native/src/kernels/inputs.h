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

inline float largest_size(const float* x, int n) {
  F most = zero();
  for (int i = 0; i < n; i += kLanes) most = max(most, size(load(x + i)));
  return largest(most);
}

// A row that holds a NaN or an infinity must stay visibly broken: its scales become NaN, and so do its outputs.
inline bool is_finite(const float* x, int n) {
  constexpr int kSums = 4;  // side by side: one alone would wait for itself
  F totals[kSums];
  repeat<kSums>([&](auto i) RL_INLINE { totals[i] = zero(); });
  int at = 0;
  for (; at + kSums * kLanes <= n; at += kSums * kLanes)
    repeat<kSums>([&](auto i) RL_INLINE { totals[i] = fma(load(x + at + i * kLanes), zero(), totals[i]); });
  for (; at < n; at += kLanes) totals[0] = fma(load(x + at), zero(), totals[0]);
  return sum(add(add(totals[0], totals[1]), add(totals[2], totals[3]))) == 0.0f;
}

constexpr float kLeastSize = 1e-30f;  // below the smallest normal number an inverse would overflow: such a group is zero

// ---- one limb: bytes, and a scale per group ----

// A group as bytes. sums: of its halves. pairs: of each half, the sums of the first and of the last two inputs of its quads,
// as 16-bit halves of one dword (AVX2 alone asks for them).
struct ByteGroup {
  alignas(32) int8_t bytes[kGroup];
  int32_t sums[2], pairs[2];
};

// 32 values times `inverse`, rounded.
RL_INLINE inline void round_to_bytes(const float* x, float inverse, ByteGroup& g) {
  I q[kGroup / kLanes];
  repeat<kGroup / kLanes>([&](auto i) RL_INLINE { q[i] = round_int(mul(load(x + i * kLanes), set(inverse))); });
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(q[1]), _mm512_cvtepi32_epi8(q[0]));
#else
  const I mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const I bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
  _mm256_store_si256(reinterpret_cast<__m256i*>(g.bytes), bytes);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);  // a half of the group in each half
  pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
  pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0xb1));
  const __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  g.pairs[0] = _mm256_extract_epi32(pairs, 0), g.pairs[1] = _mm256_extract_epi32(pairs, 4);
  g.sums[0] = _mm256_extract_epi32(sums, 0), g.sums[1] = _mm256_extract_epi32(sums, 4);
#else
  I totals[2] = {zero_int(), zero_int()};
  repeat<kGroup / kLanes>([&](auto i) RL_INLINE {
    store_int8(g.bytes + i * kLanes, q[i]);
    totals[i * kLanes * 2 / kGroup] = add_int(totals[i * kLanes * 2 / kGroup], q[i]);
  });
  for (int half = 0; half < 2; half++) g.sums[half] = sum_int(totals[half]), g.pairs[half] = 0;
#endif
}

// Int8Coded, and six bits on AVX2, begin 16-bit sums of pairs with theirs.
inline bool has_pair_sums([[maybe_unused]] InputKind kind, [[maybe_unused]] int parts) {
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
  if (kind == InputKind::Int8 && parts == 2) return true;
#endif
  return kind == InputKind::Int8Coded;
}

// Both 16-bit sums of `pairs` plus those of `others`, times offset; they may wrap.
inline int32_t pair_sums(int32_t pairs, int32_t others, int32_t offset) {
  const int32_t low = offset * int16_t(pairs + others), high = offset * ((pairs >> 16) + (others >> 16));
  return int32_t(uint32_t(uint16_t(low)) | uint32_t(high) << 16);
}

// As linear_words.h pairs them: of each quad the first and the third byte, then the second and the fourth.
inline void scatter_words([[maybe_unused]] const int8_t* bytes, [[maybe_unused]] uint8_t* out, [[maybe_unused]] size_t at,
                          [[maybe_unused]] int stride) {
#if defined(__AVX2__)
  const __m256i quads = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
  alignas(32) __m256i pairs[2] = {_mm256_srai_epi16(_mm256_slli_epi16(quads, 8), 8), _mm256_srai_epi16(quads, 8)};
  for (int odd = 0; odd < 2; odd++) scatter_dwords(pairs + odd, kGroup / 4, out, at + size_t(odd) * stride, 2 * stride);
#endif
}

inline void prepare_bytes(const float* x, const Inputs& in, int row) {
  constexpr int kBatch = 16;  // groups whose divisions are done together
  alignas(64) constexpr float kZeros[kGroup] = {};
  const InputKind kind = in.kind;
  const int groups = in.k / kGroup, dwords = kGroup / 4 * high_bytes(kind), parts = in.parts, offset = in.offset;
  const RowSlot slot = slot_of(in, row, groups * dwords, groups);
  const int stride = slot.stride;
  const bool finite = is_finite(x, in.k), in_pairs = has_pair_sums(kind, parts);
  size_t at = slot.at;
  uint8_t* high = in.high;
  float *scales = in.scales + slot.scale_at, *sums = in.sums + slot.sum_at;
  for (int first = 0; first < groups; first += kBatch) {
    const int count = std::min(kBatch, groups - first);
    alignas(64) float most[kBatch] = {}, inverse[kBatch], scale[kBatch];
    for (int i = 0; i < count; i++) most[i] = largest_size(x + (first + i) * kGroup, kGroup);
    for (int i = 0; i < kBatch; i += kLanes) {
      const F size = load(most + i), top = set(127.0f), least = set(kLeastSize);
      store(inverse + i, zero_up_to(div(top, size), size, least));
      store(scale + i, finite ? zero_up_to(div(size, top), size, least) : set(std::numeric_limits<float>::quiet_NaN()));
    }
    for (int i = 0; i < count; i++, at += size_t(dwords) * stride, scales += stride) {
      ByteGroup g;
      round_to_bytes(finite ? x + (first + i) * kGroup : kZeros, finite ? inverse[i] : 0.0f, g);  // a NaN has no integer
      if (kind == InputKind::Int8Words) scatter_words(g.bytes, high, at, stride);
      else scatter_dwords(g.bytes, kGroup / 4, high, at, stride);
      *scales = scale[i];
      for (int part = 0; part < parts; part++, sums += stride) {
        const int other = parts == 1;  // the part of a whole group is both halves
        const int32_t integers = g.sums[part] + (other ? g.sums[1] : 0);
        const int32_t corrected = in_pairs ? pair_sums(g.pairs[part], other ? g.pairs[1] : 0, offset) : offset * integers;
        if (offset) std::memcpy(sums, &corrected, 4);
        else *sums = scale[i] * float(integers);
      }
    }
  }
}

// ---- two limbs ----

// 32 values times `inverse`, rounded. sums: of both halves.
inline void round_to_limbs(const float* x, float inverse, int8_t* high, int8_t* low, int32_t* sums) {
  I totals[2] = {zero_int(), zero_int()};
  for (int i = 0; i < kGroup; i += kLanes) {
    const I q = round_int(mul(load(x + i), set(inverse))), top = shift_right(add_int(q, set_int(64)), 7);
    I& total = totals[i / (kGroup / 2)];
    total = add_int(total, q);
    store_int8(high + i, top);
    store_int8(low + i, sub_int(q, shift_left(top, 7)));
  }
  sums[0] = sum_int(totals[0]), sums[1] = sum_int(totals[1]);
}

inline void prepare_limbs(const float* x, const Inputs& in, int row) {
  constexpr float kTop = 16256.0f;  // 127 · 128: the high limb stays inside a byte
  const bool per_row = has_row_scale(in.kind), finite = is_finite(x, in.k);
  const int groups = in.k / kGroup;
  const RowSlot slot = in.kind == InputKind::Int16Rows ? RowSlot{size_t(row) * in.k / 4, 1, size_t(row), 0}
                                                       : slot_of(in, row, in.k / 4, groups);
  const float row_largest = per_row ? largest_size(x, in.k) : 0.0f;
  float row_sum = 0.0f;
  alignas(64) int8_t high[kGroup] = {}, low[kGroup] = {};  // a row that is not finite keeps the zeros: a NaN has no integer
  int32_t halves[2] = {0, 0};
  for (int g = 0; g < groups; g++) {
    const float most = per_row ? row_largest : largest_size(x + g * kGroup, kGroup);
    const float inverse = finite && most > kLeastSize ? kTop / most : 0.0f;
    const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : inverse == 0.0f ? 0.0f : most / kTop;
    if (finite) round_to_limbs(x + g * kGroup, inverse, high, low, halves);
    const int32_t total = halves[0] + halves[1];
    const size_t at = slot.at + size_t(g) * (kGroup / 4) * slot.stride;
    scatter_dwords(high, kGroup / 4, in.high, at, slot.stride);
    scatter_dwords(low, kGroup / 4, in.low, at, slot.stride);
    if (in.kind == InputKind::Int16Rows) {
      row_sum += scale * float(total);
      in.scales[row] = scale, in.sums[row] = row_sum;
      continue;
    }
    in.scales[slot.scale_at + size_t(g) * slot.stride] = scale;
    for (int part = 0; part < in.parts; part++) {
      float& sum = in.sums[slot.sum_at + (size_t(g) * in.parts + part) * slot.stride];
      const int32_t corrected = in.offset * (in.parts == 2 ? halves[part] : total);
      if (in.offset) std::memcpy(&sum, &corrected, 4);
      else sum = scale * float(total);
    }
  }
}

inline void prepare_quantized(const float* x, const Inputs& in, int row) {
  if (has_two_limbs(in.kind)) prepare_limbs(x, in, row);
  else prepare_bytes(x, in, row);
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
