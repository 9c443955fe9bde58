// Writing keys and values into their blocks, in the layouts of KvHead.
#pragma once
#include <algorithm>
#include <limits>

#include "inputs.h"

namespace {

using ridgeline::kBlock;
using ridgeline::KvHead;
using ridgeline::kMaxHeadDim;

// The value's scale, and the value as bytes offset by 128.
inline float offset_bytes(const float* value, int dim, uint8_t* bytes) {
  const float most = largest_size(value, dim);
  if (!is_finite(value, dim)) {
    std::memset(bytes, 128, size_t(dim));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  for (int i = 0; i < dim; i += kLanes) {
    int8_t rounded[kLanes];
    store_int8(rounded, round_int(mul(load(value + i), set(inverse))));
    for (int j = 0; j < kLanes; j++) bytes[i + j] = uint8_t(rounded[j] ^ 0x80);
  }
  return inverse == 0.0f ? 0.0f : most / 127.0f;
}

// The value's minimum and scale as one word, and the value as numbers from 0 to 15.
inline uint32_t small_steps(const float* value, int dim, uint8_t* numbers) {
  if (!is_finite(value, dim)) {
    std::memset(numbers, 0, size_t(dim));
    return 0x7fc07fc0;  // two NaN
  }
  float low = value[0], high = value[0];
  for (int i = 1; i < dim; i++) low = std::min(low, value[i]), high = std::max(high, value[i]);
  uint16_t minimum = ridgeline::to_bf16(low);  // rounded down: no value is below it
  if (ridgeline::from_bf16(minimum) > low) minimum = minimum & 0x8000 ? minimum + 1 : minimum ? minimum - 1 : 0x8001;
  const float start = ridgeline::from_bf16(minimum);
  const uint16_t scale = ridgeline::to_bf16((high - start) / 15.0f);
  const float step = ridgeline::from_bf16(scale);
  const float inverse = step > 1e-30f ? 1.0f / step : 0.0f;
  for (int i = 0; i < dim; i += kLanes) {
    int8_t rounded[kLanes];
    store_int8(rounded, round_int(mul(sub(load(value + i), set(start)), set(inverse))));
    std::memcpy(numbers + i, rounded, kLanes);
  }
  return uint32_t(scale) << 16 | minimum;
}

// Two numbers a byte: of each run of 2 · `half` the first ones in the low halves.
inline void join_halves(const uint8_t* numbers, int dim, int half, uint8_t* bytes) {
  for (int run = 0; run < dim; run += 2 * half)
    for (int i = 0; i < half; i++) *bytes++ = uint8_t(numbers[run + i] | numbers[run + half + i] << 4);
}

inline void store_key(const KvHead& kv, int block, int slot, const float* value) {
  uint8_t* keys = const_cast<uint8_t*>(kv.keys) + size_t(block) * kv.block_bytes + slot * 4;
  const int dim = kv.head_dim;
  alignas(64) uint8_t packed[kMaxHeadDim * 4];
  int dwords = dim;
  if (kv.format == RL_KV_F32) {
    std::memcpy(packed, value, size_t(dim) * 4);
  } else if (kv.format == RL_KV_BF16) {
    for (int i = 0; i < dim; i += kLanes) store_bf16(reinterpret_cast<uint16_t*>(packed) + i, load(value + i));
    dwords = dim / 2;
  } else if (kv.format == RL_KV_INT4) {
    alignas(64) uint8_t numbers[kMaxHeadDim];
    const uint32_t word = small_steps(value, dim, numbers);
    std::memcpy(const_cast<float*>(kv.key_scales) + size_t(block) * kv.scale_stride + slot, &word, 4);
    join_halves(numbers, dim, 4, packed);
    dwords = dim / 8;
  } else {
    const_cast<float*>(kv.key_scales)[size_t(block) * kv.scale_stride + slot] = offset_bytes(value, dim, packed);
    dwords = dim / 4;
  }
  for (int i = 0; i < dwords; i++) std::memcpy(keys + size_t(i) * kBlock * 4, packed + i * 4, 4);
}

inline void store_value(const KvHead& kv, int block, int slot, const float* value) {
  uint8_t* values = const_cast<uint8_t*>(kv.values) + size_t(block) * kv.block_bytes;
  const int dim = kv.head_dim;
  if (kv.format == RL_KV_F32) {
    std::memcpy(values + size_t(slot) * dim * 4, value, size_t(dim) * 4);
  } else if (kv.format == RL_KV_BF16) {
    alignas(64) uint16_t rounded[kMaxHeadDim];
    for (int i = 0; i < dim; i += kLanes) store_bf16(rounded + i, load(value + i));
    uint16_t* out = reinterpret_cast<uint16_t*>(values) + size_t(slot / 2) * dim * 2 + slot % 2;
    for (int i = 0; i < dim; i++) out[i * 2] = rounded[i];
  } else if (kv.format == RL_KV_INT4) {
    alignas(64) uint8_t numbers[kMaxHeadDim], bytes[kMaxHeadDim / 2];
    const uint32_t word = small_steps(value, dim, numbers);
    std::memcpy(const_cast<float*>(kv.value_scales) + size_t(block) * kv.scale_stride + slot, &word, 4);
    join_halves(numbers, dim, 8, bytes);
    uint8_t* out = values + size_t(slot / 4) * dim * 2 + slot % 4;
    for (int i = 0; i < dim / 2; i++) out[i * 4] = bytes[i];
  } else {
    alignas(64) uint8_t bytes[kMaxHeadDim];
    const_cast<float*>(kv.value_scales)[size_t(block) * kv.scale_stride + slot] = offset_bytes(value, dim, bytes);
    uint8_t* out = values + size_t(slot / 4) * dim * 4 + slot % 4;
    for (int i = 0; i < dim; i++) out[i * 4] = bytes[i];
  }
}

}  // namespace
