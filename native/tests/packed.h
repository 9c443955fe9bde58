// A packed matrix that owns its memory, made of floats; and the floats to make it of.
#pragma once
#include <vector>

#include "check.h"

const int kFormats[] = {RL_F32, RL_BF16, RL_Q4_H, RL_Q4_HM, RL_Q4_K, RL_Q4_Z, RL_Q8_H, RL_Q8_FM, RL_Q8_C, RL_Q6_K, RL_F8};
const char* const kKvNames[] = {"F32", "BF16", "INT8", "INT4"};
inline const char* format_name(int format) {
  const char* const names[] = {"F32", "BF16", "Q4_H", "Q4_HM", "Q4_K", "Q4_Z", "Q8_H", "Q8_FM", "Q8_C", "Q6_K", "F8"};
  return names[format];
}

inline std::vector<float> random_floats(Random& random, size_t count, float size = 1.0f) {
  std::vector<float> values(count);
  for (float& value : values) value = random.normal() * size;
  return values;
}

struct Packed {
  Aligned<uint8_t> data;
  rl_matrix matrix;

  Packed(int format, int n, int k)
      : data(size_t(rl_packed_bytes(format, n, k))), matrix{n, k, format, data.data(), nullptr} {}
  Packed(int format, int n, int k, const std::vector<float>& source) : Packed(format, n, k) {
    CHECK_OK(rl_pack_float(format, n, k, source.data(), data.data()));
  }

  std::vector<float> rows(int first, int count) const {
    std::vector<float> floats(size_t(count) * matrix.k);
    CHECK_OK(rl_unpack(&matrix, first, count, floats.data()));
    return floats;
  }
  std::vector<float> all() const { return rows(0, matrix.n); }
};
